"""Builds a model once, before ranks are forked: what is read and compiled for it is then kept."""

from __future__ import annotations

from tests.strategy.shards import builder

builder("lora")(on_meta=True)
