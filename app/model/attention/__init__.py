"""Which attention runs, and how the documents of a batch are kept apart from each other.

A packed batch holds many documents in one row, and no token may attend to another document. The
boundaries of a batch become indices once, which every layer gets. Whether a model passes them on to
its layers is checked before training (`check_isolation`).
"""

from app.model.attention.backends import (
    BY_BOUNDARIES,
    BY_DOCUMENT,
    IN_HALF,
    ON_GPU,
    PACKAGES,
    AttentionConfig,
    attention_implementation,
    check_implementation,
    generation_attention,
    why_not_batched,
    why_not_packed,
)
from app.model.attention.choice import (
    AttentionChoice,
    choose_backend,
    restore_kernel,
    take_fastest_kernel,
)
from app.model.attention.inputs import attention_inputs, pair_inputs
from app.model.attention.mixers import keep_documents, modules_by_document
from app.model.attention.probes import (
    check_causal,
    check_isolation,
    check_pair_isolation,
    check_reference,
    free_mixers,
)

__all__ = [
    "BY_BOUNDARIES",
    "BY_DOCUMENT",
    "IN_HALF",
    "ON_GPU",
    "PACKAGES",
    "AttentionChoice",
    "AttentionConfig",
    "attention_implementation",
    "attention_inputs",
    "check_causal",
    "check_implementation",
    "check_isolation",
    "check_pair_isolation",
    "check_reference",
    "choose_backend",
    "free_mixers",
    "generation_attention",
    "keep_documents",
    "modules_by_document",
    "pair_inputs",
    "restore_kernel",
    "take_fastest_kernel",
    "why_not_batched",
    "why_not_packed",
]
