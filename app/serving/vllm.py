"""The line that starts vLLM with what a run has trained, for an environment of its own.

vLLM is not installed here: it pins another torch and another transformers.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""values of --max-lora-rank"""


def why_merge_first(adapter: Mapping[str, Any]) -> str | None:
    """Return what of an adapter_config.json vLLM does not serve beside its base; None: nothing."""
    kind = adapter.get("peft_type")
    if kind != "LORA":
        return f"{kind} adapters"
    unserved = {
        "use_dora": "DoRA",
        "modules_to_save": "modules trained whole",
        "trainable_token_indices": "trained token rows",
        "target_parameters": "adapters on experts",
        "rank_pattern": "ranks by module",
        "alpha_pattern": "alphas by module",
    }
    found = next((what for name, what in unserved.items() if adapter.get(name)), None)
    if found is None and adapter.get("bias", "none") != "none":
        found = "trained biases"
    if found is None and int(adapter["r"]) > RANKS[-1]:
        found = f"ranks above {RANKS[-1]}"
    return found


def command(
    model: str,
    name: str,
    *,
    host: str,
    port: int,
    tokenizer: Path,
    generation: Path,
    adapter: Path | None = None,
    rank: int = 0,
    revision: str | None = None,
) -> str:
    """Return the line that starts vLLM for `model`, with an adapter where there is one.

    `tokenizer` is the folder with the template of training, `generation` the one whose
    generation_config.json has its stop tokens.
    """
    words: Sequence[str] = ["vllm", "serve", model, "--tokenizer", str(tokenizer)]
    words = [*words, "--chat-template", str(tokenizer / "chat_template.jinja")]
    words = [*words, "--generation-config", str(generation), "--host", host, "--port", str(port)]
    words = [*words, "--revision", revision] if revision else words
    if adapter is None:
        return shlex.join([*words, "--served-model-name", name])
    least = next(one for one in RANKS if one >= rank)
    lora = ["--enable-lora", "--max-lora-rank", str(least), "--lora-modules", f"{name}={adapter}"]
    return shlex.join([*words, *lora])
