"""Planning an epoch of a million documents: fill, speed, balance between ranks, seek time.

Lengths are lognormal (median 150, sigma 1.0, cut at 2,048 tokens), of three data sets mixed by
tokens for the time of the plan (mixture, packs, steps, ranks) and of one data set for the packs.
All runs use one core; seconds are CPU seconds.

TRL is measured favourably: only the part of its `bfd` that chooses the packs (the sort and the
loop, from its `pc.make_struct` to its `pc.take`), on one table of all documents and in the batches
of 1,000 that `pack_dataset` makes, whichever is faster; copying tokens and writing a data set are
not included. Ours includes everything from the mixture to the ranks. The time of `pack_dataset` as
a user calls it is printed too.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.figure import Figure
from benchmarks.peers import peer_python
from common.text import percent

DOCUMENTS, CAPACITY, CUT = 1_000_000, 4096, 2048
RANKS, REPEATS, SEEKS = 8, 5, 20
SHARES = (0.6, 0.3, 0.1)

TRL = """
import json, sys, time
import numpy as np, pyarrow as pa, pyarrow.compute as pc
from datasets import Dataset
from trl import data_utils, pack_dataset

class Clock:
    seconds = began = 0.0
    def __getattr__(self, name):
        return getattr(pc, name)
    def make_struct(self, *arguments):
        self.began = time.process_time()
        return pc.make_struct(*arguments)
    def take(self, *arguments):
        self.seconds += time.process_time() - self.began
        return pc.take(*arguments)

lengths, capacity = np.load(sys.argv[1]), int(sys.argv[2])
offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
ids = pa.ListArray.from_arrays(offsets, np.zeros(offsets[-1], dtype=np.int32))
table = pa.table({"input_ids": ids})
result = {}
data_utils.pc = clock = Clock()
packed = data_utils._pack_bfd(table, capacity)
result["one_table"], result["one_table_packs"] = clock.seconds, len(packed)
del packed
data_utils.pc = clock = Clock()
began = time.perf_counter()
packed = pack_dataset(Dataset(table), capacity, strategy="bfd")
result["pack_dataset"] = time.perf_counter() - began
result["batches"], result["batches_packs"] = clock.seconds, len(packed)
print(json.dumps(result))
"""


def measure() -> list[Figure]:
    """Measure our plan of an epoch and TRL's packing on the same lengths."""
    drawn = np.random.default_rng(0).lognormal(np.log(150), 1.0, DOCUMENTS).astype(np.int64)
    lengths = np.clip(drawn, 1, CUT)
    seconds = median(plan_seconds(lengths) for _ in range(REPEATS))
    trl = trl_seconds(lengths)
    kindest = min(trl["one_table"], trl["batches"])
    print(
        f"TRL bfd: choosing packs {trl['one_table']:.2f} s in one table "
        f"({trl['one_table_packs']:,} packs), {trl['batches']:.2f} s in batches "
        f"({trl['batches_packs']:,} packs); pack_dataset as called {trl['pack_dataset']:.1f} s"
    )
    plan = make_plan(lengths, accumulation_steps=1)
    packs = plan._epoch(0).packs
    fill = float(lengths.sum() / (len(packs) * CAPACITY))
    print(f"ours: mixture to ranks {seconds:.3f} s, {len(packs):,} packs")
    warm, cold = seek_seconds(lengths, plan)
    print(f"seek: {warm * 1e3:.2f} ms, {cold:.2f} s when the epoch must be planned first")
    imbalance = 0.0
    for accumulation_steps in (1, 4, 16):
        plan = make_plan(lengths, accumulation_steps=accumulation_steps)
        over_epoch, lag = unevenness(plan, lengths)
        imbalance = max(imbalance, over_epoch)
        print(
            f"{RANKS} ranks, {accumulation_steps} packs a step each: sum(length^2) of the fullest "
            f"rank {percent(over_epoch, 3)} above the mean over the epoch, {percent(lag)} "
            "in a step on average"
        )
    return [
        Figure(figure="packing/fill", value=fill, bar=0.995, better="higher"),
        Figure(
            figure="packing/speedup_over_trl_bfd", value=kindest / seconds, bar=10, better="higher"
        ),
        Figure(figure="packing/rank_imbalance", value=imbalance, bar=0.01),
        Figure(figure="packing/seek_share_of_a_plan", value=warm / seconds, bar=0.1),
    ]


def make_plan(lengths: Any, accumulation_steps: int) -> Any:
    """Plan one epoch of one data set for RANKS ranks."""
    from data_modules import BatchSpec
    from data_modules.packing import StepPlan

    rows = np.arange(len(lengths))
    return StepPlan(
        lengths,
        lengths.astype(np.float64),
        lambda epoch: rows,
        BatchSpec(accumulation_steps=accumulation_steps, num_ranks=RANKS),
        capacity=CAPACITY,
        method="multipack",
        seed=0,
    )


def plan_seconds(lengths: Any) -> float:
    """Return the seconds from the lengths of three data sets to the steps and ranks of an epoch.

    Shares are those of the data sets' sizes, so that an epoch has each document once.
    """
    from data_modules import BatchSpec
    from data_modules.packing import Mixture, StepPlan
    from data_modules.settings import MixtureConfig

    datasets = np.random.default_rng(1).choice(len(SHARES), len(lengths), p=SHARES)
    groups = [np.flatnonzero(datasets == index) for index in range(len(SHARES))]
    label_weights = lengths.astype(np.float64)
    config = MixtureConfig(weights="tokens", temperature=1.0)
    began = time.process_time()
    mixture = Mixture(groups, [1.0] * len(groups), 0, config, lengths)
    plan = StepPlan(
        lengths,
        label_weights,
        mixture.epoch,
        BatchSpec(accumulation_steps=4, num_ranks=RANKS),
        capacity=CAPACITY,
        method="multipack",
        seed=0,
        datasets=datasets,
    )
    plan.micro_batches(0, 0)
    return time.process_time() - began


def seek_seconds(lengths: Any, plan: Any) -> tuple[float, float]:
    """Return the longest time to a new sampler's first micro-batch, in seconds."""
    from data_modules.packing import StepSampler

    warm = []
    for step in np.linspace(0, plan.num_steps - 1, SEEKS).astype(int).tolist():
        began = time.perf_counter()
        next(iter(StepSampler(plan, RANKS - 1, step)))
        warm.append(time.perf_counter() - began)
    began = time.perf_counter()
    fresh = make_plan(lengths, accumulation_steps=1)
    next(iter(StepSampler(fresh, RANKS - 1, fresh.num_steps // 2)))
    return max(warm), time.perf_counter() - began


def unevenness(plan: Any, lengths: Any) -> tuple[float, float]:
    """Return how far sum(length^2) of the fullest rank is above the mean, per epoch and step.

    The last step, which is not full, counts for the epoch only.
    """
    epoch = plan._epoch(0)
    costs = np.zeros(epoch.shares.size)
    squares = lengths[epoch.packs.documents].astype(np.float64) ** 2
    costs[: len(epoch.packs)] = np.add.reduceat(squares, epoch.packs.starts[:-1])
    by_rank = costs[epoch.shares].sum(axis=2)
    totals, full = by_rank.sum(axis=0), by_rank[:-1]
    return (
        float(totals.max() / totals.mean() - 1),
        float((full.max(axis=1) / full.mean(axis=1) - 1).mean()),
    )


def trl_seconds(lengths: Any) -> dict[str, Any]:
    """Return seconds and number of packs of TRL's bfd, in its own environment."""
    python = peer_python("trl")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lengths.npy"
        np.save(file, lengths)
        done = subprocess.run(
            [str(python), "-c", TRL, str(file), str(CAPACITY)],
            env={"HF_HOME": folder, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise SystemExit(f"TRL's packing ended with {done.returncode}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
