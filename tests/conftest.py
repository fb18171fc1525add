"""Shared fixtures: the shipped base, real sample data, and runs of verbs in this process."""

from __future__ import annotations

import csv
import fcntl
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.reliability.python import WARM_VARIABLE, start_warm

if TYPE_CHECKING:
    from tests.reliability.shell import Shell

# Set before torch is imported, which reads them; child processes inherit them. Models this small
# are slower on two threads than on one, and other tests run at the same time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"
STORIES = SHARED / "models" / "stories260K"

SCREEN = "screen.txt"
"""file next to a run's folder: the output of the command"""

LONGEST_FILES = (
    *("launch/test_slurm_cluster.py", "training/test_dpo.py", "training/checkpoint/test_resume.py"),
    *("end_to_end/test_two_hosts.py", "parity/strategies/test_resume.py", "run/test_remote.py"),
    *("strategy/test_pipeline.py", "strategy/test_disk_states.py", "planning/test_choose.py"),
    *("process/test_peers.py", "end_to_end/test_docs.py", "end_to_end/test_signals.py"),
    *("strategy/test_sharded.py", "parity/strategies/test_splits.py", "planning/test_plan.py"),
    *("parity/strategies/test_slow_links.py", "training/test_classify.py"),
    *("reliability/test_chaos.py", "launch/test_launch.py", "end_to_end/test_merge_and_chat.py"),
    *("data_modules/test_remote.py", "end_to_end/test_learning.py", "training/test_kto.py"),
    *("process/test_supervisor.py", "parity/strategies/test_steps.py", "doctor/test_bandwidth.py"),
    *("strategy/test_expert_parallel.py", "process/test_signals.py", "training/test_distill.py"),
    *("strategy/test_context_parallel.py", "sweep/test_slurm.py", "model/test_streaming.py"),
    *("parity/test_trl.py", "training/checkpoint/test_store_killed.py", "tools/test_simulate.py"),
    *("parity/test_every_family.py", "benchmarks/test_gpu_ops.py"),
)
"""files whose tests take half a minute or more in total: longest first, but those that mostly wait
(for lost hosts, cut links, runs that stop) between others, so that these use the processors"""

TrainRun = Callable[..., Path]


ROOM_IN_MEMORY_GIB = 12
"""free memory that a session's files and processes need"""


def pytest_configure(config: pytest.Config) -> None:
    """Start the warm process; keep test files in memory if they fit, since checkpoints sync files.

    Tests check by the calls what is synced, and in which order.
    """
    shared = Path("/dev/shm")
    if config.option.basetemp is None and shared.is_dir() and os.access(shared, os.W_OK):
        free = os.statvfs(shared)
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        room = min(free.f_bavail * free.f_frsize, int(lines["MemAvailable"].split()[0]) * 1024)
        if room >= ROOM_IN_MEMORY_GIB * 2**30 and not free.f_flag & os.ST_NOEXEC:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(shared))
    if not hasattr(config, "workerinput"):
        # The workers of this session share a warm process; a session in a test has its own.
        os.environ.pop(WARM_VARIABLE, None)
        if config.getoption("numprocesses", None):
            os.environ[WARM_VARIABLE] = start_warm()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest files first; skip tests marked `gpu` without a GPU.

    Tests marked `strategies` run only if `-m` names them.
    """
    if "strategies" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("strategies")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    slow = {item.path for item in items if "slow" in item.keywords}
    places = {ROOT / "tests" / file: place for place, file in enumerate(LONGEST_FILES)}
    # One worker runs a whole file: with this order, workers end at about the same time.
    items.sort(key=lambda item: (places.get(item.path, len(places)), item.path not in slow))
    if not any("gpu" in item.keywords for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[object]:
    """Collect no garbage during imports; exclude imported objects from later collections.

    These are less frequent: objects of tests are few, imported ones are many.
    """
    gc.disable()
    found = yield
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()
    return found


@pytest.hookimpl(wrapper=True)
def _bounded_phase() -> Iterator[None]:
    """Fail a test, its set-up or its tear-down that hangs."""
    from tests.bounded import bounded

    with bounded():
        return (yield)


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _bounded_phase


@pytest.fixture(autouse=True, scope="session")
def _cache_of_these_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Use a separate cache of tokenized data; child processes inherit it."""
    os.environ["LOFT_DATA_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True, scope="session")
def _compositions_are_kept() -> Iterator[None]:
    """Compose the shipped files of the same options once per process."""
    from tests.composing import keep_compositions

    with pytest.MonkeyPatch.context() as patch:
        keep_compositions(patch)
        yield


@pytest.fixture(autouse=True)
def _faults_are_of_one_test() -> Iterator[None]:
    from app.process import faults

    yield
    faults.arm_faults([], Path())


@pytest.fixture(autouse=True)
def _no_inherited_run_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove variables that a verb sets for its ranks, so that the next test is not a rank.

    Also the one that forbids requests to the hub.
    """
    for name in ("LOFT_RUN_DIR", "LOFT_RESUME_STEP", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")  # so that monkeypatch undoes what a run sets
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def shell() -> Shell:
    """Runs commands as a user does, in forks of a process that has imported everything."""
    from tests.reliability.shell import shared_shell

    return shared_shell()


@pytest.fixture(scope="session")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only folder of a finished quickstart, shared by all workers."""
    from tests.processes import run_verb

    own = tmp_path_factory.getbasetemp()
    parent = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "default"
    parent.mkdir(exist_ok=True)
    with (parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (parent / SCREEN).exists():
            with pytest.MonkeyPatch.context() as patch:
                # Otherwise messages about the cache depend on which worker trained the run.
                patch.setenv("LOFT_DATA_CACHE", str(parent / "cache"))
                words = ("+experiment=quickstart", "evaluation.max_rows=40")
                said = run_verb("train", *words, f"output.dir={parent / 'run'}")
            (parent / SCREEN).write_text(said)
    return parent / "run"


@pytest.fixture
def train_run(tmp_path: Path) -> TrainRun:
    """Return a function that runs `app.train` in this process and returns the run's folder."""
    from tests.in_process import run_into

    def run(*words: str) -> Path:
        folder = tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}"
        run_into("train", folder, *words, "logger=csv")
        return folder

    return run


def read_column(folder: Path, column: str) -> dict[int, float]:
    """Read one column of a run's metrics.csv: step -> value, without empty cells."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {int(row["step"]): float(row[column]) for row in rows if row[column]}


@pytest.fixture
def stories() -> Path:
    """Folder of a real trained Llama with tied embeddings; skips the test if it is missing."""
    if not STORIES.is_dir():
        pytest.skip("../shared/data is absent")
    return STORIES
