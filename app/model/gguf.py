"""A merged model as one GGUF file, by llama.cpp's own converter; and its greedy tokens."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from app.process.errors import TrainingFault, UserError

SCRIPT = "convert_hf_to_gguf.py"
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""dtype of the merged weights -> the converter's name of it"""
UNKNOWN_TOKENIZER = "pre-tokenizer was not recognized"
"""what the converter says of a tokenizer that it has no name for"""
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
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why = lines[-1].strip() if lines else "no word of why"
        if UNKNOWN_TOKENIZER in why:
            why = "llama.cpp has a list of the tokenizers that it knows, without that of this base"
        raise UserError(
            f"{converter} does not convert {model}: {why}; the merged model itself is complete: "
            "leave merge.gguf=true out"
        )
    return file


def greedy_tokens(file: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return up to `count` tokens with which llama.cpp goes on after each prompt, on the CPU.

    An end of text is the last of them.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx = max(len(prompt) for prompt in prompts) + count
    params.n_parallel, params.warmup, params.verbosity = 1, False, 0
    runner = xllamacpp.Server(params)
    asked = {"n_predict": count, "temperature": 0, "top_k": 1, "logprobs": 1, "cache_prompt": False}
    answers = []
    for prompt in prompts:
        answer = runner.handle_completions({"prompt": list(prompt), **asked})
        if "choices" not in answer:
            raise TrainingFault(f"{file}: llama.cpp does not go on with it: {answer['error']}")
        answers.append([token["id"] for token in answer["choices"][0]["logprobs"]["content"]])
    return answers
