"""Two or four ranks of one machine that call a function together, without a command around it.

They are forked from a process that has imported everything: that takes seconds once, and a rank a
fraction of one.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import lightning.pytorch.strategies
import peft
import torch
import transformers.models.llama.modeling_llama

import app.model.build
import app.strategy.fsdp  # noqa: F401
from app.process.launch import free_port

PRELOADED = (peft, transformers, lightning)
LONGEST = 180
"""seconds of a call"""


def on_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(*args)` on ranks that have met; returns what each returned, in their order."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks", "tests.strategy.built"])
    port = free_port()
    ranks = []
    for rank in range(num_ranks):
        listens, tells = context.Pipe(duplex=False)
        process = context.Process(
            target=_be_rank, args=(rank, num_ranks, port, tells, function, args), daemon=True
        )
        process.start()
        tells.close()
        ranks.append((process, listens))
    try:
        answers = [_answer_of(listens) for _, listens in ranks]
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()
    failed = [said for has_failed, said in answers if has_failed]
    assert not failed, "\n".join(failed)
    return [result for _, result in answers]


def _answer_of(listens: Any) -> tuple[bool, Any]:
    if not listens.poll(LONGEST):
        return True, f"a rank said nothing for {LONGEST} seconds"
    try:
        answer: tuple[bool, Any] = pickle.loads(listens.recv_bytes())  # noqa: S301  our own
        return answer
    except EOFError:
        return True, "a rank ended without a word"


def _be_rank(
    rank: int, num_ranks: int, port: int, tells: Any, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(LONGEST - 5)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
    }
    try:
        answer = False, function(*args)
    except BaseException:  # noqa: BLE001  the caller is told, whatever it is
        answer = True, f"rank {rank}: {traceback.format_exc()}"
    # By value: the connection's own pickler would leave tensors in this process's memory.
    tells.send_bytes(pickle.dumps(answer))
    tells.close()
    os._exit(0)


def ready(strategy: Any, precision: str = "32-true") -> Any:
    """Do for a strategy what Lightning's trainer does before it has a model."""
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.plugins import MixedPrecision, Precision
    from lightning.pytorch.plugins.environments import LightningEnvironment

    num_ranks = int(os.environ["WORLD_SIZE"])
    strategy.accelerator = CPUAccelerator()
    strategy.parallel_devices = [torch.device("cpu")] * num_ranks
    strategy.cluster_environment = LightningEnvironment()
    strategy.precision_plugin = (
        Precision() if precision == "32-true" else MixedPrecision("bf16-mixed", "cpu")
    )
    strategy.set_world_ranks()
    strategy.setup_environment()
    return strategy
