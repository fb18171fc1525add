"""Open a base and an adapter as a run does before its first step, in this process."""

from __future__ import annotations

import contextlib
import io
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import DONE, report

LONGEST_SECONDS = 20


@dataclass(frozen=True)
class End:
    """How an attempt ended: the exit code, what was printed of it, and the model where there is."""

    code: int
    said: str
    model: Any = None
    error: BaseException | None = None


def open_run(config: Any) -> End:
    """Check and load what a verb's settings name, as the verb does."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), at_most(LONGEST_SECONDS):
        try:
            model = _open(config)
        except (Exception, SystemExit) as error:  # noqa: BLE001  as the door does
            return End(report(error), said.getvalue(), error=error)
        except BaseException as error:  # a panic of a library in Rust
            if type(error).__name__ != "PanicException":
                raise
            return End(report(error), said.getvalue(), error=error)
    return End(DONE, said.getvalue(), model)


def _open(config: Any) -> Any:
    from app.config.door import check_before_start

    check_before_start(config)

    from app.model.attention import choose_backend
    from app.model.base import decoder_start_token_id, load_architecture
    from app.model.build import build_model
    from app.model.chat import stop_token_ids
    from app.model.tokenizer import build_tokenizer, new_token_ids
    from app.model.tokens import num_rows

    architecture = load_architecture(config.model)
    backend = choose_backend(config.attention, architecture, "cpu", "fp32").backend
    tokenizer = build_tokenizer(config.model)
    new_ids = new_token_ids(config.model, tokenizer, num_rows(architecture))
    stop_token_ids(tokenizer, config.model.stop_tokens)
    decoder_start_token_id(architecture)
    how = (config.quantization, backend, config.adapter, config.recompute, "fp32")
    return build_model(config.model, *how, new_ids=new_ids)


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError where the main thread is not through in time."""

    def stop(*_: Any) -> None:
        raise TookTooLong(f"hangs for more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class TookTooLong(BaseException):
    """What no `except Exception` of a library may take for its own."""


def copy_of(folder: Path, to: Path) -> Path:
    """Copy a folder, in place of what was there."""
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(folder, to))
