"""The settings of a task; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from data_modules import setting

KINDS = ("multiple_choice", "exact_match", "numeric", "likelihood", "perplexity", "code")


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """Name one task."""

    name: str = setting()
    """its name in metrics; gsm8k, mmlu, arc, openbookqa, hellaswag, winogrande, boolq, lambada,
    math and humaneval have their published forms"""
    path: str | None = setting(None)
    """file of its rows (json, jsonl, csv, parquet; .gz or .zst); null = that of a named task in
    evaluation.task_dir"""
    form: str | None = setting(None)
    """published form of its rows and prompts, where `name` is another; null = `name`'s, if it has
    one"""
    kind: str | None = setting(None, choices=KINDS)
    """how it is measured: multiple_choice (the likeliest choice), exact_match or numeric (of an
    answer), likelihood (of a continuation), perplexity (of a text), code (an answer is run); null =
    its form's"""
    columns: dict[str, str] = setting(default_factory=dict)
    """field: column that holds it, where they differ: question, choices and answer, context and
    continuation, or text; dots go into nested fields"""
    few_shot: int | None = setting(None, ge=0, le=100)
    """examples before each question; null = its form's"""
    few_shot_path: str | None = setting(None)
    """file of the examples; null = its form's, or the first rows of `path`, which are not asked"""
    max_rows: int | None = setting(None, ge=1)
    """ask at most this many rows, the first; null = all"""
