"""The micro-batches of a data module, one after the other."""

from __future__ import annotations

from itertools import chain

from data_modules import Batch, FinetuneDataModule


def micro_batches(module: FinetuneDataModule) -> list[Batch]:
    """Return this rank's micro-batches of all steps."""
    return list(chain.from_iterable(module.train_dataloader()))
