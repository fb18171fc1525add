"""A loop written with transformers and peft only, on full sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.task import Part, Task, lora_of

if TYPE_CHECKING:
    from data_modules import Batch


def train(task: Task, part: Part, recompute: str, batches: Sequence[Batch], clock: Clock) -> str:
    """Train on the same tokens, one sequence per row, with transformers' own loss.

    Return the attention that transformers uses.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    numbers = dict(task.shape)
    architecture = AutoConfig.for_model(numbers.pop("model_type"), **numbers)
    with torch.device(task.device):
        model: Any = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16)
    if recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if part.adapter == "lora":
        import peft

        ours = lora_of(part)
        theirs = peft.LoraConfig(
            r=ours.r,
            lora_alpha=2 * ours.r,
            lora_dropout=ours.dropout,
            target_modules="all-linear",
        )
        model = peft.get_peft_model(model, theirs)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0, fused=True)
    autocast = torch.autocast(task.device, torch.bfloat16, enabled=part.adapter == "lora")
    micro_batches = task.tokens_per_step // (part.packs * task.sequence_len)
    clock.start()
    for number, batch in enumerate(batches, start=1):
        ids = batch.input_ids.view(part.packs, -1).to(task.device, non_blocking=True)
        clock.mark("between")
        with autocast:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / micro_batches
        clock.mark("forward")
        loss.backward()
        clock.mark("backward")
        clock.micro_batch_done(batch.num_tokens)
        if number % micro_batches:
            continue
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.mark("optimizer")
        clock.step_done()
    return str(architecture._attn_implementation)
