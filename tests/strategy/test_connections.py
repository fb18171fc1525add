"""Network interfaces and timeouts of ranks, and buffers that DDP does not send."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import app.strategy.loading as loading
import app.strategy.rendezvous as rendezvous
from app.assembly.training import build_strategy
from app.process.launch import Launch
from app.strategy import settings
from app.strategy.rendezvous import connect_ranks, find_interface
from tests.ranks import connect, on_ranks

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
SEVERAL = [
    *(settings.StrategyConfig(), settings.DdpConfig(), settings.DdpConfig(compression="powersgd")),
    *(settings.FsdpConfig(), settings.ZeroConfig(stage=2), settings.ZeroConfig()),
]


def test_every_strategy_has_the_same_timeout_and_ddp_sends_no_buffers() -> None:
    for config in SEVERAL:
        built: Any = build_strategy(config, accelerator="cpu", num_ranks=2)
        assert built._timeout is settings.TIMEOUT, config
        if isinstance(config, settings.DdpConfig):
            kept = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
            assert built._ddp_kwargs == kept


def time_outs() -> list[set[timedelta]]:
    """Return the timeouts of a rank's groups: of the mesh, and of a node's ranks."""
    strategy = connect(settings.FsdpConfig(tensor_parallel_size=2))
    strategy._timeout = loading.TIMEOUT = timedelta(minutes=7)  # the constant is gloo's default
    strategy._init_mesh()
    of_mesh = strategy.device_mesh.get_all_groups()
    assert sorted(map(dist.get_world_size, of_mesh)) == [1, 2, 2]
    of_node = loading.Broadcaster(torch.device("cpu"), num_ranks=4, ranks_per_node=2)._node_group
    dist.barrier()  # rank 0 holds the store by which the others find each other
    return [
        {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
        for groups in (of_mesh, [of_node])
    ]


@pytest.mark.slow
def test_all_groups_have_the_strategys_timeout() -> None:
    assert on_ranks(4, time_outs) == [[{timedelta(minutes=7)}] * 2] * 4


@linux
def test_find_interface() -> None:
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("no such host.") is None


@pytest.mark.parametrize(
    ("num_nodes", "reached", "default", "typed", "expected"),
    [
        (2, "eth1", "eth0", None, "eth1"),
        (1, "lo", "eth0", None, "lo"),
        (2, "lo", "eth0", None, "eth0"),  # the host's own name as 127.0.1.1
        (2, "lo", None, None, None),
        (2, None, "eth0", None, None),
        (2, "eth1", "eth0", "ib0", "ib0"),
    ],
)
def test_launched_ranks_use_the_interface_that_reaches_rank_0(
    num_nodes: int,
    reached: str | None,
    default: str | None,
    typed: str | None,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "INTERFACE", "lo")
    monkeypatch.setattr(rendezvous, "read_launch", lambda: Launch(detected_by="RANK", num_ranks=4))
    interfaces = {"the first": reached, rendezvous.ANY_REMOTE_ADDRESS: default}
    monkeypatch.setattr(rendezvous, "find_interface", interfaces.__getitem__)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", typed or "")
    if typed is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    environment = SimpleNamespace(main_address="the first")
    connect_ranks(SimpleNamespace(num_nodes=num_nodes, cluster_environment=environment))
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
