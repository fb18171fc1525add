"""Which peers a run of `make bench-peers` takes."""

from __future__ import annotations

import pytest

from benchmarks.peers import PACKAGES
from benchmarks.training.__main__ import ASKED, HERE, PEERS, asked_peers


def test_only_those_that_are_asked_for_join() -> None:
    assert asked_peers([]) == {}
    assert list(asked_peers(["with=litgpt,torchtune"])) == ["litgpt", "torchtune"]
    assert asked_peers(["with=all"]) == ASKED


def test_an_unknown_peer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"with=unsloth.*torchtune"):
        asked_peers(["with=unsloth,litgpt"])


def test_every_peer_has_its_environment_and_script() -> None:
    for environment, script, *_ in (PEERS | ASKED).values():
        assert environment in PACKAGES
        assert (HERE / script).exists()
