"""AdamW with its states on a disk takes the steps of AdamW in memory, in bounded memory."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.planning import training
from app.planning.memory import GIB
from app.planning.training import check_disk
from app.preflight.couplings import strategy as rows_of_strategy
from app.strategy import disk_states
from app.strategy.disk_states import AdamWOnDisk
from app.strategy.settings import FsdpConfig
from app.training.checkpoint.checkpoint import read_tensors, write_tensors
from app.training.checkpoint.documents import MODEL, OPTIMIZER
from app.training.checkpoint.state import optimizer_state, restore_optimizer
from app.training.checkpoint.store import CheckpointStore
from common.errors import DiskError
from common.files import file_system_of
from tests.planning.test_planned import run_of
from tests.preflight.test_couplings import problems_of
from tests.processes import RUN
from tests.ranks import on_ranks
from tests.reliability.shell import Shell
from tests.runs import figures_of, rows_of
from tests.strategy import fsdp_training as fsdp
from tests.tiny import small_run

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}
SIZES = (1, 1023, 1024, 5000)
"""numbers of weights: less than a block, almost one, one, several"""
DONE, NO_ENVIRONMENT, KILLED = 0, 3, -9


@pytest.fixture
def states() -> Iterator[Path]:
    """Return a folder on a disk; the tests' own may be in memory."""
    if file_system_of(Path("/var/tmp")) in rows_of_strategy.MEMORY_FILES:
        pytest.skip("/var/tmp is in memory")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def blocks_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_states, "STATE_BLOCK_BYTES", 4096)
    monkeypatch.setattr(disk_states, "MEASURED_BYTES", 1 << 16)


class Net(torch.nn.Module):
    """Weights of every size, the last of which never has a gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        for size in (*SIZES, 7):
            weight = torch.randn(size, generator=random).to(device, dtype)
            self.register_parameter(f"w{size}", torch.nn.Parameter(weight))

    def groups(self) -> list[dict[str, Any]]:
        first, *others = self.parameters()
        return [
            {"params": others, "weight_decay": 0.1, "name": "matrices"},
            {"params": [first], "weight_decay": 0.0, "name": "no decay"},
        ]

    def take_steps(self, optimizer: Any, steps: range, *, skipped: int = -1) -> None:
        for step in steps:
            random = torch.Generator().manual_seed(step)
            for weight in list(self.parameters())[:-1]:
                weight.grad = torch.randn(len(weight), generator=random).to(weight)
            optimizer.found_inf = torch.tensor(float(step == skipped), device=weight.device)
            optimizer.grad_scale = torch.tensor(1.0 + step, device=weight.device)
            optimizer.step()

    def bits(self) -> list[bytes]:
        return [w.detach().cpu().view(torch.uint8).numpy().tobytes() for w in self.parameters()]


def in_memory(net: Net) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.groups(), fused=True, **OPTIONS)


def on_disk(net: Net, folder: Path) -> AdamWOnDisk:
    return AdamWOnDisk(net.groups(), folder, **OPTIONS)


@pytest.mark.parametrize("device", ["cpu", "copied", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_and_states_equal_those_in_memory_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "copied":  # blocks are copied to the device and back
        device, to = "cpu", torch.Tensor.to
        monkeypatch.setattr(
            torch.Tensor, "to", lambda self, *args, **how: to(self, *args, **how).clone()
        )
    mine, plain = Net(dtype, device), Net(dtype, device)
    states = []
    for net, optimizer in ((mine, on_disk(mine, tmp_path)), (plain, in_memory(plain))):
        net.take_steps(optimizer, range(4), skipped=2)
        tensors, document = optimizer_state(net, optimizer)
        write_tensors(tmp_path / "states", tensors)
        states.append(((tmp_path / "states").read_bytes(), document))
        (tmp_path / "states").unlink()
    assert mine.bits() == plain.bits()
    assert states[0] == states[1]


def test_a_checkpoint_is_resumed_from_disk_and_from_memory(tmp_path: Path) -> None:
    whole = Net()
    whole.take_steps(in_memory(whole), range(6))
    for makes in (lambda net: on_disk(net, tmp_path), in_memory):
        first = Net()
        optimizer = on_disk(first, tmp_path)
        first.take_steps(optimizer, range(3))
        tensors, document = optimizer_state(first, optimizer)
        write_tensors(tmp_path / "states", tensors)
        resumed = Net()
        resumed.load_state_dict(first.state_dict())
        other = makes(resumed)
        restore_optimizer(resumed, other, read_tensors(tmp_path / "states"), document)
        resumed.take_steps(other, range(3, 6))
        assert resumed.bits() == whole.bits()
        (tmp_path / "states").unlink()


def test_a_kill_within_a_step_leaves_no_file(tmp_path: Path) -> None:
    if not (child := os.fork()):
        count, mapped = iter(range(99)), disk_states.StateFile.map

        def map_or_die(*args: Any) -> Any:
            if next(count) == 8:
                os.kill(os.getpid(), signal.SIGKILL)
            return mapped(*args)

        disk_states.StateFile.map = map_or_die  # type: ignore[method-assign]
        net = Net()
        net.take_steps(on_disk(net, tmp_path), range(4))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    assert list(tmp_path.iterdir()) == []


def test_a_step_maps_a_block_of_both_moments_and_a_checkpoint_one_tensor_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, now, peak = mmap.mmap, 0, 0

    def unmap(size: int) -> None:
        nonlocal now
        now -= size

    def map_and_count(*args: Any, **where: Any) -> mmap.mmap:
        nonlocal now, peak
        mapped = own(*args, **where)
        weakref.finalize(mapped, unmap, len(mapped))
        now += len(mapped)
        peak = max(peak, now)
        return mapped

    monkeypatch.setattr(mmap, "mmap", map_and_count)
    net = Net()
    optimizer = on_disk(net, tmp_path)
    net.take_steps(optimizer, range(2))
    assert (now, peak) == (0, 2 * 4096)
    peak = 0
    write_tensors(tmp_path / "states", optimizer_state(net, optimizer)[0])
    assert (now, peak) == (0, 4 * max(SIZES))


def test_a_full_disk_is_told_with_what_is_needed_and_free(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"rank need 2097152\.00 GiB, and [\d.]+ GiB are free"):
        disk_states.StateFile(tmp_path, 1 << 51)
    with pytest.raises(DiskError, match=r"type strategy\.offload_dir=FOLDER"):
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
        try:
            disk_states.StateFile(tmp_path, 2 << 20)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == []


def test_room_is_checked_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, _ = run_of("+experiment=llama8b", "adapter=full", "hardware=2xh100", "strategy=ddp")
    planned = replace(planned, strategy=replace(planned.strategy, offload_optimizer="disk"))
    need = 2 * 8 * planned.model.num_weights / GIB
    for free, fits in ((need + 1, True), (need - 1, False)):
        monkeypatch.setattr(training, "free_bytes", lambda _, free=free: free * GIB)
        check_disk(planned, None)
        with nullcontext() if fits else pytest.raises(DiskError, match=f"need {need:.2f} GiB"):
            check_disk(planned, tmp_path)


@pytest.mark.parametrize("kind", ["tmpfs", "nfs4", "ext4"])
def test_states_are_not_kept_in_memory_or_on_a_remote_disk(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(rows_of_strategy, "file_system_of", lambda folder: kind)
    problems = problems_of(0, "strategy.offload_optimizer=disk strategy.offload_dir=/states")
    assert len(problems) == (kind != "ext4")
    for problem in problems:
        assert f"/states is on {kind}, which" in problem
        assert "type strategy.offload_dir=FOLDER on a local disk" in problem


def test_the_file_system_of_a_folder_is_that_of_its_longest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"22 21 0:5 / {tmp_path}/a\\040b rw,nosuid shared:3 - tmpfs tmpfs rw\n"
        f"23 22 0:6 / {tmp_path}/a\\040b/deep rw - nfs4 host:/x rw\n"
    )
    found = {
        name: file_system_of(tmp_path / name, mounts)
        for name in ("a b", "a b/new/er", "a b/deep/er", "a")
    }
    assert found == {"a b": "tmpfs", "a b/new/er": "tmpfs", "a b/deep/er": "nfs4", "a": "ext4"}
    assert file_system_of(Path("/dev/shm")) in ("tmpfs", "")


def train_sharded(
    folder: Path, config: FsdpConfig, numbers: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train under FSDP with states on the disk and in memory, of which the first is resumed."""
    found = []
    for is_on_disk in (True, False):
        strategy, model = fsdp.build_sharded_model(config, fsdp.model_builder("full", **numbers))

        def build(model: Any = model, is_on_disk: bool = is_on_disk) -> Any:
            group = fsdp.make_optimizer(model).param_groups[0]["params"]
            options: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4}
            if is_on_disk:
                return AdamWOnDisk([{"params": group, "name": "all"}], folder, **options)
            return torch.optim.AdamW([{"params": group, "name": "all"}], fused=True, **options)

        optimizer = build()
        fsdp.train(model, strategy, steps=2, optimizer=optimizer)
        tensors, document = optimizer_state(model, optimizer, strategy)
        states = fsdp._gather_all(tensors)
        if is_on_disk:
            optimizer = build()
            restore_optimizer(model, optimizer, states, document, strategy)
        found.append(
            fsdp.train(model, strategy, begins=2, optimizer=optimizer) | {"states": states}
        )
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "numbers"),
    [(FsdpConfig(), {}), (FsdpConfig(expert_parallel_size=2), fsdp.MIXTURE)],
    ids=["fsdp", "experts"],
)
def test_two_ranks_shard_the_states_over_their_files(
    config: FsdpConfig, numbers: dict[str, Any], tmp_path: Path
) -> None:
    for mine, plain in on_ranks(2, train_sharded, tmp_path, config, numbers):
        assert (mine["losses"], mine["norms"]) == (plain["losses"], plain["norms"])
        for key in ("weights", "states"):
            assert mine[key].keys() == plain[key].keys()
            assert all(torch.equal(mine[key][name], plain[key][name]) for name in mine[key])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_run_on_disk_equals_an_uninterrupted_one_in_memory(
    shell: Shell, tmp_path: Path, states: Path, strategy: str
) -> None:
    words = small_run(*RUN, "trainer.devices=2", "trainer.accelerator=cpu", f"strategy={strategy}")
    run, whole = tmp_path / "run", tmp_path / "whole"
    disk = ("strategy.offload_optimizer=disk", f"strategy.offload_dir={states}")
    killed = (*words, *disk, "resume=auto", "faults=[rank_killed@3,ckpt:after_file@4]")
    for code in (NO_ENVIRONMENT, NO_ENVIRONMENT, DONE):
        shell.train_into(run, *killed, code=code)
        assert list(states.iterdir()) == []
    shell.train_into(whole, *words)
    assert rows_of(run) == rows_of(whole)
    assert figures_of(run) == figures_of(whole)
    mine, plain = (CheckpointStore(of / "checkpoints").checkpoints()[-1] for of in (run, whole))
    for name in (MODEL, OPTIMIZER):  # under ddp the ranks share the writing of states on disks
        found, expected = mine.tensors(name), plain.tensors(name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)
