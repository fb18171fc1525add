"""DeepSpeed ZeRO: its config follows from our settings, and its ranks train as one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from app.strategy.deepspeed import Zero, check_zero_config
from app.strategy.deepspeed_config import (
    ALLOWED_KEYS,
    DEEPSPEED_KEYS,
    REFUSED,
    deepspeed_config,
)
from app.strategy.settings import ZeroConfig
from app.training.module import skip_nonfinite_step
from common.errors import UserError
from tests.conftest import read_column
from tests.ranks import connect, on_ranks
from tests.reliability.shell import Shell
from tests.strategy import zero_training
from tests.strategy.test_sharded import check_close_on_gpus
from tests.strategy.zero_training import CLIP, SHARD_EVERYTHING
from tests.tiny import small_run

CONFIGS = [
    ZeroConfig(name="zero1", stage=1),
    ZeroConfig(name="zero2", stage=2),
    ZeroConfig(name="zero2_offload", stage=2, offload_optimizer="cpu"),
    ZeroConfig(name="zero3", config=SHARD_EVERYTHING),
    ZeroConfig(
        name="zero3_offload",
        offload_optimizer="cpu",
        offload_parameters="cpu",
        config=SHARD_EVERYTHING,
    ),
]


def made(config: ZeroConfig, **facts: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "on_gpu": True,
        "dtype": torch.float32,
        "num_trained": 1001,
        "ranks_per_node": 8,
        "accumulation": 4,
        "max_norm": 0.5,
    }
    return deepspeed_config(config, **(known | facts))


def test_config_from_settings() -> None:
    config = made(CONFIGS[2])
    assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == (4, 0.5)
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"]) == (2, 1002)  # no more than is to be sent
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert "offload_param" not in zero and "bf16" not in config
    plus = ZeroConfig(partition_within_node=True, quantized_weights=True, quantized_gradients=True)
    zero = made(plus)["zero_optimization"]
    assert zero["zero_hpz_partition_size"] == 8
    assert zero["zero_quantized_weights"] and zero["zero_quantized_gradients"]
    in_bf16 = made(CONFIGS[1], dtype=torch.bfloat16)["bf16"]
    assert in_bf16["bf16_master_weights_and_grads"] and in_bf16["bf16_optimizer_states"]


def test_further_keys_are_merged_at_any_depth() -> None:
    further = {"zero_optimization": {"overlap_comm": True, "offload_optimizer": {"ratio": 0.5}}}
    config = made(ZeroConfig(offload_optimizer="cpu", config=further))
    zero = config["zero_optimization"]
    assert zero["stage"] == 3 and zero["overlap_comm"] is True
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "ratio": 0.5}


def test_invalid_values_of_deepspeed_keys_are_refused() -> None:
    further = {"overlap_comm": "sometimes", "offload_optimizer": {"ratio": 3.0}}
    config = ZeroConfig(offload_optimizer="cpu", config={"zero_optimization": further})
    with pytest.raises(UserError) as caught:
        check_zero_config(made(config))
    for problem in ("overlap_comm is 'sometimes'", "offload_optimizer.ratio is 3.0"):
        assert f"strategy.config.zero_optimization.{problem}: " in str(caught.value)
    check_zero_config(made(CONFIGS[2]))


class Offloaded(Zero):
    """Has shards in host memory, whose gradients are still being copied from `device`."""

    def __init__(self, home: str, device: str) -> None:
        super().__init__(ZeroConfig(stage=2, offload_optimizer=home))
        self.device = torch.device(device)
        self.part = torch.zeros(2)
        self.part.grad = torch.zeros(2)
        on_device = torch.zeros(2, device=device)
        self._zero = SimpleNamespace(
            single_partition_of_fp32_groups=[self.part], averaged_gradients={0: [on_device]}
        )

    @property
    def root_device(self) -> torch.device:
        return self.device


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)


def test_clip_waits_for_offloaded_gradients(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.accelerator import get_accelerator

    strategy = Offloaded("cpu", "cpu")

    def come() -> None:
        strategy.part.grad = torch.tensor([3.0, 4.0])

    monkeypatch.setattr(get_accelerator(), "synchronize", come)
    assert strategy.clip(torch.optim.AdamW([strategy.part]), 1.0).item() == 5


@pytest.mark.parametrize(("home", "where"), [("cpu", "cpu"), ("none", "cuda")])
def test_the_norm_is_on_the_optimizers_device(one_rank: None, home: str, where: str) -> None:
    """Otherwise a fused AdamW on the host would read a flag before it has been copied."""
    with FakeTensorMode():
        strategy = Offloaded(home, "cuda:0")
        optimizer = torch.optim.AdamW([torch.zeros(2, requires_grad=True)], fused=True)
        norm = strategy.clip(optimizer, 1.0)
        skip_nonfinite_step(optimizer, norm, is_scaled=False)
        assert norm.device.type == where
        assert optimizer.found_inf.device.type == where  # type: ignore[attr-defined]


def prepare_without_compiler() -> str:
    """Build a model on two ranks, each the first of its machine, of which one cannot compile."""
    strategy = connect(ZeroConfig(quantized_weights=True))
    is_second = strategy.global_rank == 1
    strategy.cluster_environment.local_rank = lambda: 0  # each is the first of its machine

    def prepare() -> None:
        if is_second:
            raise UserError("no compiler here; type strategy=zero3_hpz")

    strategy._prepare_quantizer = prepare
    with pytest.raises(UserError) as error:
        strategy.build_model(build_nothing)
    return str(error.value)


def build_nothing(on_meta: bool = False, **_: Any) -> Any:
    raise AssertionError("operators come before weights")


@pytest.mark.slow
def test_a_failed_operator_build_ends_all_ranks() -> None:
    messages = on_ranks(2, prepare_without_compiler)
    assert messages == ["no compiler here; type strategy=zero3_hpz"] * 2


@pytest.mark.slow
def test_ranks_train_as_one_process() -> None:
    """With accumulation, clipping and a nonfinite step; checkpoints are full and bit-identical.

    Three ranks have parts of no two sizes alike.
    """
    num_ranks = 3
    all_gather_list = on_ranks(num_ranks, zero_training.train_all, CONFIGS)
    for has_bad_step in (False, True):
        alone = zero_training.train_in_one_process(num_ranks, has_bad_step=has_bad_step)
        assert alone["norms"][0] > CLIP
        for rank, answer in enumerate(all_gather_list):
            for config, found in zip(CONFIGS, answer[has_bad_step], strict=True):
                assert_same_results(found, alone, config.name)
                is_reader = rank == 0 or config.stage < 3
                assert found["built"] == ["cpu" if is_reader else "meta"], config.name


@pytest.mark.slow
def test_kernels_train_on_sharded_weights() -> None:
    for number, expected, found in on_ranks(2, zero_training.train_with_kernels, CONFIGS[3]):
        assert number == 7 and expected["norms"][0] > CLIP
        assert_same_results(found, expected, "zero3")


def assert_same_results(found: dict[str, Any], alone: dict[str, Any], which: str) -> None:
    assert found["norms"] == pytest.approx(alone["norms"], rel=1e-4, nan_ok=True), which
    assert found["kept"].keys() == alone["kept"].keys(), which
    for name, value in alone["kept"].items():
        torch.testing.assert_close(
            found["kept"][name], value, atol=1e-6, rtol=1e-4, msg=f"{which}: {name}"
        )


@pytest.mark.slow
def test_added_tokens_in_a_sharded_embedding(shell: Shell, tmp_path: Path) -> None:
    words = [
        "model.added_tokens=[<|one|>,<|two|>]",
        "trainer.devices=2",
        "trainer.accelerator=cpu",
        "trainer.max_steps=2",
        "evaluation.exact_match=false",
        "adapter.dropout=0",
        "logger=csv",
    ]
    losses = []
    for name in ("ddp", "zero3"):
        further = [] if name == "ddp" else [f"+strategy.config={_typed(SHARD_EVERYTHING)}"]
        shell.train_into(tmp_path / name, *small_run(*words), f"strategy={name}", *further)
        losses.append(read_column(tmp_path / name, "train/loss"))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def _typed(config: Any) -> str:
    return str(config).replace("'", "")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_hpz"]
)
def test_one_gpu_trains_as_with_strategy_single(name: str, tmp_path: Path) -> None:
    """Tests NCCL, pinned host memory and streams; on one GPU a shard is the full tensor."""
    check_close_on_gpus(tmp_path, ("single", name), "trainer.devices=1", within=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_one_gpu_skips_a_nonfinite_step(config: ZeroConfig) -> None:
    """Also if weights are stepped in host memory and the nonfinite value is on the GPU."""
    [found] = on_ranks(1, zero_training.train, config, 0, "gpu")
    assert_same_results(
        found, zero_training.train_in_one_process(1, has_bad_step=True), config.name
    )


@pytest.mark.gpu
def test_zero_plus_plus_losses_are_close(tmp_path: Path) -> None:
    """ZeRO++ on all GPUs of this machine."""
    if torch.cuda.device_count() < 2:
        pytest.skip("what travels between GPUs needs two of them")
    check_close_on_gpus(tmp_path, ("ddp", "zeropp"), within=0.1)


class RecordingConfig(dict[str, Any]):
    """A DeepSpeed config that records which keys are read."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.keys_read: set[str] = set()  # its copies share it

    def __contains__(self, key: object) -> bool:
        self.keys_read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self


def test_known_keys_are_those_of_deepspeed() -> None:
    from deepspeed.runtime import config as of_deepspeed
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields.items()
    names = {f"zero_optimization.{key}" for name, field in fields for key in (name, field.alias)}
    config = RecordingConfig(train_micro_batch_size_per_gpu=1)
    of_deepspeed.DeepSpeedConfig(config)
    names |= config.keys_read - set(of_deepspeed._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    listed = {*ALLOWED_KEYS, *REFUSED, *DEEPSPEED_KEYS, "zero_optimization.None"}
    known = {".".join(key.split(".")[:count]) for key in listed for count in (1, 2)}
    new = names - known
    assert not new, f"DeepSpeed has keys that app/strategy/deepspeed_config.py does not list: {new}"
