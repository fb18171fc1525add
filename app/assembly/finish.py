"""The end of a training run: its result is saved, verified, compared with the base and reported.

Which step's weights are the result, and the dtype in which a whole model is saved, are decided by
what the run measured on its validation rows. Importing this module needs no torch.
"""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.config import TrainConfig, changed_settings, words_to_type
from app.evaluation.significance import MIN_DIFFERENCE, paired_bootstrap
from app.model.save import dtype_name, loses_bits, round_weights, stored_dtype, trained_dtype
from app.process.collectives import run_on_rank0
from app.process.launch import is_first_rank, quote_words
from app.process.logs import LOG_FILE, show
from app.process.status import FINISHED, confirm_finished, end_status
from app.report.model_card import write_card
from app.report.run_page import end_loggers, speed_lines, write_page
from app.run import Run, checkpoints_of
from app.run.find import checkpoint_of_step
from app.run.folder import METRICS_FILE, OUTPUTS
from app.run.manifest import record_result
from app.run.upload import share_checkpoint, uploading
from app.training.checkpoint.documents import MODEL
from app.training.run_documents import METRICS, read_document
from common.errors import DONE, TrainingFault
from common.files import write_atomically
from common.installation import python_command, verb_command
from common.text import printable

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from app.assembly.base import Base
    from app.evaluation.evaluator import Evaluator
    from app.planning.training import Estimate
    from app.training.module import FinetuneModule
    from data_modules import FinetuneDataModule

_HALF_SIZE = "output.dtype=bf16 would save half the bytes"
TUNED, ROUNDED = "tuned", "rounded"
"""variants of the trained model that the evaluator measures"""
log = logging.getLogger(__name__)


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
    from app.evaluation.evaluator import print_samples
    from app.evaluation.significance import change_metrics, check_regression, report_comparison
    from app.model.adapter import saves_whole_model
    from app.model.tokenizer import save_stop_tokens
    from app.model.tokenizer_file import save_tokenizer

    trainer = module.trainer
    if module.shards is None and not trainer.is_global_zero:
        return None
    settings = changed_settings(run.typed_config)
    measured = {} if estimate is None else estimate.compare(module)
    result = _restore_result(config, run, module)
    saved, model, evaluator, metrics = _save_and_compare(config, run, module, data, base, result)
    changes = evaluator.changes(trained=data.dataset_names)
    groups = evaluator.group_changes()
    metrics |= change_metrics([*changes, *groups]) | module.metrics.summary() | measured

    def write() -> None:
        save_tokenizer(base.tokenizer, saved)
        evaluator.write_predictions(run.folder)
        if not saves_whole_model(config.adapter) and not config.model.labels:
            save_stop_tokens(model, saved)
        print_samples(evaluator, config.evaluation.show_answers)
        report_comparison(metrics, changes, groups, run.folder)
        write_page(run.folder, settings, metrics=metrics)
        write_card(saved, run.folder, settings, metrics=metrics)
        end_loggers(trainer.loggers, run.folder, metrics, settings)
        record_result(run.folder, asdict(result))
        # The last file: a run that has it counts as finished, and is not resumed.
        write_atomically(run.folder / METRICS_FILE, json.dumps(metrics, indent=2) + "\n")
        end_status(run.folder, FINISHED, DONE)
        show("\n".join([f"\nresult: {result}", *speed_lines(metrics)]))
        print_next(run, saved)

    if module.shards is None:
        write()
    else:
        run_on_rank0(write)
    check_regression(changes, config.evaluation.max_regression)
    return metrics.get("val/loss") if trainer.is_global_zero else None


def _save_and_compare(
    config: TrainConfig,
    run: Run,
    module: FinetuneModule,
    data: FinetuneDataModule,
    base: Base,
    result: Result,
) -> tuple[Path, PreTrainedModel, Evaluator, dict[str, float]]:
    """Save the trained model, verify it, and measure it and its base; return all four of them."""
    from app.evaluation.evaluator import Evaluator, compare_trained
    from app.evaluation.row_runner import Progress, RowRunner
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
            dtype, tuned = _choose_dtype(config, run, module, evaluator, base.architecture, result)
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
            tuned = _last_losses(module, evaluator, result)
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
        confirm_finished(run.folder)
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


@dataclass(frozen=True, slots=True)
class Result:
    """The step whose weights are the result of a run."""

    step: int
    last: int
    """last optimizer step of the run"""
    monitor: str | None = None
    """metric by which the step is the best; None for the last step, whatever it measured"""
    value: float | None = None
    """the metric's value"""

    @property
    def is_last(self) -> bool:
        return self.step == self.last

    def __str__(self) -> str:
        if self.monitor is None:
            return f"step {self.step}, the last"
        by = f"the best by {self.monitor} ({self.value:.4f})"
        return (
            f"step {self.step}, {by}" if self.is_last else f"step {self.step} of {self.last}, {by}"
        )


def _restore_result(config: TrainConfig, run: Run, module: FinetuneModule) -> Result:
    """Load the weights of the best step into the module, if they are the result of the run.

    If weights are sharded, all ranks call this.
    """
    last, metrics = module.trainer.global_step, module.metrics
    if not config.ends_with_best:
        return Result(last, last)
    if module.shards is None:
        best = _best_of(run)
    else:  # all ranks load what rank 0 has found
        best = module.trainer.strategy.broadcast(run_on_rank0(lambda: _best_of(run)))
    if best is None:
        log.warning(
            "output.from=best: %s ranked no saved step, so the last one is used", metrics.monitor
        )
        return Result(last, last)
    step, metric = best
    if step != last:
        _load_step(run, module, step)
    return Result(step, last, metrics.monitor, metrics.as_measured(metric))


def _best_of(run: Run) -> tuple[int, float] | None:
    """Return step and metric of the best undamaged checkpoint; None if none was ranked."""
    checkpoint, problems = checkpoints_of(run.folder).best_good()
    for problem in problems:
        log.warning("%s", problem)
    if checkpoint is None or checkpoint.metric is None:
        return None
    return checkpoint.step, checkpoint.metric


def _load_step(run: Run, module: FinetuneModule, step: int) -> None:
    """Load the weights that were saved at `step`; if they are sharded, all ranks call this."""
    import torch

    if module.shards is not None:
        share_checkpoint(run.folder, step)
    if (checkpoint := checkpoint_of_step(run.folder, step)) is None:
        raise TrainingFault(f"{run.folder}: the checkpoint of step {step} is gone")
    module.load_state_dict(checkpoint.tensors(MODEL))
    torch.clear_autocast_cache()


def _choose_dtype(
    config: TrainConfig,
    run: Run,
    module: FinetuneModule,
    evaluator: Evaluator,
    architecture: PretrainedConfig,
    result: Result,
) -> tuple[torch.dtype, dict[str, float] | None]:
    """Return the dtype in which a whole model is saved, and its validation losses if known.

    If it rounds the trained weights, both are measured on the validation rows, and the module has
    the trained weights again afterwards. If weights are sharded, all ranks call this.
    """
    import torch

    asked, model = config.output.dtype, module.model
    trained = trained_dtype(model)
    exact = torch.promote_types(trained, torch.float32)
    if asked == "fp32":
        return exact, _last_losses(module, evaluator, result)
    wanted = torch.bfloat16 if asked == "bf16" else stored_dtype(model, architecture)
    losses = _last_losses(module, evaluator, result)
    if not loses_bits(trained, wanted):
        return wanted, losses
    if not len(evaluator.data.val_examples):
        if asked == "auto":
            log.info(
                "model: saved in %s: there are no validation rows to measure what rounding to %s "
                "costs; %s",
                *(dtype_name(exact), dtype_name(wanted), _HALF_SIZE),
            )
        return exact if asked == "auto" else wanted, None
    losses = losses or evaluator.measure_losses(TUNED, model)
    rows = evaluator.row_losses[TUNED]
    round_weights(model, wanted, module.shards)
    rounded = evaluator.measure_losses(ROUNDED, model)
    rounded_rows = evaluator.row_losses.pop(ROUNDED)
    _load_step(run, module, result.step)
    cost, low = _compare_losses(rows, rounded_rows)
    keeps = asked == "auto" and not low <= MIN_DIFFERENCE / 2  # also if the loss is not finite
    log.info(
        "model: rounding to %s changes val/loss from %.4f to %.4f (%+.4f%s): saved in %s%s",
        dtype_name(wanted),
        losses["val/loss"],
        rounded["val/loss"],
        cost,
        "" if low > MIN_DIFFERENCE / 2 else ", within noise",
        dtype_name(exact if keeps else wanted),
        f"; {_HALF_SIZE}" if keeps else "",
    )
    if keeps:
        return exact, losses
    evaluator.row_losses[TUNED] = rounded_rows
    return wanted, rounded


def _last_losses(
    module: FinetuneModule, evaluator: Evaluator, result: Result
) -> dict[str, float] | None:
    metrics = module.metrics
    rows = metrics.row_losses[-1]
    if rows is None or rows.shape[1] != len(evaluator.data.val_examples):
        return None
    if not metrics.validations or not metrics.validated_step == result.step == result.last:
        return None
    evaluator.row_losses[TUNED] = rows
    return metrics.validations[-1]


def _compare_losses(trained: Tensor, rounded: Tensor) -> tuple[float, float]:
    """Return how much higher the loss of the rounded weights is, and the least it could be.

    Both are [2, rows]: weighted losses and weights, as in `Evaluator.row_losses`.
    """
    weights = trained[1].numpy()
    counted = weights > 0  # a row without a token to train on has no loss
    differences = ((rounded[0] - trained[0]).numpy()[counted]) / weights[counted]
    low, _ = paired_bootstrap(differences, weights[counted])
    return float((differences * weights[counted]).sum() / weights.sum()), low
