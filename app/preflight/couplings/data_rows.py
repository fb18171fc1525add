"""Rows on data: what is asked of it, and what a stream cannot give."""

from __future__ import annotations

from app.preflight.couplings.situation import Coupling

DATA_ROWS = (
    Coupling(
        "evaluation.exact_match data.val_set_size data.test_datasets",
        lambda s: (
            s.config.evaluation.exact_match
            and not s.config.data.val_set_size
            and not s.config.data.test_datasets
        ),
        lambda s: "evaluation.exact_match=true, but there are no rows to ask",
        lambda s: "data.val_set_size=0.05, or data.test_datasets=[{path: FILE}]",
    ),
    Coupling(
        "data.streaming trainer.max_steps",
        lambda s: s.config.data.streaming and s.config.trainer.max_steps is None,
        lambda s: "data.streaming=true without trainer.max_steps: a stream has no end",
        lambda s: "trainer.max_steps=N, or data.streaming=false",
    ),
    Coupling(
        "data.streaming packing.window",
        lambda s: s.config.data.streaming and s.config.packing.window is not None,
        lambda s: (
            f"packing.window={s.config.packing.window} means nothing for data.streaming=true, "
            "which packs windows of its own"
        ),
        lambda s: "packing.window=null",
    ),
)
