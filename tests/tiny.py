"""Models that are built in milliseconds, and runs of a few steps on the shipped samples."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    BartForConditionalGeneration,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
)

from tests.conftest import ROOT
from tests.in_process import run_into

SAMPLES = ROOT / "data_modules" / "samples"
TINY_BASE = SAMPLES / "tiny_base"
NAMES = ["lists", "orders"]
SMALL_RUN = {
    "data.datasets": (
        f"[{{path: {SAMPLES / 'lists_test.json'}, name: lists}},"
        f" {{path: {SAMPLES / 'orders_test.jsonl'}, name: orders}}]"
    ),
    "data.val_set_size": "6",
    "data.sequence_len": "256",
    "trainer.max_steps": "4",
    "trainer.gradient_accumulation_steps": "2",
    "trainer.precision": "fp32",
    "evaluation.show_answers": "0",
}


@functools.cache
def small_base() -> Path:
    """Return the folder of the shipped base without its upper two layers, made once per process."""
    parent = Path(tempfile.mkdtemp(prefix="loft"))
    maker = os.getpid()
    atexit.register(lambda: os.getpid() == maker and shutil.rmtree(parent, ignore_errors=True))
    folder = shutil.copytree(TINY_BASE, parent / TINY_BASE.name)
    config = json.loads((TINY_BASE / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    tensors = load_file(TINY_BASE / "model.safetensors")
    above = (".layers.2.", ".layers.3.")
    kept = {name: one for name, one in tensors.items() if not any(part in name for part in above)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def small_run(*words: str) -> list[str]:
    """Return the overrides of a run of four steps on two data sets; `words` take precedence."""
    chosen = {"model.path": str(small_base())} | SMALL_RUN
    chosen |= dict(word.split("=", 1) for word in words)
    return [f"{key}={value}" for key, value in chosen.items()]


def train_into(folder: Path, *words: str) -> Path:
    """Run `app.train` in this process, for fixtures that several tests share."""
    run_into("train", folder, *small_run(*words))
    return folder


SMALL = {"vocab_size": 64, "eos_token_id": 2, "pad_token_id": 0}


def build_random(
    model_class: Any, seed: int, shape: dict[str, Any], numbers: dict[str, Any]
) -> Any:
    """Build a random fp32 model of a shape that `numbers` change."""
    torch.manual_seed(seed)
    return model_class(model_class.config_class(**(SMALL | shape | numbers))).eval()


def tiny_llama(*, seed: int = 0, **numbers: Any) -> LlamaForCausalLM:
    """Build a random fp32 Llama with two layers, 64 tokens and a tied head; `numbers` change it.

    Its weights are large enough for every token to have its own logits.
    """
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": None,
    }
    return build_random(LlamaForCausalLM, seed, shape, numbers)


def tiny_gpt2(*, seed: int = 0, **numbers: Any) -> GPT2LMHeadModel:
    """Build a random fp32 GPT-2 (transposed matrices) with two layers and a tied head."""
    shape = {
        "n_embd": 32,
        "n_inner": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "initializer_range": 0.2,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
    }
    return build_random(GPT2LMHeadModel, seed, shape, numbers)


def tiny_t5(*, seed: int = 0, **numbers: Any) -> T5ForConditionalGeneration:
    """Build a random fp32 T5 with 2 encoder and 2 decoder layers, 64 tokens and a tied head."""
    shape = {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    }
    return build_random(T5ForConditionalGeneration, seed, shape, numbers)


def tiny_bart(*, seed: int = 0, **numbers: Any) -> BartForConditionalGeneration:
    """Build a random fp32 BART with 2 encoder and 2 decoder layers, 64 tokens and a tied head."""
    shape = {
        "d_model": 32,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "max_position_embeddings": 128,
        "init_std": 0.2,
        "dropout": 0.0,
        "bos_token_id": None,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    }
    return build_random(BartForConditionalGeneration, seed, shape, numbers)


def save_with_tokenizer(model: Any, folder: Path) -> Path:
    """Save a model with 768 tokens as a base, with the shipped tokenizer."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_BASE).save_pretrained(folder)
    return folder


def move(model: Any, *, scale: float = 0.1, seed: int = 7) -> Any:
    """Change all trainable weights, as training would; return the model."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn_like(parameter)
    return model


def randomize(model: Any) -> None:
    """Draw weights that all affect the logits."""
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.15)
        else:
            weight.data = weight.nan_to_num() + 0.1 * torch.randn_like(weight)


def random_ids(rows: int = 1, tokens: int = 16) -> torch.Tensor:
    """Return token ids [rows, tokens] of `tiny_llama`, the same in every call."""
    return torch.randint(3, 64, (rows, tokens), generator=torch.Generator().manual_seed(1))


def built(
    base: Any,
    method: str = "none",
    precision: str = "fp32",
    adapter: Any = None,
    recompute: str = "none",
    backend: str = "sdpa",
    seed: int = 0,
    **how: Any,
) -> Any:
    """Build a model to train on `base`, a folder or a `ModelConfig`; `how` as for `build_model`."""
    from app.model.adapter import LoraConfig
    from app.model.base import ModelConfig
    from app.model.build import build_model
    from app.model.quantization import QuantizationConfig
    from app.model.recompute import RecomputeConfig

    torch.manual_seed(seed)
    return build_model(
        base if isinstance(base, ModelConfig) else ModelConfig(path=str(base)),
        QuantizationConfig(method=method),
        backend,
        adapter or LoraConfig(r=4, dropout=0.0),
        RecomputeConfig(mode=recompute),
        precision,
        **how,
    )


TINY: dict[str, Callable[..., Any]] = {
    "llama": tiny_llama,
    "gpt2": tiny_gpt2,
    "t5": tiny_t5,
    "bart": tiny_bart,
}
MODELS: dict[str, Callable[[], Any]] = {
    "tied": tiny_llama,
    "untied": lambda: tiny_llama(tie_word_embeddings=False),
    **{name: TINY[name] for name in ("gpt2", "t5", "bart")},
}


def probe(rows: int = 1, tokens: int = 16) -> dict[str, torch.Tensor]:
    """Return `random_ids` as a keyword argument of the model."""
    return {"input_ids": random_ids(rows, tokens)}


def probe_of(model: Any) -> dict[str, torch.Tensor]:
    """Return `probe`, with decoder inputs for encoder-decoder models."""
    row = probe()
    if model.config.is_encoder_decoder:
        row["decoder_input_ids"] = random_ids()[:, :8]
    return row
