"""Preparing rows: each is kept and counted, dropped and reported, or an error with the fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import DataError
from data_modules.settings import DataConfig, DatasetConfig, check_datasets
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


def test_rows_without_an_answer_are_dropped_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    ask = {"messages": [{"role": "user", "content": "q"}]}
    say = {"messages": [*ask["messages"], {"role": "assistant", "content": "one"}]}
    prepared = prepare(write_jsonl(tmp_path / "d.jsonl", [ask, say, ask]), tokenizer, 99)
    assert trained(prepared, tokenizer) == ["one</s>"]
    assert prepared.counts.empty == 2
    assert [origin[-2:] for origin in prepared.counts.empty_origins] == [":1", ":3"]


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


def test_cut_on_the_left_keeps_the_bos(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(["<s>", "</s>"], bos="<s>", eos="</s>", adds_bos=True)
    config = write_jsonl(tmp_path / "d.jsonl", alpaca("one two three " * 20))
    prepared = prepare(config, tokenizer, 16, on_long="truncate_left")
    ids = rows_of(prepared)[0][0].input_ids.tolist()
    assert len(ids) == 16 and ids.count(tokenizer.bos_token_id) == 1
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


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


def test_changes_and_damages_of_the_tokens_invalidate_the_cache(
    tmp_path: Path, tokenizer: Any
) -> None:
    config = write_jsonl(tmp_path / "d.jsonl", alpaca("one", "two"))
    assert prepare(config, tokenizer, 99).how == "tokenized (now cached)"
    assert prepare(config, tokenizer, 99).how == "found in the cache"
    for file in sorted((tmp_path / "cache").glob("*/*.*")):
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2] + b"x" + whole[len(whole) // 2 :])
        assert prepare(config, tokenizer, 99).how == "tokenized (the entry was damaged)", file
    assert "settings changed: sequence_len" in prepare(config, tokenizer, 98).how
    again = prepare(config, tokenizer, 99, train_on_inputs=True)
    assert "settings changed:" in again.how and "train_on_inputs" in again.how
    write_jsonl(tmp_path / "d.jsonl", alpaca("one", "three"))
    changed = prepare(config, tokenizer, 99)
    assert "the data changed" in changed.how
    assert trained(changed, tokenizer) == ["one</s>", "three</s>"]


@pytest.mark.parametrize("on_long", ["split", "truncate_left"])
def test_a_row_that_begins_without_a_bos_gets_none(
    on_long: str, tmp_path: Path, make_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = make_tokenizer(["<s>", "</s>"], bos="<s>", eos="</s>", adds_bos=True)
    ids = list(range(100, 150))
    config = write_jsonl(tmp_path / "d.jsonl", [{"input_ids": ids, "labels": ids}])
    pieces = rows_of(prepare(config, tokenizer, 16, on_long=on_long))[0]
    together = [token for piece in pieces for token in piece.input_ids.tolist()]
    assert together == (ids if on_long == "split" else ids[-16:])
    assert all((piece.weights == 1).all() for piece in pieces)


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
BAD = "{% if 'bad' in m.content %}{{ raise_exception('not polite') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no system prompt') }}", "no system prompt; fix the template, or"),
        (CONTENT.replace("TEXT", "m.text.strip()"), "no attribute 'text'; fix the template, or"),
        (CONTENT.replace("TEXT", "m.content | upper"), "does not write the answer `one 0` unch"),
        (CONTENT.replace("TEXT", "'-'"), "does not write the answer `one 0`; set"),
        ("{% for _ in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)
def test_what_a_template_refuses_in_every_row_is_its_own_fault_said_once(
    template: str, said: str, tmp_path: Path, tokenizer: Any
) -> None:
    (tmp_path / "t.jinja").write_text(template)
    rows = write_jsonl(tmp_path / "d.jsonl", alpaca(*(f"one {number}" for number in range(40))))
    with pytest.raises(DataError) as error:
        prepare(rows, tokenizer, 64, template=str(tmp_path / "t.jinja"))
    (problem,) = error.value.problems
    assert problem.startswith(f"the chat template fits none of the 40 rows, first {rows.path}:1 ")
    assert said in problem and "change the row" not in problem


def test_equal_reasons_of_a_template_are_said_once_with_their_rows(
    tmp_path: Path, tokenizer: Any
) -> None:
    template = CONTENT.replace("{{ m.role", BAD + "{{ m.role").replace("TEXT", "m.content")
    (tmp_path / "t.jinja").write_text(template)
    answers = ["good", *(f"bad {number}" for number in range(30))]
    rows = write_jsonl(tmp_path / "d.jsonl", alpaca(*answers))
    with pytest.raises(DataError) as error:
        prepare(rows, tokenizer, 64, template=str(tmp_path / "t.jinja"))
    (problem,) = error.value.problems
    assert problem.startswith(f"{rows.path}:2 the chat template refuses this row")
    end = "change the row, or set data.chat_template=plain (30 rows for this reason, the last "
    assert problem.endswith(f"{end}{rows.path}:31)")


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


def test_a_row_that_quotes_the_template_is_not_its_fault(tmp_path: Path, tokenizer: Any) -> None:
    """What a template refuses is told by the kind of the error, whatever the words in it."""
    answer = "the chat template \ud83d"
    dataset = write_jsonl(tmp_path / "d.jsonl", alpaca(*[answer] * 3))
    with pytest.raises(DataError) as error:
        prepare(dataset, tokenizer, 64)
    assert len(error.value.problems) == 3
    roles = [{"messages": [{"role": "the chat template", "content": "q"}]}] * 3
    with pytest.raises(DataError) as error:
        prepare(write_jsonl(tmp_path / "r.jsonl", roles), tokenizer, 64)
    assert len(error.value.problems) == 3 and "fits none" not in str(error.value)
