"""Compiled layers equal uncompiled ones, and are compiled only in the first steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

from app.config import check_before_start, load_config
from app.model.adapter import AdapterConfig, FullConfig, LoraConfig, apply_adapter
from app.model.attention import attention_implementation
from app.model.head import fuse_head
from app.model.recompute import RecomputeConfig, apply_recompute
from app.training import compilation as compiling
from app.training.compilation import Compilation, CompiledLayers, num_compiled_graphs
from app.training.objective.objective import DatasetSums, Sft, batch_loss
from common.errors import Origin, UserError
from data_modules.collator import Batch, Collator
from data_modules.types import Example
from tests.conftest import read_column
from tests.model.test_head import assert_near
from tests.tiny import (
    move,
    save_with_tokenizer,
    small_run,
    tiny_gpt2,
    tiny_llama,
    tiny_t5,
    train_into,
)

pytestmark = pytest.mark.slow

ROW = 64
MAKERS = {"llama": tiny_llama, "gpt2": tiny_gpt2}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace graphs but run them eagerly: recompilations are the same, in a tenth of the time."""
    monkeypatch.setattr(compiling, "BACKEND", "eager")


@pytest.fixture
def split_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also trace the graphs of backward passes, without generating kernels."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")


def build(kind: str = "llama", adapter: AdapterConfig | None = None, **recompute: Any) -> Any:
    base = MAKERS[kind]()
    base.set_attn_implementation(attention_implementation("sdpa"))
    fuse_head(base)
    apply_recompute(base, RecomputeConfig(**recompute))
    torch.manual_seed(3)
    adapter = adapter or LoraConfig(r=4, dropout=0.0)
    return move(apply_adapter(base, adapter, half_precision=False).train(), scale=0.05)


def batch_of(*lengths: int, row_len: int | None = ROW) -> Batch:
    """A packed batch of documents, whose tokens follow from their lengths."""
    documents = []
    for length in lengths:
        ids = np.random.default_rng(length).integers(3, 64, length).astype(np.int32)
        documents.append(Example(ids, np.ones(length, np.float32), 0, Origin("x", 1)))
    return Collator(0, packed=True, row_len=row_len)([documents], 1.0)


TRAINING = [batch_of(30, 20, 10), batch_of(64), batch_of(9, 8, 7, 6, 5, 4), batch_of(50)]
VALIDATION = [batch_of(33, 31), batch_of(12)]


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    return batch_loss(Sft(), model, batch, "sdpa", DatasetSums(1)) / ROW


def validate(model: Any) -> list[float]:
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model, batch).item() for batch in VALIDATION]
    model.train()
    return losses


def train_steps(model: Any, steps: int) -> list[float]:
    """Run training steps of two batches each, with validations before and between them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = validate(model)
    for step in range(steps):
        optimizer.zero_grad()
        for batch in (TRAINING[step % 4], TRAINING[(step + 1) % 4]):
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        if step % 4 == 3:
            losses += validate(model)
    return losses


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for batch in TRAINING:
        loss_of(model, batch).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.versions
@pytest.mark.parametrize(("kind", "adapter"), [("llama", None), ("gpt2", FullConfig())], ids=MAKERS)
def test_ten_steps_of_real_kernels(kind: str, adapter: AdapterConfig | None) -> None:
    """Of a LoRA, and of a whole model."""
    plain, compiled = build(kind, adapter), build(kind, adapter)
    layers = CompiledLayers(compiled)
    assert_near(gradients(compiled), gradients(plain), 1e-5)
    assert train_steps(compiled, 10) == pytest.approx(train_steps(plain, 10), rel=1e-5)
    assert layers.failure is None


@pytest.mark.versions
@pytest.mark.parametrize("recompute", [{}, {"mode": "full", "every": 2}], ids=["none", "every"])
def test_nothing_is_compiled_after_the_third_step(
    recompute: dict[str, Any], traced_only: None
) -> None:
    """Whatever comes later: other documents, one document a row, padding, validations."""
    model = build(**recompute)
    CompiledLayers(model)
    before = num_compiled_graphs()
    validate(model)
    for _ in range(3):
        loss_of(model, batch_of(30, 20, 10)).backward()
    settled = num_compiled_graphs()
    assert settled > before
    train_steps(model, 4)
    assert num_compiled_graphs() == settled


@pytest.mark.versions
@pytest.mark.parametrize(
    ("mode", "every", "adapter"), [("full", 2, FullConfig()), ("offload", 1, None)]
)
def test_recompute_around_compiled_layers(
    mode: str, every: int, adapter: AdapterConfig | None, split_only: None
) -> None:
    plain, compiled = build(adapter=adapter), build(adapter=adapter, mode=mode, every=every)
    CompiledLayers(compiled)
    before = num_compiled_graphs()
    found = gradients(compiled)
    assert num_compiled_graphs() - before >= 4  # the parts of a layer between its attentions
    assert_near(found, gradients(plain), 1e-5)


@pytest.mark.versions
def test_random_numbers_are_the_same_when_a_layer_is_computed_again(split_only: None) -> None:
    """Gradients with dropout are those of the loss that was computed, by finite differences."""
    model = build(adapter=LoraConfig(r=4, dropout=0.3), mode="full")
    CompiledLayers(model)
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_B.default.weight"
    weight = model.get_parameter(name)

    def loss() -> torch.Tensor:
        torch.manual_seed(7)
        return loss_of(model, TRAINING[0])

    loss().backward()
    direction = weight.grad / weight.grad.norm()
    with torch.no_grad():
        weight += 1e-2 * direction
        above = loss().item()
        weight -= 2e-2 * direction
        below = loss().item()
    assert (above - below) / 2e-2 == pytest.approx(weight.grad.norm().item(), rel=1e-2)


@pytest.mark.versions
def test_remove_restores_names_and_the_uncompiled_model(traced_only: None) -> None:
    model = build(mode="full", every=2)
    names, expected = list(model.state_dict()), gradients(model)
    layers = CompiledLayers(model)
    assert list(model.state_dict()) == names
    gradients(model)
    layers.remove()
    before = num_compiled_graphs()
    found = gradients(model)
    assert num_compiled_graphs() == before
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    inner = model.base_model.model.model.layers
    assert [layer.gradient_checkpointing for layer in inner] == [True, False]
    assert not any("forward" in vars(layer) for layer in inner)


def breaking(after: int) -> Any:
    """A compiler that gives up when `after` graphs are done."""
    seen: list[int] = []

    def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(1)
        if len(seen) > after:
            raise FileNotFoundError("no such compiler\nand a page of other lines")
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return compile_graph


@pytest.mark.versions
@pytest.mark.parametrize(("after", "mode"), [(0, "none"), (7, "full")])
def test_a_failed_compilation_is_logged_once_and_the_run_continues(
    after: int, mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the first graph, and when some are compiled already, in the validation or a step."""
    monkeypatch.setattr(compiling, "BACKEND", breaking(after))
    plain, compiled = build(), build(mode=mode)
    layers = CompiledLayers(compiled)
    assert train_steps(compiled, 3) == pytest.approx(train_steps(plain, 3), rel=1e-5)
    said = [record.message for record in caplog.records if "compile" in record.message]
    cause = "FileNotFoundError: no such compiler"
    assert said == [f"compile: {cause}; the run continues without it"]
    assert layers.failure == cause


@pytest.mark.versions
def test_a_backward_pass_that_cannot_be_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def give_up(*_: Any) -> None:
        raise NotImplementedError("no kernel for a gradient")

    backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=give_up)
    monkeypatch.setattr(compiling, "BACKEND", backend)
    plain, compiled = build(), build(mode="full")
    layers = CompiledLayers(compiled)
    assert train_steps(compiled, 2) == pytest.approx(train_steps(plain, 2), rel=1e-5)
    assert layers.failure == "NotImplementedError: no kernel for a gradient"


def test_an_error_of_the_model_is_not_a_failed_compile(traced_only: None) -> None:
    model = build()
    layers = CompiledLayers(model)
    attention = "attention_by_document"

    def out_of_memory(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("not enough")

    attend = layers._attention[attention]
    compiling.AttentionInterface.register(attention, layers._outside(out_of_memory))
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(model, TRAINING[0])
    compiling.AttentionInterface.register(attention, attend)
    assert layers.failure is None


class TestCallback:
    def step(self, callback: Compilation, number: int) -> None:
        trainer: Any = SimpleNamespace(global_step=number)
        callback.on_train_batch_end(trainer, None, None, None, 0)  # type: ignore[arg-type]

    @pytest.mark.versions
    def test_a_late_compilation_is_logged_once_with_its_reason(
        self, traced_only: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = build()
        callback = Compilation()
        callback.on_train_start(None, SimpleNamespace(model=model))  # type: ignore[arg-type]
        for number, row_len in [(2, ROW), (3, ROW), (4, ROW), (5, 96), (6, 96)]:
            if number == 6:
                torch._dynamo.reset()  # all is forgotten, and compiled once more
            loss_of(model, batch_of(30, 20, row_len=row_len)).backward()
            self.step(callback, number)
        said = [record.message for record in caplog.records if "again" in record.message]
        assert len(said) == 1
        assert "at step 5" in said[0]
        assert "size mismatch at index 1. expected 64, actual 96" in said[0]
        assert "trainer.compile=false" in said[0]

    def test_what_failed_is_given_up_after_the_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiling, "BACKEND", breaking(2))
        model = build(mode="full")
        callback = Compilation()
        callback.on_train_start(None, SimpleNamespace(model=model))  # type: ignore[arg-type]
        loss_of(model, TRAINING[0]).backward()
        self.step(callback, 1)
        layers = model.base_model.model.model.layers
        assert not any("forward" in vars(layer) for layer in layers)
        assert all(layer.gradient_checkpointing for layer in layers)

    @pytest.mark.parametrize("how", ["ends", "breaks off"])
    def test_a_fit_leaves_a_plain_model(self, how: str, traced_only: None) -> None:
        model = build()
        callback: Any = Compilation()
        callback.on_train_start(None, SimpleNamespace(model=model))
        assert all("forward" in vars(layer) for layer in model.base_model.model.model.layers)
        if how == "ends":
            callback.on_fit_end(None, None)
        else:
            callback.on_exception(None, None, KeyboardInterrupt())
        assert not any("forward" in vars(layer) for layer in model.base_model.model.model.layers)


def test_a_run_with_compiled_layers(
    split_only: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Through the command line's door: steps, validations, saving, answers after the training."""
    base = save_with_tokenizer(tiny_gpt2(vocab_size=768, n_positions=256), tmp_path / "base")
    words = [f"model.path={base}", "adapter.dropout=0.0", "trainer.max_steps=3"]
    words += ["trainer.validate_every_steps=1", "evaluation.max_new_tokens=4", "logger=csv"]
    before = num_compiled_graphs()
    compiled = train_into(tmp_path / "compiled", *words, "trainer.compile=true")
    after = num_compiled_graphs()
    assert after > before
    plain = train_into(tmp_path / "plain", *words)
    assert num_compiled_graphs() == after
    for column in ("train/loss", "val/loss", "train/grad_norm"):
        expected = read_column(plain, column)
        assert len(expected) >= 3
        assert read_column(compiled, column) == pytest.approx(expected, rel=1e-5)
    assert not [record for record in caplog.records if "compile" in record.message]


def test_an_encoder_decoder_is_refused_before_its_weights_are_loaded(tmp_path: Path) -> None:
    base = save_with_tokenizer(tiny_t5(vocab_size=768), tmp_path)
    said = r"t5 models are encoder-decoders.*type trainer\.compile=false"
    with pytest.raises(UserError, match=said):
        check_before_start(
            load_config("train", small_run(f"model.path={base}", "trainer.compile=true"))
        )


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("recompute", ["none", "full", "offload"])
    def test_steps_are_those_of_plain_layers(
        self, recompute: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        plain, compiled = build().to("cuda"), build(mode=recompute).to("cuda")
        CompiledLayers(compiled)
        losses = []
        for model in (plain, compiled):
            losses.append([])
            for batch in TRAINING:
                loss = loss_of(model, batch.to("cuda"))
                loss.backward()
                losses[-1].append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
