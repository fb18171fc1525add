"""IA3: vectors that scale keys, values and the feed-forward's inside (arXiv 2205.05638)."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from app.model.adapter import targets
from app.model.adapter.settings import Ia3Config
from app.model.adapter.wrap import wrap
from app.model.patterns import by_ending, shortest
from app.process.errors import UserError

if TYPE_CHECKING:
    import peft
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


def apply_ia3(model: PreTrainedModel, config: Ia3Config) -> peft.PeftModel:
    """Put vectors of ones on the outputs of keys and values and the inputs of the feed-forward.

    UserError for a pattern that matches nothing, and for an architecture that is not known.
    """
    import peft
    from transformers.pytorch_utils import Conv1D

    found = targets.find_targets(config, targets.modules_of(model))
    if found.problems:
        raise UserError(found.problems)
    names, inner = found.matrices, found.scaled_inputs
    every = [name for name, _ in model.named_modules()]
    short = shortest(names, found.endings, every)
    short_inner = [one for one in short if by_ending(one, inner)]
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
            fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in names),
        ),
    )
