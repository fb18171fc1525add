"""Merged models, loaded by stock transformers, equal base + adapter for every kind of adapter."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

from app.model.adapter import saved
from app.model.adapter.apply import apply_adapter, save_converted
from app.model.adapter.settings import AdapterConfig, Ia3Config, LoraConfig
from app.model.base import ModelConfig, load_base, read_shapes, weight_files
from app.model.merging import BOUNDS, Difference, MergePlan, measure_difference, merge_weights
from app.model.quantization import QuantizationConfig
from app.process import environment
from common.errors import UserError
from tests.conftest import ROOT
from tests.families import tiny_family
from tests.model.test_experts import tiny_mixture
from tests.multimodal import tiny_multimodal
from tests.processes import LONGEST
from tests.tiny import move, probe, probe_of, save_with_tokenizer, tiny_gpt2, tiny_llama, tiny_t5

Model = Any
Adapters = Sequence[tuple[Path, float]]


def on_meta(base: Path) -> Model:
    with torch.device("meta"):
        return load_base(ModelConfig(path=str(base)), "eager", torch.float32, on_meta=True)


def read_base(base: Path, **how: Any) -> Model:
    return load_base(ModelConfig(path=str(base)), "eager", torch.float32, **how)


def make_adapter(
    base: Path, folder: Path, adapter: AdapterConfig, *, seed: int = 7, **how: Any
) -> Model:
    """Save an adapter with nonzero weights; return base + adapter."""
    adapted = move(apply_adapter(read_base(base), adapter, half_precision=False, **how), seed=seed)
    saved.save_adapter(adapted, folder)
    return adapted.eval()


def by_peft(
    base: Path, folder: Path, targets: list[str], experts: list[str] | None = None, **how: Any
) -> Model:
    """Save an adapter that stock peft has made; return base + adapter."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=targets, target_parameters=experts)
    adapted = move(peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config))
    adapted.save_pretrained(folder, **how)
    return adapted


def merged(
    base: Path, adapters: Adapters, folder: Path, dtype: Any = torch.float32, **how: Any
) -> Model:
    """Merge, and load the result with stock transformers."""
    model = on_meta(base)
    merge_weights(model, plan_of(base, adapters, dtype, **how), folder)
    kind = AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32)


def plan_of(base: Path, adapters: Adapters, dtype: Any = torch.float32, **how: Any) -> MergePlan:
    changes = saved.read_weight_changes(lambda: on_meta(base), adapters)
    return MergePlan(base_files=weight_files(base), changes=changes, dtype=dtype, **how)


def check_within(found: Difference, bound: str = "float32") -> None:
    assert found.is_within(BOUNDS[bound]), str(found)


def difference(one: Model, other: Model) -> Difference:
    rows = [saved.probe_logits(model, probe_of(other)) for model in (one, other)]
    return measure_difference(rows[:1], rows[1:])


LORA, WHOLE_HEAD = LoraConfig(r=4), LoraConfig(r=4, modules_to_save=["lm_head"])
DORA, RSLORA = LoraConfig(r=4, use_dora=True), LoraConfig(r=4, use_rslora=True)
# Of a DeepSeek's matrices peft takes those named as its experts' for them: no DoRA there.
DORA_ON_ATTENTION = LoraConfig(r=4, use_dora=True, target_modules=["o_proj"])
EXPERTS = LoraConfig(r=4, experts="lora", rank_pattern={"experts.down_proj": 2, "o_proj": 3})
DENSE = LoraConfig(r=4, experts="lora", alpha_pattern={"gate_proj": 3})
ROWS: dict[str, Any] = {"token_ids": [5, 7]}
Case = tuple[Callable[..., Model], dict[str, Any], AdapterConfig, dict[str, Any]]
CASES: dict[str, Case] = {
    "rslora, rows": (tiny_llama, {"tie_word_embeddings": False}, RSLORA, ROWS),
    "dora": (tiny_llama, {}, DORA, {}),
    "ia3": (tiny_llama, {"attention_bias": True}, Ia3Config(), {}),
    "rows, tied": (tiny_llama, {}, LORA, ROWS),
    "pair, rows": (tiny_t5, {}, LORA, ROWS),
    "whole head": (tiny_llama, {"tie_word_embeddings": False}, WHOLE_HEAD, {}),
    "dora, transposed": (tiny_gpt2, {}, DORA, {}),
    "transposed ia3": (tiny_gpt2, {}, Ia3Config(), {}),
    "pair, untied": (tiny_t5, {"tie_word_embeddings": False}, LORA, ROWS),
    "rank pattern": (
        tiny_llama, {}, LoraConfig(r=4, rank_pattern={"q_proj": 2}, alpha_pattern={"k_proj": 3}), {}
    ),
}  # fmt: skip

MIXTURES: dict[str, Case] = {
    "dense layers and experts": (tiny_mixture, {"kind": "deepseek_v3"}, DENSE, {}),
    "qwen3_moe": (tiny_mixture, {"kind": "qwen3_moe"}, EXPERTS, {}),
    "gpt_oss": (tiny_mixture, {"kind": "gpt_oss"}, EXPERTS, {}),
}
"""models whose routers may choose other experts after rounding; compared in fp32"""


def check_case(case: Case, dtype: torch.dtype, folder: Path) -> None:
    build, numbers, adapter, how = case
    model = build(**numbers)
    model.save_pretrained(folder / "base")
    adapted = make_adapter(folder / "base", folder / "adapter", adapter, **how)
    read = merged(folder / "base", [(folder / "adapter", 1.0)], folder / "merged", dtype)
    check_within(difference(adapted, read), str(dtype).removeprefix("torch."))
    before, written = (read_shapes(weight_files(folder / name)) for name in ("base", "merged"))
    assert written == before
    assert not difference(read_base(folder / "base"), read).is_within(BOUNDS["bfloat16"])


@pytest.mark.parametrize("name", [*CASES, *MIXTURES])
def test_a_merge_in_fp32_equals_base_and_adapter(name: str, tmp_path: Path) -> None:
    check_case((CASES | MIXTURES)[name], torch.float32, tmp_path)


@pytest.mark.parametrize("name", ["rslora, rows", "transposed ia3"])
def test_a_merge_in_bf16_is_within_its_bound(name: str, tmp_path: Path) -> None:
    check_case(CASES[name], torch.bfloat16, tmp_path)


def test_a_head_that_only_the_adapter_changed_is_untied(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_llama().save_pretrained(base)
    targets = ["embed_tokens", "q_proj"]
    adapted = by_peft(base, tmp_path / "adapter", targets, save_embedding_layers=False)
    read = merged(base, [(tmp_path / "adapter", 1.0)], tmp_path / "merged")
    assert not read.config.tie_word_embeddings
    check_within(difference(adapted.eval(), read))


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_head_is_tied_as_the_files_say(is_equal: bool, tmp_path: Path) -> None:
    """config.json says tied; the files hold a head of their own, or a copy of the embedding."""
    base, adapter = with_head(tiny_llama(tie_word_embeddings=True), tmp_path, is_equal=is_equal)
    adapted = by_peft(base, adapter, ["q_proj"])
    read = merged(base, [(adapter, 1.0)], tmp_path / "merged")
    assert read.config.tie_word_embeddings == is_equal
    check_within(difference(adapted.eval(), read))


def test_a_separate_head_of_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    base, adapter = with_head(tiny_t5(), tmp_path, is_equal=False)
    make_adapter(base, adapter, LORA)
    with pytest.raises(UserError, match="a head unlike the embedding"):
        merged(base, [(adapter, 1.0)], tmp_path / "merged")


def with_head(model: Any, parent: Path, *, is_equal: bool) -> tuple[Path, Path]:
    """Save a tied base with a head in its files; return the folders of base and adapter."""
    model.save_pretrained(parent / "base")
    tensors = load_file(parent / "base" / "model.safetensors")
    embedding = model.get_input_embeddings().weight.detach()
    tensors["lm_head.weight"] = embedding.clone() if is_equal else torch.rand_like(embedding)
    save_file(tensors, parent / "base" / "model.safetensors", {"format": "pt"})
    return parent / "base", parent / "adapter"


def test_a_shared_weight_with_different_changes_is_refused(tmp_path: Path) -> None:
    tiny_family("zamba2").save_pretrained(tmp_path / "base")
    make_adapter(tmp_path / "base", tmp_path / "adapter", LoraConfig(r=4))
    with pytest.raises(UserError, match=r"layers\.1\..* differently from .*layers\.3\..*cannot be"):
        merged(tmp_path / "base", [(tmp_path / "adapter", 1.0)], tmp_path / "merged")
    in_mixers = LoraConfig(r=4, target_modules=["in_proj"])
    adapted = make_adapter(tmp_path / "base", tmp_path / "mixers", in_mixers)
    read = merged(tmp_path / "base", [(tmp_path / "mixers", 1.0)], tmp_path / "b")
    check_within(difference(adapted, read))


def test_experts_saved_by_stock_peft_are_merged_into_files_per_expert(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_mixture("mixtral").save_pretrained(base)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = by_peft(base, tmp_path / "adapter", ["q_proj"], experts)
    expected = saved.probe_logits(adapted.eval(), probe_of(adapted.get_base_model()))
    read = merged(base, [(tmp_path / "adapter", 1.0)], tmp_path / "merged")
    check_within(measure_difference([expected], [saved.probe_logits(read, probe_of(read))]))
    names = [file.name for file in weight_files(tmp_path / "merged")]
    with (
        safe_open(tmp_path / "merged" / names[0], "pt") as written,
        safe_open(base / names[0], "pt") as before,
    ):
        assert set(written.keys()) == set(before.keys())


@pytest.mark.parametrize(
    ("build", "numbers"), [(tiny_llama, {}), (tiny_mixture, {"kind": "deepseek_v3"})]
)
def test_several_adapters_are_added_by_weight(
    build: Callable[..., Model], numbers: dict[str, Any], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    build(**numbers).save_pretrained(base)
    for name, seed in (("one", 7), ("two", 8)):
        make_adapter(base, tmp_path / name, LoraConfig(r=4), seed=seed)
    adapters = [(tmp_path / "one", 0.75), (tmp_path / "two", -0.5)]
    read = merged(base, adapters, tmp_path / "merged")
    served = saved.load_weighted_adapters(read_base(base), adapters)
    check_within(difference(served, read))
    alone = saved.load_adapter(read_base(base), tmp_path / "one")
    assert not difference(alone, read).is_within(BOUNDS["bfloat16"])
    make_adapter(base, tmp_path / "dora", DORA_ON_ATTENTION if numbers else DORA)
    with pytest.raises(UserError, match="only plain LoRA can be weighted or summed"):
        saved.read_weight_changes(lambda: on_meta(base), [*adapters, (tmp_path / "dora", 1.0)])


WIDE = {"kind": "qwen3_moe", "hidden_size": 64, "head_dim": 16}


@pytest.mark.parametrize(
    ("build", "numbers", "method"),
    [
        (tiny_llama, {}, "nf4"),
        (tiny_mixture, WIDE, "nf4"),
        *(pytest.param(tiny_llama, {}, each, marks=pytest.mark.slow) for each in ("int8", "fp8")),
    ],
)
def test_a_merge_onto_rounded_weights_equals_or_is_close_to_the_quantized_base(
    build: Callable[..., Model], numbers: dict[str, Any], method: str, tmp_path: Path
) -> None:
    """Layers in int8 and fp8 round their inputs too: close, but not equal."""
    base, rounding = tmp_path / "base", QuantizationConfig(method=method)
    build(**numbers).save_pretrained(base)
    adapted = apply_adapter(read_base(base, quantization=rounding), LORA, half_precision=False)
    move(adapted)
    saved.save_adapter(adapted, tmp_path / "adapter")
    how = {"quantization": rounding, "quantized_from": torch.float32}
    adapters = [(tmp_path / "adapter", 1.0)]
    read = merged(base, adapters, tmp_path / "merged", **how)
    found = difference(adapted.eval(), read)
    check_within(found, "float32" if method == "nf4" else method)
    original = merged(base, adapters, tmp_path / "original")
    of_original = difference(adapted, original)
    assert found.mean < of_original.mean and not of_original.is_within(BOUNDS["float32"])


def test_the_part_that_pissa_removed_from_the_base_is_restored(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_gpt2().save_pretrained(base)
    pissa = LoraConfig(r=4, init="pissa")
    adapted = move(apply_adapter(read_base(base), pissa, half_precision=False))
    save_converted(adapted, tmp_path / "adapter")
    read = merged(base, [(tmp_path / "adapter", 1.0)], tmp_path / "merged")
    check_within(difference(adapted.eval(), read))
    assert not difference(read_base(base), read).is_within(BOUNDS["bfloat16"])


def test_a_multimodal_base_is_merged_with_its_towers(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "merged"
    save_with_tokenizer(tiny_multimodal("gemma3"), base)
    (base / "preprocessor_config.json").write_text('{"do_resize": true}')
    adapted = make_adapter(base, tmp_path / "adapter", LORA)
    plan = plan_of(base, [(tmp_path / "adapter", 1.0)])
    merge_weights(on_meta(base), plan, folder)
    copied = folder / "preprocessor_config.json"
    assert copied.read_text() == (base / copied.name).read_text()
    whole, loading = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    logits = ([saved.probe_logits(each, probe())] for each in (adapted, whole.float()))
    check_within(measure_difference(*logits))
    before = AutoModelForImageTextToText.from_pretrained(base).state_dict()
    towers = {name for name in before if "vision_tower" in name or "projector" in name}
    assert towers
    for name, weight in whole.state_dict().items():
        is_changed = name not in towers and name in plan.changes
        assert torch.equal(weight, before[name]) or is_changed, name


@pytest.mark.parametrize(
    ("factor", "may_widen", "dtype"),
    [(1.0, True, torch.bfloat16), (1e-3, True, torch.float32), (1e-3, False, torch.bfloat16)],
)
def test_a_change_below_the_rounding_of_the_base_is_merged_in_fp32(
    factor: float, may_widen: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    base, folder = tmp_path / "base", tmp_path / "merged"
    tiny_llama().to(torch.bfloat16).save_pretrained(base)
    make_adapter(base, tmp_path / "adapter", LORA)
    adapters = [(tmp_path / "adapter", factor)]
    plan = plan_of(base, adapters, torch.bfloat16, may_widen=may_widen)
    assert merge_weights(on_meta(base), plan, folder) is dtype
    whole = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in whole.parameters()} == {dtype}


def test_the_verb_gives_freed_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(
        environment, "return_freed_memory", lambda: called.append("return_freed_memory")
    )
    monkeypatch.setattr(environment, "run_program", lambda work: called.append(work()))
    monkeypatch.setattr(sys, "argv", ["merge", "--help"])
    runpy.run_path(str(ROOT / "app" / "merge.py"), run_name="__main__")
    assert called == ["return_freed_memory", 0]


MERGE = """
import resource, sys, threading, time
from pathlib import Path
import torch
from app.model.adapter.saved import read_weight_changes
from app.model.base import ModelConfig, load_base
from app.model.base import weight_files
from app.model.merging import MergePlan, merge_weights
from app.process.environment import return_freed_memory

return_freed_memory()  # as the verb does
base, adapter, folder = map(Path, sys.argv[1:])

def build():
    with torch.device("meta"):
        return load_base(ModelConfig(path=str(base)), "sdpa", torch.bfloat16, on_meta=True)

def read(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024

torch.ones(64, 64) @ torch.ones(64, 64)
build()  # what is imported on the way does not count
read_weight_changes(build, [(adapter, 1.0)])
Path("/proc/self/clear_refs").write_text("5")  # the peak so far
before = read("VmRSS")
changes = read_weight_changes(build, [(adapter, 1.0)])
plan = MergePlan(base_files=weight_files(base), changes=changes, dtype=torch.bfloat16)
merge_weights(build(), plan, folder)
print(read("VmHWM") - before)
"""


@pytest.mark.slow
def test_memory_grows_by_less_than_the_largest_file(tmp_path: Path) -> None:
    base, adapter, folder = (tmp_path / name for name in ("base", "adapter", "merged"))
    numbers = {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 3072}
    numbers |= {"num_hidden_layers": 8, "num_attention_heads": 6, "tie_word_embeddings": False}
    model = tiny_llama(**numbers).to(torch.bfloat16)
    model.save_pretrained(base, max_shard_size="60MB")
    sizes = [file.stat().st_size for file in base.glob("*.safetensors")]
    assert len(sizes) == 3 and sum(sizes) >= 150e6
    adapted = move(apply_adapter(model, LoraConfig(r=8), half_precision=False), scale=0.01)
    saved.save_adapter(adapted, adapter)
    done = subprocess.run(
        [sys.executable, "-c", MERGE, str(base), str(adapter), str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    growth = int(done.stdout.splitlines()[-1])
    print(f"growth {growth / 1e6:.0f} MB, largest file {max(sizes) / 1e6:.0f} MB")
    assert growth <= 1.7 * max(sizes)  # all three would be 2.9
    index = "model.safetensors.index.json"
    before, after = (json.loads((one / index).read_text()) for one in (base, folder))
    assert before["weight_map"] == after["weight_map"]
