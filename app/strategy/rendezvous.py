"""The rendezvous of ranks: over the loopback interface if all are on this machine.

torch's TCPStore listens on every address, without a password, and gloo on that of the host's name.
Ranks started by torchrun or srun, or on several machines, use the addresses that these give.
"""

from __future__ import annotations

import atexit
import os
import socket
import struct
import sys
import time
import uuid
from typing import TYPE_CHECKING, Any

from app.process.launch import free_port, read_launch
from app.strategy.settings import TIMEOUT

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
BACKLOG = 1024
"""connections that may wait to be accepted"""
ASK_SECONDS = 0.05
"""between two looks of rank 0 for ranks that ask where to meet"""
SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface"""


def connect_ranks(strategy: Any) -> None:
    """Connect the ranks of `strategy`, a Lightning strategy whose device is set.

    Ranks that something else has started, or on several machines, are connected by Lightning: for
    these only gloo's interface is chosen. OSError if the port was taken in the meantime. Reads
    `_timeout` and `_get_process_group_backend` of Lightning 2.6's strategies, which have no public
    names.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if strategy.num_nodes > 1 or not read_launch().is_started_here:
        choose_gloo_interface(strategy.cluster_environment.main_address, strategy.num_nodes)
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


def choose_gloo_interface(main_address: str, num_nodes: int) -> None:
    """Have gloo use the interface that reaches rank 0's machine, unless GLOO_SOCKET_IFNAME is set.

    By itself gloo takes the address of the host's name, which many machines have as 127.0.1.1.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    name = find_interface(main_address)
    if name is not None and (name != INTERFACE or num_nodes == 1):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def check_network(num_nodes: int) -> list[str]:
    """List the names of interfaces and of rank 0's machine that ranks could not meet by.

    Those that the environment gives to ranks which something else has started: torch would wait
    for the others until its time-out.
    """
    launch = read_launch()
    if launch.is_started_here or launch.num_ranks in (None, 1):
        return []
    problems, there = [], [name for _, name in socket.if_nameindex()]
    reaching = None
    if launch.first_address is not None:
        if not _is_known(launch.first_address):
            problems.append(
                f"MASTER_ADDR={launch.first_address}: no host of that name is known here; type "
                "the name or address of the machine with rank 0"
            )
        reaching = find_interface(launch.first_address)
    taken = f"{reaching} reaches {launch.first_address}" if reaching else "the others"
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        typed = os.environ.get(variable, "")
        if not typed or typed.startswith("^"):  # NCCL's word for all but these
            continue
        is_prefix = variable.startswith("NCCL") and not typed.startswith("=")
        names = [name.partition(":")[0] for name in typed.removeprefix("=").split(",")]
        found = [
            one
            for one in there
            if any(one.startswith(name) if is_prefix else one == name for name in names)
        ]
        if not found:
            problems.append(
                f"{variable}={typed}: this machine has no such interface, but {', '.join(there)}; "
                f"unset it ({taken})"
            )
        elif found == [INTERFACE] and num_nodes > 1:
            problems.append(
                f"{variable}={typed} is the interface of this machine alone, and the ranks are on "
                f"{num_nodes}; unset it ({taken})"
            )
    return problems


def _is_known(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def find_interface(host: str) -> str | None:
    """Return the interface by which `host` is reached; None where that is not known.

    Linux alone, and IPv4 addresses.
    """
    own = find_own_address(host)
    if sys.platform != "linux" or own is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        names = (name for _, name in socket.if_nameindex())
        return next((name for name in names if _address_of(name, probe) == own), None)


def find_own_address(host: str) -> str | None:
    """Return this machine's address on the way to `host`; None where there is none.

    Sends nothing.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:  # a name that is not known, or no route
            return None
        address: str = probe.getsockname()[0]
        return address


def _address_of(interface: str, probe: socket.socket) -> str | None:
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    try:
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
    except OSError:  # an interface without an IPv4 address
        return None
    return socket.inet_ntoa(answer[20:24])


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


def use_separate_store() -> None:
    """Have the ranks of torchrun meet at a store of their own, not at that of its agents.

    That one lives on over restarts, with the addresses of dead ranks (seen with torch 2.13; its
    #135712 was meant to end that), unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 was set before
    torchrun. Ranks of one machine that starts for the first time need none. Machines restart
    independently, so that no count of restarts is common to them: each rank asks with a word of
    its own, which only a rank 0 that lives answers.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shares_store or (restart == "0" and is_one_machine):
        return
    from torch.distributed import TCPStore

    address = os.environ["MASTER_ADDR"]
    shared = TCPStore(
        address,
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=TIMEOUT,
        wait_for_workers=False,
    )
    if os.environ["RANK"] == "0":
        own = find_own_address(address)
        # Loopback: the agents' store is on this machine, which has its own name as 127.0.1.1.
        is_known = own is not None and not own.startswith("127.")
        meeting = f"{own if is_known else address} {free_port()} {uuid.uuid4().hex}"
        _answer(shared, meeting, int(os.environ["WORLD_SIZE"]))
    else:
        meeting = _ask(shared, os.environ["RANK"])
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], _ = meeting.split()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def _ask(shared: TCPStore, rank: str) -> str:
    """Return what rank 0 answers: an address, a port, and the word of this meeting."""
    word = uuid.uuid4().hex
    shared.set(f"loft/asks/{rank}", word)
    answer: str = shared.get(f"loft/answer/{word}").decode()
    shared.set(f"loft/heard/{word}", answer)
    return answer


def _answer(shared: TCPStore, meeting: str, num_ranks: int) -> None:
    """Answer each rank until it has heard of this meeting; dead ranks have heard of others."""
    waiting = set(range(1, num_ranks))
    until = time.monotonic() + TIMEOUT.total_seconds()
    while waiting:
        if time.monotonic() > until:
            raise OSError(
                f"{len(waiting)} of {num_ranks} ranks did not come within {TIMEOUT}: "
                f"{', '.join(map(str, sorted(waiting)[:20]))}; what their machines print says why"
            )
        for rank in sorted(waiting):
            if not shared.check([f"loft/asks/{rank}"]):
                continue
            word = shared.get(f"loft/asks/{rank}").decode()
            shared.set(f"loft/answer/{word}", meeting)
            heard = f"loft/heard/{word}"
            if shared.check([heard]) and shared.get(heard).decode() == meeting:
                waiting.remove(rank)
        time.sleep(ASK_SECONDS)
