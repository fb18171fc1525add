"""The rendezvous of ranks: over the loopback interface if all are on this machine.

torch's TCPStore listens on every address, without a password, and gloo on that of the host's name.
Ranks started by torchrun or srun, or on several machines, use the addresses that these give.
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
BACKLOG = 1024
"""connections that may wait to be accepted"""


def meet_on_loopback(strategy: Any) -> None:
    """Connect the ranks of `strategy`, a Lightning strategy whose device is set.

    Does nothing unless this program has started all ranks on this machine. OSError if the port was
    taken in the meantime. Reads `_timeout` and `_get_process_group_backend` of Lightning 2.6's
    strategies, which have no public names.
    """
    import torch.distributed as dist

    if strategy.num_nodes > 1 or not read_launch().is_started_here or dist.is_initialized():
        return
    strategy.set_world_ranks()
    backend = strategy._get_process_group_backend()
    # Read when a process group is created. Between GPUs of one machine NCCL uses the network only
    # to bootstrap.
    os.environ |= {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": f"={INTERFACE}"}
    port = strategy.cluster_environment.main_port
    listening = {"master_listen_fd": _listen(port)} if strategy.global_rank == 0 else {}
    store = dist.TCPStore(
        LOOPBACK,
        port,
        strategy.world_size,
        is_master=strategy.global_rank == 0,
        timeout=strategy._timeout,
        wait_for_workers=False,
        **listening,
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
    if backend == "nccl":  # it warns of groups that are not destroyed at exit
        atexit.register(_destroy_group)


def _listen(port: int) -> int:
    """Return the descriptor of a socket that listens at `port` of the loopback interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(BACKLOG)
        return listener.detach()


def _destroy_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def use_new_store_after_restart() -> None:
    """Connect ranks that torchrun has restarted over a new store.

    torchrun keeps its store over restarts, with the addresses of dead ranks (seen with torch 2.13;
    its #135712 was meant to end that). Machines that restart independently have no common restart
    count: there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun helps.
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
