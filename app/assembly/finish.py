"""The end of a training run: save, verify, compare with the base, report.

Importing this module needs no torch.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from app.config import TrainConfig, changed_settings, words_to_type
from app.process.launch import is_first_rank, quote_words
from app.process.logs import LOG_FILE, show
from app.process.status import FINISHED, end_status
from app.report.model_card import write_card
from app.report.run_page import end_loggers, speed_lines, write_page
from app.run import Run
from app.run.folder import METRICS_FILE, OUTPUTS
from app.run.manifest import record_result
from app.run.remote import uploading
from app.training.run_documents import METRICS, read_document
from common.errors import DONE
from common.files import write_atomically
from common.installation import python_command, verb_command
from common.text import printable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from app.assembly.base import Base
    from app.assembly.result import Result
    from app.evaluation.evaluator import Evaluator
    from app.planning.training import Estimate
    from app.training.module import FinetuneModule
    from data_modules import FinetuneDataModule


def finish(
    config: TrainConfig,
    run: Run,
    module: FinetuneModule,
    data: FinetuneDataModule,
    base: Base,
    estimate: Estimate | None = None,
) -> float | None:
    """Save and verify the trained model, compare it with its base; return the validation loss.

    Returns None on ranks above 0. If the weights are sharded, all ranks take part and rank 0
    writes; otherwise the other ranks return at once. `estimate`: the plan's estimate, to be
    compared with the measured memory and speed.
    """
    from app.assembly.result import restore_result
    from app.evaluation.comparison import print_comparison, print_samples
    from app.evaluation.significance import change_metrics, check_regression, report_changes
    from app.model.adapter import saves_whole_model
    from app.model.tokenizer import save_stop_tokens
    from app.model.tokenizer_file import save_tokenizer
    from app.process.collectives import run_on_rank0

    trainer = module.trainer
    if module.shards is None and not trainer.is_global_zero:
        return None
    settings = changed_settings(run.typed_config)
    measured = {} if estimate is None else estimate.compare(module)
    result = restore_result(config, run, module)
    saved, model, evaluator, metrics = save_and_compare(config, run, module, data, base, result)
    changes = evaluator.changes(trained=data.dataset_names)
    groups = evaluator.group_changes()
    metrics |= change_metrics([*changes, *groups]) | module.metrics.summary() | measured

    def write() -> None:
        save_tokenizer(base.tokenizer, saved)
        evaluator.write_predictions(run.folder)
        if not saves_whole_model(config.adapter) and not config.model.labels:
            save_stop_tokens(model, saved)
        write_atomically(run.folder / METRICS_FILE, json.dumps(metrics, indent=2) + "\n")
        print_samples(evaluator, config.evaluation.show_answers)
        print_comparison(metrics, data.dataset_names)
        report_changes(changes, groups, run.folder)
        write_page(run.folder, settings)
        write_card(saved, run.folder, settings)
        end_loggers(trainer.loggers, run.folder, metrics, settings)
        record_result(run.folder, asdict(result))
        end_status(run.folder, FINISHED, DONE)
        show("\n".join([f"\nresult: {result}", *speed_lines(metrics)]))
        print_next(run, saved)

    if module.shards is None:
        write()
    else:
        run_on_rank0(write)
    check_regression(changes, config.evaluation.max_regression)
    return metrics.get("val/loss") if trainer.is_global_zero else None


def save_and_compare(
    config: TrainConfig,
    run: Run,
    module: FinetuneModule,
    data: FinetuneDataModule,
    base: Base,
    result: Result,
) -> tuple[Path, PreTrainedModel, Evaluator, dict[str, float]]:
    """Save the trained model, verify it, and measure it and its base; return all four of them."""
    from app.assembly.result import choose_dtype, last_losses
    from app.evaluation.comparison import compare_trained
    from app.evaluation.evaluator import Evaluator
    from app.evaluation.progress import Progress
    from app.evaluation.row_runner import RowRunner
    from app.evaluation.tasks.questions import build_tasks
    from app.model.adapter import saves_whole_model
    from app.model.save import save_model
    from app.model.tokenizer import set_ends

    module.release_optimizer()  # verification loads the base as a second model
    evaluator = Evaluator(
        config.evaluation,
        base,
        data,
        build_tasks(config.evaluation),
        module.objective,
        sharding=module.shards,
        sum_over_ranks=module.sum_over_ranks,
        runner=RowRunner(show=(progress := Progress(prints_lines=False)).show),
        num_shown=0 if config.model.labels else config.evaluation.show_answers,
    )
    set_ends(module.model, evaluator.stop_ids, base.tokenizer)
    with module.trainer.precision_plugin.forward_context(), progress:
        dtype, tuned = None, None
        if saves_whole_model(config.adapter):
            dtype, tuned = choose_dtype(config, run, module, evaluator, base.architecture, result)
        saved, model = save_model(
            module.model,
            config.adapter,
            base.architecture,
            run.folder,
            data.probe(),
            base=base.description,
            reload_base=base.load,
            shards=module.shards,
            dtype=dtype,
        )
        if dtype is None and model is module.model:
            tuned = last_losses(module, evaluator, result)
        metrics = compare_trained(
            evaluator,
            model,
            config.adapter,
            module.metrics.validations,
            None if config.model.from_scratch else base.load,
            base_rows=module.metrics.row_losses[0],
            tuned=tuned,
            is_as_trained=model is module.model,
        )
    return saved, model, evaluator, metrics


def print_next(run: Run, saved: Path) -> None:
    """Print the files of a run, and commands to continue with."""
    from app.model.adapter import saves_whole_model

    shown = printable(str(run.folder))
    show(f"\n{shown}/:")
    show(f"  {saved.name}/, report.html, metrics.csv, metrics.json, {LOG_FILE}")
    show("  config.yaml, manifest.json")

    # The commands must work as printed, also after `make train` without an active environment.
    def command(verb: str) -> str:
        words = quote_words(f"run={run.folder}", *words_to_type(run.typed_config, verb))
        return f"{verb_command(verb)} {words}"

    writes_text = not run.typed_config.model.labels
    commands = [command("evaluate"), *([command("chat")] if writes_text else [])]
    if "tensorboard" in (run.typed_config.logger.name, *run.typed_config.logger.also):
        # All runs of outputs/NAME/TIME; for another output.dir, the folder that contains it.
        parent = run.folder.parent
        logs = parent.parent if parent.parent.name == OUTPUTS.name else parent
        shown_logs = shlex.quote(printable(str(logs)))
        commands.append(f"{python_command()} -m tensorboard.main --logdir {shown_logs}")
    elif not saves_whole_model(run.typed_config.adapter):
        commands.append(command("merge"))
    show("next:")
    for line in commands:
        show(f"  {line}", is_copied=True)
    show(f"run: {shown}", is_copied=True)


def print_done(run: Run) -> float | None:
    """Print that the run has finished already; return its final validation loss."""
    if is_first_rank():
        shown = printable(str(run.folder))
        step, planned = run.last_step, run.manifest["total_steps"]
        early = f" of {planned}, stopped early" if step < planned else ""
        print(f"done at step {step}{early}: {shown} has finished")
        longer = "trainer.max_steps=N 'resume_allow=[epochs]'"
        if early:
            longer = "trainer.early_stopping_patience=N (larger, or null)"
        words = quote_words(f"resume={run.folder}", *words_to_type(run.typed_config))
        print(f"to continue training: {words} {longer}")
        print(f"run: {shown}")
    with uploading(run.folder):
        loss: float | None = read_document(run.folder / METRICS_FILE, METRICS).get("val/loss")
    return loss
