"""Merge: adapter into base, verified against base + adapter; a Hugging Face folder, and GGUF.

`python -m app.merge run=FOLDER`, or `model.path=... adapter_path=... output.dir=...`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config import MergeConfig, load_run_config, run_verb, save_config, words_to_type
from app.model.adapter import is_adapter, saves_whole_model
from app.model.gguf import OLLAMA_FILE, convert_to_gguf, find_converter
from app.model.hub import is_offline
from app.process.environment import configure_libraries, return_freed_memory, run_program
from app.process.launch import quote_words
from app.process.logs import print_loading
from app.report.model_card import CARD_FILE, render_merged_card
from app.run.find import FINAL, has_checkpoints
from app.run.folder import CONFIG_FILE, METRICS_FILE, decide_run_dir, move_finished, open_unfinished
from app.run.manifest import MANIFEST_FILE
from app.training.run_documents import METRICS, SHOWN_MANIFEST, read_document
from common.errors import UserError
from common.files import write_atomically
from common.installation import verb_command
from common.text import printable

if TYPE_CHECKING:
    from app.model.merging import Difference

log = logging.getLogger(__name__)

_REPORT_FILE = "merge.json"


def merge(config: MergeConfig) -> Difference | None:
    """Merge as `config` says; return the difference of logits from base + adapter, if verified."""
    adapters = _find_adapters(config)
    manifest, metrics = _read_facts(config.run)
    kind = config.merge.gguf
    converter = find_converter(kind, config.merge.llama_cpp) if kind else None
    folder = decide_run_dir(config.output)
    configure_libraries(offline=is_offline(config.model))

    print_loading()
    # Imported late, so that --help and config errors do not wait for torch.
    from app.assembly.base import open_tuned, with_checkpoint
    from app.evaluation.merged import CHECKED, check_gguf, check_tokens, render_ollama_file, verify
    from app.model.merging import merge_weights, plan_merge
    from app.model.tokenizer import set_ends
    from app.model.tokenizer_file import save_tokenizer
    from app.training.trainer import resolve_single_device

    env = resolve_single_device(config.trainer.accelerator, config.trainer.precision)
    config = with_checkpoint(config, env, folder)
    adapters[0] = Path(str(config.tuned_path)), adapters[0][1]
    tuned = open_tuned(config, env)
    model, plan = plan_merge(config.merge, tuned.base, adapters, len(tuned.tokenizer))
    set_ends(model, tuned.stop_ids, tuned.tokenizer)
    unfinished = open_unfinished(folder)
    dtype = merge_weights(model, plan, unfinished)
    save_tokenizer(tuned.tokenizer, unfinished)
    check_tokens(tuned, unfinished, is_fault=config.merge.verify)
    differences = {}
    if config.merge.verify:
        differences = verify(config, tuned, env, adapters, unfinished, dtype)
    if converter is not None:
        file = convert_to_gguf(converter, unfinished, str(dtype).removeprefix("torch."), kind)
        check_gguf(config, tuned, unfinished, file)
        write_atomically(unfinished / OLLAMA_FILE, render_ollama_file(tuned, unfinished))
    objective = None if config.run is None else asdict(load_run_config(Path(config.run)).objective)
    card = render_merged_card(
        config, tuned, differences, dtype, manifest, metrics, objective=objective
    )
    write_atomically(unfinished / CARD_FILE, card)
    report = {name: asdict(difference) for name, difference in differences.items()}
    write_atomically(unfinished / _REPORT_FILE, json.dumps(report, indent=2) + "\n")
    save_config(config, unfinished / CONFIG_FILE)
    move_finished(unfinished, last="config.json")  # without it, no library opens a model's folder
    print(f"run: {printable(str(folder))}")
    return differences.get(CHECKED)


def _read_facts(run: str | None) -> tuple[dict[str, Any], dict[str, float]]:
    """Return a run's manifest and metrics for the card, empty if missing; UserError if damaged."""
    shapes = ((MANIFEST_FILE, SHOWN_MANIFEST), (METRICS_FILE, METRICS))
    files = [(Path(run or "") / name, shape) for name, shape in shapes]
    manifest, metrics = (
        read_document(file, shape) if run is not None and file.is_file() else {}
        for file, shape in files
    )
    return manifest, {name: value for name, value in metrics.items() if value is not None}


def _find_adapters(config: MergeConfig) -> list[tuple[Path, float]]:
    if config.tuned_path is None:
        raise UserError("nothing to merge: type run=FOLDER, or adapter_path=FOLDER with model.path")
    first = Path(config.tuned_path)
    if config.checkpoint != FINAL:
        of_run = load_run_config(Path(str(config.run)))
        if saves_whole_model(of_run.adapter):
            resume = quote_words(f"resume={config.run}", *words_to_type(of_run))
            raise UserError(
                f"run={config.run} trains the base weights, so there is no adapter to merge: "
                f"finish it with {verb_command('train')} {resume}"
            )
    elif config.is_of_run and not is_adapter(first):
        if (first / "config.json").is_file():
            raise UserError(
                f"run={config.run} trained the base weights, so there is no adapter to merge: "
                f"{first} is already a full model"
            )
        newest = "; type checkpoint=newest" if has_checkpoints(Path(str(config.run))) else ""
        raise UserError(f"run={config.run}: there is no adapter in {first.parent}{newest}")
    further = [(Path(each.path), each.weight) for each in config.merge.adapters]
    return [(first, config.merge.weight), *further]


if __name__ == "__main__":
    return_freed_memory()
    run_program(lambda: run_verb("merge", merge))
