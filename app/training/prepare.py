"""Prepare a model for its first batch: verify it, fuse its layers, seed and restore this rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from app.model.adapter import group_adapters
from app.model.architecture import reading_first_forward
from app.model.attention import (
    attention_inputs,
    check_against_eager,
    check_causal,
    check_isolation,
    check_padded_rows,
    check_pair_isolation,
    mixers_run_by_document,
    select_fastest_kernel,
)
from app.model.attention.exchange import check_exchange
from app.model.attention.mixer_search import isolate_mixers
from app.model.classifier import hidden_as_logits
from app.model.feed_forward import chunk_feed_forwards
from app.model.fp8 import train_in_fp8
from app.model.head import check_head_loss, run_probe
from app.model.kernels import fuse_layers
from app.model.quantization import quantize_tokens_independently
from app.training.fp8_check import check_fp8
from app.training.resume import check_same_step

if TYPE_CHECKING:
    from app.training.module import FinetuneModule


def prepare_model(module: FinetuneModule) -> None:
    """Verify and speed up the module's built model, then seed this rank and restore the optimizer.

    UserError if the model mixes documents, or computes another attention or loss than its
    definition; a faster layer that computes something else is only left out.
    """
    model, strategy, backend = module.model, module.strategy, module.backend
    device = strategy.root_device
    per_token = quantize_tokens_independently(model)
    with module.trainer.precision_plugin.forward_context(), per_token:
        # 1. The attention kernel, first: everything below verifies the one that will train.
        if module.uses_fused_kernels:
            select_fastest_kernel(backend, model.config, device)
        # 2. Attention and head against their definitions, while all layers are still the base's.
        with reading_first_forward(model), hidden_as_logits(model):
            verify_attention(module, device)
            check_head_loss(model, backend, device)
        # 3. Products in FP8, then fused layers, each verified against the layer that it replaces.
        if module.trains_in_fp8:
            train_in_fp8(model)
        if module.uses_fused_kernels and strategy.fuses_adapters:
            run = partial(run_probe, model, backend, device)
            fuse_layers(model, strategy.gathered, device, run)
            if device.type == "cuda":  # results on a CPU must not change
                group_adapters(model, run)
            if module.recomputes_layers:
                chunk_feed_forwards(model)
    # 4. The base's log-probabilities, by the layers that will train.
    if module.store_references is not None:
        module.store_references(module)
    # 5. The micro-batch, measured with these layers, too.
    if module.probe_micro_batch is not None:
        module.probe_micro_batch(module)
    # 6. Products in FP8 against bf16, on a first micro-batch of the size that was found.
    check_fp8(module)
    # 7. From here on only dropout draws random numbers, and each rank must draw different ones.
    torch.manual_seed(torch.initial_seed() + strategy.random_rank)
    # 8. The checkpoint's optimizer, last: all before it has run forward and backward passes.
    check_same_step(module.trainer, module.resume)
    if module.resume is not None:
        module.resume.restore_optimizer()


def verify_attention(module: FinetuneModule, device: torch.device) -> None:
    """Verify that no token reads a later one or another document, and the result against eager.

    Layers that must run document by document to keep documents apart are told to the strategy.
    """
    model, backend, is_packed = module.model, module.backend, module.is_packed
    ranks = module.strategy.context_ranks
    if model.config.is_encoder_decoder:
        check_pair_isolation(model, backend, device, is_packed=is_packed)
        return
    check_causal(model, device)
    if is_packed:
        check_isolation(model, backend, device)
    else:
        check_padded_rows(model, backend, device)
        if ranks is not None:  # recurrent layers gather the slices of padded rows, too
            isolate_mixers(model, device, partial(attention_inputs, model, backend))
    module.strategy.set_leaf_modules(mixers_run_by_document(model))
    check_against_eager(model, backend, device, is_packed=is_packed)
    if ranks is not None:
        check_exchange(model, backend, device, ranks)
