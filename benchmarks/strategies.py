"""Overhead of training on two ranks, compared with two independent runs and hand-written loops.

Every loop takes the same steps of LoRA on a Llama of 23 M weights, with a thread and a core for
each of its two processes. They alternate, and their medians are compared. Ours is the trainer with
one of its strategies; the hand-written one is torch's DDP, `fully_shard` or DeepSpeed's engine
around the same model, loss, batches and optimizer, and nothing else.
"""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from benchmarks.figure import Figure
from benchmarks.parts import build_data, builder, fit
from common.text import percent

ROUNDS, STEPS, WARM_UP = 3, 5, 2
ACCUMULATION, SEQUENCE_LEN = 2, 512
SHAPE = {"hidden_size": 512, "intermediate_size": 1376}
RANKS = 2
LONGEST = 300
"""seconds of one loop"""
Time = tuple[float, float]
"""seconds by the clock, and of a core that this process had"""
BY_HAND = ("ddp", "zero1", "zero2", "zero3", "fsdp")
"""strategies with a hand-written counterpart"""
OTHERS = ("fsdp_grad_op", "tp")


def measure() -> list[Figure]:
    """Measure the speed of each strategy, and our overhead over the libraries."""
    import_all()
    jobs = [("alone", "")]
    jobs += [(how, name) for name in BY_HAND for how in ("ours", "by hand")]
    jobs += [("ours", name) for name in OTHERS]
    seconds: dict[tuple[str, str], list[Time]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(write_task, Path(folder), num_ranks=1)
        for number in range(ROUNDS):
            for how, name in jobs:
                steps = on_ranks(run, Path(folder), number, how, name)
                seconds[how, name] += [one for of_rank in steps for one in of_rank]
    of = {job: in_medians(found) for job, found in seconds.items()}
    alone, computed = of["alone", ""]
    print(f"two alone: a step in {alone * 1e3:.0f} ms, {computed * 1e3:.0f} of a core")
    figures = []
    for name in (*BY_HAND, *OTHERS):
        ours, computed = of["ours", name]
        # Tensor-parallel ranks see the same data, so two of them take the steps of one.
        share = alone / ours / (RANKS if name == "tp" else 1)
        said = f"{name}: {ours * 1e3:.0f} ms, {computed * 1e3:.0f} of a core"
        said += f", {share:.3f} of two alone"
        if name in BY_HAND:
            by_hand, computed_by_hand = of["by hand", name]
            overhead = ours / by_hand - 1.0
            said += f"; by hand {by_hand * 1e3:.0f} ms, {computed_by_hand * 1e3:.0f} of a core"
            core = computed / computed_by_hand - 1.0
            said += f"; we add {percent(overhead)}, {percent(core)} of a core"
            figures.append(Figure(figure=f"strategies/{name}_overhead", value=overhead, bar=0.05))
        print(said)
        if name == "ddp":
            speed = Figure(
                figure="strategies/ddp_of_two_alone", value=share, bar=0.95, better="higher"
            )
            figures.insert(0, speed)
    return figures


def in_medians(found: list[Time]) -> Time:
    """Return the median of both clocks."""
    wall, computed = zip(*found, strict=True)
    return median(wall), median(computed)


def import_all() -> None:
    """Import what the loops need before they are forked from this process."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    import deepspeed  # noqa: F401
    import lightning  # noqa: F401
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import app.model.build
    import app.strategy.deepspeed
    import app.strategy.fsdp
    import app.training.module
    import app.training.trainer  # noqa: F401
    import data_modules.datamodule  # noqa: F401


def on_ranks(function: Callable[..., Any], *words: Any, num_ranks: int = RANKS) -> list[Any]:
    """Call `function` in connected processes with a core each; return their results."""
    from app.process.launch import free_port

    context, port = multiprocessing.get_context("fork"), free_port()
    ranks = []
    for rank in range(num_ranks):
        listens, tells = context.Pipe(duplex=False)
        process = context.Process(target=_be_rank, args=(rank, port, tells, function, words))
        process.start()
        tells.close()
        ranks.append((process, listens))
    try:
        answers = [
            listens.recv() if listens.poll(LONGEST) else ("it took too long", None)
            for _, listens in ranks
        ]
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()
    for failure, _ in answers:
        if failure:
            raise SystemExit(f"{words}: {failure}")
    return [result for _, result in answers]


def _be_rank(
    rank: int, port: int, tells: Any, function: Callable[..., Any], words: tuple[Any, ...]
) -> None:
    from app.process.environment import retain_freed_memory

    retain_freed_memory()  # as the verbs do
    import torch

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    os.environ |= {"NODE_RANK": "0", "WORLD_SIZE": str(RANKS), "RANK": str(rank)}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            answer = "", function(*words)
    except BaseException:  # noqa: BLE001 - told to the process that waits
        answer = traceback.format_exc(), None
    tells.send(answer)
    os._exit(0)


def write_task(folder: Path) -> None:
    """Write the base and its rows."""
    from benchmarks.training.task import write_files

    write_files(folder, num_rows=600, **SHAPE)


def run(folder: Path, number: int, how: str, name: str) -> list[Time]:
    """Run all steps of one loop; return the seconds of the measured ones."""
    logging.disable(logging.INFO)
    from app.process.environment import configure_libraries

    configure_libraries(offline=True)
    if how == "by hand":
        return by_hand(folder, name)
    rank = os.environ["LOCAL_RANK"]
    if how == "alone":
        os.environ.pop("RANK")
        os.environ |= {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        return ours(folder / f"{number}-alone-{rank}", folder, "single", int(rank))
    return ours(folder / f"{number}-{name}-{rank}", folder, name, int(rank))


def datamodule(folder: Path, num_ranks: int, seed: int = 0) -> Any:
    """The rows in packs of 512 tokens."""
    from data_modules import DatasetConfig

    rows = DatasetConfig(path=str(folder / "rows.jsonl"), format="pretokenized", name="rows")
    return build_data(
        folder / "base",
        [rows],
        SEQUENCE_LEN,
        seed=seed,
        cache_dir=folder / "cache",
        accumulation_steps=ACCUMULATION,
        num_ranks=num_ranks,
        max_steps=STEPS,
        row_multiple=64,
    )


def ours(run_folder: Path, folder: Path, name: str, rank: int) -> list[Time]:
    """Train with the parts of `app.train`."""
    import lightning as L

    from app.assembly.training import build_strategy
    from app.config import settings_of
    from app.model.adapter import LoraConfig
    from app.training.trainer import TrainerConfig, resolve_environment

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.ends: list[Time] = []

        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            self.ends.append(now())

    L.seed_everything(0, verbose=False)
    num_ranks = 1 if name == "single" else RANKS
    settings = settings_of("strategy", name)
    config = TrainerConfig(
        accelerator="cpu",
        devices=num_ranks,
        gradient_accumulation_steps=ACCUMULATION,
        precision="fp32",
        kernels="torch",  # as in the hand-written loops
    )
    env = resolve_environment(config, settings)
    # Independent processes train on different rows, as two ranks do.
    data = datamodule(folder, env.num_data_ranks, seed=rank if name == "single" else 0)
    data.setup("fit")
    clock, adapter = Clock(), LoraConfig(dropout=0.0)
    fit(
        builder(folder / "base", adapter),
        adapter,
        data,
        config,
        run_folder,
        env=env,
        strategy=build_strategy(
            settings, accelerator="cpu", num_ranks=num_ranks, accumulation=ACCUMULATION
        ),
        steps=STEPS,
        lr=1e-4,
        callbacks=[clock],
        uses_fused_kernels=False,
    )
    return seconds_between(clock.ends)


def seconds_between(ends: list[Time]) -> list[Time]:
    """Return the seconds of the steps after the warm-up."""
    return [
        (after[0] - before[0], after[1] - before[1])
        for before, after in pairwise(ends[WARM_UP - 1 :])
    ]


def now() -> Time:
    """Return wall time and CPU time of this process."""
    return time.perf_counter(), time.process_time()


def by_hand(folder: Path, name: str) -> list[Time]:
    """Train with a hand-written loop over a library's wrapper."""
    import torch
    import torch.distributed as dist

    from app.model.adapter import LoraConfig
    from app.training.objective.objective import DatasetSums, Sft, batch_loss

    class Loss(torch.nn.Module):
        """The model with its loss, as a module for DDP and DeepSpeed to wrap."""

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model
            self.sums = DatasetSums(1)

        def forward(self, batch: Any) -> Any:
            return batch_loss(Sft(), self.model, batch, "sdpa", self.sums) / batch.step_weight

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = datamodule(folder, RANKS)
    data.trainer = SimpleNamespace(
        world_size=RANKS,
        distributed_sampler_kwargs={"num_replicas": RANKS, "rank": dist.get_rank()},
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    data.setup("fit")
    steps = {"ddp": _by_ddp, "fsdp": _by_fsdp}.get(name, _by_deepspeed)
    module, ends = Loss(builder(folder / "base", LoraConfig(dropout=0.0))()), []
    module.train()
    micro_batches = chain.from_iterable(data.train_dataloader())
    for loss in steps(name, module, micro_batches):
        module.sums.take()
        loss.item()
        ends.append(now())
    return seconds_between(ends)


def _trained(module: Any) -> list[Any]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def _by_ddp(name: str, module: Any, micro_batches: Iterator[Any]) -> Iterator[Any]:
    import torch

    ddp = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    trained = _trained(module)
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    for _ in range(STEPS):
        with ddp.no_sync():
            for _ in range(ACCUMULATION - 1):
                (ddp(next(micro_batches)) * RANKS).backward()
        loss = ddp(next(micro_batches)) * RANKS
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def _by_fsdp(name: str, module: Any, micro_batches: Iterator[Any]) -> Iterator[Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from app.model.layers import decoder_layers

    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in decoder_layers(module.model, "LAYER"):
        fully_shard(module.model.get_submodule(layer), mesh=mesh)
    fully_shard(module.model, mesh=mesh)
    trained = _trained(module)
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    for _ in range(STEPS):
        for number in range(ACCUMULATION):
            # As we do with few trainable weights: gradients are sent once per step.
            module.model.set_requires_gradient_sync(number == ACCUMULATION - 1)
            loss = module(next(micro_batches)) * RANKS
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def _by_deepspeed(name: str, module: Any, micro_batches: Iterator[Any]) -> Iterator[Any]:
    from importlib import import_module

    import deepspeed
    import torch
    from deepspeed.utils import logger

    from app.config import settings_of
    from app.model.adapter import unfuse_adapters
    from app.strategy.deepspeed_config import deepspeed_config

    logger.setLevel(logging.ERROR)
    # It would compile an operator for a minute that only its inference uses.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo", verbose=False)
    settings = settings_of("strategy", name)
    if settings.stage == 3:
        unfuse_adapters(module.model)
    trained = _trained(module)
    config = deepspeed_config(
        settings,
        on_gpu=False,
        dtype=torch.float32,
        num_trained=sum(weight.numel() for weight in trained),
        ranks_per_node=RANKS,
        accumulation=ACCUMULATION,
        max_norm=1.0,
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=trained,
        optimizer=torch.optim.AdamW(trained, lr=1e-4, fused=True),
        config=config,
    )
    for _ in range(STEPS):
        for _ in range(ACCUMULATION):
            loss = engine(next(micro_batches)) * RANKS * ACCUMULATION
            engine.backward(loss)
            engine.step()
        yield loss
