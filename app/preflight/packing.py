"""Which bases cannot be packed, said before any weight is read."""

from __future__ import annotations

from app.model.attention import AttentionConfig, why_not_packed
from app.preflight.base_model import BaseModel
from data_modules import PackingConfig

SEES_PADDING = ("encoder-decoder", "prophetnet")
"""model types that train neither packed nor padded: no mask of theirs hides all of the padding"""


def check_packing_of_base(
    packing: PackingConfig, attention: AttentionConfig, base: BaseModel
) -> list[str]:
    """List why the documents of a pack cannot be kept apart in this base."""
    numbers = base.numbers or {}
    if (model_type := numbers.get("model_type")) in SEES_PADDING:
        return [
            f"{base.name}: {model_type} models let documents see the padding behind them, and each "
            "other in a pack: type model.path=ANOTHER_BASE"
        ]
    if packing.method == "none":
        return []
    if reason := why_not_packed(numbers):
        return [f"packing={packing.method}: {reason}"]
    if numbers.get("is_encoder_decoder") and attention.backend == "eager":
        return [
            f"packing={packing.method}: attention=eager cannot keep the documents of a pack apart "
            "in an encoder-decoder model: type packing=none"
        ]
    return []
