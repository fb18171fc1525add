"""Convert a merged model to GGUF by llama.cpp's converter, and decode greedily from the file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import TrainingFault, UserError

SCRIPT = "convert_hf_to_gguf.py"
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""dtype of the merged weights -> the converter's name for it"""
UNKNOWN_TOKENIZER = "pre-tokenizer was not recognized"
"""the converter's error for a tokenizer that it does not know"""
INSTALL = (
    "pip download --no-deps --no-binary :all: llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz"
)
"""commands that fetch the converter, which the packages gguf and llama-cpp-python do not install"""


def find_converter(folder: str | None) -> Path:
    """Return the path of llama.cpp's converter in `folder` or on PATH.

    The UserError for a missing converter contains the commands that fetch it.
    """
    found = shutil.which(SCRIPT) if folder is None else str(Path(folder) / SCRIPT)
    if found is None or not Path(found).is_file():
        where = "on PATH" if folder is None else f"in merge.llama_cpp={folder}"
        raise UserError(
            f"merge.gguf=true: there is no {SCRIPT} {where}; type `{INSTALL}`, and then "
            "merge.llama_cpp=$(echo llama_cpp_python-*/vendor/llama.cpp)"
        )
    return Path(found)


def convert(converter: Path, model: Path, dtype: str) -> Path:
    """Write `model.gguf` into a model's folder; UserError with the converter's last line."""
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
        why = lines[-1].strip() if lines else "it printed no error"
        if UNKNOWN_TOKENIZER in why:
            why = "llama.cpp does not support the tokenizer of this base"
        raise UserError(
            f"{converter} does not convert {model}: {why}; the merged model in that folder is "
            "complete: move it, or leave merge.gguf=true out"
        )
    return file


def greedy_tokens(file: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return up to `count` tokens that llama.cpp generates greedily per prompt, on the CPU.

    The end-of-text token, if it is generated, is included.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx = max(len(prompt) for prompt in prompts) + count
    params.n_parallel, params.warmup, params.verbosity = 1, False, 0
    runner = xllamacpp.Server(params)
    sampling = {"n_predict": count, "temperature": 0, "top_k": 1, "logprobs": 1}
    completions = []
    for prompt in prompts:
        request = {"prompt": list(prompt), "cache_prompt": False, **sampling}
        response = runner.handle_completions(request)
        if "choices" not in response:
            raise TrainingFault(f"{file}: llama.cpp cannot generate from it: {response['error']}")
        content = response["choices"][0]["logprobs"]["content"]
        completions.append([token["id"] for token in content])
    return completions
