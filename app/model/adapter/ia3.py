"""IA3: vectors that scale keys, values and the feed-forward's inside (arXiv 2205.05638)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.model.adapter import targets
from app.model.adapter.settings import Ia3Config
from app.model.adapter.wrap import wrap
from app.process.errors import UserError

if TYPE_CHECKING:
    import peft
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

KEYS_AND_VALUES = (("k_proj", "v_proj"), ("k", "v"))
"""matrices of their own: most models, T5"""
FUSED = {
    "bloom": "query_key_value",
    "falcon": "query_key_value",
    "gpt2": "c_attn",
    "gpt_bigcode": "c_attn",
    "gpt_neox": "query_key_value",
    "mpt": "Wqkv",
    "phi3": "qkv_proj",
}
"""by model_type: query, key and value are one matrix, so the query is scaled with them"""
FEED_FORWARD = (
    "down_proj",
    "fc2",
    "DenseReluDense.wo",
    "dense_4h_to_h",
    "mlp.c_proj",
    "fc_out",
)
"""the second matrix of the feed-forward, whose input is what is inside"""


def apply_ia3(model: PreTrainedModel, config: Ia3Config) -> peft.PeftModel:
    """Put vectors of ones on the outputs of keys and values and the inputs of the feed-forward.

    ValueError for a pattern that matches nothing, and for an architecture that is not known.
    """
    import peft
    from transformers.pytorch_utils import Conv1D

    linear = targets.linear_modules(model)
    patterns, names, inner = target_modules(model, config)
    every = [name for name, _ in model.named_modules()]
    short = targets.shortest(names, patterns if isinstance(patterns, list) else [], every)
    short_inner = [one for one in short if any(map(targets.is_ending(one), inner))]
    # peft wants feedforward_modules among target_modules, and compares them without a dot.
    if {name for name in names if name.endswith(tuple(short_inner))} != set(inner):
        short, short_inner = sorted(names), sorted(inner)
    counts = Counter(name.rpartition(".")[2] for name in names)
    log.info("ia3: vectors on %s", ", ".join(f"{end} x {count}" for end, count in counts.items()))
    return wrap(
        model,
        peft.IA3Config(
            task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
            target_modules=short,
            feedforward_modules=short_inner,
            fan_in_fan_out=any(isinstance(linear[name], Conv1D) for name in names),
        ),
    )


def target_modules(
    model: PreTrainedModel, config: Ia3Config
) -> tuple[list[str] | str, list[str], list[str]]:
    """Return the patterns, the full names of what is scaled, and those whose input is scaled."""
    names = targets.in_layers(model, config.layers, targets.linear_modules(model))
    patterns, inner = config.target_modules, config.feedforward_modules
    if patterns == "auto":
        patterns = _by_architecture(model, names)
    chosen = targets.match(patterns, names, "adapter.target_modules")
    if inner == "auto":
        return patterns, chosen, [name for name in chosen if _is_feed_forward(name)]
    if not inner:
        return patterns, chosen, []
    scaled_inside = targets.match(inner, names, "adapter.feedforward_modules")
    if outside := [name for name in scaled_inside if name not in chosen]:
        raise UserError(
            f"adapter.feedforward_modules={inner} means {outside[0]} as well, which is not among "
            f"adapter.target_modules={patterns}; name it in both, or in neither"
        )
    return patterns, chosen, scaled_inside


def _by_architecture(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Return the endings of keys, values and feed-forward; ValueError where they are not known."""
    model_type = model.config.model_type

    def exists(ending: str) -> bool:
        return any(map(targets.is_ending(ending), names))

    attention = [list(pair) for pair in KEYS_AND_VALUES if all(map(exists, pair))]
    if model_type in FUSED and exists(FUSED[model_type]):
        attention = [[FUSED[model_type]]]
    feed_forward = [ending for ending in FEED_FORWARD if exists(ending)]
    if not attention or not feed_forward:
        raise UserError(
            f"adapter=ia3: which modules of {model_type} models are keys, values and feed-forward "
            "is not known; type adapter.target_modules=[...] and adapter.feedforward_modules="
            f"[...]; the model has {', '.join(targets.endings(names))}"
        )
    return [*attention[0], feed_forward[0]]


def _is_feed_forward(name: Any) -> bool:
    return any(targets.is_ending(ending)(name) for ending in FEED_FORWARD)
