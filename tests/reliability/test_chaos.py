"""A subset of `make chaos`: chains of kills, damage, failed saves and shards, of few deaths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.reliability import cases, plans
from tests.reliability.chain import References, count_operations, run_chain
from tests.reliability.shell import Shell

pytestmark = pytest.mark.slow
SEED = 0
ANYONE = plans.plan_anyone_killed()[-1]
KILLS = {chain.variant.name: chain for chain in plans.plan_kills(SEED)}


def fewer(chain: cases.Chain, every: int) -> cases.Chain:
    """Return the chain with every second (third, ...) death."""
    return replace(chain, deaths=chain.deaths[::every])


def accumulate(chain: cases.Chain, number: int) -> cases.Chain:
    """Return the chain with another number of accumulated micro-batches."""
    return replace(chain, variant=replace(chain.variant, accumulation=number))


FSDP, *_ = plans.plan_strategies(SEED)
CHAINS = [
    fewer(KILLS["full-1-padded-4"], every=2),
    fewer(plans.plan_damaged(SEED)[0], every=2),
    # Its workers and the command; end_to_end/test_signals.py kills and signals its ranks.
    replace(ANYONE, deaths=ANYONE.deaths[2:4]),
    # A shard that is not written, for either reason; parity/strategies kills in steps.
    accumulate(replace(FSDP, deaths=FSDP.deaths[2::2]), 1),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    folder = tmp_path_factory.mktemp("chaos")
    cases.make_base(folder)
    return References(folder)


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.name)
def test_a_killed_and_resumed_run_is_unchanged(
    chain: cases.Chain, shell: Shell, references: References
) -> None:
    result = run_chain(chain, shell, references, SEED)
    assert result.problems == []
    assert result.is_equal and result.done == result.planned


def test_a_failed_save_keeps_a_valid_checkpoint(shell: Shell, references: References) -> None:
    """test_store_killed.py and test_store_disk_full.py test every operation of a save."""
    variant = cases.Variant()
    counted = {variant: count_operations(variant, shell, references)}
    assert counted[variant].all > plans.FEWEST_OPERATIONS
    full, *_ = plans.plan_disk_full(SEED, counted)
    result = run_chain(fewer(full, every=8), shell, references, SEED)
    assert result.problems == []
    assert result.is_equal and result.done == result.planned
