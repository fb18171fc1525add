"""A step written with transformers, peft and bitsandbytes only, on full sequences.

Attention is the flash kernel that `scaled_dot_product_attention` takes on a GPU, and the loss is
transformers' own, from all logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.fake_device.ours import DEVICE, place, take_first_step
from benchmarks.gpu.task import RANK
from tools.simulate.counting import Counted, OperatorCounter


def count(words: Sequence[str], architecture: dict[str, Any], lengths: Sequence[int]) -> Counted:
    """Count a step on rows of equal `lengths`; options: `lora`, `nf4`, `recompute`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    numbers = dict(architecture)
    config = AutoConfig.for_model(numbers.pop("model_type"), **numbers)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    if "nf4" in words:
        _quantize(model, recomputes="recompute" in words)
    elif "recompute" in words:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if "lora" in words:
        import peft

        lora = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
        with torch.device("meta"):
            model = peft.get_peft_model(model, lora)
    model.train()
    rows = torch.zeros(len(lengths), lengths[0], dtype=torch.int64).pin_memory()
    counting = OperatorCounter(num_pairs=float(sum(length**2 for length in lengths)))
    with FakeTensorMode(allow_non_fake_inputs=True), flash_attention():
        with OperatorCounter(num_pairs=0):
            place(model)
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0, fused=True)
            if "lora" not in words:
                take_first_step(trained, optimizer)
        with counting, counting.watching_modules(), counting.without_gradients(trained):
            ids = rows.to(DEVICE, non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16, enabled="lora" in words):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            counting.phase = "backward"
            loss.backward()
            counting.phase = "step"
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
    return Counted(
        tally=counting.tally,
        model=model,
        optimizer=optimizer,
        num_tokens=rows.numel(),
        num_trained=rows.numel(),
    )


def _quantize(model: Any, *, recomputes: bool) -> None:
    """Replace the layers as transformers does, and prepare the rest as peft recommends."""
    import peft

    from app.model.quantization import QuantizationConfig, quantization_settings, quantize_on_meta

    config = QuantizationConfig(method="nf4")
    quantize_on_meta(model, config, torch.bfloat16)
    model.config.quantization_config = quantization_settings(config, torch.bfloat16)
    model.is_loaded_in_4bit = True
    peft.prepare_model_for_kbit_training(
        model,
        use_gradient_checkpointing=recomputes,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )


@contextmanager
def flash_attention() -> Iterator[None]:
    """Use the attention kernel that PyTorch would use on a GPU."""
    functional = torch.nn.functional
    own = functional.scaled_dot_product_attention

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        assert attn_mask is None and is_causal
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        output: torch.Tensor = kernel(query, key, value, dropout_p, True, False, scale=scale)[0]
        return output

    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = own
