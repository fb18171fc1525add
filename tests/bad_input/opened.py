"""Open a base and an adapter as a run does before its first step, in this process."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from app.config import check_before_start, load_config
from app.process.reporting import report
from common.errors import DONE
from tests.bounded import on_alarm
from tests.in_process import VARIABLES_OF_OTHER_RUNS

LONGEST_SECONDS = 20


class TookTooLongError(BaseException):
    """What no `except Exception` of a library may take for its own."""


@dataclass(frozen=True)
class Opened:
    """How an attempt ended: the exit code, stderr, and the model if there is one."""

    code: int
    stderr: str
    model: Any = None
    error: BaseException | None = None


def settings_for(base: Path, data: Path, *words: str, verb: str = "train") -> Any:
    """Return the settings of a run on `base`."""
    config = copy.deepcopy(_composed(verb, words))
    config.model.path, config.data.datasets[0].path = str(base), str(data)
    return config


@cache
def _composed(verb: str, words: tuple[str, ...]) -> Any:
    return load_config(verb, ["model.path=a/b", "data.datasets=[{path: c}]", *words])


def open_run(config: Any) -> Opened:
    """Check and load what a run's settings name, as the run does, and compute some logits."""
    stderr = io.StringIO()
    variables = {k: v for k, v in os.environ.items() if k not in VARIABLES_OF_OTHER_RUNS}
    with (
        mock.patch.dict(os.environ, variables, clear=True),
        contextlib.redirect_stderr(stderr),
        library_log_to(stderr),
        at_most(LONGEST_SECONDS),
    ):
        try:
            model = _open(config)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            return Opened(report(error), stderr.getvalue(), error=error)
    return Opened(DONE, stderr.getvalue(), model)


def _open(config: Any) -> Any:
    check_before_start(config)

    from app.model.architecture import (
        decoder_start_token_id,
        load_architecture,
        reading_first_forward,
    )
    from app.model.attention import choose_backend
    from app.model.attention.probes import check_isolation, check_pair_isolation
    from app.model.base import check_described
    from app.model.build import build_model
    from app.model.tokenizer import build_tokenizer, new_token_ids, num_rows, stop_token_ids

    architecture = load_architecture(config.model)
    check_described(config.model, architecture)
    backend = choose_backend(config.attention, architecture, "cpu", "fp32").backend
    tokenizer = build_tokenizer(config.model)
    new_ids = new_token_ids(config.model, tokenizer, num_rows(architecture))
    stop_token_ids(tokenizer, config.model.stop_tokens)
    decoder_start_token_id(architecture)
    how = (config.quantization, backend, config.adapter, config.recompute, "fp32")
    model = build_model(config.model, *how, new_ids=new_ids)
    with reading_first_forward(model):
        if architecture.is_encoder_decoder:
            check_pair_isolation(model, backend, is_packed=True)
        else:
            check_isolation(model, backend)
    return model


@contextlib.contextmanager
def library_log_to(stderr: io.StringIO) -> Iterator[None]:
    """Let transformers log into `stderr`: its own handler has kept the stderr of its import."""
    from transformers.utils import logging as transformers_logging

    handler = logging.StreamHandler(stderr)
    transformers_logging.disable_default_handler()
    transformers_logging.add_handler(handler)
    try:
        yield
    finally:
        transformers_logging.remove_handler(handler)
        transformers_logging.enable_default_handler()


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TookTooLongError where the main thread is not through in time."""

    def stop() -> None:
        raise TookTooLongError(f"hangs for more than {seconds} s")

    with on_alarm(seconds, stop):
        yield
