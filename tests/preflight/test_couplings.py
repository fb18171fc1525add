from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app import config
from app.preflight import couplings as compatibility
from app.preflight.couplings import deepspeed_rows, situation
from app.preflight.couplings.situation import Coupling
from app.strategy.settings import FAMILIES, ZeroConfig
from tests.door import ask, make_data, make_model


@pytest.fixture(autouse=True)
def all_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_rows, "_has_deepspeed", lambda: True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    model, data = make_model(folder / "model"), make_data(folder / "data.jsonl")
    return [f"model.path={model}", f"data.datasets=[{{path: {data}}}]"]


CLASHES = [
    # GPUs, what was typed, what must be said, what is right
    (
        0,
        ["trainer.precision=fp16"],
        ["fp16 needs a GPU", "the CPU", "type trainer.precision=fp32"],
        ["trainer.precision=bf16"],
    ),
    (
        2,
        ["trainer.precision=fp16", "trainer.accelerator=cpu"],
        ["fp16 needs a GPU"],
        ["trainer.precision=fp16"],
    ),
    (
        0,
        ["attention=flash2"],
        ["attention=flash2 runs on NVIDIA GPUs", "attention=sdpa"],
        ["attention=eager"],
    ),
    (
        1,
        ["attention=flash2", "trainer.precision=fp32"],
        ["half precision", "trainer.precision=bf16"],
        ["attention=sdpa", "trainer.precision=fp32"],
    ),
    (
        0,
        ["trainer.accelerator=gpu"],
        ["no GPU was found", "trainer.accelerator=cpu"],
        ["trainer.accelerator=cpu"],
    ),
    (
        2,
        ["trainer.devices=3"],
        ["trainer.devices=3, but this machine has 2 GPUs", "trainer.devices=2"],
        ["trainer.devices=2"],
    ),
    (
        0,
        ["strategy=single", "trainer.devices=2"],
        ["strategy=single", "2 ranks", "strategy=ddp"],
        ["strategy=ddp", "trainer.devices=2"],
    ),
    (
        0,
        ["trainer.global_batch_size=7", "trainer.micro_batch_size=2", "trainer.devices=2"],
        ["micro_batch_size 2 x 2 ranks = 4", "=4 or 8"],
        ["trainer.global_batch_size=8", "trainer.micro_batch_size=2", "trainer.devices=2"],
    ),
    (
        0,
        ["evaluation.exact_match=true", "data.val_set_size=0"],
        ["there are no rows to ask", "data.val_set_size=0.05"],
        ["evaluation.exact_match=true"],
    ),
    (
        0,
        ["data.streaming=true", "data.val_set_size=0", "trainer.max_steps=3", "packing.window=9"],
        ["packing.window=9 means nothing", "packing.window=null"],
        ["data.streaming=true", "data.val_set_size=0", "trainer.max_steps=3"],
    ),
    (
        0,
        ["data.streaming=true", "data.val_set_size=0"],
        ["a stream has no end", "trainer.max_steps=N"],
        ["data.streaming=true", "data.val_set_size=0", "trainer.max_steps=3"],
    ),
    (
        0,
        ["adapter.init=pissa", "adapter.use_dora=true"],
        ["adapter.init=pissa takes its start", "type adapter.init=default"],
        ["adapter.init=gaussian", "adapter.use_dora=true"],
    ),
    (
        0,
        ["adapter.use_dora=true", "quantization=nf4", "strategy=fsdp"],
        ["adapter.use_dora=true", "4-bit", "type adapter.use_dora=false"],
        ["quantization=nf4", "strategy=fsdp"],
    ),
    (
        0,
        ["adapter.init=pissa", "strategy=fsdp"],
        ["adapter.init=pissa takes its start", "strategy=fsdp", "type adapter.init=default"],
        ["adapter.init=pissa", "strategy=zero2"],
    ),
    (
        0,
        ["adapter.init=olora", "strategy=zero3"],
        ["adapter.init=olora takes its start", "strategy=ddp"],
        ["adapter.init=olora", "strategy=ddp"],
    ),
    (
        0,
        ["adapter.init=olora", "quantization=nf4"],
        ["adapter.init=olora takes its start", "quantization=nf4", "or quantization=none"],
        ["adapter.init=olora"],
    ),
    (
        0,
        ["adapter=ia3", "model.added_tokens=[<|new|>]"],
        ["adapter=ia3 trains vectors alone", "type adapter=lora or adapter=full"],
        ["adapter=lora", "model.added_tokens=[<|new|>]"],
    ),
    (
        0,
        ["trainer.global_batch_size=4", "trainer.gradient_accumulation_steps=4"],
        ["decide the same thing"],
        ["trainer.gradient_accumulation_steps=4"],
    ),
    (
        0,
        ["schedule.warmup_steps=10", "trainer.max_steps=10"],
        ["schedule.warmup_steps=10 leaves nothing"],
        ["schedule.warmup_steps=5", "trainer.max_steps=10"],
    ),
    (
        0,
        ["optimizer=muon", "adapter.lora_plus_ratio=16"],
        ["adapter.lora_plus_ratio=16 sets", "optimizer=muon", "type optimizer=adamw"],
        ["optimizer=adamw", "adapter.lora_plus_ratio=16"],
    ),
    (
        0,
        ["adapter.lora_plus_weight_decay=0.1"],
        ["means nothing without adapter.lora_plus_ratio", "adapter.lora_plus_ratio=16"],
        ["adapter.lora_plus_weight_decay=0.1", "adapter.lora_plus_ratio=16"],
    ),
    (
        0,
        ["optimizer=muon", "adapter=ia3"],
        ["adapter=ia3 trains vectors", "type optimizer=adamw"],
        ["optimizer=muon"],
    ),
    (
        0,
        ["strategy=zero3", "quantization=nf4"],
        ["strategy=zero3 spreads weights as plain numbers", "type strategy=fsdp (with nf4)"],
        ["strategy=zero2", "quantization=nf4"],
    ),
    (
        0,
        ["strategy=zero2_offload", "trainer.precision=bf16-pure"],
        ["in host memory keeps them in fp32", "type trainer.precision=bf16"],
        ["strategy=zero2", "trainer.precision=bf16-pure"],
    ),
    (
        0,
        ["strategy=fsdp", "quantization=int8"],
        ["quantization=int8 are whole numbers", "type quantization=nf4, or strategy=zero2"],
        ["strategy=fsdp", "quantization=nf4"],
    ),
    (
        0,
        ["strategy=tp", "trainer.devices=2", "quantization=nf4"],
        ["strategy=tp splits matrices", "type strategy=fsdp, or quantization=none"],
        ["strategy=tp", "trainer.devices=2"],
    ),
    (
        0,
        ["strategy=fsdp_tp", "trainer.devices=2", "adapter.use_dora=true"],
        ["adapter.use_dora=true measures whole columns", "type adapter.use_dora=false"],
        ["strategy=fsdp", "trainer.devices=2", "adapter.use_dora=true"],
    ),
    (
        2,
        ["strategy=fsdp_tp", "strategy.offload_parameters=true"],
        ["strategy=fsdp_tp splits matrices", "type strategy=fsdp_offload, or"],
        ["strategy=fsdp_offload"],
    ),
    (
        0,
        ["strategy=fsdp_offload"],
        ["pinned for a GPU", "the CPU (no GPU was found)", "type strategy=fsdp"],
        ["strategy=fsdp"],
    ),
    (
        0,
        ["strategy=zeropp"],
        ["strategy=zeropp quantizes", "the CPU (no GPU was found)", "type strategy=zero3_hpz"],
        ["strategy=zero3_hpz"],
    ),
    (
        1,
        ["strategy=zero3_nvme"],
        ["would keep weights and optimizer states on a disk", "type strategy=zero3_offload"],
        ["strategy=zero3_offload"],
    ),
    (
        0,
        ["strategy=zero2_offload", "strategy.offload_parameters=cpu"],
        ["strategy.offload_parameters=cpu moves weights", "strategy.stage=2", "strategy.stage=3"],
        ["strategy=zero2_offload", "strategy.offload_parameters=cpu", "strategy.stage=3"],
    ),
    (
        0,
        ["strategy=zero1", "strategy.partition_within_node=true"],
        ["partition_within_node", "strategy.stage=1 spreads none", "type strategy.stage=3"],
        ["strategy=zero3", "strategy.partition_within_node=true"],
    ),
    (
        0,
        ["strategy=zero2", "strategy.config={zero_optimization: {stage: 3}, gradient_clipping: 1}"],
        [
            "zero_optimization.stage is strategy.stage here, gradient_clipping is trainer.max_gr",
            "type strategy.stage, trainer.max_grad_norm instead",
        ],
        ["strategy=zero2", "strategy.config={zero_optimization: {overlap_comm: true}}"],
    ),
    (
        0,
        ["strategy=zero2", "strategy.config={zero_optimisation: {overlap_comm: true}}"],
        ["DeepSpeed knows no zero_optimisation (did you mean zero_optimization?)"],
        ["strategy=zero2", "strategy.config={zero_optimization: {overlap_comm: true}}"],
    ),
    (
        0,
        ["strategy=zero2", "strategy.config={train_micro_batch_size: 4, zzz: 1}"],
        [
            "no train_micro_batch_size (did you mean train_micro_batch_size_per_gpu, which is "
            "trainer.micro_batch_size here?), no zzz; type a key that it knows",
        ],
        ["strategy=zero2", "trainer.micro_batch_size=4"],
    ),
    (
        0,
        ["strategy=zero2", "strategy.config={zero_optimization: {overlap_com: true}}"],
        ["DeepSpeed knows no zero_optimization.overlap_com (did you mean overlap_comm?)"],
        ["strategy=zero3", "strategy.config={zero_optimization: {stage3_max_reuse_distance: 9}}"],
    ),
    (
        0,
        ["strategy=zero2", "trainer.checkpoint.async=true"],
        ["trainer.checkpoint.async=true", "type trainer.checkpoint.async=false"],
        ["strategy=ddp", "trainer.checkpoint.async=true"],
    ),
    (
        1,
        ["strategy=fsdp", "trainer.precision=fp16"],
        ["strategy=fsdp and trainer.precision=fp16", "type trainer.precision=bf16"],
        ["strategy=ddp", "trainer.precision=fp16"],
    ),
    (
        0,
        ["strategy=fsdp", "trainer.compile=true"],
        ["not tried together", "type trainer.compile=false, or strategy=ddp"],
        ["strategy=ddp", "trainer.compile=true"],
    ),
    (
        0,
        ["strategy=zero1", "optimizer=muon"],
        ["optimizer=muon does not step parts", "strategy=zero1", "type optimizer=adamw"],
        ["strategy=ddp", "optimizer=muon"],
    ),
    (
        0,
        ["strategy=zero2", "optimizer=schedule_free", "schedule=constant"],
        ["optimizer=schedule_free does not step parts", "strategy=zero2"],
        ["strategy=fsdp", "optimizer=schedule_free", "schedule=constant"],
    ),
    (
        0,
        ["strategy=fsdp_tp", "trainer.devices=3"],
        ["=2 does not divide 3 ranks (3 / 2 leaves 1)", "or trainer.devices=2"],
        ["strategy=fsdp_tp", "trainer.devices=2"],
    ),
    (
        0,
        ["strategy=fsdp_tp"],
        ["strategy.tensor_parallel_size=2 does not divide 1 rank", "type strategy=ddp, or"],
        ["strategy=ddp"],
    ),
    (
        0,
        ["strategy=fsdp_hybrid", "strategy.replicas=3", "trainer.devices=4"],
        ["strategy.replicas=3 does not divide 4 ranks", "type strategy.replicas=1 or 2 or 4"],
        ["strategy=fsdp_hybrid", "strategy.replicas=2", "trainer.devices=4"],
    ),
    (
        0,
        ["strategy=fsdp_tp", "trainer.devices=4", "trainer.global_batch_size=5"],
        ["micro_batch_size 1 x 2 groups of ranks (4 ranks / 2 that split a matrix) = 2; type", "6"],
        ["strategy=fsdp_tp", "trainer.devices=4", "trainer.global_batch_size=6"],
    ),
]


@pytest.mark.parametrize(
    ("gpus", "bad", "fragments", "good"), CLASHES, ids=[" ".join(c[1]) for c in CLASHES]
)
def test_clashes_are_explained_and_their_twins_pass(
    base: list[str], gpus: int, bad: list[str], fragments: list[str], good: list[str]
) -> None:
    answer = ask(*base, *bad, gpus=gpus)
    assert answer.code == 2, answer.said
    for fragment in [*fragments, "; type "]:
        assert fragment in answer.said
    assert "Traceback" not in answer.said
    answer = ask(*base, *good, gpus=gpus)
    assert answer.code == 0, answer.said


@pytest.mark.parametrize(
    ("name", "gpus", "instead"),
    [
        ("zero1", 0, "fsdp_grad_op"),
        ("zero2_offload", 0, "fsdp"),
        ("zero2_offload", 1, "fsdp_offload"),
        ("zero3", 0, "fsdp"),
        ("zero3_hpz", 0, "fsdp_hybrid"),
    ],
)
def test_without_deepspeed_what_comes_nearest_is_named(
    base: list[str], monkeypatch: pytest.MonkeyPatch, name: str, gpus: int, instead: str
) -> None:
    monkeypatch.setattr(deepspeed_rows, "_has_deepspeed", lambda: False)
    answer = ask(*base, f"strategy={name}", gpus=gpus)
    assert answer.code == 2
    assert f"strategy={name} needs the package deepspeed, which is not installed" in answer.said
    assert f"; type strategy={instead}, or DS_BUILD_OPS=0 pip install deepspeed" in answer.said
    assert ask(*base, f"strategy={instead}", gpus=gpus).code == 0


@pytest.mark.parametrize(
    ("config", "owned"),
    [
        ({"fp16": {"enabled": True}}, {"fp16.enabled": "trainer.precision"}),
        ({"optimizer": {}}, {"optimizer": "optimizer"}),
        ({"zero_allow_untested_optimizer": False}, {"zero_allow_untested_optimizer": "optimizer"}),
        ({"zero_force_ds_cpu_optimizer": True}, {"zero_force_ds_cpu_optimizer": "optimizer"}),
        ({"data_types": {"param_dtype": "fp32"}}, {"data_types.param_dtype": "trainer.precision"}),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "strategy.offload_parameters",
        ),
        ({"zero_optimization": None}, "strategy.stage"),
        ({"zero_optimization": {"offload_param": {"buffer_count": 5}}}, {}),
        ({"steps_per_print": 1, "zero_optimization": {"overlap_comm": True}}, {}),
    ],
)
def test_keys_of_deepspeed_that_are_settings_here_are_found_at_any_depth(
    config: dict[str, Any], owned: dict[str, str] | str
) -> None:
    found = deepspeed_rows._owned(config)
    assert owned in found.values() if isinstance(owned, str) else found == owned


def test_every_strategy_of_deepspeed_has_one_of_pytorch() -> None:
    zero = {name for name, family in FAMILIES.items() if family is ZeroConfig}
    assert set(deepspeed_rows.PYTORCHS_OWN) == zero
    assert set(deepspeed_rows.PYTORCHS_OWN.values()) <= set(FAMILIES)


def test_a_preview_counts_no_ranks_of_another_machine(base: list[str]) -> None:
    assert ask(*base, "strategy=fsdp_tp", verb="preview").code == 0
    assert ask(*base, "strategy=fsdp_tp", "trainer.devices=3", verb="preview").code == 2


NAN, INF = float("nan"), float("inf")
RANGES: list[tuple[str, list[Any], Any]] = [
    ("optimizer.lr", [0.0, -1e-3, NAN, INF, 1000.0], 1e-3),
    ("optimizer.weight_decay", [-0.1, NAN], 0.1),
    ("adapter.r", [0, -4], 1),
    ("adapter.alpha", [0.0, NAN], 8.0),
    ("adapter.dropout", [1.0, -0.1, NAN], 0.0),
    ("adapter.neftune_alpha", [0.0, -5.0, NAN, INF], 5.0),
    ("adapter.lora_plus_ratio", [0.0, -1.0, NAN, INF], 16.0),
    ("adapter.lora_plus_weight_decay", [-0.1, NAN], 0.0),
    ("optimizer.base_batch_size", [0, -8], 16),
    ("schedule.warmup_ratio", [1.0, -0.1, 2.0, NAN], 0.5),
    ("schedule.warmup_steps", [-1], 0),
    ("trainer.micro_batch_size", [0, -1], 1),
    ("trainer.gradient_accumulation_steps", [0], 1),
    ("trainer.global_batch_size", [0, -8], 8),
    ("trainer.num_epochs", [0, -1], 1),
    ("trainer.max_steps", [0, -1], 1),
    ("trainer.max_grad_norm", [0.0, NAN], 0.5),
    ("trainer.max_skipped_steps", [-1], 3),
    ("trainer.devices", [0, -1, "two", 1.5, True], 1),
    ("strategy.tensor_parallel_size", [0, -2], 1),
    ("strategy.replicas", [0, -1], None),
    ("trainer.validate_every_steps", [0], 1),
    ("evaluation.max_new_tokens", [0], 1),
    ("seed", [-1, 2**32], 0),
]


@pytest.mark.parametrize(("key", "bad", "good"), RANGES, ids=[row[0] for row in RANGES])
def test_numbers_out_of_range_are_named_with_the_range(
    right: config.TrainConfig, key: str, bad: list[Any], good: Any
) -> None:
    *path, name = key.split(".")
    part = getattr(right, path[0]) if path else right
    before = getattr(part, name)
    for value in bad:
        setattr(part, name, value)
        (problem,) = compatibility.check_compatibility(right, num_gpus=0)
        assert problem.startswith(f"{key}={value}: expected ")
    for value in (good, before):
        setattr(part, name, value)
        assert compatibility.check_compatibility(right, num_gpus=0) == []


@pytest.fixture(scope="module")
def right() -> config.TrainConfig:
    # The decay of LoRA+ is refused without its ratio.
    words = ["model=tiny", "data=skills", "adapter.lora_plus_ratio=16", "strategy=fsdp"]
    loaded = config.load_config("train", words)
    assert isinstance(loaded, config.TrainConfig)
    return loaded


def test_every_row_stands_in_the_table_once() -> None:
    rows = [row for row, _ in _rows_and_sources()]
    assert len(rows) == len(compatibility.COUPLINGS)
    assert set(rows) == set(compatibility.COUPLINGS)


def test_every_row_names_the_settings_that_it_reads(right: config.TrainConfig) -> None:
    zero = config.load_config("train", ["model=tiny", "data=skills", "strategy=zero3"])
    on_gpu = {"trainer.accelerator"}
    ranks = {*on_gpu, "trainer.devices", "trainer.num_nodes"}
    for row, source in _rows_and_sources():
        read = {f"{group}.{name}" for group, name in re.findall(r"config\.(\w+)\.(\w+)", source)}
        read |= on_gpu if re.search(r"s\.(on_gpu|device)\b", source) else set()
        read |= ranks if "s.num_ranks" in source else set()
        read |= {f"trainer.{name}" for name in re.findall(r"config\.trainer, '(\w+)'", source)}
        assert set(row.reads.split()) == read
        assert all(_has(right, key) or _has(zero, key) for key in read)


def _rows_and_sources() -> Iterator[tuple[Coupling, str]]:
    for file in sorted(Path(deepspeed_rows.__file__).parent.glob("*_rows.py")):
        (table,) = (
            node
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_ROWS")
        )
        assert isinstance(table.value, ast.Tuple)
        subject = importlib.import_module(f"{compatibility.__name__}.{file.stem}")
        rows = getattr(subject, ast.unparse(table.targets[0]))
        yield from zip(rows, map(ast.unparse, table.value.elts), strict=True)


def _has(value: object, key: str) -> bool:
    for name in key.split("."):
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("0,-1,1", 1)]
)
def test_gpus_are_counted_by_their_device_files(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    files = [Path(f"/dev/{name}") for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(files))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert situation.count_gpus() == count
