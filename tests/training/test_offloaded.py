"""Weights that wait elsewhere between two passes, as in host memory: who computes must not look."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import Precision

from app.model.attention import attention_implementation
from app.model.attention.inputs import attention_inputs, pair_inputs
from app.model.head import LossHead, fuse_head
from app.model.kernels import FusedLinear, FusedNorm
from app.training.module import FinetuneModule
from app.training.objective.objective import Sft, validate
from app.training.optimizers import ScheduleConfig
from tests.tiny import tiny_llama, tiny_t5
from tests.training.test_loss import make_batch

HERE = torch.device("cpu")


def keep_elsewhere(model: Any) -> Callable[[Any], AbstractContextManager[None]]:
    """Leave a model's weights on `meta`, but in its passes; return what has them here else."""
    own = [
        (module, name, weight)
        for module in model.modules()
        for name, weight in module._parameters.items()
        if weight is not None
    ]
    away = {
        weight: torch.nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)
        for _, _, weight in own
    }

    def bring(*_: Any) -> None:
        for module, name, weight in own:
            module._parameters[name] = weight

    def put_away(*_: Any) -> None:
        for module, name, weight in own:
            module._parameters[name] = away[weight]

    @contextmanager
    def gathered(module: torch.nn.Module) -> Iterator[None]:
        bring()
        yield
        put_away()

    model.register_forward_pre_hook(bring)
    model.register_forward_hook(put_away)
    put_away()
    assert model.device.type == "meta"
    return gathered


@pytest.mark.parametrize(
    ("build", "backend", "is_packed"),
    [
        (tiny_llama, "sdpa", True),
        (tiny_llama, "eager", True),
        (tiny_t5, "sdpa", True),
        (tiny_t5, "eager", False),
    ],
    ids=["llama", "eager", "t5", "padded"],
)
def test_a_fit_tries_its_model_where_it_computes(
    build: Callable[[], Any], backend: str, is_packed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    model.set_attn_implementation(attention_implementation(backend))
    fuse_head(model)
    strategy = SimpleNamespace(
        root_device=HERE,
        gathered=keep_elsewhere(model),
        fuses_adapters=True,
        accumulates_in_products=False,
        random_rank=0,
        context_ranks=None,
    )
    gathered_from: list[torch.device] = []
    strategy.set_leaf_modules = list
    strategy.all_gather = lambda tensor: gathered_from.append(tensor.device) or tensor
    metrics: Any = SimpleNamespace(dataset_names=["a"])
    module = FinetuneModule(
        build,
        backend=backend,
        objective=Sft(),
        build_optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        schedule=ScheduleConfig(),
        total_steps=1,
        is_packed=is_packed,
        metrics=metrics,
    )
    module.model = model
    trainer: Any = SimpleNamespace(strategy=strategy, precision_plugin=Precision(), world_size=1)
    module._trainer = trainer
    module._device = torch.device("meta")
    with caplog.at_level(logging.INFO):
        module.on_fit_start()
    assert isinstance(model.get_output_embeddings(), LossHead), caplog.text
    assert gathered_from == [HERE]
    fused = {type(vars(one).get("forward")) for one in model.modules()}
    assert FusedLinear in fused
    assert (FusedNorm in fused) == (model.config.model_type == "llama")


def test_attention_inputs_are_on_the_device_of_the_tokens() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    packed, padded = [[3, 5], [8]], [[5], [8]]
    llama, t5 = tiny_llama(), tiny_t5()
    masks = attention_inputs(llama, "eager", packed, ids)
    boundaries = attention_inputs(llama, "varlen", packed, ids)
    documents = attention_inputs(llama, "sdpa", packed, ids)["documents"]
    padding = pair_inputs(t5, "eager", padded, padded, ids, ids)
    pairs = pair_inputs(t5, "sdpa", packed, packed, ids, ids)["documents"]
    for tensor in (
        masks["attention_mask"],
        boundaries["cu_seq_lens_q"],
        documents.restore,
        padding["attention_mask"],
        pairs.encoder.restore,
        pairs.decoder.restore,
        pairs.cross.restore,
    ):
        assert tensor.device == ids.device


def test_a_model_is_measured_where_it_computes() -> None:
    model: Any = tiny_llama()
    model.set_attn_implementation(attention_implementation("sdpa"))
    fuse_head(model)
    ids = list(range(3, 19))
    batch = make_batch([ids[:8], ids[8:]], [[1.0] * 8] * 2, [0, 0])
    expected = validate(Sft(), model, [batch], "sdpa", ["a"])
    keep_elsewhere(model)
    assert validate(Sft(), model, [batch], "sdpa", ["a"], HERE) == expected
