"""Settings of a judge: the questions, the LLM or reward model that grades the answers, limits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from app.process.launch import is_loopback
from common.errors import UserError
from common.facts import setting

KEY_VARIABLE = "LOFT_JUDGE_KEY"


@dataclass(kw_only=True, slots=True)
class JudgeConfig:
    questions: str | None = setting(None, shown=True, is_path=True)
    """file of multi-turn questions in the format of MT-bench's question.jsonl, or a folder with
    that file and its reference answers; null = no judge"""
    references: str | None = setting(None, is_path=True)
    """file of reference answers in the format of MT-bench's reference_answer files; null = those in
    the rows or the folder of `questions`"""
    max_questions: int | None = setting(None, ge=1)
    """maximum number of questions, the first ones; null = all"""
    max_new_tokens: int = setting(512, ge=1)
    """maximum length of each answer in tokens"""
    url: str | None = setting(None, shown=True, grants="host")
    """base URL of an OpenAI-compatible endpoint, such as https://api.openai.com/v1; its API key is
    read only from the environment variable LOFT_JUDGE_KEY"""
    model: str | None = setting(None, shown=True, grants="nothing")
    """name of the judge model at the endpoint"""
    reward_model: str | None = setting(None, is_path=True)
    """judge that rates answers in place of an endpoint: folder of a run of objective=reward, or of
    a sequence classifier with one output, such as a merged run"""
    best_of: int = setting(1, ge=1, le=1024)
    """answers sampled for each question, of which the reward model chooses the best; 1 = none"""
    temperature: float = setting(1.0, gt=0, le=2)
    """temperature of the answers of `best_of`"""
    grading: list[str] = setting(
        default_factory=lambda: ["single"], choices=("single", "pairwise"), shown=True
    )
    """single = grade each answer from 1 to 10, or by its reward; pairwise = choose between base and
    tuned, requested twice with the order swapped; both: [single, pairwise]"""
    parameters: dict[str, Any] = setting(
        default_factory=lambda: {"temperature": 0, "max_tokens": 1024}, grants="nothing"
    )
    """parameters of each request; null removes a parameter"""
    num_parallel: int = setting(4, ge=1, le=64)
    """number of concurrent requests"""
    requests_per_minute: float | None = setting(None, gt=0)
    """rate limit; null = as fast as the endpoint answers"""
    timeout_seconds: float = setting(120.0, gt=0, le=3600)
    """timeout of a request, in seconds"""
    max_retries: int = setting(5, ge=0, le=20)
    """retries of a failed request, with exponential backoff or after the delay that the endpoint
    requests"""
    input_price: float | None = setting(None, ge=0)
    """price of a million input tokens in dollars; null = cost is shown in tokens"""
    output_price: float | None = setting(None, ge=0)
    """price of a million output tokens in dollars"""

    @property
    def name(self) -> str:
        """What the judge is called."""
        return str(self.reward_model or self.model)


def read_key(config: JudgeConfig) -> str | None:
    """Return the API key of the judge from the environment, None if it is not set.

    Raises UserError if the endpoint or its model is not set, or if the key would be sent over a
    network unencrypted. The key is never a setting, since settings are printed and saved.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    problems = [
        f"evaluation.judge.questions={config.questions} without evaluation.judge.{name}; type "
        f"evaluation.judge.{name}={example}"
        for name, example in (
            (
                "url",
                "https://HOST/v1 (or http://127.0.0.1:8000/v1 of python -m app.serve), or "
                "evaluation.judge.reward_model=RUN",
            ),
            ("model", "NAME, the judge's name at the endpoint"),
        )
        if not getattr(config, name)
    ]
    if config.url:
        parts = urlsplit(config.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            problems.append(f"evaluation.judge.url={config.url}: expected http(s)://HOST[:PORT]/v1")
        elif parts.username or parts.password or parts.query:
            problems.append(
                "evaluation.judge.url contains a user, a password or a query; pass the key in the "
                f"environment: {KEY_VARIABLE}=... before the command"
            )
        elif key and parts.scheme == "http" and not is_loopback(parts.hostname):
            problems.append(
                f"evaluation.judge.url={config.url}: {KEY_VARIABLE} would be sent unencrypted; "
                f"type https://, or unset {KEY_VARIABLE} if the endpoint needs no key"
            )
    if key and not (key.isascii() and key.isprintable()):
        problems.append(
            f"{KEY_VARIABLE} contains a line break or another character that no API key has"
        )
    if not config.grading:
        problems.append("evaluation.judge.grading=[]: type [single], [pairwise] or both")
    if problems:
        raise UserError(problems)
    return key or None
