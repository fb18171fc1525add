"""From Python: train, and use the result. `from app import load_config, train`."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from app.config import ChatConfig, EvaluateConfig, MergeConfig, TrainConfig, load_config
from app.evaluate import evaluate
from app.evaluation.conversation import ConversationConfig
from app.merge import merge
from app.process.launch import run_dir
from app.push import PushConfig, push
from app.report.run_page import PAGE_FILE
from app.run.folder import METRICS_FILE
from app.train import train as train_here
from app.training.run_documents import CSV_FILE, METRICS, read_curves, read_document, read_object
from data_modules import Turn

if TYPE_CHECKING:
    import lightning as L

    from app.evaluation.conversation import Responder

_T = TypeVar("_T")
VerbSettings = Mapping[str, Any]
"""settings of a verb as for `load_config`, such as {"evaluation.max_rows": 20}"""


@dataclass(slots=True)
class TrainedRun:
    """A finished run: its folder, what it measured, and what can be done with it."""

    folder: Path
    _loaded: tuple[str, Responder] | None = None
    """the settings of the model that answers, and what answers"""

    @property
    def metrics(self) -> dict[str, float]:
        """The final metrics by name, such as `val/loss` and `tuned/exact_match/<data set>`."""
        found: dict[str, float] = read_document(self.folder / METRICS_FILE, METRICS)
        return found

    @property
    def rows(self) -> list[dict[str, float]]:
        """A dictionary for each step and validation, for `pandas.DataFrame(run.rows)`."""
        curves = read_curves(self.folder / CSV_FILE)
        return [{"step": step, **metrics} for step, metrics in curves]

    @property
    def verdict(self) -> str | None:
        """What became better or worse, in words; None if nothing was held out to compare."""
        return read_object(self.folder / "verdict.json").get("verdict") or None

    @property
    def report(self) -> Path:
        """The page of the run, to open in a browser."""
        return self.folder / PAGE_FILE

    def evaluate(self, settings: VerbSettings | None = None) -> dict[str, float]:
        """Measure base and tuned as `loft evaluate` does; return all metrics."""
        return evaluate(self._config("evaluate", EvaluateConfig, settings))

    def generate(self, prompts: Sequence[str], settings: VerbSettings | None = None) -> list[str]:
        """Return the tuned model's answer to each prompt, as `loft chat` does with `chat.*`."""
        config = self._config("chat", ChatConfig, settings)
        described = repr(replace(config, chat=ConversationConfig()))
        if self._loaded is None or self._loaded[0] != described:
            from app.assembly.base import open_tuned, with_checkpoint
            from app.training.trainer import resolve_single_device

            env = resolve_single_device(config.trainer.accelerator, config.trainer.precision)
            with tempfile.TemporaryDirectory() as folder:
                selected = with_checkpoint(config, env, Path(folder))
                self._loaded = None  # only one model is in memory at a time
                tuned = open_tuned(selected, env)
                self._loaded = described, tuned.responder(tuned.load(env), env)
        _, responder = self._loaded
        system = [Turn("system", config.chat.system)] if config.chat.system else []
        turns = [[*system, Turn("user", prompt)] for prompt in prompts]
        return ["".join(responder.stream(each, config.chat)) for each in turns]

    def merge(self, settings: VerbSettings | None = None) -> Path:
        """Merge the adapter into its base and verify it; return the folder of the model."""
        merge(self._config("merge", MergeConfig, settings))
        return _folder()

    def push(self, repo: str, *, private: bool = True) -> str:
        """Upload what was trained, with its card, to the hub; return the URL of the commit."""
        return push(PushConfig(repo=repo, run=str(self.folder), private=private))

    def _config(self, verb: str, kind: type[_T], settings: VerbSettings | None) -> _T:
        config = load_config(verb, {"run": str(self.folder), **(settings or {})})
        assert isinstance(config, kind)
        return config


def train(config: TrainConfig, callbacks: Sequence[L.Callback] = ()) -> TrainedRun:
    """Fine-tune in this process as `config` says, with further callbacks of Lightning.

    Raises UserError for settings and data, TrainingFault if training went bad, and
    KeyboardInterrupt where a notebook's cell is interrupted.
    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        train_here(config, callbacks=callbacks)
    except SystemExit as end:
        if not isinstance(end.__context__, KeyboardInterrupt):
            raise
        signal.signal(signal.SIGINT, handler)  # Lightning ignores the signal before it exits
        raise KeyboardInterrupt from None
    return TrainedRun(_folder())


def _folder() -> Path:
    folder = run_dir()
    assert folder is not None, "a verb decides its folder"
    return folder
