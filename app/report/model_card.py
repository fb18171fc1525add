"""The README.md of a merged model: what it is, what it was made of, and how it was checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from app.process.errors import UserError
from app.process.untrusted import read_json_object
from data_modules import printable, redact

if TYPE_CHECKING:
    import torch

    from app.assembly.tuned import Tuned
    from app.config import MergeConfig
    from app.model.merging import Difference

CARD_FILE = "README.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFacts:
    """What a model card says."""

    base: str
    revision: str | None
    adapter: str
    """its kind and settings in words"""
    dtype: str
    how: Sequence[str]
    """how it was merged and checked, a sentence each"""
    stop_tokens: Sequence[str]
    is_encoder_decoder: bool
    datasets: Sequence[Mapping[str, Any]] = ()
    """name and numbers of rows, as a run's manifest has them"""
    metrics: Mapping[str, float] = field(default_factory=dict)


def render_card(facts: CardFacts) -> str:
    """Return the card as Markdown, with what the hub reads of it in front."""
    kind = "AutoModelForSeq2SeqLM" if facts.is_encoder_decoder else "AutoModelForCausalLM"
    task = "text2text-generation" if facts.is_encoder_decoder else "text-generation"
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": task}
    base = facts.base
    if Path(base).is_absolute():
        base = Path(base).name  # where it lies here is nobody else's business
    else:
        head["base_model"] = base
    front = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    revision = f" (revision {facts.revision})" if facts.revision else ""
    lines = [
        f"# {Path(base).name}, fine-tuned",
        "",
        f"`{base}`{revision} with {facts.adapter} merged into it, in {facts.dtype}.",
        "",
        *(f"- {sentence}" for sentence in facts.how),
        f"- An answer ends with {' or '.join(f'`{token}`' for token in facts.stop_tokens)}.",
        "",
        "```python",
        f"from transformers import {kind}, AutoTokenizer",
        "",
        f'model = {kind}.from_pretrained("THIS_FOLDER", dtype="auto")',
        'tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")',
        'messages = [{"role": "user", "content": "..."}]',
        "text = tokenizer.apply_chat_template("
        "messages, add_generation_prompt=True, tokenize=False)",
        f"inputs = tokenizer(text, return_tensors='pt', "
        f"add_special_tokens={facts.is_encoder_decoder})",
        "answer = model.generate(**inputs)",
        "```",
    ]
    if facts.datasets:
        lines += ["", "## Trained on", ""]
        lines += [
            f"- {one.get('name')}: {one.get('train_rows', 0):,} rows, "
            f"{one.get('validation_rows', 0):,} held out"
            for one in facts.datasets
        ]
    shown = {
        name: value
        for name, value in facts.metrics.items()
        if re.match("(base|tuned)/(val/loss|exact_match)", name)
    }
    if shown:
        lines += ["", "## Measured on held-out rows", "", "| figure | value |", "|---|---|"]
        lines += [f"| {name} | {value:.4g} |" for name, value in shown.items()]
    body = "\n".join(printable(redact(line)) for line in lines)
    return f"---\n{front}---\n\n{body}\n"


def describe_merged(
    config: MergeConfig,
    tuned: Tuned,
    differences: Mapping[str, Difference],
    dtype: torch.dtype,
    manifest: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> CardFacts:
    """Return what the model card says."""
    how = [f"Merged vs {name}: {difference}." for name, difference in differences.items()]
    if tuned.base.quantization.method != "none":
        method = tuned.base.quantization.method
        how.insert(0, f"Trained on {method} weights; merged onto {config.merge.onto} ones.")
    settings = read_json(Path(str(config.tuned_path)) / "adapter_config.json")
    kind = str(settings.get("peft_type"))
    words = [
        f"{name}={settings[name]}"
        for name in ("r", "lora_alpha", "use_dora", "use_rslora")
        if settings.get(name)
    ]
    return CardFacts(
        base=str(config.model.path),
        revision=config.model.revision,
        adapter=f"an adapter ({', '.join([kind, *words])})",
        dtype=str(dtype).removeprefix("torch."),
        how=how,
        stop_tokens=tuned.tokenizer.convert_ids_to_tokens(sorted(tuned.stop_ids)),
        is_encoder_decoder=tuned.base.architecture.is_encoder_decoder,
        datasets=manifest.get("data", ()),
        metrics=metrics,
    )


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object of a run's folder; nothing where there is none."""
    if not file.is_file():
        return {}
    content, problem = read_json_object(file)
    if problem is not None:
        raise UserError(problem)
    return content
