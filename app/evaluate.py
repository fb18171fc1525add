"""Evaluate: loss per data set, metrics of generated answers, and tasks, base vs tuned.

`python -m app.evaluate run=FOLDER`, or `model.path=... adapter_path=... data=...`, or
`model.path=... evaluation=mmlu evaluation.task_dir=FOLDER`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config import EvaluateConfig, changed_settings, run_verb, save_config
from app.evaluation.judge import grading
from app.model.hub import is_offline
from app.preflight import requested_devices
from app.process.environment import configure_libraries, run_program
from app.process.launch import exit_with_parent, is_child, is_first_rank, quote_words
from app.process.logs import print_loading
from app.report.run_page import PageSection, render_sections, write_page
from app.run.find import FINAL
from app.run.folder import CONFIG_FILE, METRICS_FILE, decide_run_dir
from app.run.ranks import run_shares
from common.errors import UserError
from common.files import write_atomically
from common.text import printable

if TYPE_CHECKING:
    from app.assembly.base import Base
    from app.evaluation.evaluator import Evaluator
    from app.evaluation.row_runner import RowRunner
    from app.training.trainer import Environment
    from data_modules import FinetuneDataModule

_JUDGE_PAGE = "judge.html"


def evaluate(config: EvaluateConfig) -> dict[str, float]:
    """Compare a tuned model with its base as `config` says; return the contents of metrics.json.

    Partial results are saved in the folder: the same command with its output.dir continues.
    """
    folder, judged = decide_run_dir(config.output), config.evaluation.judge
    bench = _build_bench(config)
    configure_libraries(offline=is_offline(config.model, config.data))

    print_loading()
    # Imported late, so that --help and config errors do not wait for torch.
    from app.assembly import base as models
    from app.evaluation.evaluator import print_samples, report_confusion
    from app.evaluation.significance import change_metrics, check_regression, report_comparison
    from app.training.trainer import resolve_single_device
    from data_modules import BatchSpec

    env = resolve_single_device(config.trainer.accelerator, config.trainer.precision)
    config = models.with_checkpoint(config, env, folder)
    base = models.open_base(config, env, models.adapter_of(config))
    batching = BatchSpec(
        micro_batch_size=config.trainer.micro_batch_size, row_multiple=env.row_multiple
    )
    data = models.build_datamodule(config, base.tokenizer, base.spec, batching)
    data.setup("validate")
    rate = models.open_reward_model(judged.reward_model, config.trainer.accelerator)
    evaluator, runner, metrics = _measure_models(config, folder, env, base, data, bench)
    if not is_first_rank():
        return metrics
    evaluator.write_predictions(folder)
    verdicts = None
    if bench is not None:
        verdicts = bench.judge(folder, Path(config.data.cache_dir) / "judge", rate)
        metrics |= verdicts.metrics()
        write_atomically(folder / _JUDGE_PAGE, _verdicts_page(bench, verdicts))
    grades = {} if verdicts is None or bench is None else verdicts.row_scores(bench.name)
    changes = evaluator.changes(models.trained_datasets(config), grades)
    groups = evaluator.group_changes()
    metrics |= change_metrics([*changes, *groups])
    write_atomically(folder / METRICS_FILE, json.dumps(metrics, indent=2) + "\n")
    save_config(config, folder / CONFIG_FILE)
    runner.remove_partial_results()
    print_samples(evaluator)
    report_confusion(evaluator, folder)
    if verdicts is not None:
        grading.print_judgement(verdicts, judged, str(folder / _JUDGE_PAGE))
    report_comparison(metrics, changes, groups, folder)
    write_page(folder, changed_settings(config))
    print(f"run: {printable(str(folder))}")
    if verdicts is not None:
        grading.check_judgement(verdicts, judged)
    check_regression(changes, config.evaluation.max_regression)
    return metrics


def _build_bench(config: EvaluateConfig) -> grading.Bench | None:
    judged = config.evaluation.judge
    if judged.questions and judged.grading == ["pairwise"] and config.tuned_path is None:
        raise UserError(
            "evaluation.judge.grading=[pairwise] compares base and tuned, and there is no tuned "
            "model; type run=FOLDER, adapter_path=FOLDER, or evaluation.judge.grading=[single]"
        )
    if not judged.questions:
        return None
    return grading.Bench(judged, config.evaluation.batch_size, config.seed)


def _measure_models(
    config: EvaluateConfig,
    folder: Path,
    env: Environment,
    base: Base,
    data: FinetuneDataModule,
    bench: grading.Bench | None,
) -> tuple[Evaluator, RowRunner, dict[str, float]]:
    """Measure base and tuned, one in memory at a time; UserError if there is nothing to measure.

    Returns the evaluator, the runner that saves partial results in `folder`, and the metrics.
    """
    from app.assembly.base import adapter_of, build_objective, place_as_trained
    from app.evaluation.evaluator import Evaluator
    from app.evaluation.row_runner import Progress, build_row_runner, build_sum_over_ranks
    from app.evaluation.tasks.questions import build_tasks
    from app.model.adapter import saves_whole_model

    adapter, source = adapter_of(config), config.objective.reference_source
    # A model whose weights were all trained does not contain its base.
    is_stored = source == "cached" or (source == "base" and saves_whole_model(adapter))
    identity = [base.description, _describe_tuned(config), env.precision, repr(base.quantization)]
    with Progress() as progress:
        runner = build_row_runner(folder, identity, progress.show, on_gpu=env.accelerator == "gpu")
        evaluator = Evaluator(
            config.evaluation,
            base,
            data,
            build_tasks(config.evaluation),
            build_objective(config.objective, config.model, base.teacher),
            runner=runner,
            sum_over_ranks=build_sum_over_ranks(runner),
        )
        if not evaluator.measures_answers and not len(data.val_examples) and bench is None:
            raise UserError(_nothing_to_measure(config))

        def measure(variant: str, model: Any) -> dict[str, float]:
            placed = place_as_trained(model, adapter, env)
            with env.autocast():
                if variant == "base" and is_stored:
                    evaluator.measure_references(placed)
                if bench is not None and is_first_rank():
                    one_rank = replace(runner, rank=0, num_ranks=1, gather=lambda own: [own])
                    stops = evaluator.stop_ids
                    bench.answer(variant, placed, base, data.template, stops, one_rank)
                return evaluator.measure(variant, placed)

        metrics: dict[str, float] = {}
        if not config.model.from_scratch:
            metrics |= measure("base", base.load(env.rank_device))
        if config.tuned_path:
            tuned = base.load_tuned(Path(config.tuned_path), env.rank_device)
            metrics |= measure("tuned", tuned)
    return evaluator, runner, metrics


def _verdicts_page(bench: grading.Bench, judged: grading.Judgement) -> str:
    verdicts = {
        (verdict.request.question.id, verdict.request.turn, verdict.request.variant): verdict
        for verdict in judged.verdicts
        if not verdict.request.is_pairwise
    }
    shown = []
    for question in bench.questions:
        for turn, text in enumerate(question.turns):
            texts = [("reference", question.reference[turn])] if question.reference else []
            for variant, by_question in bench.answers.items():
                verdict = verdicts.get((question.id, turn, variant))
                grade = "" if verdict is None else judged.grade(verdict)
                answer = by_question[question.id][turn] or "(empty)"
                texts.append((f"{variant}{f', {grade}' if grade else ''}", answer))
                if verdict is not None and verdict.reply.text:
                    texts.append((f"judge of {variant}", verdict.reply.text))
            source = f"{question.category}: {question.id}, turn {turn + 1}"
            shown.append({"source": source, "prompt": text, "texts": texts})
    facts = [judged.state(), *([judged.cost(bench.config)] if judged.is_graded else [])]
    sections = [
        PageSection(title="Grades", tables=[grading.judge_table(judged)]),
        PageSection(title="Answers", predictions=shown),
    ]
    return render_sections(f"{bench.name}: graded by {bench.config.name}", facts, sections)


def _describe_tuned(config: EvaluateConfig) -> list[Any]:
    if config.tuned_path is None:
        return []
    files = sorted(file for file in Path(config.tuned_path).glob("*") if file.is_file())
    entries = ((file, file.stat()) for file in files)
    known = [(file.name, entry.st_size, entry.st_mtime_ns) for file, entry in entries]
    return [str(config.tuned_path), *known]


def evaluate_in_ranks(config: EvaluateConfig) -> None:
    """Evaluate in this process, or start one rank per device, each with a share of the rows."""
    devices = requested_devices(config)
    if is_child() or devices.num_ranks == 1:
        evaluate(config)
        return
    folder = decide_run_dir(config.output)
    if config.checkpoint != FINAL:  # once, before the ranks open it
        from app.assembly.base import with_checkpoint
        from app.training.trainer import resolve_single_device

        configure_libraries(offline=is_offline(config.model, config.data))
        env = resolve_single_device(config.trainer.accelerator, config.trainer.precision)
        with_checkpoint(config, env, folder)
    if code := run_shares("evaluate", folder, devices, sys.argv[1:]):
        word = quote_words(f"output.dir={folder}")
        print(f"to continue: type the same command with {word}", file=sys.stderr)
        sys.exit(code)


def _nothing_to_measure(config: EvaluateConfig) -> str:
    if config.evaluation.answers_prompts:
        return (
            "nothing to measure: there are no validation rows, and no row has an answer to compare "
            "with; type data.test_datasets=[{path: FILE}] with rows that end in an answer"
        )
    tests = "data.test_datasets" if config.data.test_datasets else "held-out rows"
    return (
        "nothing to measure: there are no validation rows to compute a loss on, and "
        f"evaluation.exact_match=false; type evaluation.exact_match=true to compare answers with "
        f"those of {tests}, data.datasets=[{{path: FILE}}] data.val_set_size=0.05 for a loss, or "
        "evaluation=mmlu (arc, gsm8k, ...) for a task"
    )


if __name__ == "__main__":
    exit_with_parent()
    run_program(lambda: run_verb("evaluate", evaluate_in_ranks))
