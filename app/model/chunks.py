"""How many positions have their logits in memory at once. Importing this needs no torch."""

from __future__ import annotations

LOGITS_PER_CHUNK = 2**25
"""logits in memory at once: 128 MiB in fp32, enough for products at full speed"""
CPU_LOGITS, CPU_ROWS = 2**21, 256
"""logits per chunk that fit in a CPU's cache, and the smallest chunk with fast matrix products"""
_GPU_ROWS = 1024
"""smallest chunk on a GPU, in positions: with fewer, reading the weight dominates the time"""
_GPU_TILE = 128
"""rows of a matrix product's tile on a GPU"""
FUSED_CHUNKS, TRAINED_CHUNKS = 2, 4
"""factors on the chunk length: with the fused loss kernel, which needs no fp32 logits; and with a
trainable head, whose whole gradient is updated once per chunk"""

FEED_FORWARD_TOKENS = 2**14
"""tokens for which a recomputed layer has its feed-forward's activations in memory at once"""


def rows_per_chunk(vocabulary: int, device: str) -> int:
    """Return the number of positions whose logits are in memory at the same time."""
    rows = max(1, LOGITS_PER_CHUNK // vocabulary)
    if device == "cpu":
        from app.model.cpu import ROWS

        rows = min(rows, max(CPU_LOGITS // vocabulary, CPU_ROWS))
        return rows - rows % ROWS or rows
    rows = max(rows, _GPU_ROWS)
    return rows - rows % _GPU_TILE
