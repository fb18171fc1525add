"""Which documents are in an epoch and share a pack, and in which step and rank they are used.

Its settings are here, apart from what imports numpy.
"""

from dataclasses import dataclass

from common.facts import setting


@dataclass(kw_only=True, slots=True)
class PackingConfig:
    """How documents are packed."""

    method: str = setting("multipack", choices=("multipack", "like_length", "none"))
    """multipack: documents fill packs of `data.sequence_len` tokens, each attending to itself only
    (fastest); like_length: the same with documents of similar length in a pack (cheaper attention,
    packs differ more); none: one document a row, right-padded (slower), which is chosen
    automatically, with a message, for models that cannot keep the documents of a pack apart"""
    window: int | None = setting(None, ge=1)
    """number of documents that are packed together; null = all of an epoch (fuller packs)"""


@dataclass(kw_only=True, slots=True)
class MixtureConfig:
    """The meaning of the data sets' weights."""

    weights: str = setting("epochs", choices=("epochs", "rows", "tokens"))
    """epochs: how often each row is seen in an epoch; rows: a data set's share of an epoch's rows;
    tokens: its share of an epoch's tokens. Shares need not sum to 1: 7 and 3 are 70 % and 30 %"""
    temperature: float | None = setting(None, gt=0)
    """null: the weights are the shares, regardless of size; T: shares are proportional to
    weight * size^(1/T), size in rows or tokens: 1 = by size, more = more equal"""
    stop: str = setting("all", choices=("all", "first"))
    """with shares, an epoch ends when every data set was seen completely (all: smaller ones
    repeat), or when the first one is exhausted (first: the others continue in the next epoch)"""
