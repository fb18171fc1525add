"""Tiny multimodal checkpoints of several families, including random vision towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)
from transformers.models.auto import modeling_auto

from tests.parity.every_family import SMALL, tiny_config
from tests.tiny import TINY_BASE, randomize, save_with_tokenizer

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}


def whole_class(config: Any) -> Any:
    """Return the class with which transformers opens a multimodal checkpoint."""
    return modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]


def tiny_multimodal(family: str) -> Any:
    """Build a random multimodal fp32 model with 768 tokens; every weight affects its logits."""
    config = tiny_config(family)
    if config.sub_configs.get("vision_config") and config.vision_config is None:
        kind = config.sub_configs["vision_config"]
        config.vision_config = kind(**(SMALL | VISION))
    text = config.get_text_config()
    text.vocab_size, text.max_position_embeddings = 768, 512
    if hasattr(text, "vocab_size_per_layer_input"):
        text.vocab_size_per_layer_input = 768
    torch.manual_seed(0)
    model = whole_class(config)(config)
    randomize(model)
    model.set_attn_implementation("eager")
    return model.eval()


def llava_of_the_tiny_base(folder: Path) -> Path:
    """Save a LLaVA whose language model is the shipped base."""
    text = AutoModelForCausalLM.from_pretrained(TINY_BASE, dtype=torch.float32)
    config = LlavaConfig(
        text_config=text.config,
        vision_config=SiglipVisionConfig(**VISION),
        tie_word_embeddings=text.config.tie_word_embeddings,
        image_token_index=text.config.vocab_size - 1,
    )
    torch.manual_seed(0)
    whole = LlavaForConditionalGeneration(config).float()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    return save_with_tokenizer(whole, folder)
