"""The README.md beside what a run has saved: what it is, what it learned from, how to use it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from app.model.hub import cache_folder
from app.process.files import write_whole
from app.report.model_card import CARD_FILE
from app.report.run_files import NOT_DRAWN, RunFiles, read_run_files
from app.report.run_page import CURVES_FILE, Setting, number
from data_modules import is_hub_id, printable, redact

ADAPTER_CONFIG = "adapter_config.json"
MAX_README = 1_000_000
"""letters of a base's README.md that are read for its licence"""


def write_card(
    saved: Path, run: Path, settings: Sequence[Setting], *, repo: str | None = None
) -> None:
    """Write the card of what a run has saved into its folder, with the picture of its curves.

    `repo`: the hub's name of what is pushed; its card names no folder of this machine. All files
    get the mode that the card has, by the user's umask: safetensors makes its own private.
    """
    if (run / CURVES_FILE).is_file():
        shutil.copyfile(run / CURVES_FILE, saved / CURVES_FILE)
    files = read_run_files(run)
    write_whole(saved / CARD_FILE, render_adapter_card(saved, files, settings, repo=repo))
    mode = (saved / CARD_FILE).stat().st_mode & 0o777
    for file in saved.iterdir():
        if file.is_file() and not file.is_symlink():
            file.chmod(mode)


def render_adapter_card(
    saved: Path, run: RunFiles, settings: Sequence[Setting], *, repo: str | None = None
) -> str:
    """Return the card as Markdown, with what the hub reads of it in front."""
    is_adapter = (saved / ADAPTER_CONFIG).is_file()
    model, adapter = run.config.get("model") or {}, run.config.get("adapter") or {}
    base, revision = str(model.get("path") or ""), model.get("revision")
    is_local = Path(base).is_absolute() or Path(base).is_dir()
    shown = Path(base).name if repo is not None and is_local else base
    is_pair = _is_pair(saved)
    front: dict[str, Any] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text2text-generation" if is_pair else "text-generation",
    }
    if base and not is_local:
        front |= {"base_model": base}
    if (licence := licence_of(base, is_local=is_local)) is not None:
        front |= {"license": licence}
    data = [one for one in run.manifest.get("data") or [] if isinstance(one, dict)]
    if known := sorted({str(one.get("path")) for one in data if is_hub_id(str(one.get("path")))}):
        front |= {"datasets": known}
    kind = str(adapter.get("name") or "adapter")
    front |= {"tags": ["loft", "sft", *([kind] if is_adapter else [])]}
    name = Path(base).name or "A model from random weights"
    numbers = ", ".join(f"{key} {adapter[key]:g}" for key in ("r", "alpha") if adapter.get(key))
    of = f" ({numbers})" if numbers else ""
    what = f"A {kind} adapter{of} for" if is_adapter else "All weights, trained from"
    at = f" (revision {revision})" if revision else ""
    body = [
        f"# {name}, fine-tuned",
        "",
        f"{what} `{Path(base).name if is_local else base}`{at}.",
        "",
        "## Use",
        "",
        *_snippet(repo or str(saved), shown, revision, is_adapter=is_adapter, is_pair=is_pair),
        "",
        "## Trained on",
        "",
        *_data_table(data),
        "",
        *_figures(saved, run),
        "## Settings that differ from the defaults",
        "",
        "| setting | value |",
        "|---|---|",
        *(
            f"| `{key}` | {cell(value)} |"
            for key, value, _ in settings
            if repo is None or not ("path:" in value or value.startswith("/"))
        ),
        "",
    ]
    if versions := run.manifest.get("versions"):
        said = ", ".join(f"{name} {version}" for name, version in versions.items())
        body += ["## Made with", "", f"loft; {said}", ""]
    text = "\n".join(printable(redact(line)) for line in body)
    return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n{text}"


def _data_table(data: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        "| data set | rows | held out | trained tokens | sha256 |",
        "|---|---:|---:|---:|---|",
        *(
            f"| {cell(one.get('name'))} | {one.get('train_rows') or 0:,} | "
            f"{one.get('validation_rows') or 0:,} | {one.get('trained_tokens') or 0:,} | "
            f"`{str(one.get('sha256') or '')[:16]}` |"
            for one in data
        ),
    ]


def _snippet(
    saved: str, base: str, revision: str | None, *, is_adapter: bool, is_pair: bool
) -> list[str]:
    kind = "AutoModelForSeq2SeqLM" if is_pair else "AutoModelForCausalLM"
    at = f", revision={revision!r}" if revision else ""
    lines = ["```python"]
    if is_adapter:
        lines += [
            "from peft import PeftModel",
            f"from transformers import {kind}, AutoTokenizer",
            "",
            f'base = {kind}.from_pretrained({base!r}{at}, dtype="auto")',
            f"model = PeftModel.from_pretrained(base, {saved!r})",
        ]
    else:
        lines += [
            f"from transformers import {kind}, AutoTokenizer",
            "",
            f'model = {kind}.from_pretrained({saved!r}, dtype="auto")',
        ]
    return [
        *lines,
        f"tokenizer = AutoTokenizer.from_pretrained({saved!r})",
        'messages = [{"role": "user", "content": "..."}]',
        "text = tokenizer.apply_chat_template("
        "messages, add_generation_prompt=True, tokenize=False)",
        f'inputs = tokenizer(text, return_tensors="pt", add_special_tokens={is_pair})',
        "answer = model.generate(**inputs, max_new_tokens=64)",
        "print(tokenizer.decode(answer[0], skip_special_tokens=True))",
        "```",
    ]


def _figures(saved: Path, run: RunFiles) -> list[str]:
    rows = [
        (name.partition("/")[2], run.metrics.get(f"base/{name.partition('/')[2]}"), value)
        for name, value in run.metrics.items()
        if name.startswith("tuned/") and not any(part in name for part in NOT_DRAWN)
    ]
    lines = []
    if rows:
        lines += [
            "## Measured on held-out rows",
            "",
            "| figure | base | tuned |",
            "|---|---:|---:|",
        ]
        lines += [f"| {cell(what)} | {number(one)} | {number(two)} |" for what, one, two in rows]
        lines.append("")
    if (saved / CURVES_FILE).is_file():
        lines += [f"![curves of training and validation]({CURVES_FILE})", ""]
    return lines


def cell(text: object) -> str:
    """Return a text for a cell of a Markdown table: no bar, no markup of its own."""
    kept = str(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return kept.replace("`", "'").replace("[", "\\[").replace("\n", " ")


def licence_of(base: str, *, is_local: bool) -> str | None:
    """Return the licence that a base's own card names, where it lies on this machine."""
    cached = cache_folder() / f"models--{base.replace('/', '--')}" / "snapshots"
    cards = [Path(base) / CARD_FILE] if is_local else sorted(cached.glob(f"*/{CARD_FILE}"))
    for card in cards:
        try:
            text = card.read_text(encoding="utf-8")[:MAX_README]
            _, front, _ = text.split("---\n", 2)
            values = yaml.safe_load(front)
        except (OSError, ValueError, yaml.YAMLError):
            continue
        licence = values.get("license") if isinstance(values, Mapping) else None
        if isinstance(licence, str) and licence.isprintable() and len(licence) < 60:
            return licence
    return None


def _is_pair(saved: Path) -> bool:
    """Tell whether the model has an encoder, by adapter_config.json or config.json."""
    for file in (saved / ADAPTER_CONFIG, saved / "config.json"):
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return values.get("task_type") == "SEQ_2_SEQ_LM" or bool(values.get("is_encoder_decoder"))
    return False
