"""Where the ranks of one machine meet: on its loopback interface, which no other machine reaches.

Torch's own store listens on every address, without a password, and gloo on the one that the host's
name stands for. Ranks that torchrun or srun has started, or those of several machines, meet as
these say.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
from datetime import timedelta
from typing import Any

from app.process.launch import free_port, read_launch

LOOPBACK = "127.0.0.1"
INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
MAX_WAITING = 1024
"""ranks whose connections may wait to be accepted"""


def meet_on_loopback(strategy: Any) -> None:
    """Connect the ranks of `strategy`, a Lightning strategy whose device is set.

    Nothing where they were not started by this program on this machine alone. OSError where the
    port was taken in the meantime.
    """
    import torch.distributed as dist

    if strategy.num_nodes > 1 or not read_launch().is_started_here or dist.is_initialized():
        return
    strategy.set_world_ranks()
    backend = strategy._get_process_group_backend()
    # Both look for them as a group is made. Where GPUs reach each other (NVLink, PCIe, shared
    # memory) NCCL has no use for a network but to say so.
    os.environ |= {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": f"={INTERFACE}"}
    port = strategy.cluster_environment.main_port
    listens = {"master_listen_fd": _listen(port)} if strategy.global_rank == 0 else {}
    store = dist.TCPStore(
        LOOPBACK,
        port,
        strategy.world_size,
        is_master=strategy.global_rank == 0,
        timeout=strategy._timeout,
        wait_for_workers=False,
        **listens,
    )
    device = strategy.root_device
    dist.init_process_group(
        backend,
        store=store,
        rank=strategy.global_rank,
        world_size=strategy.world_size,
        timeout=strategy._timeout,
        device_id=None if device.type == "cpu" else device,
    )
    if backend == "nccl":  # it warns of groups that a process leaves behind
        atexit.register(_leave)


def _listen(port: int) -> int:
    """Return a socket that listens at `port` of the loopback interface; its owner closes it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(MAX_WAITING)
        return listener.detach()


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def use_new_store_after_restart() -> None:
    """Let ranks that torchrun has started again meet where nothing is left of those before them.

    It keeps its store over restarts, in which they would find the addresses of dead ranks (seen
    with torch 2.13; its #135712 was meant to end that). Between machines that restart apart nobody
    counts the restarts for all: there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun helps.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restart == "0" or not is_one_machine or not shares_store:
        return
    from torch.distributed import TCPStore

    shared = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(minutes=5),
    )
    key = f"port of restart {restart}"
    if os.environ["RANK"] == "0":
        shared.set(key, str(free_port()))
    os.environ["MASTER_PORT"] = shared.get(key).decode()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
