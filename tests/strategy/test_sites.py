"""Sites that keep their rows: what goes over the link, and what is said when one is missing."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from app.process.launch import free_port
from app.strategy import local_sgd
from app.strategy.settings import LocalSgdConfig
from common.errors import Interrupted, UserError

SIZE = 2 * local_sgd._MESSAGE_SIZE + 3
"""elements of a vector that takes three messages"""


def at_sites(num: int, work: Callable[[local_sgd._Link, int], Any]) -> list[Future[Any]]:
    """Run `work(link, site)` in a thread for each site; return what each has come to."""
    address = f"127.0.0.1:{free_port()}"

    def run(site: int) -> Any:
        return work(
            local_sgd._Link(LocalSgdConfig(sites=num, site=site, site_address=address), rank=0),
            site,
        )

    with ThreadPoolExecutor(num) as pool:
        futures = [pool.submit(run, site) for site in range(1, num + 1)]
    return futures


def test_every_site_gets_the_mean_weighted_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, send = set[str](), local_sgd._Link._set

    def record(link: local_sgd._Link, key: str, value: bytes) -> None:
        sent.add(re.sub(r"\d+", "N", key))
        send(link, key, value)

    monkeypatch.setattr(local_sgd._Link, "_set", record)
    vectors = torch.randn(3, 3, SIZE, generator=torch.Generator().manual_seed(1))
    weights = [10.0, 25.0, 5.0]

    def work(link: local_sgd._Link, site: int) -> list[Tensor]:
        link.compare(0, {"seed": 1})
        means = []
        for number, own in enumerate(vectors[:, site - 1]):
            link.step = 4 * (number + 1)
            means.append(link.mean(own, weights[site - 1]))
        link.close()
        if site == 1:  # a mean is removed once every site has it
            assert not link._store.check(["8/0/mean"]) and link._store.check(["12/0/mean"])
        return means

    answers = [each.result() for each in at_sites(3, work)]
    for number, of_sites in enumerate(vectors.double()):
        expected = sum(own * weight for own, weight in zip(of_sites, weights, strict=True)) / 40
        torch.testing.assert_close(answers[0][number].double(), expected, atol=1e-6, rtol=1e-6)
        assert all(torch.equal(each[number], answers[0][number]) for each in answers)
    # Nothing but the first settings, steps, weights and their tokens leaves a site.
    assert sent == {"facts/N", "past/N", "N/N/N", "N/weight/N", "N/N/mean", "done/N"}


def test_the_first_site_gets_the_counts_of_the_others_and_nobody_else_does() -> None:
    def work(link: local_sgd._Link, site: int) -> dict[int, dict[str, float]]:
        link.compare(0, {})
        link.step = 4
        return link.gather({"train/loss": float(site)})

    answers = [each.result() for each in at_sites(3, work)]
    assert answers == [{2: {"train/loss": 2.0}, 3: {"train/loss": 3.0}}, {}, {}]


@pytest.mark.parametrize(
    ("steps", "facts", "said"),
    [
        ((0, 0), ({"seed": 1}, {"seed": 2}), "seed is 2 on site 2, and 1 on site 1; type the same"),
        ((8, 4), ({"seed": None}, {"seed": None}), "on site 1 those after step 4"),
        ((4, 8), ({"seed": None}, {"seed": None}), "on site 2 those after step 4"),
    ],
)
def test_sites_that_do_not_belong_together_end(
    steps: tuple[int, int],
    facts: tuple[dict[str, Any], ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_sgd, "TIMEOUT", timedelta(seconds=2))

    def work(link: local_sgd._Link, site: int) -> None:
        link.compare(steps[site - 1], facts[site - 1])
        link.step = 6 if steps[site - 1] < 6 else 10  # of the first mean after that
        link.mean(torch.ones(4), 1.0)

    errors = [each.exception() for each in at_sites(2, work)]
    assert all(errors)
    assert any(isinstance(each, UserError) and said in str(each) for each in errors), errors


def error_without_second_site() -> BaseException | None:
    """Return what the first site's wait for the weights of a second one, which ends, comes to."""

    def work(link: local_sgd._Link, site: int) -> None:
        link.compare(0, {})
        link.step = 4
        if site == 1:
            link.mean(torch.ones(4), 1.0)

    return at_sites(2, work)[0].exception()


def test_a_site_that_sends_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_sgd, "TIMEOUT", timedelta(seconds=1))

    error = error_without_second_site()
    assert isinstance(error, OSError) and "site 2 has sent nothing for 0:00:01" in str(error)


def test_a_signal_ends_the_wait_for_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_sgd, "TIMEOUT", timedelta(seconds=5))
    monkeypatch.setattr(local_sgd, "_SIGNAL_SECONDS", 0.5)
    monkeypatch.setattr(local_sgd, "signal_received", lambda: signal.SIGTERM)

    error = error_without_second_site()
    assert isinstance(error, Interrupted) and error.code == 128 + signal.SIGTERM
    assert "site 2 did not answer" in str(error)


def test_a_first_site_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_sgd, "TIMEOUT", timedelta(seconds=1))
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(OSError, match=f"no answer at {address} .*resume=auto"):
        local_sgd._Link(LocalSgdConfig(sites=2, site=2, site_address=address), rank=0)
