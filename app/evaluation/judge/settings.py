"""Which questions are asked, who judges the answers, and what a judge may cost."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from app.process.errors import UserError
from app.process.launch import is_loopback
from data_modules import setting

KEY_VARIABLE = "LOFT_JUDGE_KEY"


@dataclass(kw_only=True, slots=True)
class JudgeConfig:
    questions: str | None = setting(None, shown=True)
    """a file of questions of two turns, as MT-bench's question.jsonl, or a folder with one and its
    reference answers; null = no judge"""
    references: str | None = None
    """a file of answers known to be right, as MT-bench's reference_answer files; null = those in
    the questions' rows or folder"""
    max_questions: int | None = setting(None, ge=1)
    """questions that are asked, the first ones; null = all"""
    max_new_tokens: int = setting(512, ge=1)
    """tokens of an answer at most"""
    url: str | None = setting(None, shown=True)
    """an OpenAI-compatible endpoint, as https://api.openai.com/v1; its key comes from the
    environment alone, LOFT_JUDGE_KEY"""
    model: str | None = setting(None, shown=True)
    """the judge's name at the endpoint"""
    grading: list[str] = setting(
        default_factory=lambda: ["single"], choices=("single", "pairwise"), shown=True
    )
    """single = 1 to 10 for each answer; pairwise = base or tuned, asked twice with the places
    swapped; both: [single, pairwise]"""
    parameters: dict[str, Any] = setting(
        default_factory=lambda: {"temperature": 0, "max_tokens": 1024}
    )
    """of each request; null leaves one out"""
    num_parallel: int = setting(4, ge=1, le=64)
    """requests at a time"""
    requests_per_minute: float | None = setting(None, gt=0)
    """at most; null = as fast as the endpoint answers"""
    timeout_seconds: float = setting(120.0, gt=0, le=3600)
    """that a request may take"""
    max_retries: int = setting(5, ge=0, le=20)
    """of a request that failed, each after twice the wait of the one before, or the one that the
    endpoint asks for"""
    input_price: float | None = setting(None, ge=0)
    """dollars for a million tokens that the judge reads; null = cost is shown in tokens"""
    output_price: float | None = setting(None, ge=0)
    """dollars for a million tokens that the judge writes"""


def read_key(config: JudgeConfig) -> str | None:
    """Return the judge's key from the environment; None where there is none.

    UserError where no endpoint or no judge is named, or where the key would cross a network in the
    clear. The key is never a setting: those are printed and written.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    problems = [
        f"evaluation.judge.questions={config.questions} without evaluation.judge.{name}; type "
        f"evaluation.judge.{name}={example}"
        for name, example in (
            ("url", "https://HOST/v1 (or http://127.0.0.1:8000/v1 of python -m app.serve)"),
            ("model", "NAME, as the endpoint calls its judge"),
        )
        if not getattr(config, name)
    ]
    if config.url:
        parts = urlsplit(config.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            problems.append(f"evaluation.judge.url={config.url}: expected http(s)://HOST[:PORT]/v1")
        elif parts.username or parts.password or parts.query:
            problems.append(
                "evaluation.judge.url holds a user, a password or a query; a key belongs into the "
                f"environment: {KEY_VARIABLE}=... before the command"
            )
        elif key and parts.scheme == "http" and not is_loopback(parts.hostname):
            problems.append(
                f"evaluation.judge.url={config.url}: {KEY_VARIABLE} would cross the network in the "
                f"clear; type https://, or unset {KEY_VARIABLE} where the endpoint needs none"
            )
    if key and not (key.isascii() and key.isprintable()):
        problems.append(f"{KEY_VARIABLE} holds a line break or a character that no key has")
    if not config.grading:
        problems.append("evaluation.judge.grading=[]: type [single], [pairwise] or both")
    if problems:
        raise UserError(problems)
    return key or None
