"""The command that starts vLLM with a trained model, in a separate environment.

vLLM is never imported: it pins other versions of torch and transformers.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""values that vLLM accepts for --max-lora-rank"""


def find_unsupported_feature(adapter: Mapping[str, Any]) -> str | None:
    """Return the feature of an adapter_config.json that vLLM cannot serve unmerged, or None."""
    kind = adapter.get("peft_type")
    if kind != "LORA":
        return f"{kind} adapters"
    unsupported = {
        "use_dora": "DoRA",
        "modules_to_save": "fully trained modules",
        "trainable_token_indices": "trained token rows",
        "target_parameters": "adapters on experts",
        "rank_pattern": "per-module ranks",
        "alpha_pattern": "per-module alphas",
    }
    found = next((what for name, what in unsupported.items() if adapter.get(name)), None)
    if found is None and adapter.get("bias", "none") != "none":
        found = "trained biases"
    if found is None and int(adapter["r"]) > MAX_LORA_RANKS[-1]:
        found = f"ranks above {MAX_LORA_RANKS[-1]}"
    return found


def build_vllm_command(
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
    """Return the shell command that starts vLLM for `model` and, if given, a LoRA adapter.

    `tokenizer` is the folder with the chat template of training, `generation` the folder whose
    generation_config.json has the stop tokens of training, `rank` the adapter's rank.
    """
    words: Sequence[str] = ["vllm", "serve", model, "--tokenizer", str(tokenizer)]
    words = [*words, "--chat-template", str(tokenizer / "chat_template.jinja")]
    words = [*words, "--generation-config", str(generation), "--host", host, "--port", str(port)]
    words = [*words, "--revision", revision] if revision else words
    if adapter is None:
        return shlex.join([*words, "--served-model-name", name])
    max_rank = next(allowed for allowed in MAX_LORA_RANKS if allowed >= rank)
    lora = [
        "--enable-lora",
        "--max-lora-rank",
        str(max_rank),
        "--lora-modules",
        f"{name}={adapter}",
    ]
    return shlex.join([*words, *lora])
