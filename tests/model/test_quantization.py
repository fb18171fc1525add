from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import transformers

from app.model.adapter import AdapterConfig, FreezeConfig, FullConfig, Ia3Config, LoraConfig
from app.model.adapter.saved import load_adapter, probe_logits, save_adapter, verify_adapter
from app.model.attention import attention_implementation, inputs
from app.model.attention.probes import check_isolation
from app.model.base import ModelConfig, load_base
from app.model.kernels import without_dropout
from app.model.quantization import (
    QuantizationConfig,
    quantization_settings,
    quantize_tokens_independently,
    storage_of,
)
from common.errors import UserError
from tests.in_process import make_data, run_command
from tests.tiny import build_random, built, move, probe, random_ids, tiny_gpt2, tiny_llama, tiny_t5

METHODS = {"nf4": bnb.nn.Linear4bit, "int8": bnb.nn.Linear8bitLt}
PACKED = tuple(METHODS.values())
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-pure": torch.bfloat16}


def save_llama(folder: Path, **numbers: Any) -> ModelConfig:
    tiny_llama(hidden_size=64, intermediate_size=128, **numbers).save_pretrained(folder)
    return ModelConfig(path=str(folder))


def save_quantized(folder: Path, method: str, **numbers: Any) -> ModelConfig:
    """Save a base in quantized form."""
    save_llama(folder / "full", **numbers)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "full",
        quantization_config=quantization_settings(QuantizationConfig(method=method), torch.float32),
    )
    model.save_pretrained(folder / method)
    return ModelConfig(path=str(folder / method))


def load(config: ModelConfig, dtype: torch.dtype, **settings: Any) -> Any:
    implementation = attention_implementation("sdpa")
    return load_base(config, implementation, dtype, QuantizationConfig(**settings))


@pytest.mark.parametrize(
    ("method", "tied", "dtype"),
    [("nf4", True, torch.bfloat16), ("int8", True, torch.float32), ("int8", False, torch.bfloat16)],
)
def test_every_matrix_but_embedding_and_head_is_quantized(
    tmp_path: Path, method: str, tied: bool, dtype: torch.dtype
) -> None:
    model = load(save_llama(tmp_path, tie_word_embeddings=tied), dtype, method=method)
    matrices = [m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    assert len(matrices) == 14
    assert all(type(matrix) is METHODS[method] for matrix in matrices)
    assert type(model.lm_head.weight) is torch.nn.Parameter  # no class of packed weights
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad
        # Four bits are stored in the dtype of the rest, so that one shard can hold both.
        packed = isinstance(parameter, bnb.nn.Int8Params)
        assert parameter.dtype == (torch.int8 if packed else dtype), name
    if method == "nf4":
        assert all(m.compute_dtype == m.weight.quant_state.dtype == dtype for m in matrices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_storage_dtype_changes_no_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    config = save_llama(tmp_path)
    settings = quantization_settings(QuantizationConfig(method="nf4"), dtype)
    assert settings is not None
    settings.bnb_4bit_quant_storage = torch.uint8
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        config.path,
        quantization_config=settings,
        dtype=dtype,
        attn_implementation=attention_implementation("sdpa"),
    )
    stored = load(config, dtype, method="nf4")
    for name, parameter in stored.named_parameters():
        bits = parameter.data.flatten().view(torch.uint8)
        assert torch.equal(bits, plain.get_parameter(name).data.flatten().view(torch.uint8))
    ids = random_ids()
    with torch.no_grad():
        assert torch.equal(stored.train()(ids).logits, plain.train()(ids).logits)


def test_double_quantization_saves_bits(tmp_path: Path) -> None:
    config = save_llama(tmp_path)
    once, twice = (
        sum(storage_of(weight).num_bytes for weight in model.parameters())
        for model in (
            load(config, torch.float32, method="nf4", double_quant=double)
            for double in (False, True)
        )
    )
    assert twice < once


FLAN = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
FALCON = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
OTHERS: dict[str, Callable[[], Any]] = {
    "gpt2": partial(tiny_gpt2, n_embd=64, n_layer=1, n_inner=256),
    "flan-t5": partial(tiny_t5, d_model=64, d_kv=16, d_ff=128, num_layers=1, **FLAN),
    "falcon": partial(build_random, transformers.FalconForCausalLM, 0, FALCON, {}),
}


@pytest.mark.parametrize(
    ("name", "method"),
    [*((name, "nf4") for name in ("gpt2", "flan-t5", "falcon")), ("gpt2", "int8")],
)
def test_other_architectures_are_quantized_and_train(
    tmp_path: Path, name: str, method: str
) -> None:
    plain, largest = OTHERS[name](), {"nf4": 0.5, "int8": 0.05}[method]
    plain.save_pretrained(tmp_path)
    model = built(ModelConfig(path=str(tmp_path)), method, backend="eager")
    ids = random_ids(2)
    with torch.no_grad():
        expected = plain(input_ids=ids, labels=ids).logits
        difference = model.eval()(input_ids=ids, labels=ids).logits - expected
    # GPT-2's matrices lie the other way round: one that is not turned would give other logits.
    assert difference.norm() < largest * expected.norm()
    model.train()(input_ids=ids, labels=ids).loss.backward()
    trained = [p for n, p in model.named_parameters() if "lora_B" in n]
    quantized = [m for m in model.modules() if isinstance(m, PACKED)]
    assert len(quantized) >= 4
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in trained)
    base = model.get_base_model()
    assert not isinstance(base.get_output_embeddings(), PACKED)
    assert isinstance(base.get_input_embeddings(), torch.nn.Embedding)


def step(model: Any, precision: str) -> dict[str, torch.Tensor]:
    """Return the gradients of one forward and backward pass, by parameter name."""
    ids = random_ids(2)
    model.train()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("method", "is_stored", "precision", "recompute"),
    [
        ("nf4", False, "bf16", "full"),
        ("nf4", True, "bf16-pure", "none"),
        ("int8", False, "fp32", "none"),
        ("int8", True, "bf16", "full"),
    ],
)
def test_gradients_are_the_same_after_a_validation(
    tmp_path: Path, method: str, is_stored: bool, precision: str, recompute: str
) -> None:
    if is_stored:
        model = built(save_quantized(tmp_path, method), "none", precision, recompute=recompute)
    else:
        model = built(save_llama(tmp_path), method, precision, recompute=recompute)
    move(model)
    before = step(model, precision)
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        model(input_ids=random_ids(4, 32))
    after = step(model, precision)
    assert len(after) == 28
    for name, gradient in after.items():
        assert gradient is not None, name
        assert gradient.any(), name
        assert torch.equal(gradient, before[name]), name


@pytest.mark.parametrize(("method", "dtype"), [("nf4", torch.bfloat16), ("int8", torch.float32)])
def test_a_base_that_is_stored_quantized_is_loaded_as_it_is(
    tmp_path: Path, method: str, dtype: torch.dtype
) -> None:
    config = save_quantized(tmp_path, method)
    while_loading = load(ModelConfig(path=str(tmp_path / "full")), torch.float32, method=method)
    for typed in ("none", method):
        model = load(config, dtype, method=typed)
        assert model.model.norm.weight.dtype == model.lm_head.weight.dtype == dtype
        for name, parameter in model.named_parameters():
            assert not parameter.requires_grad
            if isinstance(parameter, (bnb.nn.Params4bit, bnb.nn.Int8Params)):
                # Bits: read as floating-point numbers, some of them are NaN.
                bits = while_loading.get_parameter(name).data.flatten().view(torch.uint8)
                assert torch.equal(parameter.data.flatten().view(torch.uint8), bits)
        layer = model.model.layers[0].mlp.up_proj
        assert type(layer) is METHODS[method]
        if method == "nf4":
            assert layer.compute_dtype == layer.weight.quant_state.dtype == dtype
        if dtype == torch.float32:
            ids = random_ids()
            assert torch.equal(model.train()(ids).logits, while_loading.train()(ids).logits)


def test_a_method_other_than_that_of_the_files_is_refused(tmp_path: Path) -> None:
    config = save_quantized(tmp_path, "nf4")
    said = r"quantization=int8, but .*nf4 already .*quantization=none"
    with pytest.raises(UserError, match=said):
        load(config, torch.float32, method="int8")


@pytest.mark.parametrize("adapter", [FullConfig(), FreezeConfig(layers="top 1")])
def test_training_quantized_base_weights_is_refused(tmp_path: Path, adapter: AdapterConfig) -> None:
    config = save_quantized(tmp_path, "int8")
    with pytest.raises(UserError, match=r"in int8 .*cannot be trained; type adapter=lora"):
        built(config, "none", adapter=adapter)
    built(config, "none", adapter=LoraConfig())


def test_other_quantizers_are_refused(tmp_path: Path) -> None:
    by = "gptq"
    config = save_llama(tmp_path)
    numbers = json.loads((tmp_path / "config.json").read_text())
    numbers["quantization_config"] = {"quant_method": by, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    with pytest.raises(UserError, match=rf"quantized by {by} .*THE_UNQUANTIZED_BASE"):
        load(config, torch.float32)


def test_the_isolation_probe_is_not_affected_by_int8_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Large activations are what LLM.int8() takes apart, for all tokens of a batch at once.
    model = load(save_llama(tmp_path, initializer_range=1.0), torch.float32, method="int8")
    with pytest.raises(ValueError, match="see each other"):
        check_isolation(model, "sdpa")
    with quantize_tokens_independently(model):
        check_isolation(model, "sdpa")
    assert {m.state.threshold for m in model.modules() if isinstance(m, PACKED)} == {6.0}
    monkeypatch.setattr(inputs, "group_documents", lambda *_: None)
    with quantize_tokens_independently(model), pytest.raises(ValueError, match="see each other"):
        check_isolation(model, "sdpa")


@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_a_pass_without_dropout_rounds_as_a_training_step_does(tmp_path: Path, method: str) -> None:
    model = load(save_llama(tmp_path, initializer_range=1.0), torch.float32, method=method)
    ids = torch.arange(3, 23)[None]
    expected = model.train()(ids).logits
    with without_dropout(model):
        assert torch.equal(model(ids).logits, expected)
    assert all(module.training for module in model.modules())


def test_the_checks_read_the_stored_quantization(tmp_path: Path) -> None:
    config, data = save_quantized(tmp_path, "nf4"), make_data(tmp_path / "data.jsonl")
    (tmp_path / "nf4" / "tokenizer.json").write_text('{"model": {}}')
    right = [f"model.path={config.path}", f"data.datasets=[{{path: {data}}}]"]
    result = run_command(*right, "quantization=int8")
    assert result.code == 2 and "type quantization=none" in result.stderr
    # Packed matrices have one column: the rank is not compared with that.
    result = run_command(*right, "quantization=nf4", "adapter.target_modules=[q_proj]")
    assert result.code == 0, result.stderr


ADAPTERS: dict[str, AdapterConfig] = {
    "lora": LoraConfig(dropout=0.0),
    "dora": LoraConfig(dropout=0.0, use_dora=True),
    "ia3": Ia3Config(),
}


@pytest.mark.parametrize(
    ("kind", "method", "precision"),
    [
        ("lora", "nf4", "bf16"),
        ("lora", "fp8", "bf16"),
        ("dora", "int8", "bf16"),
        ("ia3", "int8", "fp32"),
        ("ia3", "fp8", "bf16-pure"),
    ],
)
def test_an_adapter_of_a_quantized_base_is_saved_and_loaded_exactly(
    tmp_path: Path, kind: str, method: str, precision: str
) -> None:
    config = save_llama(tmp_path / "base")
    model = move(built(config, method, precision, ADAPTERS[kind]))
    # As a run saves: inside one autocast, which keeps copies of the weights that it has cast.
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        expected = probe_logits(model, probe())
        save_adapter(model, tmp_path / "adapter")
        assert verify_adapter(model, tmp_path / "adapter", probe()) == 0.0
        base = load(config, DTYPES[precision], method=method)
        loaded = load_adapter(base, tmp_path / "adapter")
        assert torch.equal(probe_logits(loaded, probe()), expected)
    kept = {p.dtype for n, p in loaded.named_parameters() if "lora_" in n or "ia3_" in n}
    assert kept == {torch.bfloat16 if precision == "bf16-pure" else torch.float32}
