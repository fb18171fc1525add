"""The start-up probe: do documents that are packed together see each other?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.model.attention.inputs import attention_inputs, pair_inputs

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def check_isolation(
    model: PreTrainedModel, backend: str, device: torch.device | None = None
) -> None:
    """Raise ValueError if editing one document of a pack changes another one's logits.

    Costs two forward passes of eight tokens, on `device` or where the model is; run before
    training, since models differ in what they hand on to their layers and libraries change.
    """
    import torch

    device = device or model.device
    vocab_size = model.config.get_text_config().vocab_size
    tokens = torch.arange(8, device=device).unsqueeze(0) % vocab_size
    edited = tokens.clone()
    edited[0, :4] = (edited[0, :4] + 11) % vocab_size
    inputs = attention_inputs(model, backend, [[4, 4]], tokens)
    position_ids = torch.arange(4, device=device).repeat(1, 2)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = [
            model(input_ids=ids, position_ids=position_ids, use_cache=False, **inputs).logits[0]
            for ids in (tokens, edited)
        ]
    model.train(was_training)
    changes = (logits[0] - logits[1]).float().abs()
    # Experts see other numbers of rows after the edit, so their products may round otherwise.
    rounding = 100 * torch.finfo(logits[0].dtype).eps * logits[0].float().abs().max().item()
    if changes[:4].max().item() <= rounding:
        raise ValueError(f"attention={backend}: the isolation probe saw no effect of its own edit")
    difference = changes[4:].max().item()
    if difference > rounding:
        raise ValueError(
            f"attention={backend}: documents packed together see each other "
            f"(logits differ by {difference:.2g}): type attention=eager, or packing=none"
        )


def check_pair_isolation(
    model: PreTrainedModel, backend: str, device: torch.device | None = None, *, is_packed: bool
) -> None:
    """Raise ValueError if a document's logits depend on what it shares a batch with.

    For encoder-decoder models; costs two forward passes of nine and five tokens, on `device` or
    where the model is. Packed, a document comes behind another neighbour than it had before: if it
    sees either, or counts positions from the row's start, it has other logits then. Padded, the
    tokens of the padding change.
    """
    import torch

    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits, others = (_moved if is_packed else _padded)(model, backend, device or model.device)
    model.train(was_training)
    scale = logits.float().abs().max().item()
    # The shapes are the same, so that even bf16 rounds alike: a wrong position changes far more.
    rounding = min(100 * torch.finfo(logits.dtype).eps, 0.05) * scale
    difference = (logits - others).float().abs().max().item()
    if difference > rounding:
        raise ValueError(
            f"attention={backend}: {_fault(is_packed)} (logits differ by {difference:.2g}): "
            f"type {'packing=none' if is_packed else 'attention=eager'}"
        )


def _fault(is_packed: bool) -> str:
    if is_packed:
        return "documents packed together see each other, or begin at wrong positions"
    return "documents see the padding behind them"


def _moved(
    model: PreTrainedModel, backend: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [3, vocabulary] of a document before one neighbour, and behind another one."""
    import torch

    source, target = _ids(model, device, 4, 3)
    others, other_targets = _ids(model, device, 10, 4)
    first = torch.cat([source, others[:5]]), torch.cat([target, other_targets[:2]])
    second = torch.cat([others[5:], source]), torch.cat([other_targets[2:], target])
    before = _pair_logits(model, backend, *first, [4, 5], [3, 2])
    return before[:3], _pair_logits(model, backend, *second, [5, 4], [2, 3])[2:]


def _padded(
    model: PreTrainedModel, backend: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [3, vocabulary] of a document before some padding, and before another."""
    import torch

    source, target = _ids(model, device, 4, 3)
    padding, other_padding = _ids(model, device, 10, 4)
    first = torch.cat([source, padding[:5]]), torch.cat([target, other_padding[:2]])
    second = torch.cat([source, padding[5:]]), torch.cat([target, other_padding[2:]])
    before = _pair_logits(model, backend, *first, [4], [3])
    return before[:3], _pair_logits(model, backend, *second, [4], [3])[:3]


def _ids(model: PreTrainedModel, device: torch.device, *lengths: int) -> tuple[torch.Tensor, ...]:
    """Token ids of two stretches, which begin with a different token each."""
    import torch

    vocab_size = model.config.get_text_config().vocab_size
    return tuple(torch.arange(n, n + n, device=device) % vocab_size for n in lengths)


def _pair_logits(
    model: PreTrainedModel,
    backend: str,
    sources: torch.Tensor,
    targets: torch.Tensor,
    source_lengths: list[int],
    target_lengths: list[int],
) -> torch.Tensor:
    ids = {"input_ids": sources.unsqueeze(0), "decoder_input_ids": targets.unsqueeze(0)}
    inputs = pair_inputs(model, backend, [source_lengths], [target_lengths], *ids.values())
    logits: torch.Tensor = model(**ids, use_cache=False, **inputs).logits[0]
    return logits
