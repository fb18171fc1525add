"""Preview: the text, tokens, loss mask and packs of a run; needs only a tokenizer.

`python -m app.preview +experiment=NAME`, or `model.path=TOKENIZER_FOLDER data=...`.
"""

from __future__ import annotations

import io
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.config import PreviewConfig, run_verb, save_config
from app.model.base import ModelConfig
from app.model.hub import is_offline
from app.process.environment import configure_libraries, run_program
from app.process.logs import print_loading
from app.run.folder import CONFIG_FILE, decide_run_dir
from app.strategy.settings import StrategyConfig, describe_split, ranks_per_row
from app.training.trainer import TrainerConfig, adapts_to_small_data
from common.files import write_atomically
from common.redaction import redact
from common.text import printable
from data_modules import DataConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from app.report.preview import Preview
    from data_modules import ModelSpec

_STREAM_ROWS = 2000
"""number of rows that are read of each streamed data set"""
_NO_LIMIT = 1_000_000
"""tokenizers without a context length have a `model_max_length` far above this"""

log = logging.getLogger(__name__)


def preview(config: PreviewConfig) -> Path:
    """Show the training data of `config` in the terminal and as a page; return the folder."""
    folder = decide_run_dir(config.output)
    configure_libraries(
        offline=is_offline(_files_read(config.model), config.data, needs_weights=False)
    )

    print_loading()
    # Imported late, so that --help and config errors do not wait for torch.
    from app.assembly.base import build_datamodule
    from app.model.tokenizer import build_tokenizer
    from app.report.preview import collect_preview
    from data_modules import BatchSpec

    tokenizer = build_tokenizer(config.model)
    spec, context_fact = _find_model_spec(config, tokenizer)
    num_ranks, accumulation = requested_batching(config.trainer, config.strategy)
    batching = BatchSpec(
        micro_batch_size=config.trainer.least_micro_batch,
        accumulation_steps=accumulation,
        num_ranks=num_ranks,
        num_epochs=config.trainer.num_epochs,
        max_steps=config.trainer.max_steps,
    )
    shown = first_rows_of(config.data) if config.data.streaming else config.data
    data = build_datamodule(
        replace(config, data=shown),
        tokenizer,
        spec,
        batching,
        first_rows=rows_per_dataset(config.preview.max_rows, shown),
    )
    data.setup("fit")
    sampled = {one.name: one.rows for one in data.report.datasets if one.is_cut}
    adapts = adapts_to_small_data(config.trainer, config.strategy) and not sampled
    adapted = data.adapt_to_small_data() if adapts else None
    result = collect_preview(
        config.preview,
        data,
        tokenizer,
        title=f"preview: {(config.output.name or '').removesuffix('-preview')}",
        facts=[
            f"tokenizer: {config.model.tokenizer_path or config.model.path}, "
            f"{len(tokenizer):,} tokens",
            *([note] if (note := data.report.template_note) else []),
            f"sequence length: {data.sequence_len:,} tokens ({context_fact})",
            _describe_ranks(config.trainer, config.strategy, num_ranks),
            *_describe_stream(config.data),
            *_describe_sample(sampled),
            *([adapted] if adapted else []),
        ],
    )
    save_config(config, folder / CONFIG_FILE)
    data.write_reports(folder)
    _show_preview(result, folder, config.preview.tokens)
    data.audit.check()  # last, so that the rows it lists can be inspected
    return folder


def _show_preview(result: Preview, folder: Path, max_tokens: int) -> None:
    from rich.console import Console

    from app.report.preview import print_preview, render_page

    write_atomically(folder / "preview.html", redact(render_page(result)))
    # A terminal that cannot encode a character prints its escape instead.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    print_preview(result, Console(highlight=False), max_tokens)
    print(f"\n{printable(str(folder))}/preview.html: this preview with more details")
    print(f"run: {printable(str(folder))}")


def requested_batching(trainer: TrainerConfig, strategy: StrategyConfig) -> tuple[int, int]:
    """Return data ranks and accumulation steps as typed; `auto` devices count as one rank."""
    num_ranks = trainer.nodes
    if isinstance(trainer.devices, int):
        all_ranks = trainer.devices * trainer.nodes
        num_ranks = all_ranks // ranks_per_row(strategy, trainer.devices)
    return num_ranks, trainer.accumulation(num_ranks)


def _describe_ranks(trainer: TrainerConfig, strategy: StrategyConfig, num_ranks: int) -> str:
    """Return the number of ranks for which steps are planned, and the settings that decide it."""
    if isinstance(trainer.devices, int):
        typed = f"trainer.devices={trainer.devices}, trainer.num_nodes={trainer.num_nodes}"
        if split := describe_split(strategy, trainer.devices):
            typed += f"; strategy={strategy.name}: {split}"
        return f"ranks: {num_ranks}, as set ({typed})"
    return (
        f"ranks: {num_ranks}, assuming 1 device for trainer.devices={trainer.devices}; type the "
        "number of GPUs that the run will have"
    )


def first_rows_of(data: DataConfig) -> DataConfig:
    """Return settings that read the first rows of the streamed data sets.

    The rows that the run holds out for validation become test data, so that the audit compares them
    with the training rows.
    """
    held_out = int(data.held_out)
    first = [
        replace(dataset, split=f"{dataset.split}[{held_out}:{held_out + _STREAM_ROWS}]")
        for dataset in data.datasets
    ]
    held_out_sets = [
        replace(dataset, split=f"{dataset.split}[:{held_out}]", max_rows=None)
        for dataset in data.datasets
        if held_out
    ]
    tests = [*data.test_datasets, *held_out_sets]
    return replace(data, datasets=first, test_datasets=tests, val_set_size=0, streaming=False)


def _describe_stream(data: DataConfig) -> list[str]:
    if not data.streaming:
        return []
    held_out = int(data.held_out)
    after = f" after {held_out:,} rows held out for validation" if held_out else ""
    return [
        f"a stream: only its first {_STREAM_ROWS:,} rows{after} were read; steps, epochs and "
        "shares below refer to these rows"
    ]


def rows_per_dataset(max_rows: int | None, data: DataConfig) -> int | None:
    """Return how many rows of each data set are read (None: all), so that some are trained on."""
    if max_rows is None:
        return None
    share = max_rows // max(1, len(data.loss_datasets))
    return max(1, share, 2 * int(data.held_out))


def _describe_sample(rows: dict[str, int]) -> list[str]:
    """Return which data sets were read in part; `rows` maps their names to the rows read."""
    if not rows:
        return []
    parts = ", ".join(f"{name} ({number:,})" for name, number in rows.items())
    return [
        f"a sample: only the first rows were read of {parts}; steps, epochs, shares and the audit "
        "refer to these rows; preview.max_rows=null reads all"
    ]


def _files_read(model: ModelConfig) -> ModelConfig:
    """Return `model` without its path if neither its config nor its tokenizer is read from it."""
    is_known = "model_type" in model.architecture and model.tokenizer_path is not None
    return replace(model, path=None) if is_known else model


def _find_architecture(model: ModelConfig) -> PretrainedConfig | None:
    """Return the config of the base, None if there is only a tokenizer."""
    from app.model.architecture import load_architecture

    folder = None if model.path is None else Path(model.path)
    if folder is not None and folder.is_dir():
        return load_architecture(model) if (folder / "config.json").exists() else None
    if "model_type" in model.architecture:
        return load_architecture(replace(model, from_scratch=True))
    return None if folder is None else load_architecture(model)


def _find_model_spec(
    config: PreviewConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[ModelSpec, str]:
    """Return the properties of the model that the data depends on, and a note on its context.

    Without a config.json, every token is assumed to have an embedding row, and a requested
    `sequence_len` is not checked against the model's context.
    """
    from app.assembly.base import model_spec
    from app.model.tokenizer import new_token_ids, num_rows
    from data_modules import ModelSpec

    architecture = _find_architecture(config.model)
    if architecture is not None:
        new_ids = new_token_ids(config.model, tokenizer, num_rows(architecture))
        spec = model_spec(architecture, new_ids)
        context = spec.context_len
        return spec, f"the model's context: {context:,}" if context else "no known limit"
    limit = int(tokenizer.model_max_length)
    if config.data.sequence_len is not None or limit > _NO_LIMIT:
        fact = "the model's context is not known: there is no config.json"
        return ModelSpec(context_len=None), fact
    fact = f"the tokenizer's model_max_length is {limit:,}; there is no config.json"
    return ModelSpec(context_len=limit), fact


if __name__ == "__main__":
    run_program(lambda: run_verb("preview", preview))
