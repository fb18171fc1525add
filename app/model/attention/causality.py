"""The start-up probe of direction: does a token see what comes behind it?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

FIRST_ID, TOKENS = 3, 8
SEEN = 0.02
"""share of the logits' spread by which a token's move at least where it sees what was edited"""


def check_causal(model: PreTrainedModel, device: torch.device | None = None) -> None:
    """Raise UserError where tokens of a causal model see those behind them, as in a BERT.

    Such a model would be shown the answers that it is trained to give. Costs two forward passes of
    eight tokens, on `device` or where the model is.
    """
    import torch

    vocab_size = model.config.get_text_config().vocab_size
    device = device or model.device
    ids = torch.arange(FIRST_ID, FIRST_ID + TOKENS, device=device).unsqueeze(0) % vocab_size
    edited, half = ids.clone(), TOKENS // 2
    edited[0, half:] = (edited[0, half:] + TOKENS) % vocab_size
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits, others = (
            model(input_ids=one, use_cache=False).logits[0, :half].float() for one in (ids, edited)
        )
    model.train(was_training)
    # The median token: an expert that is chosen otherwise, by rounding, changes one or two.
    moved = (logits - others).std(-1).median()
    if moved > SEEN * logits.std(-1).mean():
        raise UserError(
            f"{model.config.model_type} models let a token see those behind it, so that this one "
            "would be shown the answers that it is trained to give: type model.path=ANOTHER_BASE; "
            'a BERT is causal where its config.json says "is_decoder": true'
        )
