"""A process that has imported everything, and forks a child for each command of a `python`.

Imports take most of the time of a small run. Forks are made before any thread is started or random
number drawn; a child runs `app/train.py` or another module as `python -m` does. If RECORD_VARIABLE
is set, children record the hash of each batch by optimizer step and each disk operation of a save.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from app.process.launch import exit_with_parent
from tests.reliability.python import RECORD_VARIABLE, become_command, write_python

MOST_BYTES = 1 << 18
"""limit of a command's arguments and environment, in bytes"""
MOST_DESCRIPTORS = 64
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


def serve(file: str) -> NoReturn:
    """Fork a child for each command of the interpreter that is written to `file`.

    Connections are kept as descriptors, since a socket object in a later fork could close an
    unrelated file.
    """
    exit_with_parent()
    import_all()
    address = f"{file}.socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen()
        listener = os.dup(listening.fileno())
    gc.freeze()  # children do not have to collect these objects, in particular at exit
    write_python(Path(file), address)
    sys.executable = file  # children use it to start processes
    proxies: dict[int, int] = {}  # descriptor of a command's process -> connection of its proxy
    while True:
        ready, _, _ = select.select([listener, *proxies, *proxies.values()], [], [])
        for command, proxy in list(proxies.items()):
            if command in ready:
                del proxies[command]
                _report_end(command, proxy)
            elif proxy in ready:
                received = os.read(proxy, 1)  # nothing if the proxy has ended
                signal.pidfd_send_signal(command, received[0] if received else signal.SIGKILL)
        if listener in ready and (started := _fork_command(listener)) is not None:
            proxies.update([started])


def _fork_command(listener: int) -> tuple[int, int] | None:
    """Fork the command of the next proxy; return descriptors of its process and of the proxy."""
    with socket.socket(fileno=os.dup(listener)) as listening:
        connection, _ = listening.accept()
    text, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, MOST_DESCRIPTORS)
    proxy = connection.detach()
    if not text:  # the proxy has ended
        os.close(proxy)
        return None
    child = os.fork()
    if child == 0:
        become_command(json.loads(text), descriptors, run_module)
    for descriptor in descriptors:
        os.close(descriptor)
    return os.pidfd_open(child), proxy


def _report_end(command: int, proxy: int) -> None:
    """Send the exit code of a command, negative for a signal, to its proxy."""
    ended = os.waitid(os.P_PIDFD, command, os.WEXITED)
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with contextlib.suppress(OSError):  # the proxy has ended
        os.write(proxy, str(code).encode())
    os.close(command)
    os.close(proxy)


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


def run_module(name: str, words: Sequence[str]) -> NoReturn:
    """Run a verb or another module as `python -m` would, and end this process."""
    from app.process.launch import read_launch

    read_launch.cache_clear()  # the environment has changed
    if record := os.environ.get(RECORD_VARIABLE):
        record_into(Path(record))
    sys.argv = [f"{name.replace('.', '/')}.py", *words]
    sys.modules.pop(name, None)  # it becomes __main__
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    sys.exit(0)


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
