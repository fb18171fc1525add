"""Tiny random models of families with other kinds of layers than Llama."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.tiny import randomize

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
ENCODER = {"is_decoder": True}
"""settings that make a BERT causal"""
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": ENCODER,
    "bloom": {"n_head": 4, "n_layer": 2},
    "bamba": STATES | {"attn_layer_indices": [1]},
    "diffllama": {},
    "falcon_h1": STATES | {"mamba_d_ssm": 64},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4, "num_attention_heads": None},
    "granitemoehybrid": STATES
    | {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "shared_intermediate_size": 48,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
    | {"num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "mamba": {"state_size": 8, "time_step_rank": 4, "num_attention_heads": None},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16}
    | {"num_attention_heads": None},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 48,
    },
    "olmo_hybrid": LINEAR,
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR | EXPERTS,
    "roberta": ENCODER,
    "trocr": {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": True,
        "adapter_rank": 4,
        "num_key_value_heads": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "mamba_d_state": 8,
        "chunk_size": 16,
    },
}


def tiny_family(name: str, **numbers: Any) -> Any:
    """Build a random fp32 model of a family without dropout; every weight affects its logits.

    `numbers` change what `FAMILIES` has of it.
    """
    config = AutoConfig.for_model(name, **(SHAPE | FAMILIES.get(name, {}) | numbers))
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    randomize(model)
    return model


def on_meta(kind: str, **numbers: Any) -> Any:
    """Build a two-layer model on the meta device, as transformers builds it."""
    pair = {"d_model": 32, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "n_head": 4, "num_hidden_layers": 2}
    sizes = {"vocab_size": 64, "pad_token_id": 0} | (pair if kind in ("t5", "bart") else sizes)
    config = AutoConfig.for_model(kind, **(sizes | numbers))
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)
