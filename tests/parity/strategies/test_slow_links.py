"""Two hosts: losses of one host, bytes sent between them, and speed on a slow network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.config import load_config
from app.config.verbs import PlanConfig
from app.planning.communication import REDUCE_SCATTER, list_collectives, sent_by_node
from app.planning.planned import on_hardware, plan_run
from tests.hosts import PORT, Host, two_hosts
from tests.parity.strategies.counted import NOTES
from tests.parity.strategies.layouts import SINGLE, Layout, Runs, check_same_steps
from tests.planning.test_planned import STRATEGIES
from tests.processes import LONGEST
from tests.runs import rows_of
from tests.tiny import SAMPLES, save_with_tokenizer, tiny_llama

WIDE = {
    "vocab_size": 768,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "initializer_range": 0.05,
}
"""a model with 10 MB of gradients and steps of a few tens of milliseconds"""
STEPS, FROM, UNTIL = 4, 1, 3
"""steps of a run, and the steps between which bytes are counted: full periods of local SGD"""
PERIOD = 2
NEAR = 0.15
"""relative tolerance of the sent bytes"""
EVERY = (f"strategy.sync_every_steps={PERIOD}", "strategy.synchronous_steps=0")
# Otherwise ZeRO-3 keeps small weights gathered from the forward to the backward pass.
REGATHERS = (
    "+strategy.config={zero_optimization: {stage3_param_persistence_threshold: 0,"
    " stage3_max_live_parameters: 0, stage3_max_reuse_distance: 0}}"
)
LAYOUTS = {
    layout.strategy: layout
    for layout in (
        Layout(strategy="fsdp", ranks=1),
        Layout(strategy="zero3", ranks=1, words=(REGATHERS,)),
        Layout(strategy="hsdp_local_sgd", ranks=1, words=EVERY),
    )
}
"""layout per host"""
TIMED = ("fsdp", "hsdp_local_sgd")
"""strategies that are tested on a slow network, which sends the same bytes"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes and seconds per step of a run on two hosts."""

    run: Path
    bytes_per_step: float
    """bytes sent by one host, including headers"""
    seconds_per_step: float


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tiny_llama(**WIDE), tmp_path_factory.mktemp("wide"))


def words_of(base: Path, strategy: Layout, num_ranks: int) -> list[str]:
    """Return the overrides of a run in which every rank trains on one pack per step."""
    return [
        f"model.path={base}",
        f"data.datasets=[{{path: {SAMPLES / 'lists_test.json'}, name: lists}}]",
        "data.val_set_size=0",
        "data.sequence_len=96",
        "adapter=full",
        "optimizer.lr=1e-3",
        "trainer.micro_batch_size=1",
        f"trainer.global_batch_size={num_ranks}",
        f"trainer.max_steps={STEPS}",
        f"trainer.checkpoint.every_steps={STEPS}",
        "trainer.precision=fp32",
        "trainer.accelerator=cpu",
        "evaluation.exact_match=false",
        "logger=csv",
        *strategy.typed(),
    ]


class HostRuns:
    """Runs on two hosts and reference runs on one, each trained once."""

    def __init__(self, pair: tuple[Host, Host], runs: Runs, base: Path, folder: Path) -> None:
        self._pair, self._runs, self._base, self._folder = pair, runs, base, folder
        self._done: dict[Layout, Traffic] = {}
        self._references: dict[tuple[Layout, int], Path] = {}

    def reference(self, layout: Layout, num_ranks: int) -> Path:
        """Return a run on this machine with the steps of `num_ranks` ranks."""
        if (layout, num_ranks) not in self._references:
            run = self._runs.new_folder("reference")
            self._runs.shell.train_into(run, *words_of(self._base, layout, num_ranks))
            self._references[layout, num_ranks] = run
        return self._references[layout, num_ranks]

    def train(self, layout: Layout) -> Traffic:
        if layout not in self._done:
            for host in self._pair:
                host.shape("200mbit" if layout.strategy in TIMED else "10gbit")
            self._done[layout] = self._train(layout)
        return self._done[layout]

    def _train(self, layout: Layout) -> Traffic:
        """Train on both hosts, in forks of the warm process."""
        folder = self._folder / f"{layout.strategy}-{layout.ranks}"
        run = folder / "run"
        words = [*words_of(self._base, layout, 2 * layout.ranks), "trainer.num_nodes=2"]
        processes = []
        for number, host in enumerate(self._pair):
            (folder / host.name).mkdir(parents=True)
            environment = {
                NOTES: str(folder / host.name / "notes.jsonl"),
                "RANK": str(number * layout.ranks),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(2 * layout.ranks),
                "LOCAL_WORLD_SIZE": str(layout.ranks),
                "GROUP_RANK": str(number),
                "MASTER_ADDR": self._pair[0].address,
                "MASTER_PORT": str(PORT + len(self._done)),
                "TORCHELASTIC_RUN_ID": "hosts",  # by which Lightning detects torchrun's ranks
            }
            command = ("-m", "tests.parity.strategies.counted", *words, f"output.dir={run}")
            python = self._runs.shell.python
            processes.append(host.start(python, *command, environment=environment))
        output = "\n".join(process.communicate(timeout=LONGEST)[0] for process in processes)
        assert [process.returncode for process in processes] == [0, 0], output
        sent, seconds = [], []
        for host in self._pair:
            lines = (folder / host.name / "notes.jsonl").read_text().splitlines()
            notes = [json.loads(line) for line in lines]
            assert len(notes) == STEPS
            first, last = notes[FROM], notes[UNTIL]
            sent.append((last["sent"] - first["sent"]) / (UNTIL - FROM))
            seconds.append((last["seconds"] - first["seconds"]) / (UNTIL - FROM))
        assert sent[0] == pytest.approx(sent[1], rel=0.05)
        return Traffic(run=run, bytes_per_step=max(sent), seconds_per_step=max(seconds))


@pytest.fixture(scope="module")
def host_runs(
    wide: Path, runs: Runs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostRuns]:
    with two_hosts() as pair:
        yield HostRuns(pair, runs, wide, tmp_path_factory.mktemp("host_runs"))


def formula_of(layout: Layout, base: Path) -> float:
    """Return the bytes that a host sends per step according to the planner."""
    words = [f"hardware=2x{layout.ranks}xh100", "trainer.gradient_accumulation_steps=1"]
    typed = [f"strategy={layout.strategy}", *(w for w in layout.words if w in EVERY)]
    settings = ["adapter=full", "trainer.precision=fp32", "trainer.micro_batch_size=1"]
    config = load_config("plan", [f"model.path={base}", *words, *typed, *settings])
    assert isinstance(config, PlanConfig)
    numbers = json.loads((base / "config.json").read_text())
    hardware = on_hardware(config, config.hardware)
    run, _ = plan_run(config, hardware, numbers, strategies=STRATEGIES)
    return sum(
        # gloo implements reduce-scatter as an all-reduce of which it keeps a part.
        sent_by_node(run, each) * (2 if each.kind == REDUCE_SCATTER else 1)
        for each in list_collectives(run)
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", LAYOUTS)
def test_two_hosts_train_as_one_and_send_the_planned_bytes(
    strategy: str, host_runs: HostRuns, wide: Path
) -> None:
    layout = LAYOUTS[strategy]
    traffic = host_runs.train(layout)
    assert traffic.bytes_per_step == pytest.approx(formula_of(layout, wide), rel=NEAR)

    one_host = SINGLE
    if strategy == "hsdp_local_sgd":  # tests/strategy compares it with a plain loop
        one_host = Layout(strategy=strategy, ranks=2, words=("strategy.replicas=2", *EVERY))
    reference = host_runs.reference(one_host, 2 * layout.ranks)
    if one_host is SINGLE:
        check_same_steps(traffic.run, reference)
    else:
        assert rows_of(traffic.run) == rows_of(reference)


@pytest.mark.slow
def test_steps_of_local_sgd_on_a_slow_network_are_faster_than_with_full_sharding(
    host_runs: HostRuns,
) -> None:
    seconds, sharded = (
        host_runs.train(LAYOUTS[name]).seconds_per_step for name in ("hsdp_local_sgd", "fsdp")
    )
    assert seconds < sharded / 1.2
