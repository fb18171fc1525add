"""Merge: adapter into base, verified against base + adapter; a Hugging Face folder, and GGUF.

`python -m app.merge run=FOLDER`, or `model.path=... adapter_path=... output.dir=...`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config import MergeConfig, load_run_config, run_verb, save_config
from app.model.adapter import LoraConfig, is_adapter, saves_whole_model
from app.model.gguf import convert, find_converter
from app.model.hub import is_offline
from app.preflight.couplings.table import CHANGE_BASE
from app.process.environment import configure_libraries, protect_streams, return_freed_memory
from app.process.errors import UserError
from app.process.files import write_atomically
from app.process.installation import verb_command
from app.process.logs import print_loading
from app.process.signals import end_process, install_signal_handlers
from app.report.model_card import CARD_FILE, read_json, render_merged_card
from app.run.find import checkpoints_of, has_checkpoints
from app.run.folder import CONFIG_FILE, METRICS_FILE, decide_run_dir
from app.run.manifest import MANIFEST_FILE
from data_modules import printable

if TYPE_CHECKING:
    from app.model.merging import Difference
    from app.training.trainer import Environment

log = logging.getLogger(__name__)

REPORT_FILE = "merge.json"


def merge(config: MergeConfig) -> Difference | None:
    """Merge as `config` says; return the difference of logits from base + adapter, if verified."""
    is_final = config.merge.checkpoint == "final"
    adapters = find_adapters(config)
    converter = find_converter(config.merge.llama_cpp) if config.merge.gguf else None
    folder = decide_run_dir(config.output)
    configure_libraries(offline=is_offline(config.model))

    print_loading()
    # Imported late, so that --help and config errors do not wait for torch.
    from app.assembly.tuned import open_tuned
    from app.evaluation.merged import CHECKED, check_gguf, check_tokens, verify
    from app.model.merging import merge_weights, plan_merge
    from app.model.tokenizer import add_stop_tokens
    from app.model.tokenizer_file import save_tokenizer
    from app.training.trainer import resolve_single_device

    env = resolve_single_device(config.trainer.accelerator, config.trainer.precision)
    if not is_final:
        adapters[0] = save_from_checkpoint(config, env, folder / "adapter"), adapters[0][1]
        config = replace(config, adapter_path=str(adapters[0][0]))
    tuned = open_tuned(config, env)
    model, plan = plan_merge(config.merge, tuned.base, adapters, len(tuned.tokenizer))
    add_stop_tokens(model, tuned.stop_ids)
    dtype = merge_weights(model, plan, folder)
    save_tokenizer(tuned.tokenizer, folder)
    check_tokens(tuned, folder, is_fault=config.merge.verify)
    differences = {}
    if config.merge.verify:
        differences = verify(config, tuned, env, adapters, folder, dtype)
    if converter is not None:
        file = convert(converter, folder, str(dtype).removeprefix("torch."))
        check_gguf(config, tuned, folder, file)
    run = folder if config.run is None else Path(config.run)  # `folder` has neither file
    manifest, metrics = (read_json(run / name) for name in (MANIFEST_FILE, METRICS_FILE))
    card = render_merged_card(config, tuned, differences, dtype, manifest, metrics)
    write_atomically(folder / CARD_FILE, card)
    report = {name: asdict(difference) for name, difference in differences.items()}
    write_atomically(folder / REPORT_FILE, json.dumps(report, indent=2) + "\n")
    save_config(config, folder / CONFIG_FILE)
    print(f"run: {printable(str(folder))}")
    return differences.get(CHECKED)


def find_adapters(config: MergeConfig) -> list[tuple[Path, float]]:
    """Return folder and weight of each adapter to merge; UserError if there is none."""
    if config.tuned_path is None:
        raise UserError("nothing to merge: type run=FOLDER, or adapter_path=FOLDER with model.path")
    first = Path(config.tuned_path)
    if config.merge.checkpoint == "newest":
        if config.run is None or config.adapter_path is not None:
            raise UserError("merge.checkpoint=newest: type run=FOLDER, and leave out adapter_path")
    elif config.run is not None and config.adapter_path is None and not is_adapter(first):
        if (first / "config.json").is_file():
            raise UserError(
                f"run={config.run} trained the base weights, so there is no adapter to merge: "
                f"{first} is already a full model"
            )
        newest = "; type merge.checkpoint=newest" if has_checkpoints(Path(config.run)) else ""
        raise UserError(f"run={config.run}: there is no adapter in {first.parent}{newest}")
    further = [(Path(each.path), each.weight) for each in config.merge.adapters]
    return [(first, config.merge.weight), *further]


def save_from_checkpoint(config: MergeConfig, env: Environment, folder: Path) -> Path:
    """Save the adapter of a run's newest valid checkpoint as a finished run would.

    Reads no weights of the base, unless the adapter's initialization changed them. UserError if
    there is no valid checkpoint, or if the run trains the base weights.
    """
    from app.assembly.base import open_base
    from app.model.adapter import save_adapter, save_converted, write_origin
    from app.model.quantization import QuantizationConfig
    from app.model.recompute import RecomputeConfig
    from app.model.tokenizer_file import save_tokenizer
    from app.training.checkpoint.documents import MODEL
    from app.training.checkpoint.state import restore_model, trainable_parameters

    run = load_run_config(Path(str(config.run)))
    if saves_whole_model(run.adapter):
        raise UserError(
            f"run={config.run} trains the base weights, so there is no adapter to merge: "
            f"finish it with {verb_command('train')} resume={config.run}"
        )
    checkpoint, problems = checkpoints_of(Path(str(config.run))).newest_good()
    for problem in problems:
        log.warning("%s", problem)
    if checkpoint is None:
        raise UserError(f"run={config.run}: there is no valid checkpoint to merge")
    base = open_base(config, env, run.adapter)
    build = partial(base.model_builder(run, env), recompute=RecomputeConfig(mode="none"))
    trained = checkpoint.tensors(MODEL)
    model: Any
    if isinstance(run.adapter, LoraConfig) and run.adapter.init in CHANGE_BASE:
        model = build()
        restore_model(model, trained)
        save_converted(model, folder)
    else:
        model = build(quantization=QuantizationConfig(), on_meta=True)
        restore_model(model, trained)
        names = {id(weight): name for name, weight in model.named_parameters()}
        weights = trainable_parameters(model).items()
        save_adapter(model, folder, {names[id(weight)]: trained[name] for name, weight in weights})
    write_origin(folder, base.description)
    save_tokenizer(base.tokenizer, folder)
    log.info("checkpoint: step %d of %s", checkpoint.step, config.run)
    return folder


if __name__ == "__main__":
    protect_streams()
    return_freed_memory()
    install_signal_handlers()
    end_process(run_verb("merge", merge))
