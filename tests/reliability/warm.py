"""A process that has imported everything, and forks a child for each requested command.

Imports take most of the time of a small run. Forks are made before any thread is started or random
number drawn; a child runs `app/train.py` or another module as `python -m` does. The ranks of a run
are forked as early, and wait until its supervisor starts them.

On request, children record the hash of each batch by optimizer step and each disk operation of a
save.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from app.process.launch import PARENT_VARIABLE, exit_with_parent
from common.installation import CHILD
from tests.reliability.python import attend, take_descriptors, write_python

MOST_BYTES = 1 << 16
"""limit of a rank's arguments and environment, in bytes"""
IMPORTED_LATE = (
    "multiprocessing.popen_fork",
    "numpy.ctypeslib",
    "numpy.ma",
    "PIL.ImageDraw",
    "PIL.ImageFont",
    "PIL.PngImagePlugin",
    "pyarrow",
    "rich._emoji_codes",
)
"""modules that a run imports late, to plot curves or print tables"""
COMPOSED = (
    ["+experiment=quickstart", "strategy=single"],  # first, since it remains in Hydra's store
    ["+experiment=quickstart", "logger=csv"],
    ["+experiment=quickstart"],
    ["model.path=a", "logger=csv"],
    ["model.path=a", "logger=csv", "adapter=lora", "packing=multipack"],
    ["model.path=a", "logger=csv", "adapter=full", "packing=multipack"],
    ["model.path=a", "logger=csv", "adapter=lora", "packing=none"],
    ["model.path=a", "logger=csv", "adapter=full", "packing=none"],
)
"""overrides of most test runs, whose compositions are cached"""


def serve(file: str) -> None:
    """Run requested commands in forks until stdin is closed.

    Each line of stdin is a request; the replies are its process id, and later its exit code.
    Commands of the interpreter that is written to `file` arrive through a socket.
    """
    exit_with_parent()
    import_all()
    address = f"{file}.socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen()
        listener = os.dup(listening.fileno())  # a descriptor: see WaitingRank
    write_python(Path(file), address)
    sys.executable = file  # children use it to start processes
    gc.freeze()  # children do not have to collect these objects, in particular at exit
    print(json.dumps({"ready": os.getpid()}), flush=True)
    running: dict[int, int] = {}
    requested = 0
    while True:
        ready, _, _ = select.select([sys.stdin, listener, *running], [], [])
        for ended in set(ready) & running.keys():
            child = running.pop(ended)
            os.close(ended)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if child == requested:
                print(json.dumps({"code": code}), flush=True)
        if listener in ready:
            with socket.socket(fileno=os.dup(listener)) as listening:
                connection, _ = listening.accept()
            child = os.fork()
            if child == 0:
                return attend(connection, run_module)
            connection.close()
            running[os.pidfd_open(child)] = child
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            request = json.loads(line)
            requested = child = os.fork()
            if child == 0:
                return become_request(request)
            print(json.dumps({"pid": child}), flush=True)
            running[os.pidfd_open(child)] = child


def import_all() -> None:
    """Import the modules that a run imports before its first step and after its last."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # read during the import
    os.environ["JE_ARROW_MALLOC_CONF"] = (
        "background_thread:false"  # otherwise Arrow starts a thread
    )
    import bitsandbytes  # noqa: F401
    import deepspeed  # noqa: F401
    import lightning  # noqa: F401
    import peft.tuners.lora.bnb
    import peft.utils.transformers_weight_conversion  # noqa: F401
    import torch.distributed.run  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import app.assembly.auto
    import app.assembly.base
    import app.assembly.training
    import app.evaluation.evaluator
    import app.model.adapter.experts
    import app.model.adapter.fused
    import app.model.cpu
    import app.model.save
    import app.strategy.deepspeed
    import app.strategy.fsdp
    import app.train
    import app.training.loggers  # noqa: F401

    for name in IMPORTED_LATE:
        importlib.import_module(name)
    read_once()

    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("importing has started a thread: a fork of this process is not sound")


def read_once() -> None:
    """Fill caches: compositions of conf/, sources of Llama layers, weight conversions."""
    import peft
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from app.config import compose
    from app.model.layers import disable_bypassing_kernels, find_bypassed_children
    from tests.composing import keep_compositions

    get_checkpoint_conversion_mapping("llama")
    with torch.device("meta"):
        base = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1))
        lora = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = peft.get_peft_model(base, lora)
    disable_bypassing_kernels(adapted)
    for module in adapted.modules():
        find_bypassed_children(type(module))
    keep_compositions(pytest.MonkeyPatch())
    for words in COMPOSED:
        compose("train", words)


def become_request(request: Mapping[str, Any]) -> NoReturn:
    """Turn this fork into the process that `request` would have started."""
    os.environ.update(request["environment"])
    os.environ[PARENT_VARIABLE] = str(os.getppid())  # this child must not outlive it
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    stdin = os.open(request["stdin"], os.O_RDONLY)
    for descriptor, source in enumerate((stdin, log, log)):
        os.dup2(source, descriptor)
    os.closerange(3, 256)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.orig_argv = [sys.executable, "-m", request["module"], *request["words"]]
    record = Path(request["record"])
    if request["num_processes"]:
        from app.process import supervisor as starter

        waiting = [WaitingRank(record) for _ in range(request["num_processes"])]
        starter.subprocess = SimpleNamespace(  # type: ignore[assignment]
            PIPE=subprocess.PIPE,
            Popen=lambda *args, **options: waiting.pop(0).start(*args, **options),
        )
    run_module(request["module"], request["words"], record)


def run_module(name: str, words: Sequence[str], record: Path | None = None) -> NoReturn:
    """Run a verb or another module as `python -m` would, and end this process."""
    from app.process.launch import read_launch

    read_launch.cache_clear()  # the environment has changed
    if record is not None:
        record_into(record)
    sys.argv = [f"{name.replace('.', '/')}.py", *words]
    sys.modules.pop(name, None)  # it becomes __main__
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    sys.exit(0)


class WaitingRank:
    """A forked rank process that waits for its start; replaces Popen in the supervisor."""

    def __init__(self, record: Path) -> None:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Descriptors, since a socket object in a later fork could close an unrelated file.
        self._sender, receiver = (end.detach() for end in pair)
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._sender)
            _wait_to_be_rank(receiver, record)
        os.close(receiver)
        self.stderr: Any = None
        self.returncode: int | None = None

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str], stderr: int, pass_fds: list[int]
    ) -> WaitingRank:
        """Start the rank, as `subprocess.Popen` would."""
        assert command[1:3] == [CHILD, "-m"] and stderr == subprocess.PIPE
        reader, writer = os.pipe()
        message = {"module": command[3], "words": list(command[4:])}
        message |= {"environment": dict(env), "descriptors": pass_fds}
        with socket.socket(fileno=self._sender) as starter:
            socket.send_fds(starter, [json.dumps(message).encode()], [writer, *pass_fds])
        os.close(writer)
        self.stderr = os.fdopen(reader, "rb", buffering=0)
        return self

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _wait_to_be_rank(receiver: int, record: Path) -> NoReturn:
    with socket.socket(fileno=receiver) as starter:
        text, descriptors, _, _ = socket.recv_fds(starter, MOST_BYTES, 8)
    if not text:  # the run ended before it started this rank
        os._exit(0)
    start = json.loads(text)
    take_descriptors([0, 1, *descriptors], [0, 1, 2, *start["descriptors"]])
    os.environ.clear()
    os.environ.update(start["environment"])
    run_module(start["module"], start["words"], record)


def record_into(folder: Path) -> None:
    """Record batches and disk operations of this process in files in `folder`."""
    from app.process import faults
    from app.training.module import FinetuneModule

    files: dict[str, int] = {}

    def note(name: str, words: str) -> None:
        if name not in files:
            files[name] = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(files[name], b"begin\n")
        os.write(files[name], f"{words}\n".encode())

    loss: Callable[..., Any] = FinetuneModule.micro_batch_loss

    def noted_loss(module: Any, batch: Any) -> Any:
        value = loss(module, batch)
        if module.resume is None:  # otherwise the pass is discarded
            digest = hashlib.sha256(batch.input_ids.numpy().tobytes())
            digest.update(batch.labels.numpy().tobytes())
            step = module.trainer.global_step + 1
            note(f"batches-rank-{module.trainer.global_rank}", f"{step} {digest.hexdigest()[:16]}")
        return value

    FinetuneModule.micro_batch_loss = noted_loss
    reach, save = faults.fault_point, [0]

    def noted_point(point: str, step: int | None = None) -> None:
        if point == "save":
            save[0] = step or 0
        elif point.startswith("disk.") and save[0] and os.environ.get("LOCAL_RANK", "0") == "0":
            note("operations", f"{save[0]} {point}")
        reach(point, step)

    faults.fault_point = noted_point


if __name__ == "__main__":
    serve(sys.argv[1])
