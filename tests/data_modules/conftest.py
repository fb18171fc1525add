"""Small tokenizers that are trained here, so that these tests need no external files."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from common.errors import DataError, Origin, Problems
from data_modules.format import convert_row
from data_modules.format.format import format_of
from data_modules.settings import DataConfig, DatasetConfig
from data_modules.source import MAX_ROW_BYTES, BadRow, Budget, read_chunks
from data_modules.template import ChatTemplate, MaskConfig, template
from data_modules.tokens.encode import TokenSpec
from data_modules.tokens.prepare import Prepared, hash_of, prepare_dataset
from data_modules.types import Item, Row

# The same examples in every run and no folder of them in the tree: what fails here fails anywhere.
hypothesis.settings.register_profile(
    "loft", derandomize=True, database=None, deadline=None, max_examples=50
)
hypothesis.settings.load_profile("loft")

WORDS = (
    "the quick brown fox jumps over a lazy dog user assistant system answer question yes no "
    "one two three ### User: Assistant: what is it called thinking about numbers 1 2 3 "
) * 4
_WITH_TEST_CHATS = {
    f"test_{name}.py" for name in ("datamodule", "template", "template_limits", "template_proof")
}
ORIGIN = Origin("rows.json", 7)
SHARED = Path(__file__).parents[2] / ".." / "shared" / "data"


def build_tokenizer(
    specials: list[str], *, bos: str | None = None, eos: str | None = None, adds_bos: bool = False
) -> Any:
    """Train a byte-level BPE of 400 tokens with `specials`; `adds_bos` is its default."""
    import tokenizers
    import transformers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([WORDS], trainer)
    if adds_bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos
    )


def zst(data: bytes) -> bytes:
    """Return `data` as one zstd frame."""
    import pyarrow

    packed: bytes = pyarrow.compress(data, codec="zstd", asbytes=True)
    return packed


def arrow_bytes(rows: list[dict[str, Any]], new: Callable[..., Any]) -> bytes:
    """Return `rows` in one of arrow's two formats, as `new` writes it."""
    import pyarrow

    batch = pyarrow.RecordBatch.from_pylist(rows)
    sink = pyarrow.BufferOutputStream()
    with new(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def parquet_bytes(rows: list[dict[str, Any]], **settings: Any) -> bytes:
    import pyarrow.parquet

    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink, **settings)
    return sink.getvalue()


def lines_of(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def read_rows(
    path: str,
    split: str = "train",
    budget: Budget | None = None,
    *,
    revision: str | None = None,
    max_row_bytes: int = MAX_ROW_BYTES,
) -> Iterator[Row]:
    """Yield the rows of `read_chunks`; raises DataError with all problems after the good rows."""
    problems = Problems()
    try:
        for chunk in read_chunks(
            path, split=split, revision=revision, budget=budget, max_row_bytes=max_row_bytes
        ):
            for row in chunk.rows():
                if isinstance(row, BadRow):
                    problems.add(row.problem)
                else:
                    yield row
    except DataError as error:
        for problem in error.problems:
            problems.add(problem)
    problems.raise_if_any()


def items_of(
    values: dict[str, Any], name: str | None = None, unread: set[str] | None = None, **columns: str
) -> list[Item]:
    """Convert a row by the format `name`, or by the one that its columns tell."""
    name = name or format_of(values)
    assert name is not None
    return convert_row(Row(values, ORIGIN), name, columns, unread)


def write_jsonl(file: Path, rows: list[dict[str, Any]]) -> DatasetConfig:
    """Write rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(path=str(file))


def alpaca(*answers: str) -> list[dict[str, Any]]:
    """Make an alpaca row for each answer."""
    return [{"instruction": "q", "output": answer} for answer in answers]


def prepare(
    config: DatasetConfig,
    tokenizer: Any,
    sequence_len: int,
    *,
    template: str | None = "plain",
    name: str = "",
    first_rows: int | None = None,
    **data: Any,
) -> Prepared:
    """Prepare one data set with this template, for a tokenizer of this name."""
    settings = DataConfig(datasets=[config], **data)
    spec = TokenSpec(
        config=settings,
        template=ChatTemplate.resolve(tokenizer, template, MaskConfig.of(settings)),
        sequence_len=sequence_len,
        tokenizer_hash=hash_of(tokenizer),
        tokenizer=name,
        first_rows=first_rows,
    )
    return prepare_dataset(config, spec)


@pytest.fixture(autouse=True)
def _test_chats_in_this_process(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check templates in this process, and only where that is tested: it takes 40 ms.

    `test_template_proof.py` checks all templates.
    """
    if request.path.name not in _WITH_TEST_CHATS:
        monkeypatch.setattr(ChatTemplate, "_check", lambda *_: None)
    elif request.path.name != "test_template_limits.py":
        monkeypatch.setattr(template, "run_limited", lambda work, limits: work())


@pytest.fixture
def make_tokenizer() -> Callable[..., Any]:
    """Return `build_tokenizer`."""
    return build_tokenizer


@pytest.fixture
def tokenizer() -> Any:
    """Return a tokenizer with an EOS and no template, which adds no BOS."""
    return build_tokenizer(["</s>"], eos="</s>")
