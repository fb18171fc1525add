"""Ranks of one machine listen on its loopback interface only, under every strategy."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from app.strategy.rendezvous import listen
from app.strategy.settings import DdpConfig, FsdpConfig, StrategyConfig, ZeroConfig
from tests.ranks import connect, on_ranks

pytestmark = pytest.mark.slow

LISTENS = "0A"
"""state of a socket in /proc/net/tcp"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def listening(pid: int) -> list[str]:
    """Return the addresses on which a process listens over TCP."""
    descriptors = Path(f"/proc/{pid}/fd")
    own = set()
    for entry in descriptors.iterdir():
        try:
            own.add(os.readlink(entry))
        except OSError:  # closed in the meantime
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in own:
                found.append(_address(words[1].partition(":")[0]))
    return found


def _address(digits: str) -> str:
    # Words of 32 bits, each in the byte order of the machine.
    words = [bytes.fromhex(digits[at : at + 8]) for at in range(0, len(digits), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return str(ipaddress.ip_address(packed))


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def meet(config: StrategyConfig) -> list[str]:
    """Connect as a rank of `config`, use two groups, and return where this rank listens."""
    strategy = connect(config)
    ones = torch.ones(3)
    dist.all_reduce(ones)
    dist.all_reduce(ones, group=dist.new_group(backend="gloo"))
    assert ones.tolist() == [4.0] * 3
    assert strategy.world_size == 2
    found = listening(os.getpid())
    dist.barrier()
    return found


@linux
@pytest.mark.parametrize("config", [DdpConfig(), FsdpConfig(), ZeroConfig(stage=2)])
def test_ranks_listen_on_the_loopback_interface_only(config: StrategyConfig) -> None:
    first, second = on_ranks(2, meet, config)
    assert len(first) > len(second) > 0  # the store, and gloo on both
    assert all(map(is_loopback, first + second)), first + second


def test_a_taken_port_is_an_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="Address already in use"):
            listen(other.getsockname()[1])
