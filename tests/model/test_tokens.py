"""Tokens new to a base get rows, the rows train, are kept with the adapter, and are merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from app.evaluate import evaluate
from app.model.adapter.apply import apply_adapter
from app.model.adapter.saved import load_adapter, probe_logits, save_adapter, verify_adapter
from app.model.adapter.settings import FullConfig, LoraConfig
from app.model.base import ModelConfig
from app.model.build import load_tuned
from app.model.tokenizer import (
    build_tokenizer,
    new_token_ids,
    num_rows,
    resize_embeddings,
    trained_token_ids,
)
from common.errors import DataError
from tests.tiny import (
    MODELS,
    TINY_BASE,
    move,
    save_with_tokenizer,
    tiny_bart,
    tiny_llama,
    train_into,
)

CHATML = ["<|im_start|>", "<|im_end|>"]
NEW = [62, 63, 64, 65, 66]  # two spare rows of 64, and three more


@pytest.fixture(params=list(MODELS))
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return MODELS[request.param]


def tokens_of(*added: str) -> ModelConfig:
    return ModelConfig(path=str(TINY_BASE), added_tokens=list(added))


def probe_of(model: Any) -> dict[str, torch.Tensor]:
    """A row in which new tokens stand beside old ones."""
    ids = torch.tensor([[3, 62, 9, 66, 17, 64, 20, 5]])
    return {"input_ids": ids} | (
        {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
    )


def with_tokens(make: Callable[[], Any], **settings: Any) -> Any:
    """A base with rows for new tokens, and an adapter that was moved as a training would."""
    model = make()
    resize_embeddings(model, NEW)
    settings = {"r": 4, "dropout": 0.0} | settings
    adapted = apply_adapter(model, LoraConfig(**settings), half_precision=False, token_ids=NEW)
    move(adapted, seed=3)
    return adapted


def test_new_rows_start_as_the_mean_of_the_rows_before_them(make: Callable[[], Any]) -> None:
    before, model = make(), make()
    torch.manual_seed(1)
    resize_embeddings(model, NEW)
    pairs = [(before.get_input_embeddings().weight, model.get_input_embeddings().weight)]
    pairs.append((before.get_output_embeddings().weight, model.get_output_embeddings().weight))
    for old, new in pairs:
        assert new.shape == (67, old.shape[1])
        assert torch.equal(new[:62], old[:62])
        assert torch.allclose(new[62:], old[:62].mean(dim=0).expand(5, -1))
    assert model.config.vocab_size == 67
    assert (pairs[0][1] is pairs[1][1]) == (pairs[0][0] is pairs[1][0])
    again = make()
    torch.manual_seed(2)
    resize_embeddings(again, NEW)
    ids = probe_of(model)
    assert torch.equal(probe_logits(model, ids), probe_logits(again, ids))


def test_existing_rows_are_used_before_new_ones_are_added() -> None:
    model, before = tiny_llama(), tiny_llama()
    resize_embeddings(model, [])
    assert torch.equal(model.get_input_embeddings().weight, before.get_input_embeddings().weight)
    resize_embeddings(model, [62, 63])
    assert model.get_input_embeddings().num_embeddings == 64


def test_the_bias_of_a_head_grows_with_it() -> None:
    model = tiny_bart()
    model.final_logits_bias.normal_()
    bias = model.final_logits_bias.clone()
    resize_embeddings(model, NEW)
    assert torch.equal(model.final_logits_bias[:, :64], bias)
    assert torch.allclose(model.final_logits_bias[0, 64:], bias.mean().expand(3))


def test_rows_of_an_adapter_are_saved_loaded_and_merged(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    model = with_tokens(make)
    expected = probe_logits(model, probe_of(model))
    save_adapter(model, tmp_path / "adapter")
    assert verify_adapter(model, tmp_path / "adapter", probe_of(model)) == 0.0
    base = make()
    resize_embeddings(base, NEW)
    without = probe_logits(base, probe_of(base))
    assert not torch.allclose(without, expected, atol=1e-2)
    loaded = load_adapter(base, tmp_path / "adapter")
    assert torch.equal(probe_logits(loaded, probe_of(base)), expected)
    check_number_of_rows(make, tmp_path, expected)
    merged = model.merge_and_unload()
    assert torch.allclose(probe_logits(merged, probe_of(merged)), expected, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    auto = AutoModelForSeq2SeqLM if merged.config.is_encoder_decoder else AutoModelForCausalLM
    reopened = auto.from_pretrained(tmp_path / "merged")
    assert reopened.get_input_embeddings().num_embeddings == 67
    assert torch.allclose(probe_logits(reopened, probe_of(reopened)), expected, atol=1e-4)


def check_number_of_rows(make: Callable[[], Any], folder: Path, expected: torch.Tensor) -> None:
    """Load a saved adapter on its base as that is on disk: the adapter says what rows it needs."""
    make().save_pretrained(folder / "base")
    config = ModelConfig(path=str(folder / "base"))
    loaded = load_tuned(config, folder / "adapter", "sdpa", torch.float32)
    assert torch.allclose(probe_logits(loaded, probe_of(loaded)), expected, atol=1e-5)


def test_rows_needed_by_an_adapter_with_a_whole_embedding(tmp_path: Path) -> None:
    make = MODELS["untied"]
    model = with_tokens(make, modules_to_save=["embed_tokens", "lm_head"])
    save_adapter(model, tmp_path / "adapter")
    check_number_of_rows(make, tmp_path, probe_logits(model, probe_of(model)))


def test_added_tokens_are_special_tokens_and_existing_ones_are_reused() -> None:
    plain = build_tokenizer(tokens_of())
    tokenizer = build_tokenizer(tokens_of("<|think|>", "<|im_end|>", "<|end think|>"))
    assert len(tokenizer) == len(plain) + 2
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == plain.eos_token_id
    for token, index in (("<|think|>", len(plain)), ("<|end think|>", len(plain) + 1)):
        assert tokenizer.convert_tokens_to_ids(token) == index
        ids = tokenizer.encode(f"one {token} two", add_special_tokens=False)
        assert ids.count(index) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == "one  two"


def test_only_tokens_without_a_learned_row_are_new() -> None:
    config = tokens_of("<|think|>", "<|im_end|>")
    tokenizer = build_tokenizer(config)
    assert new_token_ids(config, tokenizer, 768) == [768]
    assert new_token_ids(tokens_of(), build_tokenizer(tokens_of()), 768) == []
    assert num_rows(tiny_llama(vocab_size=768).config, [768]) == 769
    assert num_rows(tiny_llama(vocab_size=800).config, [768]) == 800


def test_tokens_of_the_tokenizer_past_the_embedding_must_be_named(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    tokenizer.add_tokens(["<|theirs|>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    config = tokens_of("<|mine|>")
    config.tokenizer_path = str(tmp_path)
    with pytest.raises(ValueError, match=r"'<\|theirs\|>' with id 768.*768 rows.*added_tokens"):
        new_token_ids(config, build_tokenizer(config), 768)
    config.added_tokens = ["<|theirs|>", "<|mine|>"]
    assert new_token_ids(config, build_tokenizer(config), 768) == [768, 769]


def test_trained_tokens_are_known_as_one_token() -> None:
    tokenizer = build_tokenizer(tokens_of("<|think|>"))
    adapter = LoraConfig(trainable_tokens=["<|im_end|>", "<|pad|>"])
    ids = tokenizer.convert_tokens_to_ids(["<|think|>", "<|im_end|>", "<|pad|>"])
    assert trained_token_ids(tokenizer, ["<|think|>"], adapter) == sorted(ids)
    assert trained_token_ids(tokenizer, [], FullConfig()) == []
    adapter = LoraConfig(trainable_tokens=["<|im_end|>", "<|nothing|>"])
    with pytest.raises(ValueError, match=r"type 'model.added_tokens=\[<\|nothing\|>\]'"):
        trained_token_ids(tokenizer, [], adapter)


def test_a_tokenizer_of_more_tokens_than_the_base_has_rows_is_refused(tmp_path: Path) -> None:
    save_with_tokenizer(tiny_llama(vocab_size=700, max_position_embeddings=256), tmp_path / "base")
    with pytest.raises(DataError, match=r"token id 7\d\d, the model's embedding has 700 rows"):
        train_into(tmp_path / "refused", f"model.path={tmp_path / 'base'}")


def save_base_without_chat_tokens(folder: Path, *, is_tied: bool) -> Path:
    """Save a base whose tokenizer ends its texts, and knows nothing of a chat."""
    numbers = {"vocab_size": 768, "max_position_embeddings": 512}
    tiny_llama(**numbers, tie_word_embeddings=is_tied).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (TINY_BASE / name).read_text()
        for old, new in (("<|im_start|>", "<|begin|>"), ("<|im_end|>", "<|end|>")):
            text = text.replace(old, new)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("adapter", "is_tied"), [("lora", False), pytest.param("full", True, marks=pytest.mark.slow)]
)
def test_a_run_with_added_chat_tokens_evaluates_as_it_trained(
    adapter: str, is_tied: bool, tmp_path: Path
) -> None:
    base = save_base_without_chat_tokens(tmp_path / "base", is_tied=is_tied)
    run = train_into(
        tmp_path / "run",
        f"model.path={base}",
        f"model.added_tokens=[{','.join(CHATML)}]",
        "data.chat_template=chatml",
        f"adapter={adapter}",
        "evaluation.exact_match=true",
        "evaluation.max_rows=3",
        "evaluation.max_new_tokens=4",
    )
    saved = run / ("adapter" if adapter == "lora" else "model")
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer.convert_tokens_to_ids(CHATML) == [768, 769]
    trained = json.loads((run / "metrics.json").read_text())
    from app.config import load_config

    evaluate(load_config("evaluate", [f"run={run}", f"output.dir={tmp_path / 'evaluation'}"]))
    again = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    assert again
    for name, value in again.items():
        assert value == pytest.approx(trained[name], rel=1e-5, abs=1e-5), name
    if adapter == "lora":
        config = json.loads((saved / "adapter_config.json").read_text())
        rows = config["trainable_token_indices"]
        assert all(ids == [768, 769] for ids in rows.values())
        assert len(rows) == 2
