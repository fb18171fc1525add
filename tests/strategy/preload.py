"""Build a model before ranks are forked, so that they inherit what it imports and compiles."""

from __future__ import annotations

from tests.strategy.fsdp_training import model_builder

model_builder("lora")(on_meta=True)
