"""The rendezvous of ranks: on the loopback interface if all ranks are on this machine.

By default torch's TCPStore listens on every address, without a password, and gloo on the address of
the host name. Ranks started by torchrun or srun, or on several machines, use the launcher's
addresses.
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

_LOOPBACK = "127.0.0.1"
INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
ANY_REMOTE_ADDRESS = "192.0.2.1"
"""an address reserved for documentation, which is reached by the default route; nothing is sent"""
_BACKLOG = 1024
"""maximum number of pending connections of the store's socket"""
STORE_POLL_SECONDS = 0.05
"""interval at which rank 0 checks for requests of other ranks"""
_SIOCGIFADDR = 0x8915
"""Linux's ioctl for the IPv4 address of an interface"""


def connect_ranks(strategy: Any) -> None:
    """Connect the ranks of `strategy`, a Lightning strategy whose device is set.

    Ranks started by a launcher, or on several machines, are connected by Lightning: this only
    chooses gloo's interface for them. OSError if the port has been taken in the meantime. Reads the
    private `_timeout` and `_get_process_group_backend` of Lightning 2.6's strategies.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if strategy.num_nodes > 1 or not read_launch().is_started_here:
        choose_gloo_interface(strategy.cluster_environment.main_address, strategy.num_nodes)
        return
    strategy.set_world_ranks()
    backend = strategy._get_process_group_backend()
    # Read when a process group is created. On one machine NCCL uses the network only to bootstrap.
    os.environ |= {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": f"={INTERFACE}"}
    port = strategy.cluster_environment.main_port
    listening = {"master_listen_fd": listen(port)} if strategy.global_rank == 0 else {}
    store = dist.TCPStore(
        _LOOPBACK,
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
    if backend == "nccl":  # NCCL warns about groups that are not destroyed at exit
        atexit.register(_destroy_group)


def choose_gloo_interface(main_address: str, num_nodes: int) -> None:
    """Have gloo use the interface that reaches rank 0's machine, unless GLOO_SOCKET_IFNAME is set.

    By default gloo uses the address of the host name, which is 127.0.1.1 on many machines.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    name = find_interface(main_address)
    if name == INTERFACE and num_nodes > 1:
        # On rank 0's machine its own name may resolve to 127.0.1.1, which other nodes cannot reach.
        name = find_interface(ANY_REMOTE_ADDRESS)
    if name is not None and (name != INTERFACE or num_nodes == 1):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def check_network(num_nodes: int) -> list[str]:
    """List problems of MASTER_ADDR and of the interfaces that environment variables name.

    Only for ranks started by a launcher. Without this check torch would wait for the other ranks
    until its timeout.
    """
    launch = read_launch()
    if launch.is_started_here or launch.num_ranks in (None, 1):
        return []
    problems, interfaces = [], [name for _, name in socket.if_nameindex()]
    reaching = None
    if launch.first_address is not None:
        if not _can_resolve(launch.first_address):
            problems.append(
                f"MASTER_ADDR={launch.first_address}: this machine cannot resolve that host name; "
                "type the name or address of the machine with rank 0"
            )
        reaching = find_interface(launch.first_address)
    better = f"{reaching} reaches {launch.first_address}" if reaching else "or name another one"
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        typed = os.environ.get(variable, "")
        if not typed or typed.startswith("^"):  # NCCL's prefix that excludes interfaces
            continue
        is_prefix = variable.startswith("NCCL") and not typed.startswith("=")
        names = [name.partition(":")[0] for name in typed.removeprefix("=").split(",")]
        matching = [
            interface
            for interface in interfaces
            if any(interface.startswith(name) if is_prefix else interface == name for name in names)
        ]
        if not matching:
            problems.append(
                f"{variable}={typed}: this machine has no such interface, only "
                f"{', '.join(interfaces)}; unset it ({better})"
            )
        elif matching == [INTERFACE] and num_nodes > 1:
            problems.append(
                f"{variable}={typed} is the loopback interface, and the ranks are on {num_nodes} "
                f"machines; unset it ({better})"
            )
    return problems


def _can_resolve(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def find_interface(host: str) -> str | None:
    """Return the interface that reaches `host`; None if it is not known.

    Linux and IPv4 only.
    """
    own = _find_own_address(host)
    if sys.platform != "linux" or own is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        names = (name for _, name in socket.if_nameindex())
        return next((name for name in names if _address_of(name, probe) == own), None)


def _find_own_address(host: str) -> str | None:
    """Return the local address from which `host` is reached; None if there is no route.

    Sends nothing.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:  # unknown host name, or no route
            return None
        address: str = probe.getsockname()[0]
        return address


def _address_of(interface: str, probe: socket.socket) -> str | None:
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    try:
        reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:  # the interface has no IPv4 address
        return None
    return socket.inet_ntoa(reply[20:24])


def listen(port: int, host: str = _LOOPBACK) -> int:
    """Return the file descriptor of a socket that listens on `port` of one address only."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        return listener.detach()


def _destroy_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def use_separate_store() -> None:
    """Have ranks started by torchrun use a store of their own instead of the agents' store.

    The agents' store outlives restarts and keeps the addresses of dead ranks (seen with torch 2.13;
    its #135712 was meant to fix this), unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 was set for
    torchrun. The first start on one machine does not need this. Machines count their restarts
    independently, so the count cannot identify a rendezvous: each rank sends a request with a
    random id, which only a live rank 0 answers.
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
        own = _find_own_address(address)
        # A loopback address: rank 0 is on the store's machine, whose name resolves to 127.0.1.1.
        is_reachable = own is not None and not own.startswith("127.")
        endpoint = f"{own if is_reachable else address} {free_port()} {uuid.uuid4().hex}"
        _announce_endpoint(shared, endpoint, int(os.environ["WORLD_SIZE"]))
    else:
        request = uuid.uuid4().hex
        shared.set(f"loft/request/{os.environ['RANK']}", request)
        endpoint = shared.get(f"loft/answer/{request}").decode()
        shared.set(f"loft/received/{request}", endpoint)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], _ = endpoint.split()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def _announce_endpoint(shared: TCPStore, endpoint: str, num_ranks: int) -> None:
    """Answer the requests of all ranks until each has confirmed this endpoint.

    The id in `endpoint` tells confirmations of live ranks from those of dead ones.
    """
    waiting = set(range(1, num_ranks))
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while waiting:
        if time.monotonic() > deadline:
            raise OSError(
                f"{len(waiting)} of {num_ranks} ranks did not connect within {TIMEOUT}: "
                f"{', '.join(map(str, sorted(waiting)[:20]))}; see the output of their machines"
            )
        for rank in sorted(waiting):
            if not shared.check([f"loft/request/{rank}"]):
                continue
            request = shared.get(f"loft/request/{rank}").decode()
            shared.set(f"loft/answer/{request}", endpoint)
            received = f"loft/received/{request}"
            if shared.check([received]) and shared.get(received).decode() == endpoint:
                waiting.remove(rank)
        time.sleep(STORE_POLL_SECONDS)
