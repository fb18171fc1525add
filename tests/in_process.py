"""Run commands in this process without their work, and write small models, data and adapters."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from app.config import load_config, run_verb
from app.process.launch import RANK_VARIABLES, read_launch
from app.process.reporting import TRACEBACK_VARIABLE

VARIABLES_OF_OTHER_RUNS = (*RANK_VARIABLES, TRACEBACK_VARIABLE)


@dataclasses.dataclass(frozen=True)
class CommandResult:
    """The outcome of a command."""

    code: int
    """exit code"""
    stderr: str
    stdout: str
    config: Any
    """validated config that the verb received; None if it was not called"""
    existing: Any
    """run that is resumed, if any"""


def run_command(
    *words: str,
    verb: str = "train",
    sweep: Callable[[list[str]], int] | None = None,
    gpus: int = 0,
    environment: dict[str, str] | None = None,
    error: BaseException | None = None,
) -> CommandResult:
    """Run a command with a verb that only records its config, as on a machine with `gpus` GPUs.

    `environment` are variables of a launcher; `error` is raised by the verb.
    """
    received: list[Any] = []

    def record(config: Any, existing: Any = None) -> None:
        received.extend([config, existing])
        if error is not None:
            raise error

    stderr, stdout = io.StringIO(), io.StringIO()
    variables = {k: v for k, v in os.environ.items() if k not in VARIABLES_OF_OTHER_RUNS}
    read_launch.cache_clear()
    with (
        mock.patch.dict(os.environ, variables | (environment or {}), clear=True),
        mock.patch("app.preflight.couplings.devices.count_gpus", return_value=gpus),
        contextlib.redirect_stderr(stderr),
        contextlib.redirect_stdout(stdout),
    ):
        code = run_verb(verb, record, sweep=sweep, words=list(words))
    read_launch.cache_clear()
    return CommandResult(code, stderr.getvalue(), stdout.getvalue(), *(received or (None, None)))


@contextlib.contextmanager
def as_new_process() -> Iterator[None]:
    """Forget the run that this process has opened, before and after."""
    opened = ("LOFT_RUN_DIR", "LOFT_RESUME_STEP")
    for name in opened:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name in opened:
            os.environ.pop(name, None)


def run_into(verb: str, folder: Path, *words: str) -> Any:
    """Run a verb with the output folder `folder`, as a new process would; return its result."""
    run = getattr(importlib.import_module(f"app.{verb}"), verb)
    with as_new_process():
        return run(load_config(verb, [*words, f"output.dir={folder}"]))


def refused(*words: str, **options: Any) -> str:
    """What a command says that ends with exit code 2; `options` as for `run_command`."""
    result = run_command(*words, **options)
    assert result.code == 2, result
    return result.stderr


def accepted(*words: str, **options: Any) -> Any:
    """The config of a command that succeeds; `options` as for `run_command`."""
    result = run_command(*words, **options)
    assert result.code == 0, result.stderr
    return result.config


def make_model(folder: Path, *, context: int = 512, tied: bool = True, **numbers: Any) -> Path:
    """Write a two-layer Llama with valid headers and zero weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "max_position_embeddings": context, **numbers}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    shapes = {"model.embed_tokens.weight": [64, 32], "model.norm.weight": [32]}
    for layer in range(2):
        for name, shape in (
            ("self_attn.q_proj", [32, 32]),
            ("self_attn.k_proj", [16, 32]),
            ("self_attn.v_proj", [16, 32]),
            ("self_attn.o_proj", [32, 32]),
            ("mlp.up_proj", [64, 32]),
            ("mlp.down_proj", [32, 64]),
            ("input_layernorm", [32]),
        ):
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    if not tied:
        shapes["lm_head.weight"] = [64, 32]
    write_safetensors(folder / "model.safetensors", shapes)
    return folder


def write_safetensors(file: Path, shapes: dict[str, list[int]]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def make_data(file: Path, num_rows: int = 4) -> Path:
    rows = [{"instruction": f"Say {i}.", "input": "", "output": str(i)} for i in range(num_rows)]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return file


def make_words(folder: Path, num_rows: int = 4) -> list[str]:
    """Return the words of a run that is right, on files that are written into `folder`."""
    model, data = make_model(folder / "model"), make_data(folder / "data.jsonl", num_rows)
    return [f"model.path={model}", f"data.datasets=[{{path: {data}}}]"]


def make_adapter(folder: Path, *, r: int = 4, hidden: int = 32, **settings: Any) -> Path:
    """Write a LoRA of the q_proj of `make_model`, with valid headers and zero weights."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "target_modules": ["q_proj"]}
    if settings.get("peft_type", "LORA") == "LORA":
        config |= {"r": r, "lora_alpha": 32}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    shapes = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        shapes[f"{name}.lora_A.weight"] = [r, hidden]
        shapes[f"{name}.lora_B.weight"] = [hidden, r]
    write_safetensors(folder / "adapter_model.safetensors", shapes)
    return folder
