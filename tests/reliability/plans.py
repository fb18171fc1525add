"""Plans of deaths and damages of runs, deterministic for a seed."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterator, Mapping, Sequence

from app.process import faults
from tests.reliability.cases import NUM_STEPS, VARIANTS, Chain, Death, Operations, Variant

NUM_KILLS = 100
KILLS_IN_A_SAVE = 15
FEWEST_OPERATIONS = 100
"""lower bound of the disk operations of any save"""
NUM_SIGTERMS = 40
NUM_BAD_NUMBERS = 30
NUM_DISK_FULL = 20
SAMPLED_WRITE_POINTS = 48
DEATHS_A_CHAIN = 20
"""most deaths in one chain, if each happens in a separate save"""
NUM_DAMAGED = 8
BAD_NUMBERS = ("nan", "inf", "grad_nan", "grad_inf")
KILLED, SAVED, NO_ENVIRONMENT, BAD = -signal.SIGKILL, 143, 3, 4
"""exit codes"""


def plan_chains(seed: int, counted: Mapping[Variant, Operations], *, is_full: bool) -> list[Chain]:
    """List all chains of a seed."""
    return [
        *plan_kills(seed),
        *plan_write_points(seed, counted, is_full=is_full),
        *plan_damaged(seed),
        *plan_sigterms(seed),
        *plan_anyone_killed(),
        *plan_bad_numbers(seed),
        *plan_disk_full(seed, counted),
        *plan_strategies(seed),
    ]


def plan_kills(seed: int) -> list[Chain]:
    """Kill runs of all variants during steps, micro-batches and saves."""
    dice = random.Random(f"kills {seed}")
    with_five = set(dice.sample(range(len(VARIANTS)), NUM_KILLS % len(VARIANTS)))
    in_save = set(dice.sample(range(len(VARIANTS)), KILLS_IN_A_SAVE))
    chains = []
    for index, variant in enumerate(VARIANTS):
        number = NUM_KILLS // len(VARIANTS) + (index in with_five)
        saves = [dice.randrange(6, NUM_STEPS + 1, 2)] if index in in_save else []
        others = [step for step in range(1, NUM_STEPS) if step not in saves]
        steps = sorted([*saves, *dice.sample(others, number - len(saves))])
        deaths = [
            _kill_in_save(step, variant, dice) if step in saves else _kill(step, variant, dice)
            for step in steps
        ]
        cold = dice.randrange(number + 1) if index % 4 == seed % 4 else None
        chains.append(Chain(f"kills-{variant.name}", variant, deaths, cold=cold))
    return chains


def _killed(variant: Variant) -> int:
    return KILLED if variant.ranks == 1 else NO_ENVIRONMENT


def _kill(step: int, variant: Variant, dice: random.Random) -> Death:
    if dice.random() < 0.5:
        fault = f"batch_killed:{dice.randint(1, variant.accumulation)}@{step}"
    else:
        fault = f"rank_killed:{dice.randrange(variant.ranks)}@{step}"
    return Death("kills", step, _killed(variant), fault)


def _kill_in_save(step: int, variant: Variant, dice: random.Random) -> Death:
    if dice.random() < 0.5:
        where = f"ckpt:{dice.choice(faults.CHECKPOINT_POINTS)}"
    else:
        where = f"disk:{dice.randint(1, FEWEST_OPERATIONS)}"
    return Death("kills in a save", step, _killed(variant), f"{where}@{step}")


COUNTED = [
    Variant(),
    Variant(adapter="full", data="padded", accumulation=4),
    Variant(ranks=2, data="mixture"),
]
"""variants whose disk operations are counted, to kill them at each operation of a save"""


def plan_counted(variant: Variant) -> Chain:
    """Plan the run whose disk operations are counted: it saves and rotates after each step."""
    return Chain(f"counted-{variant.name}", variant, (), SAVES)


# Two saves per death: the second cleans up, so that every death counts from a regular save.
SAVES = (
    *(f"trainer.max_steps={2 * DEATHS_A_CHAIN + 2}", "trainer.validate_every_steps=20"),
    *("trainer.checkpoint.every_steps=1", "trainer.checkpoint.keep_last=1"),
)


def plan_write_points(
    seed: int, counted: Mapping[Variant, Operations], *, is_full: bool
) -> list[Chain]:
    """Kill runs at a sample of the operations of a save and its rotation, or at all."""
    dice = random.Random(f"write points {seed}")
    chains = []
    for variant, operations in counted.items():
        points = range(1, operations.all + 1)
        if not is_full:
            # One per part, so that the start and the end of a save are always included.
            parts = _parts(operations.all, SAMPLED_WRITE_POINTS // len(counted))
            points = [dice.randint(*part) for part in parts]
        faulty = [f"disk:{point}" for point in points]
        chains += _die_within_saves(variant, "write points", faulty, code=_killed(variant))
    return chains


def plan_disk_full(seed: int, counted: Mapping[Variant, Operations]) -> list[Chain]:
    """Simulate a full disk at operations of a save that need space."""
    dice = random.Random(f"disk full {seed}")
    chosen = [variant for variant in counted if variant.adapter == "lora"]
    chains = []
    for variant in chosen:
        parts = _parts(counted[variant].need_room, NUM_DISK_FULL // len(chosen))
        points = [f"enospc:{dice.randint(*part)}" for part in parts]
        chains += _die_within_saves(variant, "disk full", points, code=NO_ENVIRONMENT)
    return chains


def _parts(total: int, number: int) -> list[tuple[int, int]]:
    """Split 1..total into `number` ranges (first, last); the last one has length 1."""
    bounds = [round(1 + index * (total - 1) / (number - 1)) for index in range(number)]
    return [(first, after - 1) for first, after in itertools.pairwise(bounds)] + [(total, total)]


def _full(what: str, step: int, fault: str, saved: int | None) -> Death:
    says = f"step-{saved} is kept"
    return Death(what, step, NO_ENVIRONMENT, fault, saved=saved, says=says)


def _die_within_saves(
    variant: Variant, what: str, points: Sequence[str], *, code: int
) -> Iterator[Chain]:
    """Plan a death at each of `points` of a save, at most DEATHS_A_CHAIN per chain."""
    is_full = what == "disk full"
    for index in range(0, len(points), DEATHS_A_CHAIN):
        deaths = [
            _full(what, step, f"{point}@{step}", step - 1)
            if is_full
            else Death(what, step, code, f"{point}@{step}")
            for number, point in enumerate(points[index : index + DEATHS_A_CHAIN])
            for step in [2 * number + 3]
        ]
        name = f"{what}-{variant.name}-{index}".replace(" ", "-")
        yield Chain(name, variant, deaths, SAVES)


def plan_damaged(seed: int) -> list[Chain]:
    """Kill runs, and damage the newest checkpoint before they resume."""
    dice = random.Random(f"damaged {seed}")
    return [
        Chain(
            f"damaged-{variant.name}",
            variant,
            [
                Death("damaged", step, _killed(variant), f"rank_killed@{step}", damages=True)
                for step in range(5, NUM_STEPS, 2)
            ],
        )
        for variant in dice.sample(VARIANTS, NUM_DAMAGED // len(range(5, NUM_STEPS, 2)))
    ]


def plan_sigterms(seed: int) -> list[Chain]:
    """Send SIGTERM to a rank or to the command's process."""
    dice = random.Random(f"sigterms {seed}")
    chosen = _chosen(dice, 1, 1, 2, 2, 2)
    chains = []
    for index, variant in enumerate(chosen):
        deaths = []
        steps = sorted(dice.sample(range(1, NUM_STEPS - 1), NUM_SIGTERMS // len(chosen)))
        for number, step in enumerate(steps):
            who = number % (variant.ranks + 1)  # each rank, then the command's process
            if who == variant.ranks:
                deaths.append(Death("sigterms", step, SAVED, signum=signal.SIGTERM))
            else:
                deaths.append(Death("sigterms", step, SAVED, f"sigterm:{who}@{step}", saved=step))
        chains.append(Chain(f"sigterms-{index}-{variant.name}", variant, deaths))
    return chains


def _chosen(dice: random.Random, *ranks: int) -> list[Variant]:
    """Draw a variant for each number of ranks."""
    return [dice.choice([each for each in VARIANTS if each.ranks == n]) for n in ranks]


def plan_anyone_killed() -> list[Chain]:
    """Kill each kind of process of a run; no other process may remain."""
    one, two = Variant(accumulation=4), Variant(ranks=2)
    workers = ("data.num_workers=1",)

    def death(step: int, code: int, who: str | None = None) -> Death:
        if who is None:
            return Death("processes killed", step, code, signum=signal.SIGKILL)
        return Death("processes killed", step, code, f"{who}@{step}")

    of_one = [death(3, NO_ENVIRONMENT, "worker_killed"), death(5, KILLED, "rank_killed")]
    of_two = [
        *(death(3, NO_ENVIRONMENT, "rank_killed:0"), death(5, NO_ENVIRONMENT, "rank_killed:1")),
        *(death(7, KILLED), death(8, NO_ENVIRONMENT, "worker_killed:0")),
        death(10, NO_ENVIRONMENT, "worker_killed:1"),
    ]
    return [
        Chain("anyone-of-one", one, [*of_one, death(7, KILLED)], workers),
        Chain("anyone-of-two", two, of_two, workers),
    ]


def plan_bad_numbers(seed: int) -> list[Chain]:
    """Make losses or gradients NaN or infinite."""
    dice = random.Random(f"bad numbers {seed}")
    chosen = _chosen(dice, 1, 1, 2)
    number = NUM_BAD_NUMBERS // len(chosen)
    words = (f"trainer.max_steps={3 * number + 2}", "trainer.validate_every_steps=20")
    chains = []
    for index, variant in enumerate(chosen):
        deaths = []
        for first in range(1, 3 * number, 3):
            # Reported at the next save at the latest, before the next fault.
            step = first + dice.randrange(2)
            fault = f"{dice.choice(BAD_NUMBERS)}:{dice.randrange(variant.ranks)}@{step}"
            saved, says = (step - 1) // 2 * 2, f"step {step}: "
            deaths.append(Death("bad numbers", step, BAD, fault, saved=saved, says=says))
        chains.append(Chain(f"bad-numbers-{index}-{variant.name}", variant, deaths, words))
    return chains


SHARDED = [
    Variant(ranks=2, accumulation=4, strategy="fsdp"),
    Variant(adapter="full", ranks=2, data="padded", strategy="zero2"),
    Variant(ranks=2, data="mixture", strategy="zero3"),
]
"""variants whose ranks hold and save shards"""
FEWEST_OF_A_SHARE = 10
"""lower bound of the disk operations with which a rank above 0 saves its shard"""


def plan_strategies(seed: int) -> list[Chain]:
    """Kill sharded ranks during steps, while they write shards, and before the commit."""
    dice = random.Random(f"strategies {seed}")
    return [
        Chain(
            f"strategy-{variant.name}",
            variant,
            [
                _end_sharded(3, f"rank_killed:{dice.randrange(2)}"),
                _end_sharded(5, f"batch_killed:{dice.randint(1, variant.accumulation)}"),
                _end_sharded(6, f"disk:{dice.randint(1, FEWEST_OF_A_SHARE)}:1", saved=4),
                _end_sharded(8, f"ckpt:{dice.choice(('after_file', 'after_manifest'))}", saved=6),
                _end_sharded(10, f"enospc:{dice.randint(1, FEWEST_OF_A_SHARE)}:1", saved=8),
            ],
        )
        for variant in SHARDED
    ]


def _end_sharded(step: int, fault: str, saved: int | None = None) -> Death:
    if fault.startswith("enospc"):
        return _full("disk full for a share", step, f"{fault}@{step}", saved)
    return Death("kills of shares", step, NO_ENVIRONMENT, f"{fault}@{step}", saved=saved)
