"""Plans of `make chaos` are complete and valid for every seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from app.process.faults import parse_faults
from tests.reliability import cases, plans
from tests.reliability.chain import read_batches, read_lines

COUNTED = {
    variant: cases.Operations(all=250 + number, need_room=200 + number)
    for number, variant in enumerate(plans.COUNTED)
}


@pytest.mark.parametrize("seed", range(2))
def test_plans_have_the_required_numbers_of_deaths(seed: int) -> None:
    chains = plans.plan_chains(seed, COUNTED, is_full=False)
    assert chains == plans.plan_chains(seed, COUNTED, is_full=False)
    assert len({chain.name for chain in chains}) == len(chains)
    deaths = [death for chain in chains for death in chain.deaths]
    counted = Counter(death.what for death in deaths)
    assert counted["kills"] + counted["kills in a save"] == 100
    assert counted["kills in a save"] == 15
    assert {chain.variant for chain in chains[:24]} == set(cases.VARIANTS)
    assert (counted["sigterms"], counted["bad numbers"], counted["disk full"]) == (40, 30, 20)
    assert (counted["kills of shares"], counted["disk full for a share"]) == (12, 3)
    for chain in chains:
        steps = [death.step for death in chain.deaths]
        assert (
            steps == sorted(set(steps))
            and steps[0] >= 1
            and steps[-1] <= 2 * plans.DEATHS_A_CHAIN + 2
        )
        typed = [death.fault for death in chain.deaths if death.fault is not None]
        assert parse_faults(typed)[1] == []


def test_full_kills_at_every_operation() -> None:
    chains = plans.plan_write_points(0, COUNTED, is_full=True)
    for variant, operations in COUNTED.items():
        of_variant = [
            death.fault.split("@")[0]
            for chain in chains
            if chain.variant == variant
            for death in chain.deaths
            if death.fault is not None
        ]
        assert of_variant == [f"disk:{point}" for point in range(1, operations.all + 1)]


def test_records_are_read_per_process(tmp_path: Path) -> None:
    record = tmp_path / "batches"
    record.write_text("begin\n1 aa\n1 bb\nbegin\n2 cc\n3 d")
    assert read_lines(record) == ["1 aa", "1 bb", "2 cc"]
    record.write_text("begin\n1 aa\n1 bb\nbegin\n2 cc\n")
    assert read_batches(record) == [{1: ["aa", "bb"]}, {2: ["cc"]}]
