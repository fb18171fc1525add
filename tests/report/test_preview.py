"""The preview shows the real tokens and weights, with the settings of training, on any machine."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoTokenizer

from app.config import load_config
from app.preview import first_rows_of, preview, requested_batching, rows_per_dataset
from app.report.preview import MAX_ROW_TOKENS, Passage, TokenPiece, TokenRenderer, render_passage
from app.strategy.settings import FsdpConfig, StrategyConfig
from app.training.trainer import TrainerConfig
from common.errors import DataError
from common.text import printable
from data_modules import DataConfig, DatasetConfig
from tests.data_modules.conftest import build_tokenizer
from tests.in_process import CommandResult, make_data, run_command
from tests.report.test_run_page import Page, check_self_contained
from tests.tiny import TINY_BASE

HOSTILE = "<script>alert(1)</script> & \"quoted\" 'too' \x1b[31mred\x1b]0;title\x07 \u202eback"


@pytest.fixture
def run_preview(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the verb in this process; return its new folder, its page and its output."""

    def run(*words: str) -> tuple[Path, Page, str]:
        folder = tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}"
        given = [*words, f"output.dir={folder}", f"data.cache_dir={tmp_path / 'cache'}"]
        preview(load_config("preview", given))
        text = (folder / "preview.html").read_text(encoding="utf-8")
        return folder, Page(text), capsys.readouterr().out

    return run


def write_rows(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f"{{path: {file}, name: {file.stem}}}"


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A base, and a small data set."""
    rows = [{"instruction": "what is it", "output": f"number {i}"} for i in range(9)]
    return [f"model.path={TINY_BASE}", f"data.datasets=[{write_rows(tmp_path / 'a.jsonl', rows)}]"]


def test_the_default_shows_every_section(run_preview: Callable[..., Any]) -> None:
    folder, page, printed = run_preview("+experiment=quickstart")
    assert printed.splitlines()[-1] == f"run: {folder}"
    assert "\x1b" not in printed, "no colors without a terminal"
    assert "  below: «trained on», masked\n" in printed
    for shown in (printed, page.shown):
        for name in ("lists", "orders", "people"):
            assert name in shown
        for fragment in ("packs", "documents in", "lengths", "median", "epochs", "audit"):
            assert fragment.lower() in shown.lower()
    assert {file.name for file in folder.iterdir()} >= {
        *("preview.html", "audit.json", "audit.txt", "config.yaml")
    }
    assert {span.get("class") for span in page.tags_of("span")} >= {"h0", "h0 alt", "h1", "h2"}
    audit = json.loads((folder / "audit.json").read_text())
    assert [dataset["name"] for dataset in audit["datasets"]] == ["lists", "orders", "people"]
    check_self_contained(page)
    hints = [a["title"] or "" for tag, a in page.tags if tag == "i" and "title" in a]
    assert all(re.fullmatch(r"id [\d ]+, weight [\d.]+", hint) for hint in hints)
    assert len(hints) > 100


def test_trained_tokens_are_marked(run_preview: Callable[..., Any], tmp_path: Path) -> None:
    answer = "The cat sat on 3 mats."
    rows = [{"instruction": f"Say it {i} times.", "output": answer} for i in range(8)]
    words = [f"model.path={TINY_BASE}", f"data.datasets=[{write_rows(tmp_path / 'a.jsonl', rows)}]"]
    _, page, printed = run_preview(*words, "preview.rows=2")
    marked = re.findall(r"«(.*?)»", printed, re.DOTALL)
    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    assert len(marked) == 3, "the legend and two rows"
    for text in marked[1:]:
        assert text.startswith(answer)
        assert any(stop in text for stop in tokenizer.all_special_tokens), "the stop token too"
        assert "Say it" not in text
    assert page.trained.count(answer) == 2
    assert "Say it" not in page.trained
    assert "Say it" in page.shown


def test_rows_cannot_control_page_or_terminal(
    run_preview: Callable[..., Any], tmp_path: Path
) -> None:
    # As tokens: control characters in a row of text are rejected earlier.
    ids = AutoTokenizer.from_pretrained(TINY_BASE)(HOSTILE)["input_ids"]
    rows = [{"input_ids": [*ids, i], "labels": [*ids, i]} for i in range(20, 26)]
    words = [f"model.path={TINY_BASE}", f"data.datasets=[{write_rows(tmp_path / 'a.jsonl', rows)}]"]
    folder, page, printed = run_preview(*words)
    text = (folder / "preview.html").read_text(encoding="utf-8")
    kinds = {tag for tag, _ in page.tags}
    assert "script" not in kinds
    assert "<script" not in text
    assert "<script>alert(1)</script>" in page.shown.replace("↵", "")
    for shown in (printed, text):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", shown)


def test_both_answers_of_a_row_are_shown_with_their_prompt_once(
    run_preview: Callable[..., Any], tmp_path: Path
) -> None:
    pairs = [{"prompt": f"Say {n}.", "chosen": f"It is {n}", "rejected": "no"} for n in range(9)]
    data = write_rows(tmp_path / "pairs.jsonl", [*pairs])
    words = [f"model.path={TINY_BASE}", f"data.datasets=[{data}]", "data.val_set_size=0"]
    _, page, printed = run_preview(*words, "objective=dpo", "preview.rows=1")
    _, _, after = printed.partition("pairs.jsonl:1: ")
    first, _, second = after.partition("\n-- rejected answer, ")
    assert "Say 0.«It is 0" in first and first.count("Say 0.") == 1
    assert re.match(r"\d tokens? shorter, after the same prompt:\n«no", second)
    assert "Say 0." not in second.partition("\n\n")[0]
    assert "shorter, after the same prompt" in page.shown
    verdicts = [
        {"prompt": f"Say {n}.", "completion": f"It is {n}", "label": n % 2 == 0} for n in range(9)
    ]
    words[1] = f"data.datasets=[{write_rows(tmp_path / 'verdicts.jsonl', verdicts)}]"
    _, _, printed = run_preview(*words, "objective=kto", "preview.rows=2")
    assert "verdicts.jsonl:1, label true: " in printed
    assert "-- answer of another row, after the same prompt:\n«It is " in printed


def test_the_labels_of_a_row_are_shown(run_preview: Callable[..., Any], tmp_path: Path) -> None:
    rows = [{"text": "A text.", "label": ["a", "c"]}, {"text": "A text.", "label": []}]
    words = [f"model.path={TINY_BASE}", "objective=classify", "model.labels=[a, b, c]"]
    words += ["model.multi_label=true", "data.val_set_size=0"]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    _, page, printed = run_preview(*words, f"data.datasets=[{data}]")
    assert "rows.jsonl:1, label a, c: " in printed and "rows.jsonl:1, label a, c" in page.shown
    assert "rows.jsonl:2, label none: " in printed


def test_a_preview_needs_only_a_tokenizer(
    run_preview: Callable[..., Any],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_tokenizer(["</s>"], eos="</s>").save_pretrained(tmp_path / "tokenizer")
    alone = (f"model.path={tmp_path / 'tokenizer'}", words[1], "preview.rows=1")
    _, _, printed = run_preview(*alone, "trainer.devices=2")
    assert "sequence length: 2,048 tokens (the model's context is not known" in printed
    assert "ranks: 2, as set (trainer.devices=2, trainer.num_nodes=1)" in printed
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    gated = ("model=llama8b", f"model.tokenizer_path={TINY_BASE}", words[1], "preview.rows=1")
    _, _, printed = run_preview(*gated, "data.sequence_len=4096")
    assert "sequence length: 4,096 tokens (the model's context: 131,072)" in printed


def test_audit_problems_are_shown_before_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"instruction": "what is it", "output": "one " * 80} for _ in range(9)]
    folder = tmp_path / "run"
    words = [f"model.path={TINY_BASE}", f"output.dir={folder}"]
    words += [f"data.datasets=[{write_rows(tmp_path / 'a.jsonl', rows)}]"]
    words += ["data.on_long=truncate_right", "data.sequence_len=24"]
    with pytest.raises(DataError, match="no stop token is trained on"):
        preview(load_config("preview", [*words, f"data.cache_dir={tmp_path / 'cache'}"]))
    assert "problem: " in capsys.readouterr().out
    assert 'class="problem"' in (folder / "preview.html").read_text(encoding="utf-8")


def test_shares_and_packs_match_the_steps(run_preview: Callable[..., Any], tmp_path: Path) -> None:
    files = [
        write_rows(tmp_path / f"{name}.jsonl", [{"text": f"{name} {i}"} for i in range(40)])
        for name in "ab"
    ]
    sets = ", ".join([files[0].replace("}", ", weight: 3}"), files[1]])
    words = [f"model.path={TINY_BASE}", f"data.datasets=[{sets}]", "data.val_set_size=0"]
    _, page, printed = run_preview(*words, "data.sequence_len=32", "data.audit.overlap=false")
    lines = [re.split(" {2,}", line.strip()) for line in printed.splitlines()]
    heading = next(line for line in lines if line[:4] == ["data set", "rows", "tokens", "epochs"])
    table = lines[lines.index(heading) + 1 :]
    assert [*table[0][:2], *table[0][3:6]] == ["a", "40", "3", "120", "75.00 %"]
    assert [*table[1][:2], *table[1][3:6]] == ["b", "40", "1", "40", "25.00 %"]
    packs = [a for tag, a in page.tags if tag == "div" and a.get("class") == "pack"]
    assert len(packs) == 4, "two of each of the first two steps"
    _, _, printed = run_preview(*words, "data.sequence_len=32", "data.mixture.weights=rows")
    lines = [re.split(" {2,}", line.strip()) for line in printed.splitlines()]
    row = next(line for line in lines if line[:2] == ["a", "40"] and len(line) == 8)
    assert (row[4], row[5], row[7]) == ("120", "75.00 %", "75.00 %")  # requested and actual


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_pieces_concatenate_to_the_text(text: str) -> None:
    tokenizer = TOKENIZER
    ids = np.array(tokenizer(text)["input_ids"], dtype=np.int64)
    pieces = TokenRenderer(tokenizer).passage(ids, np.zeros(len(ids))).head
    assert [number for piece in pieces for number in piece.ids] == ids.tolist()
    if "\ufffd" not in text and "</s>" not in text:
        assert "".join(piece.text for piece in pieces) == printable(
            tokenizer.decode(ids), keep="\n"
        )


TOKENIZER = build_tokenizer(["</s>"], eos="</s>")


def test_incomplete_characters_never_absorb_a_special_token() -> None:
    alone = TOKENIZER("é")["input_ids"]
    ids = np.array([alone[0], TOKENIZER.eos_token_id, *alone])
    pieces = TokenRenderer(TOKENIZER).passage(ids, np.array([0.0, 1.0, 0.5, 0.5])).head
    assert [piece.is_special for piece in pieces] == [False, True, False]
    assert [piece.text for piece in pieces] == ["\ufffd", "</s>", "é"]
    assert [piece.weight for piece in pieces] == [0.0, 1.0, 0.5]


def test_long_rows_show_their_beginning_and_end() -> None:
    ids = np.full(MAX_ROW_TOKENS + 10, TOKENIZER("a")["input_ids"][0])
    whole = TokenRenderer(TOKENIZER).passage(ids, np.zeros(len(ids)))
    assert (len(whole.head), whole.num_omitted, len(whole.tail)) == (2048, 10, 2048)
    assert whole.cut(MAX_ROW_TOKENS) is whole
    cut = whole.cut(5)
    assert (len(cut.head), len(cut.tail)) == (3, 2)
    assert cut.num_omitted == len(ids) - 5


def test_ascii_terminals_are_supported() -> None:
    file = io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii", errors="backslashreplace")
    screen = Console(file=file, highlight=False)
    screen.print(render_passage(Passage([TokenPiece("né", (1,), 1.0, False)]), screen))
    file.flush()
    assert raw.getvalue() == b"<<n\\xe9>>\n"


def checked(*words: str, gpus: int = 0, environment: dict[str, str] | None = None) -> CommandResult:
    return run_command(*words, verb="preview", gpus=gpus, environment=environment)


@pytest.fixture
def tokenizer_only(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


@pytest.fixture
def data(tmp_path: Path) -> str:
    return f"data.datasets=[{{path: {make_data(tmp_path / 'd.jsonl')}}}]"


def test_without_settings_quickstart_is_previewed() -> None:
    result = checked()
    assert result.code == 0, result.stderr
    assert "no settings given: +experiment=quickstart" in result.stderr
    assert result.config.data.datasets[0].name == "lists"


def test_tokenizer_problems_are_named(tokenizer_only: Path, data: str) -> None:
    words = (f"model.path={tokenizer_only}", data)
    assert "no tokenizer: type model.path=FOLDER_OR_HUB_ID" in checked(data).stderr
    (tokenizer_only / "tokenization.py").write_text("raise SystemExit")
    assert "contains its own Python code" in checked(*words).stderr
    (tokenizer_only / "tokenizer.json").unlink()
    assert "no tokenizer found" in checked(*words).stderr


def test_a_run_for_another_machine_can_be_previewed() -> None:
    words = ["+experiment=quickstart", "trainer.accelerator=gpu", "trainer.devices=8"]
    words += ["trainer.precision=fp16", "attention=flash2"]
    assert run_command(*words).code == 2
    for gpus in (0, 1):
        result = checked(*words, gpus=gpus)
        assert result.code == 0, result.stderr
    result = checked("+experiment=quickstart", "strategy=single", "trainer.devices=2")
    assert result.code == 2, "impossible on any machine"
    assert "strategy=ddp" in result.stderr
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "x"}
    result = checked("+experiment=quickstart", environment=ranks | {"MASTER_PORT": "1"})
    assert result.code == 2
    assert "this command runs in one process" in result.stderr


def test_steps_are_planned_for_the_configured_ranks() -> None:
    auto = StrategyConfig()
    assert requested_batching(TrainerConfig(), auto) == (1, 8)
    assert requested_batching(TrainerConfig(devices=4, num_nodes=2), auto) == (8, 8)
    typed = TrainerConfig(devices=4, micro_batch_size=2, global_batch_size=24)
    assert requested_batching(typed, auto) == (4, 3)
    assert requested_batching(typed, FsdpConfig(tensor_parallel_size=2)) == (2, 6)
    assert requested_batching(typed, FsdpConfig(tensor_parallel_size=None)) == (1, 12)
    assert requested_batching(TrainerConfig(), FsdpConfig(tensor_parallel_size=2)) == (1, 8)


def test_the_first_rows_of_a_stream_are_shown() -> None:
    sets = [DatasetConfig(path="a"), DatasetConfig(path="b", split="test")]
    tests = [DatasetConfig(path="c")]
    typed = DataConfig(datasets=sets, test_datasets=tests, streaming=True, val_set_size=50)
    data = first_rows_of(typed)
    assert [dataset.split for dataset in data.datasets] == ["train[50:2050]", "test[50:2050]"]
    compared = [(dataset.path, dataset.split) for dataset in data.test_datasets]
    assert compared == [("c", "train"), ("a", "train[:50]"), ("b", "test[:50]")]
    assert (data.streaming, data.val_set_size) == (False, 0)
    none_out = replace(typed, val_set_size=0, test_datasets=[])
    assert first_rows_of(none_out).test_datasets == []


def test_only_the_first_rows_of_large_data_are_read() -> None:
    sets = [DatasetConfig(path=name) for name in "abcd"]
    assert rows_per_dataset(100_000, DataConfig(datasets=sets)) == 25_000
    assert rows_per_dataset(100, DataConfig(datasets=sets, val_set_size=50)) == 100
    assert rows_per_dataset(None, DataConfig(datasets=sets)) is None
