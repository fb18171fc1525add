"""What a run leaves on disk, that it is never overwritten, and that an evaluation repeats it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from transformers import AutoTokenizer

from app.config import load_config, load_run_config, run_verb
from app.merge import merge
from app.model.adapter import LoraConfig
from app.python import train
from app.run.manifest import git_state
from app.training.run_documents import CSV_FILE, read_curves
from common.errors import UserError
from common.files import write_atomically
from tests.conftest import TrainRun, read_column
from tests.in_process import as_new_process, run_into
from tests.reliability.shell import Shell
from tests.resumed import contents
from tests.tiny import SAMPLES, small_base, small_run, train_into

pytestmark = pytest.mark.slow

ORDERS = SAMPLES / "orders_test.jsonl"
DATASETS = ("capital", "orders")


@dataclasses.dataclass
class Run:
    """A finished run: its folder, its settings, and what it printed."""

    folder: Path
    config: Any
    printed: str

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name).read_text())


def one_answer_to_all(file: Path) -> Path:
    """A data set that a dozen steps teach: the answer is always the same."""
    rows = [{"instruction": f"Which city is it, {i}?", "output": "Prague"} for i in range(60)]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return file


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    parent = tmp_path_factory.mktemp("leaves")
    easy = one_answer_to_all(parent / "capital.jsonl")
    words = (
        f"data.datasets=[{{path: {easy}}}, {{path: {ORDERS}, name: orders, weight: 0.5}}]",
        "adapter.dropout=0",
        "optimizer.lr=1e-2",
        "schedule=constant",
        "trainer.max_steps=16",
        "trainer.validate_every_steps=16",
        "evaluation.exact_match=true",
        "evaluation.max_rows=4",
        "evaluation.max_new_tokens=6",
        "logger=tensorboard",
        "seed=7",
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train_into(parent / "run", *words)
    return Run(parent / "run", load_config("train", small_run(*words)), printed.getvalue())


def test_the_run_folder_has_exactly_the_documented_files(run: Run) -> None:
    written = "adapter audit.json audit.txt checkpoints config.yaml manifest.json metrics.csv "
    written += "metrics.json mixture.json predictions.jsonl report.html run.lock status.json "
    written += "tensorboard train.log training_curves.png verdict.json"
    assert {path.name for path in run.folder.iterdir()} == set(written.split())
    status = json.loads((run.folder / "status.json").read_text())
    assert (status["state"], status["step"], status["steps"]) == ("finished", 16, 16)
    assert status["checkpoint"] == "checkpoints/step-16" and status["exit_code"] == 0
    last = next(row for step, row in read_curves(run.folder / CSV_FILE) if step == 16)
    assert status["loss"] == last["train/loss"] and status["epoch"] > 0
    page = (run.folder / "report.html").read_text()
    verdict = run.json("verdict.json")
    assert verdict["verdict"] in page and all(cell in page for cell in verdict["table"][1])
    log = (run.folder / "train.log").read_text()
    assert all(line.strip() in log for line in run.printed.splitlines())
    assert "finished after step 16" in page and "capital, validation" in page
    assert "Prague" in page


def test_the_code_of_the_card_works_in_the_folder_of_the_run(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = (run.folder / "adapter/README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    assert str(small_base()) not in card and str(run.folder) not in card
    code = code.replace(f"'{small_base().name}'", repr(str(small_base())))
    monkeypatch.chdir(run.folder)
    exec(code.replace('"..."', '"Which city is it, 3?"'), {})  # noqa: S102  its own card
    assert "Prague" in capsys.readouterr().out
    modes = {file.name: file.stat().st_mode & 0o777 for file in (run.folder / "adapter").iterdir()}
    assert set(modes.values()) == {0o644}, modes


def test_tokenizer_and_template_are_saved_beside_the_adapter(run: Run) -> None:
    ours = AutoTokenizer.from_pretrained(run.folder / "adapter")
    base = AutoTokenizer.from_pretrained(small_base())
    turns = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Prague"}]
    assert ours.apply_chat_template(turns) == base.apply_chat_template(turns)
    assert ours.get_vocab() == base.get_vocab()
    assert (ours.eos_token_id, ours.pad_token_id) == (base.eos_token_id, base.pad_token_id)


def test_config_yaml_reads_back_equal(run: Run) -> None:
    back = load_run_config(run.folder)
    assert back == dataclasses.replace(run.config, output=back.output)
    assert back.output.dir == str(run.folder)
    assert isinstance(back.adapter, LoraConfig)
    text = (run.folder / "config.yaml").read_text()
    assert "${" not in text
    assert "!!" not in text


def test_metrics_json_is_flat_with_documented_names_and_training_improves_them(run: Run) -> None:
    metrics = run.json("metrics.json")
    assert all(isinstance(value, float) for value in metrics.values())
    expected = {"val/loss", "speed/tokens_per_second", "speed/train_seconds", "train/tokens"}
    for name in DATASETS:
        expected |= {f"val/loss/{name}", f"val/tokens/{name}", f"val/share/{name}"}
        expected |= {f"{who}/exact_match/{name}" for who in ("base", "tuned")}
        expected |= {f"{who}/val/loss/{name}" for who in ("base", "tuned")}
    assert expected <= metrics.keys()
    assert metrics["val/loss"] == metrics["tuned/val/loss"] < metrics["base/val/loss"]
    assert metrics["base/exact_match/capital"] == 0.0
    assert metrics["tuned/exact_match/capital"] == 1.0
    assert metrics["tuned/val/loss/capital"] < 0.1 < metrics["base/val/loss/capital"]


def test_the_manifest_describes_the_run_and_the_rows_of_each_data_set(run: Run) -> None:
    manifest = run.json("manifest.json")
    assert manifest["seed"] == 7
    assert manifest["command"] == [sys.executable, *sys.orig_argv[1:]]
    assert manifest["git"] == git_state()
    assert manifest["python"] == ".".join(map(str, sys.version_info[:3]))
    for library in ("torch", "lightning", "transformers", "peft", "tokenizers", "hydra-core"):
        assert manifest["versions"][library] == version(library)
    time.strptime(manifest["started"], "%Y-%m-%dT%H:%M:%S%z")
    assert len(manifest["template_sha256"]) == 64

    capital, orders = manifest["data"]
    files = {"capital": run.folder.parent / "capital.jsonl", "orders": ORDERS}
    for entry, (name, file) in zip((capital, orders), files.items(), strict=True):
        assert entry["name"] == name
        assert entry["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (capital["rows"], capital["train_rows"], capital["validation_rows"]) == (60, 54, 6)
    assert (orders["rows"], orders["format"]) == (200, "messages")


def test_tensorboard_holds_the_same_numbers_as_the_csv(run: Run) -> None:
    (file,) = (run.folder / "tensorboard").iterdir()
    found: dict[str, dict[int, float]] = {}
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            (number,) = value.tensor.float_val or [value.simple_value]
            found.setdefault(value.tag, {})[event.step] = number
    assert not [tag for tag in found if "/tokens/" in tag or "/share/" in tag]
    assert {"custom_scalars__config__", "_hparams_/experiment", "final/val/loss"} <= found.keys()
    assert {"command/text_summary", "config/text_summary"} <= found.keys()
    for name in ("train/loss", "val/loss", "val/loss/orders", "train/lr"):
        in_csv = read_column(run.folder, name)
        assert found[name].keys() == in_csv.keys()
        assert list(found[name].values()) == pytest.approx(list(in_csv.values()), rel=1e-6)


def test_a_file_is_on_the_disk_before_it_takes_the_old_one_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, synced = tmp_path / "config.yaml", []

    def sync(descriptor: int) -> None:
        there = os.fstat(descriptor)
        name = "the folder" if os.path.samestat(there, tmp_path.stat()) else "a file"
        old = file.read_text() if file.exists() else None
        synced.append((name, there.st_size if name == "a file" else None, old))

    monkeypatch.setattr(os, "fsync", sync)
    write_atomically(file, "old")
    write_atomically(file, "new one")
    assert synced == [
        ("a file", 3, None),
        ("the folder", None, "old"),
        ("a file", 7, "old"),
        ("the folder", None, "new one"),
    ]
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.stat(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        write_atomically(file, "unfinished")
    assert contents(tmp_path) == {"config.yaml": b"new one"}


def evaluated(folder: Path, *words: str) -> dict[str, float]:
    """Evaluate into `folder` in this process; returns its metrics.json."""
    run_into("evaluate", folder, *words)
    return json.loads((folder / "metrics.json").read_text())


def figures(metrics: dict[str, float]) -> dict[str, float]:
    """What an evaluation measures, of what a run has written."""
    return {name: x for name, x in metrics.items() if "val/" in name or "exact_match" in name}


@pytest.mark.parametrize(
    "kind",
    [
        "adapter=full trainer.precision=bf16",
        "adapter=freeze trainer.precision=bf16-pure",
        "quantization=fp8",
    ],
)
def test_evaluate_reproduces_any_kind_of_run(
    kind: str, tmp_path: Path, train_run: TrainRun
) -> None:
    words = (
        *kind.split(),
        "optimizer.lr=1e-3",
        "trainer.max_steps=2",
        "evaluation.exact_match=true",
        "evaluation.max_rows=2",
        "evaluation.max_new_tokens=4",
    )
    folder = train_run(*small_run(*words))
    again = evaluated(tmp_path / "again", f"run={folder}")
    assert again["val/loss"] < again["base/val/loss"]
    assert again == figures(json.loads((folder / "metrics.json").read_text()))


def test_an_adapter_is_evaluated_without_its_run(run: Run, tmp_path: Path) -> None:
    again = evaluated(
        tmp_path / "again",
        f"model.path={small_base()}",
        f"adapter_path={run.folder / 'adapter'}",
        f"data.datasets=[{{path: {run.folder.parent / 'capital.jsonl'}}}]",
        "data.val_set_size=6",
        "data.sequence_len=256",
        "trainer.precision=fp32",
        "evaluation.exact_match=true",
        "evaluation.max_new_tokens=6",
    )
    assert again["tuned/exact_match/capital"] == 1.0
    assert again["base/exact_match/capital"] == 0.0


def test_held_out_files_alone_can_be_evaluated(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = one_answer_to_all(tmp_path / "held_out.jsonl")
    tests = f"data.test_datasets=[{{path: {held_out}}}]"
    again = evaluated(tmp_path / "again", f"run={run.folder}", "data.datasets=[]", tests)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "│ held_out " in line)
    assert "100.0 %" in line
    change = "change/exact_match/held_out"
    assert again == {
        "base/exact_match/held_out": 0.0,
        "tuned/exact_match/held_out": 1.0,
        change: 1.0,
        f"{change}/low": 0.0,  # four rows: a sign test would not reject
        f"{change}/high": 1.0,
    }


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("evaluation.exact_match=false",), "type evaluation.exact_match=true to compare"),
        (("evaluation.exact_match=true",), "no row has an answer to compare"),
    ],
)
def test_evaluating_nothing_is_refused(
    words: tuple[str, ...], reason: str, run: Run, tmp_path: Path
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"only text {n}"}) + "\n" for n in range(3)))
    tests = f"data.test_datasets=[{{path: {text}}}]"
    with pytest.raises(UserError, match=f"nothing to measure.*{reason}"):
        evaluated(tmp_path / "again", f"run={run.folder}", "data.datasets=[]", tests, *words)


def test_a_base_can_be_evaluated_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = evaluated(
        tmp_path / "base",
        f"model.path={small_base()}",
        f"data.datasets=[{{path: {ORDERS}}}]",
        "data.val_set_size=4",
    )
    assert {name.partition("/")[0] for name in metrics} == {"base"}
    assert f"{metrics['base/val/loss/orders_test']:.4f}" in capsys.readouterr().out


def test_a_full_run_leaves_a_model_with_its_tokenizer(train_run: TrainRun) -> None:
    folder = train_run(*small_run("adapter=full", "trainer.max_steps=1", "output.dtype=bf16"))
    assert not (folder / "adapter").exists()
    saved = load_file(folder / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template


def test_the_longer_context_is_merged_with_the_adapter(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    screen = shell.train_into(
        run,
        f"model.path={SAMPLES / 'tiny_base'}",
        f"data.datasets=[{{path: {SAMPLES / 'lists.json'}}}]",
        "model.context_len=4096",
        "model.rope_scaling=linear",
        "data.sequence_len=2048",
        "trainer.max_steps=2",
        "trainer.accelerator=cpu",
    )
    assert "context: 1,024 -> 4,096 tokens (linear, factor 4)" in screen
    words = [f"run={run}", f"output.dir={tmp_path / 'merged'}"]
    assert run_verb("merge", merge, words=words) == 0
    saved = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert saved["max_position_embeddings"] == 4096
    assert saved["rope_parameters"]["rope_type"] == "linear"
    assert saved["rope_parameters"]["factor"] == 4.0


@pytest.fixture
def interruptible() -> Iterator[Any]:
    """SIGINT raises KeyboardInterrupt, as in a notebook; a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_cell_of_a_notebook_raises_and_its_run_resumes(
    tmp_path: Path, interruptible: Any
) -> None:
    class Interrupted(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                signal.raise_signal(signal.SIGINT)

    words = small_run(f"output.dir={tmp_path / 'run'}", "trainer.checkpoint.every_steps=1")
    with as_new_process():
        with pytest.raises(KeyboardInterrupt):
            train(load_config("train", words), callbacks=[Interrupted()])
        assert signal.getsignal(signal.SIGINT) is interruptible
        run = train(load_config("train", {"resume": str(tmp_path / "run")}))
    assert [row["step"] for row in run.rows if "train/loss" in row][-1] == 4
