"""Multi-GPU experiments pass the checks on their machine, are built and sharded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from app.config import load_config
from app.model.build import build_model
from app.model.quantization import QuantizationConfig
from app.planning.planned_model import model_from_modules
from app.planning.states import ModelStates, estimate_states, size_for
from app.preflight.couplings import devices
from app.strategy.deepspeed import Zero
from app.strategy.deepspeed_config import deepspeed_config
from app.strategy.pipeline import Pipeline
from app.strategy.settings import (
    PipelineConfig,
    ZeroConfig,
    cut_layers,
    num_stages,
)
from tests.in_process import run_command
from tests.ranks import on_ranks

GPUS = {"llama70b": 8, "llama70b_zero3": 8, "llama70b_qlora": 2, "falcon180b": 8}


@pytest.fixture(autouse=True)
def all_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_installed", lambda module: True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.mark.parametrize("name", GPUS)
def test_experiments_pass_the_checks_on_their_machine(name: str) -> None:
    result = run_command(f"+experiment={name}", gpus=GPUS[name])
    assert result.code == 0, result.stderr
    assert result.config.model.wrap_class is not None


def test_falcon_180b_settings() -> None:
    config = load_config("train", ["+experiment=falcon180b"])
    assert isinstance(config.strategy, ZeroConfig)
    assert (config.strategy.stage, config.attention.backend) == (3, "flash2")
    assert (config.trainer.num_epochs, config.trainer.global_batch_size) == (3, 64)
    assert config.data.sequence_len == 2048
    assert [Path(one.path).name for one in config.data.datasets] == ["databricks-dolly-15k"]


def test_quantized_70b_on_one_card() -> None:
    result = run_command(
        "+experiment=llama70b_qlora", "strategy=single", "trainer.devices=1", gpus=1
    )
    assert result.code == 0, result.stderr


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group with fake ranks, to which nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


@contextmanager
def without_messages(logs: str) -> Iterator[None]:
    """Have ranks that do not exist send nothing, and log no memory by the module `logs`."""
    silent = ("broadcast", "broadcast_object_list", "all_gather_object")
    nothing = dict.fromkeys(silent, mock.Mock(return_value=None))
    with mock.patch.multiple(dist, **nothing), mock.patch(f"{logs}.log_host_memory"):
        yield


def builder_of(config: Any) -> Any:
    """Return a function that builds an experiment's model on the meta device."""

    def build(**how: Any) -> Any:
        return build_model(
            replace(config.model, path=None, from_scratch=True),
            QuantizationConfig(),  # quantized weights need values
            "eager",  # supported by every model
            config.adapter,
            config.recompute,
            "bf16",
            on_meta=True,
        )

    return build


def states_of(model: Any, strategy: Any, num_ranks: int) -> ModelStates:
    """Return the estimated memory of a rank for a model's states."""
    planned = model_from_modules("", model, {})
    assert planned is not None
    ranks = {"num_ranks": num_ranks, "num_nodes": 1}
    size = size_for(planned, "bf16", QuantizationConfig(), strategy, **ranks)
    return estimate_states(size, strategy, **ranks)


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_ranks", "stage"), [("llama70b_3d", 8, "first"), ("llama405b_3d", 32, "last")]
)
def test_a_meta_model_is_cut_into_stages_of_split_layers(
    name: str, num_ranks: int, stage: str
) -> None:
    """A rank has its share of the layers and ends that its stages are planned with."""
    config = load_config("train", [f"+experiment={name}"])
    assert isinstance(config.strategy, PipelineConfig)
    rank = 0 if stage == "first" else num_ranks - 1
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    size, split = config.strategy.pipeline_parallel_size, num_ranks // 4

    class WithoutNumbers(Pipeline):
        world_size, num_processes, num_nodes, global_rank = num_ranks, split, 4, rank
        root_device = torch.device("meta")

        def _init_mesh(self) -> None:
            names = ("pipe", "replicate", "shard", "tensor")
            self._device_mesh = init_device_mesh("cpu", (size, 1, 1, split), mesh_dim_names=names)

    stages = num_stages(config.strategy)
    every = cut_layers([1.0] * config.model.architecture["num_hidden_layers"], stages)
    strategy = WithoutNumbers(config.strategy, every)
    try:
        with without_messages("app.strategy.fsdp"):
            strategy.build_model(builder_of(config))
    finally:
        dist.destroy_process_group()
    planned = model_from_modules("", builder_of(config)(), {})
    assert planned is not None
    bounds = [(own.first, own.stop) for own in strategy.stages.own]
    assert bounds == every[rank // split :: size]
    parts = (part for own in strategy.stages.own for part in strategy.stages.modules_of(own))
    held = sum(weight.numel() for part in parts for weight in part.parameters())
    part = planned.part(bounds)
    # A rank has the whole embedding; norms and one of the matrices of an adapter are small.
    whole = sum(weight.numel() for weight in part.embedding.values())
    assert held == pytest.approx((part.num_weights - whole) / split + whole, rel=0.01)


def set_up_zero(num_ranks: int) -> dict[str, float]:
    """Set up the engine of ZeRO-3 on one of many fake ranks, and take an optimizer step.

    Of a 70B's kinds of layers, but narrow: every part is a share of the weights.
    """
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    import deepspeed

    config = load_config("train", ["+experiment=llama70b_zero3"])
    config.model.architecture |= {"num_hidden_layers": 2, "hidden_size": 512, "vocab_size": 4096}
    config.model.architecture |= {"intermediate_size": 1792, "num_attention_heads": 8}
    config.model.architecture |= {"num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}
    build = builder_of(config)

    class OneOfMany(Zero):
        world_size, num_processes, num_nodes, global_rank = num_ranks, 8, num_ranks // 8, 0
        root_device = torch.device("cpu")

    with (
        without_messages("app.strategy.deepspeed"),
        mock.patch.object(import_module("deepspeed.comm.torch"), "build_shm_op"),
    ):
        deepspeed.init_distributed("fake", verbose=False)
        strategy = OneOfMany(config.strategy)
        model = strategy.build_model(lambda **_: build().to_empty(device="cpu"))
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        num_trained = sum(weight.numel() for weight in trained)
        optimizer = torch.optim.AdamW(trained)
        settings = deepspeed_config(
            config.strategy,
            on_gpu=False,
            dtype=torch.float32,
            num_trained=num_trained,
            ranks_per_node=8,
            accumulation=2,
            max_norm=1.0,
        )
        strategy._shard_weights(model, settings)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=trained, optimizer=optimizer, config=settings
        )
    flats = engine.optimizer.fp32_partitioned_groups_flat
    for number, flat in enumerate(flats):
        flat.grad = torch.zeros_like(flat)
        engine.optimizer._optimizer_step(number)
    states = [v for state in optimizer.state.values() for v in state.values() if v.ndim]
    bucket = settings["zero_optimization"]["reduce_bucket_size"] * trained[0].element_size()
    estimate = states_of(build(), config.strategy, num_ranks)
    return {
        "weights": sum(weight.ds_tensor.nbytes for weight in model.parameters()) / estimate.weights,
        "gradients": (engine.optimizer.grad_partitions_flat_buffer.nbytes + bucket)
        / estimate.gradients,
        "optimizer": sum(state.nbytes for state in (*states, *flats)) / estimate.optimizer,
    }


@pytest.mark.versions
@pytest.mark.slow
def test_memory_of_a_zero_rank_equals_the_estimate() -> None:
    (found,) = on_ranks(1, set_up_zero, 64)
    assert found == pytest.approx(dict.fromkeys(found, 1.0), rel=0.05)
