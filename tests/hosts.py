"""Two simulated hosts on this machine: network namespaces with a host name, address and link each.

The link can be slowed down, cut and restored. Names of namespaces contain the process id, so that
tests can run in parallel.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run, start

INTERFACE = "eth0"
PORT = 29500
"""port of the rendezvous; each namespace has separate ports"""
FILES = Path("/etc/netns")
"""`ip netns exec` mounts the files of a namespace's folder here over those in /etc"""
NAMED = 'hostname "$0" && exec "$@"'
BURST = "64kb"


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One host: a network namespace with its own host name and interface."""

    name: str
    """host name of its processes"""
    address: str
    namespace: str

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs `words` on this host, in the process it starts."""
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*inside, "sh", "-c", NAMED, self.name, *words]

    def start(
        self, *words: str, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command on this host, in a new session."""
        merged = {"stderr": subprocess.STDOUT, **options}
        return start(*self.command(*words), environment=environment, **merged)

    def torchrun(
        self,
        *words: str,
        first: str,
        ranks: int = 1,
        options: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        **popen: Any,
    ) -> subprocess.Popen[str]:
        """Start `torchrun --nnodes=2 ... WORDS` on this host; the rendezvous is on `first`.

        A thread a rank, unless `environment` says otherwise.
        """
        return self.start(
            *(python, "-m", "torch.distributed.run"),
            *("--nnodes=2", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"),
            *(f"--rdzv-endpoint={first}:{PORT}", "--monitor-interval=0.5"),
            *options,
            *words,
            environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | dict(environment or {}),
            **popen,
        )

    def processes(self) -> list[int]:
        """Return the processes that run on this host."""
        return [int(word) for word in _ip("netns", "pids", self.namespace).split()]

    def send(self, signum: int) -> None:
        """Send a signal to every process of this host, e.g. SIGKILL for a power failure."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def shape(self, rate: str) -> None:
        """Limit the sending rate of this host to `rate`, in the format of tc: 100mbit."""
        limit = ("root", "tbf", "rate", rate, "burst", BURST, "latency", "200ms")
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", INTERFACE, *limit)

    def cut(self) -> None:
        """Take this host's end of the link down, as if a cable were unplugged."""
        _ip("-n", self.namespace, "link", "set", INTERFACE, "down")

    def restore(self) -> None:
        """Bring this host's end of the link up again."""
        _ip("-n", self.namespace, "link", "set", INTERFACE, "up")


def _hosts_error() -> str | None:
    if sys.platform != "linux":
        return "network namespaces are of Linux"
    missing = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found (packages iproute2 and util-linux)"
    probe = f"loft{os.getpid()}-probe"
    made = run("ip", "netns", "add", probe)
    if made.returncode != 0:
        return f"no network namespace may be made: {made.stderr.strip()}"
    try:
        inside = run("ip", "netns", "exec", probe, "unshare", "--uts", "true")
    finally:
        _ip("netns", "del", probe)
    return None if inside.returncode == 0 else f"no command runs in one: {inside.stderr.strip()}"


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Create `node1` and `node2` with a link; their processes are killed at the end.

    Skips the test if this machine cannot simulate them.
    """
    if (reason := _hosts_error()) is not None:
        pytest.skip(reason)
    own = f"loft{os.getpid()}"
    first, second = (
        Host(name=f"node{number}", address=f"10.77.0.{number}", namespace=f"{own}-{number}")
        for number in (1, 2)
    )
    names = "127.0.0.1 localhost\n" + "".join(f"{h.address} {h.name}\n" for h in (first, second))
    with ExitStack() as stack:
        for host in (first, second):
            _ip("netns", "add", host.namespace)
            stack.callback(_remove, host)
            folder = FILES / host.namespace
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(names, encoding="ascii")
        ends = ("type", "veth", "peer", "name", INTERFACE, "netns", second.namespace)
        _ip("link", "add", INTERFACE, "netns", first.namespace, *ends)
        for host in (first, second):
            within = ("-n", host.namespace)
            _ip(*within, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip(*within, "link", "set", interface, "up")
        yield first, second


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as pair:
        yield pair


def _remove(host: Host) -> None:
    until = time.monotonic() + 10
    while host.processes() and time.monotonic() < until:
        host.send(signal.SIGKILL)
        time.sleep(0.05)
    _ip("netns", "del", host.namespace)
    shutil.rmtree(FILES / host.namespace, ignore_errors=True)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    done = run(*words)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout
