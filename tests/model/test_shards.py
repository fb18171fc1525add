"""A model written shard by shard is what `save_pretrained` writes; what got lost is found."""

from __future__ import annotations

import copy
import json
import math
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig
from transformers.core_model_loading import Chunk, WeightConverter

from app.model.adapter import AdapterConfig, FreezeConfig, FullConfig, Ia3Config, LoraConfig
from app.model.adapter.apply import apply_adapter
from app.model.adapter.saved import probe_logits, save_adapter
from app.model.adapter.settings import ADAPTER_FILE
from app.model.save import INDEX, WEIGHTS, _add_rope_of_v4, save_model, write_model
from common.errors import TrainingFault
from tests import tiny
from tests.model.test_experts import tiny_mixture
from tests.tiny import move, probe_of, tiny_llama, tiny_t5

BF16, FP32 = torch.bfloat16, torch.float32


MODELS: dict[str, Callable[[], Any]] = {
    **tiny.MODELS,
    "experts": lambda: tiny_mixture("mixtral"),  # one tensor in memory, each by itself on the disk
}


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model's folder; each must be in one file alone, where the index says."""
    files = sorted(folder.glob("*.safetensors"))
    by_file = {file.name: load_file(file) for file in files}
    if [file.name for file in files] != [WEIGHTS]:
        index = json.loads((folder / INDEX).read_text())
        places = {name: file for file, tensors in by_file.items() for name in tensors}
        assert index["weight_map"] == places
        num_bytes = sum(t.nbytes for tensors in by_file.values() for t in tensors.values())
        assert index["metadata"]["total_size"] == num_bytes
    return {name: tensor for tensors in by_file.values() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("name", "max_shard_bytes", "dtype"),
    [*((name, 30_000, BF16) for name in MODELS), ("tied", 10**9, FP32)],
)
def test_the_folder_equals_that_of_save_pretrained(
    name: str, max_shard_bytes: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = MODELS[name]()
    model.generation_config.max_new_tokens = 7
    write_model(model, tmp_path / "ours", dtype, max_shard_bytes=max_shard_bytes)
    assert {parameter.dtype for parameter in model.parameters()} == {FP32}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = read(tmp_path / "ours"), read(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype
        assert torch.equal(ours[key], tensor), key
    for file in ("config.json", "generation_config.json"):
        written = [json.loads((tmp_path / who / file).read_text()) for who in ("ours", "theirs")]
        added = written[0].keys() - written[1].keys()
        assert added == ({"rope_theta"} if "rope_parameters" in written[1] else set())
        assert written[0] == written[1] | {name: written[0][name] for name in added}
    num_files = len(list((tmp_path / "ours").glob("*.safetensors")))
    assert (num_files == 1) == (max_shard_bytes == 10**9)
    pairs = model.config.is_encoder_decoder
    _, loading = (AutoModelForSeq2SeqLM if pairs else AutoModelForCausalLM).from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(loading.values())


def test_matrices_that_are_one_on_the_disk_are_written_together(tmp_path: Path) -> None:
    model = tiny_llama()
    model._weight_conversions = [
        WeightConverter(
            source_patterns="mlp.gate_up_proj.weight",
            target_patterns=["mlp.gate_proj.weight", "mlp.up_proj.weight"],
            operations=[Chunk(dim=0)],
        )
    ]
    write_model(model, tmp_path / "ours", FP32, max_shard_bytes=8_000)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = read(tmp_path / "ours"), read(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert ours["model.layers.1.mlp.gate_up_proj.weight"].shape == (96, 32)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_files_of_an_earlier_attempt_are_replaced(tmp_path: Path) -> None:
    write_model(tiny_llama(), tmp_path, FP32, max_shard_bytes=20_000)
    assert (tmp_path / INDEX).exists()
    write_model(tiny_llama(seed=1), tmp_path, FP32)
    assert [file.name for file in tmp_path.glob("*.safetensors*")] == [WEIGHTS]


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group of this process alone: what ranks tell each other is told to itself."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


class Parts:
    """Stands for ranks that hold parts: a weight is only had by `whole`, which may lose some."""

    root_device = torch.device("cpu")

    def __init__(
        self, lose: Callable[[Tensor], Tensor] = torch.clone, allowed_bytes: float = math.inf
    ) -> None:
        self.lose, self.num_settled = lose, 0
        self.allowed_bytes = allowed_bytes
        self.num_bytes = self.peak_bytes = 0

    def reshard(self, model: Any) -> None:
        self.num_settled += 1

    def full_tensor(self, weight: Tensor) -> Tensor:
        gathered = self.lose(weight.detach().clone())
        # A thread of gloo releases what it sent a moment after the broadcast returned.
        deadline = time.monotonic() + 5
        while self.num_bytes + gathered.nbytes > self.allowed_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        self.num_bytes += gathered.nbytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        weakref.finalize(gathered, self._let_go, gathered.nbytes)
        return gathered

    def _let_go(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes

    def weight_state(self, weight: Tensor) -> Tensor:
        return weight.detach()

    def restore_weight(self, weight: Tensor, value: Tensor) -> None:
        assert weight.requires_grad
        weight.data.copy_(value)


def moved(config: AdapterConfig, make: Callable[[], Any] = tiny_llama, **more: Any) -> Any:
    """A model that was trained a little."""
    return move(apply_adapter(make(), config, half_precision=False, **more))


def save(model: Any, config: AdapterConfig, folder: Path, parts: Parts, dtype: Any = FP32) -> Any:
    architecture = tiny_llama().config
    architecture.dtype = dtype
    probe = {name: ids[0].tolist() for name, ids in probe_of(model).items()}
    saved, same = save_model(
        model, config, architecture, folder, probe, base={}, reload_base=lambda: None, shards=parts
    )
    assert same is model
    assert parts.num_settled
    return saved


def test_no_more_than_a_shard_and_a_weight_is_held_beside_the_parts(
    group: None, tmp_path: Path
) -> None:
    limit = 20_000
    model = moved(FullConfig(), tiny_t5)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    parts = Parts(allowed_bytes=limit + max(sizes))
    write_model(model, tmp_path, FP32, parts, max_shard_bytes=limit)
    assert sum(sizes) > 4 * limit
    assert limit / 2 < parts.peak_bytes <= limit + max(sizes)


ADAPTERS: dict[str, AdapterConfig] = {
    "lora": LoraConfig(r=4, dropout=0.0),
    "dora": LoraConfig(r=4, dropout=0.0, use_dora=True),
    "whole": LoraConfig(r=4, dropout=0.0, modules_to_save=["lm_head", "norm"]),
    "tokens": LoraConfig(r=4, dropout=0.0),
    "ia3": Ia3Config(),
}


@pytest.mark.parametrize(
    ("kind", "tied"), [*((kind, False) for kind in ADAPTERS), ("tokens", True)]
)
def test_an_adapter_that_was_gathered_is_the_file_of_one_process(
    group: None, kind: str, tied: bool, tmp_path: Path
) -> None:
    config = ADAPTERS[kind]
    model = moved(
        config,
        lambda: tiny_llama(tie_word_embeddings=tied),
        token_ids=[5, 9] if kind == "tokens" else [],
    )
    save_adapter(model, tmp_path / "one")
    saved = save(model, config, tmp_path, Parts())
    for name in ("adapter_config.json", ADAPTER_FILE):
        assert (saved / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


@pytest.mark.parametrize("config", [FullConfig(), FreezeConfig(layers="top 1")], ids=str)
def test_a_model_goes_on_as_it_was_rounded_for_the_disk(
    group: None, config: AdapterConfig, tmp_path: Path
) -> None:
    model = moved(config)
    before = probe_logits(model, probe_of(model))
    saved = save(model, config, tmp_path, Parts(), BF16)
    assert {parameter.dtype for parameter in model.parameters()} == {FP32}
    on_disk = read(saved)
    for name, parameter in model.named_parameters():
        assert torch.equal(on_disk[name], parameter.to(BF16))
        if parameter.requires_grad:
            assert torch.equal(on_disk[name].float(), parameter)
    assert not torch.equal(probe_logits(model, probe_of(model)), before)


def half(weight: Tensor) -> Tensor:
    return weight[: len(weight) // 2].clone()


def without_a_half(weight: Tensor) -> Tensor:
    weight[len(weight) // 2 :] = 0
    return weight


def from_memory_never_written(weight: Tensor) -> Tensor:
    weight.view(-1)[-1] = float("nan")
    return weight


@pytest.mark.parametrize(
    ("lose", "said", "config"),
    [
        (half, r"gathered with shape \[.*\], expected", FullConfig()),
        (without_a_half, "logits differ by", FullConfig()),
        (without_a_half, "logits differ by", LoraConfig(r=4, dropout=0.0)),
        (from_memory_never_written, "not finite", LoraConfig(r=4, dropout=0.0)),
    ],
)
def test_an_incomplete_gather_is_a_training_fault(
    group: None, lose: Callable[[Tensor], Tensor], said: str, config: AdapterConfig, tmp_path: Path
) -> None:
    with pytest.raises(TrainingFault, match=said):
        save(moved(config), config, tmp_path, Parts(lose))


def test_a_file_that_holds_something_else_is_a_training_fault(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch as safetensors

    write = safetensors.save_file

    def write_badly(tensors: dict[str, Tensor], file: Any, **more: Any) -> None:
        name = max(tensors)
        write(tensors | {name: tensors[name] + 1e-3}, file, **more)

    monkeypatch.setattr(safetensors, "save_file", write_badly)
    with pytest.raises(TrainingFault, match="differs when read back"):
        save(moved(FullConfig()), FullConfig(), tmp_path, Parts())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500_000.0},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "beta_fast": 16.0},
    ],
)
def test_versions_before_rope_parameters_find_the_same_angles(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_llama(rope_parameters=dict(rope))
    write_model(model, tmp_path, FP32)
    content = json.loads((tmp_path / "config.json").read_text())
    scaling = content.get("rope_scaling", {"rope_type": "default"})
    assert scaling | {"rope_theta": content["rope_theta"]} == content["rope_parameters"]
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.rope_parameters == model.config.rope_parameters


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LINEAR, LOCAL = {"rope_type": "linear", "factor": 8.0}, {"rope_type": "default", "rope_theta": 1e4}
BY_LAYER = {"full_attention": LINEAR | {"rope_theta": 1e6}, "sliding_attention": LOCAL}
MROPE = {"type": "default", "rope_type": "default", "mrope_section": [2, 3, 3]}


@pytest.mark.parametrize(
    ("family", "rope", "added"),
    [
        (
            "phi3",
            FACTORS | {"type": "longrope", "rope_type": "longrope", "rope_theta": 1e4},
            {"rope_theta": 1e4, "rope_scaling": FACTORS | {"type": "longrope"}},
        ),
        (
            "gemma3_text",
            BY_LAYER,
            {"rope_theta": 1e6, "rope_scaling": LINEAR, "rope_local_base_freq": 1e4},
        ),
        (
            "gpt_neox",
            LOCAL | {"partial_rotary_factor": 0.5},
            {"rotary_emb_base": 1e4, "rotary_pct": 0.5},
        ),
        ("qwen2_vl_text", MROPE | {"rope_theta": 1e6}, {"rope_theta": 1e6, "rope_scaling": MROPE}),
    ],
)
def test_rope_settings_of_single_families_are_written_as_version_4_reads_them(
    family: str, rope: dict[str, Any], added: dict[str, Any], tmp_path: Path
) -> None:
    config = AutoConfig.for_model(
        family, hidden_size=32, num_attention_heads=2, rope_parameters=copy.deepcopy(rope)
    )
    config.save_pretrained(tmp_path)
    _add_rope_of_v4(type(config), tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert {name: content.get(name) for name in added} == added


@pytest.mark.parametrize("error", [None, KeyError("rope_theta")])
def test_a_config_that_version_5_would_then_read_otherwise_stays_as_it_was(
    error: Exception | None, tmp_path: Path
) -> None:
    class Changed(LlamaConfig):
        @classmethod
        def from_pretrained(cls, *given: Any, **more: Any) -> Any:
            config = super().from_pretrained(*given, **more)
            if "rope_theta" in json.loads((tmp_path / "config.json").read_text()):
                if error is not None:
                    raise error
                config.vocab_size += 1
            return config

    Changed().save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_text()
    _add_rope_of_v4(Changed, tmp_path)
    assert (tmp_path / "config.json").read_text() == before
