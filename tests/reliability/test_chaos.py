"""A subset of `make chaos`: two chains of kills, damage, failed saves and shards."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from app.process.faults import parse_faults
from tests.reliability import cases, plans
from tests.reliability.chain import References, run_chain
from tests.reliability.shell import Shell

SEED = 0
KILLS = {chain.variant.name: chain for chain in plans.plan_kills(SEED)}["full-1-padded-4"]
DAMAGE = plans.plan_damaged(SEED)[0].deaths[2]
FSDP, *_ = plans.plan_strategies(SEED)
ANYONE = plans.plan_anyone_killed()[-1]
CHAINS = [
    replace(KILLS, deaths=[*KILLS.deaths[:2], DAMAGE]),
    # A shard that is not written, for either reason, the command and a worker of its data;
    # end_to_end/test_signals.py kills and signals ranks, parity/strategies kills in steps.
    replace(
        ANYONE,
        variant=replace(FSDP.variant, accumulation=1),
        deaths=[FSDP.deaths[2], *ANYONE.deaths[2:4], FSDP.deaths[4]],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.name)
def test_a_killed_and_resumed_run_is_unchanged(
    chain: cases.Chain, shell: Shell, tmp_path: Path
) -> None:
    cases.make_base(tmp_path)
    result = run_chain(chain, shell, References(tmp_path), SEED)
    assert result.problems == []
    assert result.is_equal and result.done == result.planned


def test_plans_have_the_required_numbers_of_deaths() -> None:
    counted = {each: cases.Operations(all=250, need_room=200) for each in plans.COUNTED}
    chains = plans.plan_chains(SEED, counted, is_full=True)
    assert {chain.variant for chain in chains[:24]} == set(cases.VARIANTS)
    deaths = [death for chain in chains for death in chain.deaths]
    assert Counter(death.what for death in deaths) == {
        "kills": 85,
        "kills in a save": 15,
        "write points": 750,
        "damaged": 8,
        "sigterms": 40,
        "processes killed": 8,
        "bad numbers": 30,
        "disk full": 20,
        "kills of shares": 12,
        "disk full for a share": 3,
    }
    assert parse_faults([death.fault for death in deaths if death.fault is not None])[1] == []
