"""Preparing rows: each is kept and counted, dropped and reported, or an error with the fix.

A preview reads only the first rows and reports it, or reads all rows on request.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import DataError, Origin
from data_modules.settings import DataConfig, DatasetConfig, check_datasets
from data_modules.source import Chunk, ReadLimits, opening, read_chunks
from data_modules.tokens import encode
from data_modules.tokens.encode import BadRows, FirstRows, Rejected
from data_modules.tokens.prepare import Prepared
from data_modules.types import Example
from tests.data_modules.conftest import alpaca, prepare, write_jsonl


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOFT_DATA_CACHE", str(tmp_path / "cache"))


HEADER_AT_END = (
    "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + eos_token }}{% endfor %}"
    "{{ '### assistant:\n' }}"
)


def rows_of(prepared: Prepared) -> list[list[Example]]:
    """Return the documents of each row."""
    rows: dict[int, list[Example]] = {}
    for index, row in enumerate(prepared.store.rows.tolist()):
        rows.setdefault(row, []).append(prepared.store.example(index, 3))
    return list(rows.values())


def trained(prepared: Prepared, tokenizer: Any) -> list[str]:
    """Return the trained text of each document."""
    return [
        tokenizer.decode(example.input_ids[example.weights > 0])
        for examples in rows_of(prepared)
        for example in examples
    ]


def length(tokenizer: Any, text: str) -> int:
    """Return the tokens of an alpaca row with answer `text`, in the plain template."""
    prompt = "### User:\nq\n\n### Assistant:\n"
    return len(tokenizer(prompt + text + "</s>")["input_ids"])


def test_rows_become_examples(tmp_path: Path, tokenizer: Any) -> None:
    prepared = prepare(write_jsonl(tmp_path / "d.jsonl", alpaca("one", "two")), tokenizer, 99)
    assert trained(prepared, tokenizer) == ["one</s>", "two</s>"]
    example = rows_of(prepared)[1][0]
    assert example.dataset == 3 and example.origin.line == 2
    assert (example.input_ids.dtype, example.weights.dtype) == ("int32", "float32")
    assert (prepared.counts.rows, prepared.format) == (2, "alpaca")
    assert prepared.format_guessed and len(prepared.sha256) == 64


@pytest.mark.parametrize("eos", ["turn", "all", "last"])
@pytest.mark.parametrize("text", [None, HEADER_AT_END])
def test_text_after_the_last_stop_token_does_not_hide_it(
    tmp_path: Path, tokenizer: Any, eos: str, text: str | None
) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", alpaca("one", "two"))
    if text is not None:
        (tmp_path / "own.jinja").write_text(text)
    prepared = prepare(
        file,
        tokenizer,
        99,
        template="plain" if text is None else str(tmp_path / "own.jinja"),
        train_on_inputs=True,
        train_on_eos=eos,
    )
    assert prepared.store.ends_in_stop.all()
    untrained = prepare(file, tokenizer, 99, train_on_inputs=True, train_on_eos="none")
    assert not untrained.store.ends_in_stop.any()


@pytest.mark.parametrize(
    ("on_long", "kept", "count"),
    [
        ("drop", None, "dropped"),
        ("truncate_right", "one two three", "truncated"),
        ("truncate_left", "two three</s>", "truncated"),
    ],
)
def test_long_rows(
    on_long: str, kept: str | None, count: str, tmp_path: Path, tokenizer: Any
) -> None:
    long = "one two three two three"
    limit = length(tokenizer, "one two three") - 1
    config = write_jsonl(tmp_path / "d.jsonl", alpaca("one", long, "two " * 9))
    prepared = prepare(config, tokenizer, limit, on_long=on_long)
    first, *others = trained(prepared, tokenizer)
    assert first == "one</s>" and len(others) == (0 if kept is None else 2)
    assert all(len(e[0].input_ids) <= limit for e in rows_of(prepared))
    if kept is not None:
        assert others[0].startswith(kept) or others[0].endswith(kept)
    assert getattr(prepared.counts, count) == 2
    longest, second = prepared.counts.longest[:2]
    assert longest[1].endswith("d.jsonl:3")
    assert second[0] == length(tokenizer, long) and second[1].endswith("d.jsonl:2")
    cut = 0 if kept is None else 2 * limit
    assert prepared.counts.lost_tokens == longest[0] + second[0] - cut


@pytest.mark.parametrize("words", [13, 20, 22, 60])
def test_each_piece_of_a_split_row_has_one_bos(
    words: int, tmp_path: Path, make_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = make_tokenizer(["<s>", "</s>"], bos="<s>", eos="</s>", adds_bos=True)
    text = "one " * words
    config = write_jsonl(tmp_path / "d.jsonl", [{"text": text}])
    prepared = prepare(config, tokenizer, 8, on_long="split")
    pieces = [piece.input_ids.tolist() for piece in rows_of(prepared)[0]]
    sizes = [len(piece) for piece in pieces]
    assert len(pieces) > 1 and max(sizes) <= 8 and max(sizes) - min(sizes) <= 1
    bos = tokenizer.bos_token_id
    assert all(piece[0] == bos and bos not in piece[1:] for piece in pieces)
    # Without loss: each token but the BOS is trained on in one piece.
    assert "".join(trained(prepared, tokenizer)) == text + "</s>"
    assert prepared.counts.split == 1


def test_several_processes_give_the_same_rows(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_modules.source.opening.CHUNK_BYTES", 2000)
    rows = alpaca(*("one two " * (1 + index % 7) for index in range(900)))
    rows[700] = {"instruction": "q", "output": "three " * 300}
    config = write_jsonl(tmp_path / "d.jsonl", rows)
    one = prepare(config, tokenizer, 200, num_proc=1, cache_dir=str(tmp_path / "one"))
    several = prepare(config, tokenizer, 200, num_proc=3, cache_dir=str(tmp_path / "several"))
    assert one.counts == several.counts
    assert one.counts.dropped == 1 and one.counts.kept == 899
    assert trained(one, tokenizer) == trained(several, tokenizer)
    assert one.store.lines.tolist() == [line for line in range(1, 901) if line != 701]
    assert one.store.rows.tolist() == several.store.rows.tolist()
    assert one.store.rows.tolist() == [line - 1 for line in one.store.lines.tolist()]


@pytest.mark.parametrize("has_bos", [True, False])
@pytest.mark.parametrize("on_long", ["split", "truncate_left"])
def test_a_row_that_is_cut_begins_with_a_bos_if_it_did(
    on_long: str, has_bos: bool, tmp_path: Path, make_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = make_tokenizer(["<s>", "</s>"], bos="<s>", eos="</s>", adds_bos=True)
    bos, ids = [tokenizer.bos_token_id] * has_bos, list(range(100, 150))
    row = {"input_ids": [*bos, *ids], "labels": [*[-100] * len(bos), *ids]}
    prepared = prepare(write_jsonl(tmp_path / "d.jsonl", [row]), tokenizer, 16, on_long=on_long)
    pieces = [piece.input_ids.tolist() for piece in rows_of(prepared)[0]]
    assert all(piece[: len(bos)] == bos and len(piece) <= 16 for piece in pieces)
    together = [token for piece in pieces for token in piece[len(bos) :]]
    assert together == (ids if on_long == "split" else ids[len(bos) - 16 :])


def test_another_setting_tokenizer_template_or_row_is_tokenized_again(
    tmp_path: Path, tokenizer: Any, make_tokenizer: Callable[..., Any]
) -> None:
    config = write_jsonl(tmp_path / "d.jsonl", alpaca("one", "two"))
    assert prepare(config, tokenizer, 99).how == "tokenized (now cached)"
    assert prepare(config, tokenizer, 99).how == "found in the cache"
    assert "settings changed: sequence_len" in prepare(config, tokenizer, 98).how
    again = prepare(config, tokenizer, 99, train_on_inputs=True)
    assert "settings changed:" in again.how and "train_on_inputs" in again.how
    (tmp_path / "own.jinja").write_text(HEADER_AT_END)
    other = prepare(config, tokenizer, 99, template=str(tmp_path / "own.jinja"))
    assert "the chat template changed" in other.how
    other = prepare(config, make_tokenizer(["</s>", "one"], eos="</s>"), 99)
    assert "the tokenizer changed" in other.how
    write_jsonl(tmp_path / "d.jsonl", alpaca("one", "three"))
    changed = prepare(config, tokenizer, 99)
    assert "the data changed" in changed.how
    assert trained(changed, tokenizer) == ["one</s>", "three</s>"]


def test_branches_of_a_tree_that_are_too_long_are_reported(tmp_path: Path, tokenizer: Any) -> None:
    long = {"text": "one two " * 90, "role": "assistant", "replies": []}
    short = {"text": "three", "role": "assistant", "replies": []}
    prompt = {"text": "q", "role": "prompter", "replies": [long, short]}
    config = write_jsonl(tmp_path / "d.jsonl", [{"message_tree_id": "1", "prompt": prompt}])
    prepared = prepare(config, tokenizer, 40)
    assert trained(prepared, tokenizer) == ["three</s>"]
    counts = prepared.counts
    assert (counts.dropped, counts.truncated, counts.notes["branch_dropped"][0]) == (0, 0, 1)
    with pytest.raises(DataError, match="1 rows are longer than 40 tokens"):
        prepare(config, tokenizer, 40, on_long="error")


CONTENT = "{% for m in messages %}{{ m.role + ': ' + TEXT + eos_token }}{% endfor %}"
BAD = "{% if '7' in m.content %}{{ raise_exception('not polite') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "start", "end"),
    [
        # In every row it is the template's own fault.
        ("{{ raise_exception('no') }}", "fits none of the 40 rows, first ", "fix the template, or"),
        (CONTENT.replace("TEXT", "'-'"), "fits none of the 40 rows", "the answer `one 0`; set"),
        (
            CONTENT.replace("{{ m.role", BAD + "{{ m.role").replace("TEXT", "m.content"),
            "refuses this row",
            "change the row, or set data.chat_template=plain (4 rows for this reason, the last ",
        ),
    ],
)
def test_equal_reasons_of_a_template_are_said_once(
    template: str, start: str, end: str, tmp_path: Path, tokenizer: Any
) -> None:
    (tmp_path / "t.jinja").write_text(template)
    rows = write_jsonl(tmp_path / "d.jsonl", alpaca(*(f"one {number}" for number in range(40))))
    with pytest.raises(DataError) as error:
        prepare(rows, tokenizer, 64, template=str(tmp_path / "t.jinja"))
    (problem,) = error.value.problems
    assert f"the chat template {start}" in problem and end in problem
    assert f"{rows.path}:{1 if 'none' in start else 8} " in problem


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
MEANINGS = {
    "pair of texts": ({"instruction": "q", "output": "a"}, {"chosen": "a", "rejected": "b"}),
    "pair of turns": ({"messages": CHAT}, {"chosen": CHAT, "rejected": CHAT}),
    "rejected answer": ({"prompt": "q", "completion": "a"}, {"rejected_response": "b"}),
    "verdict": ({"prompt": "q", "completion": "a"}, {"label": False}),
    "verdict of a chat": ({"conversations": CHAT}, {"kto_tag": True}),
    "class": ({"text": "a"}, {"label": 3}),
    "class in words": ({"content": "a"}, {"labels": "spam"}),
}
FORMATS = ("alpaca", "messages", *["prompt_completion"] * 2, "sharegpt", *["completion"] * 2)


@pytest.mark.parametrize(("kind", "form"), zip(MEANINGS, FORMATS, strict=True))
def test_rows_that_mean_more_are_refused_wherever_they_are(
    kind: str, form: str, tmp_path: Path, tokenizer: Any
) -> None:
    """Also behind the rows by which the format is guessed; nulls and a given format are fine."""
    plain, more = MEANINGS[kind]
    nothing = dict.fromkeys(more)
    rows = [plain] * 120 + [plain | nothing] + [plain | more] * 3 + [plain] * 2
    dataset = write_jsonl(tmp_path / "d.jsonl", rows)
    said = {"p": "preference pairs", "r": "preference pairs", "v": "type objective=kto"}
    (problem,) = check_datasets(DataConfig(datasets=[dataset]))
    assert problem.startswith(f"{dataset.path}:122 columns [")
    assert said.get(kind[0], "(classification)") in problem
    assert "(2 more rows have these columns; 123 rows are of format" in problem
    with pytest.raises(DataError, match=r"d\.jsonl:122 columns .* \(2 more rows have these"):
        prepare(dataset, tokenizer, 64)
    assert prepare(dataset, tokenizer, 64, on_bad_row="quarantine").counts.rejected == 3
    assert (
        check_datasets(DataConfig(datasets=[DatasetConfig(path=dataset.path, format=form)])) == []
    )
    without = write_jsonl(tmp_path / "w.jsonl", [plain] * 120 + [plain | nothing])
    assert check_datasets(DataConfig(datasets=[without])) == []


def write_texts(file: Path, num_rows: int) -> Path:
    """Write short rows."""
    file.write_text("".join(f'{{"text": "row {number} of many"}}\n' for number in range(num_rows)))
    return file


def prepare_file(file: Path, tokenizer: Any, first_rows: int | None, **settings: Any) -> Prepared:
    config, cache = DatasetConfig(path=str(file)), str(file.parent / "cache")
    return prepare(config, tokenizer, 64, first_rows=first_rows, cache_dir=cache, **settings)


def test_the_limit_is_the_number_of_rows_read(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "CHUNK_BYTES", 1000)
    file = write_texts(tmp_path / "d.jsonl", 500)
    part = prepare_file(file, tokenizer, 100)
    assert (part.counts.rows, part.is_cut) == (100, True)
    assert part.store.lines.tolist() == list(range(1, 101))
    every = prepare_file(file, tokenizer, None)
    assert (every.counts.rows, every.is_cut) == (500, False)
    assert every.store.digests[:100].tolist() == part.store.digests.tolist()
    # Neither is taken for the other, and as many rows as there are is all of them.
    assert prepare_file(file, tokenizer, 100).counts.rows == 100
    exact = prepare_file(file, tokenizer, 500)
    assert (exact.counts.rows, exact.is_cut) == (500, False)


def test_the_rest_of_the_file_is_not_opened(tmp_path: Path) -> None:
    class Counted:
        num_read = 0

        def __iter__(self) -> Any:
            for chunk in read_chunks(str(file)):
                self.num_read += 1
                yield chunk

    file = write_texts(tmp_path / "d.jsonl", 60_000)
    counted = Counted()
    first = FirstRows(iter(counted), 10)
    assert sum(chunk.count() for chunk in first) == 10
    assert first.is_cut and counted.num_read == 1


def test_too_many_rows_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    file = write_texts(tmp_path / "d.jsonl", 50)
    with pytest.raises(DataError) as caught:
        prepare_file(file, tokenizer, None, limits=ReadLimits(rows=49))
    assert caught.value.problems == [
        f"{file}: has more than 49 rows (data.limits.rows); raise it if the data is right, "
        "or use a part of it: data.datasets[].split=train[:10%]"
    ]
    assert prepare_file(file, tokenizer, None, limits=ReadLimits(rows=50)).counts.rows == 50


@pytest.mark.parametrize("how", [{"on_bad_row": "quarantine"}, {"drop_empty": True}, {}])
def test_bad_rows_are_counted_and_not_held(how: dict[str, Any]) -> None:
    bad = BadRows(DataConfig(**how))
    for number in range(1, 2_001):
        is_empty = "drop_empty" in how
        columns = None if is_empty else ("a", "b") if number % 2 else (f"c{number}",)
        bad.add(Rejected(Origin("d", number), f"d:{number} bad", "x" * 100, columns, is_empty))
    held = [len(value) for value in vars(bad).values() if isinstance(value, (list, dict))]
    assert max(held) <= 20
    assert bad.num_kept + bad.num_empty == (0 if not how else 2_000)
    if not how:
        with pytest.raises(DataError) as caught:
            bad.raise_if_any()
        assert len(caught.value.problems) == 20


def test_what_refuses_a_row_does_not_hold_its_chunk(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[ValueError] = []

    def reject(chunk: Chunk, errors: dict[int, ValueError]) -> list[Rejected]:
        refused.extend(errors.values())
        return []

    monkeypatch.setattr(encode, "_reject", reject)
    dataset = write_jsonl(tmp_path / "d.jsonl", alpaca("one", "</s> two"))
    prepare(dataset, tokenizer, 99, control_tokens="error")
    assert [error.__traceback__ for error in refused] == [None]


def test_changed_limits_are_applied_with_quarantine(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "d.jsonl"
    deep = "[" * 30 + "]" * 30
    file.write_text('{"text": "one"}\n{"text": "two", "x": ' + deep + "}\n")
    assert check_datasets(DataConfig(datasets=[DatasetConfig(path=str(file))])) == []
    low = ReadLimits(nesting=10)
    assert prepare_file(file, tokenizer, None, on_bad_row="quarantine").counts.kept == 2
    again = prepare_file(file, tokenizer, None, on_bad_row="quarantine", limits=low)
    assert (again.counts.kept, again.counts.rejected) == (1, 1)
