"""A subset of `make chaos`: a chain of each kind, with one and two ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.reliability import cases, plans
from tests.reliability.chain import References, count_operations, run_chain
from tests.reliability.person import Person

pytestmark = pytest.mark.slow
SEED = 0
SIGTERMS = plans.plan_sigterms(SEED)[-1]
"""sent to each rank and to the command's process, in turn"""
KILLS = {chain.variant.name: chain for chain in plans.plan_kills(SEED)}


def half(chain: cases.Chain, every: int = 2) -> cases.Chain:
    """Return the chain with every second (third, ...) death."""
    return replace(chain, deaths=chain.deaths[::every])


def accumulate(chain: cases.Chain, number: int) -> cases.Chain:
    """Return the chain with another number of accumulated micro-batches."""
    return replace(chain, variant=replace(chain.variant, accumulation=number))


CHAINS = [
    KILLS["full-1-padded-4"],
    half(KILLS["full-2-mixture-4"]),
    plans.plan_damaged(SEED)[0],
    replace(SIGTERMS, deaths=SIGTERMS.deaths[:6:2]),
    half(plans.plan_anyone_killed()[-1]),
    half(plans.plan_bad_numbers(SEED)[0], every=4),
    *(
        # Deaths in saves; parity/strategies/test_mixtures.py tests those in steps.
        accumulate(replace(chain, deaths=chain.deaths[2::2]), min(chain.variant.accumulation, 2))
        for chain in plans.plan_strategies(SEED)
        if chain.variant.strategy != "zero2"
    ),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    folder = tmp_path_factory.mktemp("chaos")
    cases.make_base(folder)
    return References(folder)


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.name)
def test_a_killed_and_resumed_run_is_unchanged(
    chain: cases.Chain, person: Person, references: References
) -> None:
    result = run_chain(chain, person, references, SEED)
    assert result.problems == []
    assert result.is_equal and result.done == result.planned


@pytest.mark.parametrize("what", ["write points", "disk full"])
def test_a_failed_save_keeps_a_valid_checkpoint(
    what: str, person: Person, references: References
) -> None:
    variant = cases.Variant()
    counted = {variant: count_operations(variant, person, references)}
    assert counted[variant].all > plans.FEWEST_OPERATIONS
    chains = [
        *plans.plan_write_points(SEED, counted, is_full=False),
        *plans.plan_disk_full(SEED, counted),
    ]
    for chain in [each for each in chains if each.deaths[0].what == what][:1]:
        # test_store_killed.py and test_store_disk_full.py test every operation.
        result = run_chain(half(chain, every=4), person, references, SEED)
        assert result.problems == []
        assert result.is_equal and result.done == result.planned
