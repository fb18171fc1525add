"""Two sites on two hosts: their rows stay there, and their mean goes by tokens trained on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.hosts import Host, two_hosts
from tests.parity.strategies.layouts import ADAPTERS, DONE, KILLED, SINGLE, Layout, Runs
from tests.processes import LONGEST
from tests.runs import adapter_of, metrics_of, rows_of
from tests.tiny import SAMPLES

pytestmark = pytest.mark.slow

FILES = (SAMPLES / "lists_test.json", SAMPLES / "orders_test.jsonl")
PORT = 29611
SNIFFER = """
import socket, sys
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
link.bind(("eth0", 0))
print("listening", flush=True)
with open(sys.argv[1], "wb") as target:
    while True:
        target.write(link.recv(1 << 16)[66:])  # without the headers of Ethernet, IP and TCP
        target.flush()
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as hosts:
        yield hosts


def words_of(runs: Runs, site: int, layout: Layout, *words: str) -> list[str]:
    data = f"data.datasets=[{{path: {FILES[(site - 1) % 2]}, name: rows}}]"
    batch = ("trainer.micro_batch_size=2", "trainer.global_batch_size=2")
    return runs.typed(layout, *ADAPTERS["lora"], data, *batch, "resume=auto", *words)


def start_site(
    runs: Runs, host: Host, site: int, run: Path, *words: str, sites: int = 2
) -> subprocess.Popen[str]:
    layout = Layout(strategy="hsdp_local_sgd", ranks=1, num_data_ranks=1)
    address = f"strategy.site_address=10.77.0.1:{PORT}"
    own = (f"strategy.sites={sites}", f"strategy.site={site}", "strategy.synchronous_steps=0")
    typed = words_of(runs, site, layout, *own, address, *words)
    command = (runs.shell.python, "-m", "app.train", *typed, f"output.dir={run}")
    return host.start(*command, environment={"OMP_NUM_THREADS": "1"})


def train_sites(
    runs: Runs, pair: tuple[Host, Host], *words: str, sites: int = 2
) -> tuple[Path, ...]:
    """Train sites in turn on the first and the second host."""
    folders = tuple(runs.new_folder(f"site{site}") for site in range(1, sites + 1))
    started = [
        start_site(runs, pair[(number - 1) % 2], number, folder, *words, sites=sites)
        for number, folder in enumerate(folders, 1)
    ]
    output = [process.communicate(timeout=LONGEST)[0] for process in started]
    assert [process.returncode for process in started] == [DONE] * sites, "\n".join(output)
    return folders


def test_a_round_ends_at_the_mean_of_two_runs_by_their_tokens(
    runs: Runs, pair: tuple[Host, Host]
) -> None:
    first, second = map(adapter_of, train_sites(runs, pair, "strategy.sync_every_steps=99"))
    alone = [runs.train(SINGLE, *words_of(runs, site, SINGLE)) for site in (1, 2)]
    tokens = [metrics_of(run)["train/trained_tokens/rows"] for run in alone]
    assert max(tokens) > 1.1 * min(tokens)
    adapters = [adapter_of(run) for run in alone]
    for name, weight in first.items():
        assert torch.equal(weight, second[name])
        mean = sum(a[name] * n for a, n in zip(adapters, tokens, strict=True)) / sum(tokens)
        torch.testing.assert_close(weight, mean, atol=1e-6, rtol=1e-5)


def test_a_further_site_joins_between_two_runs_and_the_first_one_logs_what_is_shared(
    runs: Runs, pair: tuple[Host, Host]
) -> None:
    words = ("strategy.sync_every_steps=2", "strategy.share_counts=true")
    two = train_sites(runs, pair, *words)
    shared = [row for row in rows_of(two[0]) if row["sites/2/train/loss"]]
    own = {row["step"]: row for row in rows_of(two[1]) if row["train/loss"]}
    assert [row["step"] for row in shared] == ["2", "4"]
    last = [own["1"]["train/loss"], own["3"]["train/loss"]]  # that were written before
    assert [row["sites/2/train/loss"] for row in shared] == last
    assert not any(name.startswith("sites/") for name in rows_of(two[1])[0])
    path = f"adapter.path={two[1] / 'adapter'}"
    adapters = [adapter_of(run) for run in train_sites(runs, pair, *words, path, sites=3)]
    before = adapter_of(two[0])
    for name, weight in adapters[0].items():
        assert torch.equal(weight, adapters[1][name]) and torch.equal(weight, adapters[2][name])
    assert any(not torch.equal(weight, before[name]) for name, weight in adapters[0].items())


def test_rows_stay_and_a_killed_site_comes_back(
    runs: Runs, pair: tuple[Host, Host], tmp_path: Path
) -> None:
    words = ("strategy.sync_every_steps=2", "trainer.checkpoint.every_steps=1")
    sniffed = tmp_path / "sniffed"
    sniffer = pair[0].start(sys.executable, "-c", SNIFFER, str(sniffed))
    assert sniffer.stdout is not None and sniffer.stdout.readline() == "listening\n"
    folders = train_sites(runs, pair, *words)
    expected = adapter_of(folders[0])
    last = max(expected.values(), key=torch.Tensor.numel).contiguous().numpy().tobytes()
    parts, until = [last[at : at + 64] for at in range(0, 4096, 64)], time.monotonic() + LONGEST
    while not any(part in (sent := sniffed.read_bytes()) for part in parts):
        assert time.monotonic() < until, "the sniffer does not see what is sent"
        time.sleep(0.1)
    sniffer.send_signal(signal.SIGKILL)
    for file in FILES:
        for text in file.read_text().split('"'):
            assert len(text) < 16 or text.encode() not in sent, text
    for run, other in (folders, reversed(folders)):
        assert rows_of(run)[-1]["val/loss"] != rows_of(other)[-1]["val/loss"]
        losses = {row["train/loss"] for row in rows_of(run)} - {""}
        assert not losses & {row["train/loss"] for row in rows_of(other)}

    killed = tuple(runs.new_folder(f"killed{site}") for site in (1, 2))
    waiting = start_site(runs, pair[0], 1, killed[0], *words)
    lost = start_site(runs, pair[1], 2, killed[1], *words, "faults=[rank_killed:0@3]")
    assert lost.wait(LONGEST) == KILLED
    again = start_site(runs, pair[1], 2, killed[1], *words)
    for process in (again, waiting):
        output = process.communicate(timeout=LONGEST)[0]
        assert process.returncode == DONE, output
    for run in killed:
        for name, weight in adapter_of(run).items():
            assert torch.equal(weight, expected[name])
