"""What becomes of every row: counted, dropped aloud, or an error that says what to type."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_modules.prepare import (
    DataConfig,
    DatasetConfig,
    Prepared,
    check_datasets,
    count_split,
    dataset_names,
    prepare_dataset,
)
from data_modules.template import ChatTemplate
from data_modules.types import DataError


def write(file: Path, rows: list[dict[str, Any]]) -> DatasetConfig:
    """Write rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(path=str(file))


def alpaca(*answers: str) -> list[dict[str, Any]]:
    """Make an alpaca row for each answer."""
    return [{"instruction": "q", "output": answer} for answer in answers]


def prepare(config: DatasetConfig, tokenizer: Any, sequence_len: int, **data: Any) -> Prepared:
    """Prepare one data set named `set` with the plain template."""
    template = ChatTemplate.resolve(tokenizer, "plain")
    settings = DataConfig(datasets=[config], **data)
    return prepare_dataset(config, "set", 3, settings, template, sequence_len)


def learned(prepared: Prepared, tokenizer: Any) -> list[str]:
    """Return the learned text of each document."""
    return [
        tokenizer.decode(example.input_ids[example.weights > 0])
        for examples in prepared.examples
        for example in examples
    ]


def length(tokenizer: Any, text: str) -> int:
    """Return the tokens of an alpaca row with answer `text`, in the plain template."""
    prompt = "### User:\nq\n\n### Assistant:\n"
    return len(tokenizer(prompt + text + "</s>")["input_ids"])


def test_rows_become_examples(tmp_path: Path, tokenizer: Any) -> None:
    prepared = prepare(write(tmp_path / "d.jsonl", alpaca("one", "two")), tokenizer, 99)
    assert learned(prepared, tokenizer) == ["one</s>", "two</s>"]
    example = prepared.examples[1][0]
    assert example.dataset == 3 and example.origin.line == 2
    assert (example.input_ids.dtype, example.weights.dtype) == ("int32", "float32")
    report = prepared.report
    assert (report.rows, report.format, report.format_guessed) == (2, "alpaca", True)
    assert len(report.sha256) == 64


def test_rows_without_an_answer_are_dropped_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    ask = {"messages": [{"role": "user", "content": "q"}]}
    say = {"messages": [*ask["messages"], {"role": "assistant", "content": "one"}]}
    prepared = prepare(write(tmp_path / "d.jsonl", [ask, say, ask]), tokenizer, 99)
    assert learned(prepared, tokenizer) == ["one</s>"]
    assert prepared.report.empty == 2
    assert [origin[-2:] for origin in prepared.report.empty_origins] == [":1", ":3"]
    assert "2 dropped with nothing to learn" in prepared.report.line(99)


@pytest.mark.parametrize(
    ("on_long", "kept", "counts"),
    [
        ("drop", ["one</s>"], {"dropped": 1}),
        ("truncate_right", ["one</s>", "one two three"], {"truncated": 1}),
        ("truncate_left", ["one</s>", "two three two three</s>"], {"truncated": 1}),
    ],
)
def test_long_rows(
    on_long: str, kept: list[str], counts: dict[str, int], tmp_path: Path, tokenizer: Any
) -> None:
    long = "one two three two three"
    limit = length(tokenizer, "one two three") - 1
    config = write(tmp_path / "d.jsonl", alpaca("one", long))
    prepared = prepare(config, tokenizer, limit, on_long=on_long)
    texts = learned(prepared, tokenizer)
    assert texts[0] == kept[0] and len(texts) == len(kept)
    assert all(len(e[0].input_ids) <= limit for e in prepared.examples)
    if on_long == "truncate_right":
        assert texts[1] == kept[1]
    if on_long == "truncate_left":
        assert texts[1].endswith("two three</s>")
    report = prepared.report
    assert {name: getattr(report, name) for name in counts} == counts
    assert report.longest_tokens == length(tokenizer, long)
    assert report.longest_origin.endswith("d.jsonl:2")
    assert f"1 {next(iter(counts))} (longer than {limit}; longest" in report.line(limit)


def test_long_rows_are_split_without_loss(tmp_path: Path, tokenizer: Any) -> None:
    text = "one two three " * 20
    config = write(tmp_path / "d.jsonl", [{"text": text}])
    prepared = prepare(config, tokenizer, 16, on_long="split")
    pieces = prepared.examples[0]
    assert len(pieces) > 2 and all(len(piece.input_ids) <= 16 for piece in pieces)
    ids = [id_ for piece in pieces for id_ in piece.input_ids.tolist()]
    assert tokenizer.decode(ids) == text + "</s>"
    assert prepared.report.split == 1


@pytest.mark.parametrize("words", [13, 20, 22, 60])
def test_each_piece_of_a_split_row_has_one_bos(
    words: int, tmp_path: Path, make_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = make_tokenizer(["<s>", "</s>"], bos="<s>", eos="</s>", adds_bos=True)
    text = "one " * words
    config = write(tmp_path / "d.jsonl", [{"text": text}])
    prepared = prepare(config, tokenizer, 8, on_long="split")
    pieces = [piece.input_ids.tolist() for piece in prepared.examples[0]]
    assert len(pieces) > 1 and all(len(piece) == 8 for piece in pieces[:-1])
    bos = tokenizer.bos_token_id
    assert all(piece[0] == bos and bos not in piece[1:] for piece in pieces)
    # Without loss: each token but the BOS is learned in one piece.
    assert "".join(learned(prepared, tokenizer)) == text + "</s>"


def test_cut_on_the_left_keeps_the_bos(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(["<s>", "</s>"], bos="<s>", eos="</s>", adds_bos=True)
    config = write(tmp_path / "d.jsonl", alpaca("one two three " * 20))
    prepared = prepare(config, tokenizer, 16, on_long="truncate_left")
    ids = prepared.examples[0][0].input_ids.tolist()
    assert len(ids) == 16 and ids.count(tokenizer.bos_token_id) == 1
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


def test_longest_row_is_named(tmp_path: Path, tokenizer: Any) -> None:
    rows = alpaca("one", "one two " * 9, "one two " * 30, "one two " * 20)
    report = prepare(write(tmp_path / "d.jsonl", rows), tokenizer, 20).report
    assert report.dropped == 3 and report.longest_origin.endswith(":3")


def test_answer_cut_away_counts_as_nothing_to_learn(tmp_path: Path, tokenizer: Any) -> None:
    rows = [*alpaca("one"), {"instruction": "one two " * 50, "output": "two"}]
    limit = length(tokenizer, "one")
    config = write(tmp_path / "d.jsonl", rows)
    prepared = prepare(config, tokenizer, limit, on_long="truncate_right")
    assert learned(prepared, tokenizer) == ["one</s>"]
    assert (prepared.report.truncated, prepared.report.empty) == (1, 1)


def test_long_rows_can_be_an_error(tmp_path: Path, tokenizer: Any) -> None:
    config = write(tmp_path / "d.jsonl", alpaca("one", "one two three " * 9))
    with pytest.raises(
        DataError, match=r"1 rows are longer than 30 tokens.*d.jsonl:2, has \d+ tok"
    ):
        prepare(config, tokenizer, 30, on_long="error")


def test_data_set_that_becomes_empty_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    config = write(tmp_path / "d.jsonl", alpaca("one two three " * 9, ""))
    with pytest.raises(
        DataError, match=r"no row of 2 is left: 1 are longer than 30 tokens.*1 have nothing"
    ):
        prepare(config, tokenizer, 30)


def test_dropped_share(tmp_path: Path, tokenizer: Any) -> None:
    config = write(tmp_path / "d.jsonl", alpaca("one", "one", "one", ""))
    prepare(config, tokenizer, 99, max_dropped_share=0.25)
    with pytest.raises(DataError, match=r"1 of 4 rows are dropped \(25.0%\).*max_dropped_share"):
        prepare(config, tokenizer, 99, max_dropped_share=0.2)


def test_control_tokens_in_the_text_are_counted_and_said(tmp_path: Path, tokenizer: Any) -> None:
    rows = alpaca("one", "two </s> one", "three")
    rows[2]["instruction"] = "what is </s>?"
    report = prepare(write(tmp_path / "d.jsonl", rows), tokenizer, 99).report
    assert report.control_rows == 2
    assert report.control_first.endswith("d.jsonl:2: </s>")
    assert "2 with control tokens in their text, kept and learned as such (first " in report.line(9)
    clean = prepare(write(tmp_path / "e.jsonl", alpaca("one", "two")), tokenizer, 99).report
    assert clean.control_rows == 0 and "control tokens" not in clean.line(99)


def test_counts_after_the_split(tmp_path: Path, tokenizer: Any) -> None:
    prepared = prepare(write(tmp_path / "d.jsonl", alpaca("one", "two")), tokenizer, 99)
    count_split(prepared, [True, False])
    report = prepared.report
    assert (report.train_rows, report.validation_rows) == (1, 1)
    assert report.tokens == len(prepared.examples[1][0].input_ids)
    assert report.trained_tokens == int((prepared.examples[1][0].weights > 0).sum())
    assert "2 rows (alpaca, guessed), 1 train + 1 validation" in report.line(99)


def test_names_are_made_from_paths_and_differ() -> None:
    paths = [
        "a/x.json",
        "b/x.jsonl.gz",
        "owner/set",
        "sample:list_corpus",
        "data/v1.5",
        "in/*.csv",
    ]
    configs = [DatasetConfig(path=path) for path in paths]
    configs.append(DatasetConfig(path="y.json", name="mine"))
    assert dataset_names(configs) == ["x", "x-2", "set", "list_corpus", "v1.5", "in", "mine"]


def problems(*datasets: DatasetConfig, **settings: Any) -> list[str]:
    """Return what the check says."""
    return check_datasets(DataConfig(datasets=list(datasets), **settings))


def test_check_passes_what_is_right(tmp_path: Path) -> None:
    good = write(tmp_path / "d.jsonl", alpaca("one"))
    hub = DatasetConfig(path="no_such_owner/no_such_set")
    assert problems(good, hub, DatasetConfig(path="sample:list_corpus")) == []


def test_check_tells_all_problems_of_all_data_sets(tmp_path: Path) -> None:
    broken = write(tmp_path / "b.jsonl", alpaca("one"))
    Path(broken.path).write_text('{"instruction": "q", "output": "a"}\n{"instruction"\n')
    found = problems(
        broken,
        DatasetConfig(path=str(tmp_path / "c.jsonl")),
        write(tmp_path / "d.jsonl", [{"question": "q", "answer": "a"}]),
        write(tmp_path / "e.jsonl", [*alpaca("one"), {"x": 1}, {"x": 2}, {"y": 3}]),
    )
    assert [problem.replace(f"{tmp_path}/", "") for problem in found] == [
        "b.jsonl:2:15 invalid JSON: Expecting ':' delimiter, near `{\"instruction\"`",
        found[1].replace(f"{tmp_path}/", ""),
        found[2].replace(f"{tmp_path}/", ""),
        "e.jsonl:2 missing 'instruction'; found ['x'] (1 more rows have these columns)",
        "e.jsonl:4 missing 'instruction'; found ['y']",
    ]
    assert "c.jsonl: no such file" in found[1]
    assert "['question', 'answer'] are of no known format" in found[2]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"on_long": "cut"}, "data.on_long is 'cut'; use drop, truncate_left"),
        ({"sequence_len": 1}, "data.sequence_len is 1"),
        ({"val_set_size": -1.0}, "data.val_set_size is -1.0"),
        ({"max_dropped_share": 2.0}, "data.max_dropped_share is 2.0"),
        ({"num_workers": -1}, "data.num_workers is -1"),
    ],
)
def test_check_of_settings(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    good = write(tmp_path / "d.jsonl", alpaca("one"))
    assert told in problems(good, **settings)[0]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"weight": 0.0}, "data.datasets[0].weight is 0.0"),
        ({"weight": float("nan")}, "data.datasets[0].weight is nan"),
        ({"format": "alpacca"}, "data.datasets[0].format: unknown format 'alpacca'; did you mean"),
        (
            {"format": "alpaca", "columns": {"outptu": "a"}},
            "data.datasets[0].columns.outptu: format 'alpaca' has no field 'outptu'; did you mean",
        ),
        ({"columns": {"output": "a"}}, "missing 'a'; found ['instruction', 'output']"),
    ],
)
def test_check_of_data_set_settings(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", alpaca("one")).path
    assert told in problems(DatasetConfig(path=path, **settings))[0]


def test_check_of_names(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", alpaca("one")).path
    twice = [DatasetConfig(path=path, name="a"), DatasetConfig(path=path, name="a")]
    assert problems(*twice) == [
        "data.datasets[1].name 'a' is already that of data.datasets[0]; give another"
    ]


def test_no_data_set_says_what_to_type() -> None:
    assert "data.datasets is empty; give" in problems()[0]


def test_test_data_sets_are_checked_without_data_sets(tmp_path: Path) -> None:
    found = problems(test_datasets=[DatasetConfig(path=str(tmp_path / "t.json"))])
    assert len(found) == 1 and "t.json: no such file" in found[0]


def test_check_reads_one_budget_in_equal_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_modules.prepare.CHECKED_BYTES", 5000)
    good = write(tmp_path / "good.jsonl", alpaca(*["one" * 20] * 90))
    late = write(tmp_path / "late.jsonl", [*alpaca(*["one" * 20] * 40), {"x": 1}])
    early = write(tmp_path / "early.jsonl", [*alpaca(*["one" * 20] * 9), {"x": 1}])
    assert 2000 < Path(late.path).stat().st_size < 4000
    assert problems(late, good, good, good, good) == []
    assert [p.split("/")[-1][:12] for p in problems(good, good, good, early)] == ["early.jsonl:"]
    # What a short file leaves of its part goes to the files after it.
    assert "late.jsonl:41 missing" in problems(early, late)[-1]


def test_count_of_problems_survives(tmp_path: Path) -> None:
    broken = write(tmp_path / "d.jsonl", alpaca("one"))
    Path(broken.path).write_text("{\n" * 50)
    found = problems(broken)
    assert len(found) == 20 and found[-1] == "... and 31 more like these"


def test_missing_mapped_column_names_its_row(tmp_path: Path, tokenizer: Any) -> None:
    config = write(tmp_path / "d.jsonl", alpaca("one"))
    config.columns = {"output": "a"}
    with pytest.raises(DataError, match=r"d\.jsonl:1 missing 'a'"):
        prepare(config, tokenizer, 99)


def test_check_imports_nothing_heavy(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", alpaca("one")).path
    code = (
        "import sys, data_modules as d\n"
        f"assert d.check_datasets(d.DataConfig(datasets=[d.DatasetConfig(path={path!r})])) == []\n"
        "d.PackingConfig(), d.PACKING_METHODS, d.TEMPLATE_NAMES\n"
        "heavy = {'torch', 'lightning', 'transformers', 'datasets', 'numpy', 'pyarrow', 'jinja2'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
