"""Model cards: the README.md beside what a run has saved, and beside a merged model.

A card says what the model is, what it was trained on, how it was measured, and how to load it. It
never names a folder of this machine that others cannot read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from app.model.adapter.settings import ADAPTER_CONFIG
from app.model.hub import cache_folder
from app.report.run_page import CURVES_FILE, ChangedSetting, RunFiles, read_run_files
from app.training.run_documents import read_object
from common.files import write_atomically
from common.redaction import redact
from common.text import counted, printable
from data_modules import is_hub_id

if TYPE_CHECKING:
    import torch

    from app.assembly.base import Tuned
    from app.config import MergeConfig
    from app.model.merging import Difference

CARD_FILE = "README.md"
_MAX_README = 1_000_000
"""characters of a base model's README.md that are searched for its license"""


def write_card(
    saved: Path,
    run: Path,
    settings: Sequence[ChangedSetting],
    *,
    repo: str | None = None,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Write the card of a saved adapter or model into its folder, with the plot of its curves.

    `repo`: hub repository that the folder is pushed to; the card then loads the model from there.
    `metrics`: those of metrics.json, if it is not written yet.
    All files in the folder get the mode of the card, which follows the user's umask: safetensors
    makes its own files private.
    """
    if (run / CURVES_FILE).is_file():
        write_atomically(saved / CURVES_FILE, (run / CURVES_FILE).read_bytes())
    files = read_run_files(run, metrics)
    write_atomically(saved / CARD_FILE, render_run_card(saved, files, settings, repo=repo))
    mode = (saved / CARD_FILE).stat().st_mode & 0o777
    for file in saved.iterdir():
        if file.is_file() and not file.is_symlink():
            file.chmod(mode)


def render_run_card(
    saved: Path, run: RunFiles, settings: Sequence[ChangedSetting], *, repo: str | None = None
) -> str:
    """Return the card of what a run has saved as Markdown, with the hub's metadata in front."""
    is_adapter = (saved / ADAPTER_CONFIG).is_file()
    model, adapter = run.config.get("model") or {}, run.config.get("adapter") or {}
    base, revision = str(model.get("path") or ""), model.get("revision")
    is_local = Path(base).is_absolute() or Path(base).is_dir()
    loaded_base = Path(base).name if is_local else base
    task = _task(_is_encoder_decoder(saved), num_outputs := len(model.get("labels") or ()))
    front: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers"}
    front["pipeline_tag"] = task
    if base and not is_local:
        front["base_model"] = base
    if (license := license_of(base, is_local=is_local)) is not None:
        front["license"] = license
    datasets = [row for row in run.manifest.get("data") or [] if isinstance(row, dict)]
    if hub_ids := sorted({path for row in datasets if is_hub_id(path := str(row.get("path")))}):
        front["datasets"] = hub_ids
    kind = str(adapter.get("name") or "adapter")
    objective = run.config.get("objective") or {}
    front["tags"] = ["loft", str(objective.get("name") or "sft"), *([kind] if is_adapter else [])]
    name = Path(base).name or "A model from random weights"
    numbers = ", ".join(f"{key} {adapter[key]:g}" for key in ("r", "alpha") if adapter.get(key))
    kind_of = f"{cell(kind)} adapter{f' ({numbers})' if numbers else ''}"
    what = f"A {kind_of} for" if is_adapter else "All weights, trained from"
    at_revision = f" (revision {cell(revision)})" if revision else ""
    body = [
        f"# {cell(name)}, fine-tuned",
        "",
        f"{what} `{cell(Path(base).name if is_local else base)}`{at_revision}, by "
        f"{_objective_and_beta(objective)}.",
        "",
        "## Use",
        "",
        *([] if repo else ["In the folder of the run, and with the path of a local base:", ""]),
        *_snippet(
            repo or saved.name,
            task,
            num_outputs=num_outputs,
            adapter_base=loaded_base if is_adapter else None,
            revision=revision,
        ),
        "",
        "## Trained on",
        "",
        *_data_table(datasets),
        "",
        *_metrics_section(saved, run),
        "## Settings that differ from the defaults",
        "",
        *_table([["setting", "value"], *([f"`{cell(k)}`", cell(v)] for k, v, _ in settings)]),
        "",
    ]
    if versions := run.manifest.get("versions"):
        listed = ", ".join(cell(f"{name} {version}") for name, version in versions.items())
        body += ["## Made with", "", f"loft; {listed}", ""]
    return _join(front, body)


def render_merged_card(
    config: MergeConfig,
    tuned: Tuned,
    differences: Mapping[str, Difference],
    dtype: torch.dtype,
    manifest: Mapping[str, Any],
    metrics: Mapping[str, float],
    *,
    objective: Mapping[str, Any] | None,
) -> str:
    """Return the card of a merged model as Markdown; `objective`: that of the run, if any."""
    task = _task(tuned.base.architecture.is_encoder_decoder, len(config.model.labels))
    front = {"library_name": "transformers", "pipeline_tag": task}
    base = str(config.model.path)
    if Path(base).is_absolute():
        base = Path(base).name  # where it is on this machine is nobody else's business
    else:
        front["base_model"] = base
    revision = f" (revision {config.model.revision})" if config.model.revision else ""
    settings = read_object(Path(str(config.tuned_path)) / ADAPTER_CONFIG)
    shown = [name for name in ("r", "lora_alpha", "use_dora", "use_rslora") if settings.get(name)]
    adapter = [str(settings.get("peft_type")), *(f"{name}={settings[name]}" for name in shown)]
    how = [f"Merged vs {name}: {difference}." for name, difference in differences.items()]
    if (method := tuned.base.quantization.method) != "none":
        how.insert(0, f"Trained on {method} weights; merged onto {config.merge.onto} ones.")
    stop_tokens = tuned.tokenizer.convert_ids_to_tokens(sorted(tuned.stop_ids))
    body = [
        f"# {cell(Path(base).name)}, fine-tuned",
        "",
        f"`{cell(base)}`{cell(revision)} with an adapter ({', '.join(adapter)}) merged into it"
        f"{'' if objective is None else f', trained by {_objective_and_beta(objective)}'}, in "
        f"{str(dtype).removeprefix('torch.')}.",
        "",
        *(f"- {sentence}" for sentence in how),
        f"- An answer ends with {' or '.join(f'`{token}`' for token in stop_tokens)}.",
        "",
        *_snippet("THIS_FOLDER", task),
    ]
    if datasets := manifest.get("data", ()):
        body += ["", "## Trained on", ""]
        body += [
            f"- {cell(row.get('name'))}: {counted(row.get('train_rows', 0), 'row')}, "
            f"{row.get('validation_rows', 0):,} held out"
            for row in datasets
        ]
    figures = [
        [cell(name), f"{value:.4g}"]
        for name, value in metrics.items()
        if re.match("(base|tuned)/(val/(loss|accuracy)|exact_match)", name)
    ]
    if figures:
        body += ["", "## Measured on held-out rows", "", *_table([["figure", "value"], *figures])]
    return _join(front, [*body, ""])


def _objective_and_beta(objective: Mapping[str, Any]) -> str:
    name, beta = cell(objective.get("name") or "sft"), objective.get("beta")
    return f"objective={name}{'' if beta is None else f' (beta {cell(beta)})'}"


def _task(is_encoder_decoder: bool, num_outputs: int) -> str:
    """Return the hub's name of what a model does; `num_outputs` of a head for classes, or 0."""
    if num_outputs:
        return "text-classification"
    return "text2text-generation" if is_encoder_decoder else "text-generation"


_AUTO_CLASSES = {
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "text-classification": "AutoModelForSequenceClassification",
}
"""the hub's name of what a model does -> the class of transformers that opens it"""


def _join(front: Mapping[str, Any], body: Sequence[str]) -> str:
    text = "\n".join(printable(redact(line)) for line in body)
    return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n{text}"


def _snippet(
    saved: str,
    task: str,
    *,
    num_outputs: int = 0,
    adapter_base: str | None = None,
    revision: str | None = None,
) -> list[str]:
    kind, is_classifier = _AUTO_CLASSES[task], task == "text-classification"
    outputs = f", num_labels={num_outputs}" if num_outputs else ""
    lines = ["```python"]
    if adapter_base is not None:
        at_revision = f", revision={revision!r}" if revision else ""
        lines += [
            "from peft import PeftModel",
            f"from transformers import {kind}, AutoTokenizer",
            "",
            f'base = {kind}.from_pretrained({adapter_base!r}{at_revision}{outputs}, dtype="auto")',
            f"model = PeftModel.from_pretrained(base, {saved!r})",
        ]
    else:
        lines += [
            f"from transformers import {kind}, AutoTokenizer",
            "",
            f'model = {kind}.from_pretrained({saved!r}, dtype="auto")',
        ]
    lines.append(f"tokenizer = AutoTokenizer.from_pretrained({saved!r})")
    if is_classifier:
        return [
            *lines,
            'text = "..."  # a text or a chat as in training, up to its last stop token',
            'inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)',
            "print(model(**inputs).logits)",
            "```",
        ]
    special = task == "text2text-generation"
    return [
        *lines,
        'messages = [{"role": "user", "content": "..."}]',
        "text = tokenizer.apply_chat_template("
        "messages, add_generation_prompt=True, tokenize=False)",
        f'inputs = tokenizer(text, return_tensors="pt", add_special_tokens={special})',
        "answer = model.generate(**inputs, max_new_tokens=64)",
        "print(tokenizer.decode(answer[0], skip_special_tokens=True))",
        "```",
    ]


def _data_table(datasets: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [["data set", "rows", "held out", "trained tokens", "sha256"]]
    for row in datasets:
        counts = (row.get(key) or 0 for key in ("train_rows", "validation_rows", "trained_tokens"))
        digest = f"`{str(row.get('sha256') or '')[:16]}`"
        cells.append([cell(row.get("name")), *(f"{count:,}" for count in counts), digest])
    return _table(cells, num_texts=1)


def _metrics_section(saved: Path, run: RunFiles) -> list[str]:
    lines, cells = [], [list(map(cell, row)) for row in run.verdict.get("table", ())]
    if len(cells) > 1:
        lines += ["## Measured on held-out rows", "", *_table(cells), ""]
    if (saved / CURVES_FILE).is_file():
        lines += [f"![curves of training and validation]({CURVES_FILE})", ""]
    return lines


def _table(cells: Sequence[Sequence[str]], num_texts: int = 2) -> list[str]:
    heading, *rows = (f"| {' | '.join(row)} |" for row in cells)
    return [heading, "|" + "---|" * num_texts + "---:|" * (len(cells[0]) - num_texts), *rows]


def cell(text: object) -> str:
    """Escape a text for a cell of a Markdown table."""
    escaped = str(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return escaped.replace("`", "'").replace("[", "\\[").replace("\n", " ")


def license_of(base: str, *, is_local: bool) -> str | None:
    """Return the license in a base model's own card, if the card is on this machine."""
    cached = cache_folder() / f"models--{base.replace('/', '--')}" / "snapshots"
    cards = [Path(base) / CARD_FILE] if is_local else sorted(cached.glob(f"*/{CARD_FILE}"))
    for card in cards:
        try:
            text = card.read_text(encoding="utf-8")[:_MAX_README]
            _, front, _ = text.split("---\n", 2)
            values = yaml.safe_load(front)
        except (OSError, ValueError, yaml.YAMLError):
            continue
        found = values.get("license") if isinstance(values, Mapping) else None
        if isinstance(found, str) and found.isprintable() and len(found) < 60:
            return found
    return None


def _is_encoder_decoder(saved: Path) -> bool:
    for file in (saved / ADAPTER_CONFIG, saved / "config.json"):
        if not (values := read_object(file)):
            continue
        return values.get("task_type") == "SEQ_2_SEQ_LM" or bool(values.get("is_encoder_decoder"))
    return False
