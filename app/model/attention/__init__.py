"""Choose the attention backend of a run, and keep the documents of a batch apart in all backends.

A packed row holds several documents, and no token may attend to another document. Document lengths
are turned into index tensors or masks once per batch, and passed to all layers. `check_isolation`
tests before training that a model uses them.
"""

from app.model.attention.backends import (
    BACKEND_PACKAGES,
    EXCHANGED,
    GPU_ONLY,
    HALF_PRECISION_ONLY,
    AttentionConfig,
    attention_implementation,
    batching_error,
    choose_backend,
    gather_reason,
    generation_attention,
    key_repeats,
    packing_error,
    restore_kernel,
    select_fastest_kernel,
)
