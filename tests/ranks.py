"""Call a function on two or four ranks of one machine, without a command line.

Ranks are forked from a fork of the warm process, which has imported everything; starting a rank
takes a fraction of a second.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker, spawn
from typing import Any

import lightning.pytorch.strategies
import peft
import torch
import transformers.models.llama.modeling_llama

import app.model.build
import app.strategy.fsdp  # noqa: F401
from app.process.launch import free_port
from app.strategy.settings import StrategyConfig
from tests.reliability.shell import shared_shell

PRELOADED = (peft, transformers, lightning)
TIMEOUT_SECONDS = 180
"""time limit of a call"""


def on_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(*args)` on each of `num_ranks` new ranks; return their results in order."""
    # CUDA cannot be used in a fork of a process that has looked for its devices.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    if not torch.cuda.is_available():
        context.set_forkserver_preload(["tests.ranks", "tests.strategy.preload"])
        _ensure_forkserver()
    port = free_port()
    ranks = []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_rank, args=(rank, num_ranks, port, sender, function, args), daemon=True
        )
        process.start()
        sender.close()
        ranks.append((process, receiver))
    try:
        results = [_receive_result(receiver) for _, receiver in ranks]
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()
    errors = [error for has_failed, error in results if has_failed]
    assert not errors, "\n".join(errors)
    return [result for _, result in results]


def _ensure_forkserver() -> None:
    """Start the process that forks ranks by the warm interpreter, unless it runs."""
    resource_tracker.ensure_running()
    own = spawn.get_executable()
    spawn.set_executable(shared_shell().python)
    try:
        forkserver.ensure_running()
    finally:
        spawn.set_executable(own)


def _receive_result(receiver: Any) -> tuple[bool, Any]:
    """Return whether a rank has failed, and its result or error."""
    if not receiver.poll(TIMEOUT_SECONDS):
        return True, f"a rank sent no result for {TIMEOUT_SECONDS} seconds"
    try:
        result: tuple[bool, Any] = pickle.loads(receiver.recv_bytes())  # noqa: S301  our own
        return result
    except EOFError:
        return True, "a rank ended without a result"


def _run_rank(
    rank: int, num_ranks: int, port: int, sender: Any, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(TIMEOUT_SECONDS - 5)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
    }
    try:
        result = False, function(*args)
    except BaseException:  # noqa: BLE001  every error is sent to the caller
        result = True, f"rank {rank}: {traceback.format_exc()}"
    # Pickled here: the connection's own pickler would leave tensors in this process's memory.
    sender.send_bytes(pickle.dumps(result))
    sender.close()
    os._exit(0)


def connect(config: StrategyConfig, precision: str = "32-true", **options: Any) -> Any:
    """Build a strategy and connect its rank, as Lightning's trainer does before it has a model."""
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.plugins import MixedPrecision, Precision
    from lightning.pytorch.plugins.environments import LightningEnvironment

    from app.assembly.training import build_strategy

    num_ranks = int(os.environ["WORLD_SIZE"])
    strategy: Any = build_strategy(config, accelerator="cpu", num_ranks=num_ranks, **options)
    strategy.accelerator = CPUAccelerator()
    strategy.parallel_devices = [torch.device("cpu")] * num_ranks
    strategy.cluster_environment = LightningEnvironment()
    strategy.precision_plugin = (
        Precision() if precision == "32-true" else MixedPrecision("bf16-mixed", "cpu")
    )
    strategy.set_world_ranks()
    strategy.setup_environment()
    return strategy
