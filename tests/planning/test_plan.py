"""`python -m app.plan`: estimates from the settings alone, with overrides as advice."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config import load_config
from app.config.verbs import PlanConfig
from app.plan import plan
from common.errors import UserError
from tests.conftest import ROOT
from tests.in_process import make_model


def plan_of(folder: Path, *words: str) -> tuple[dict[str, Any], Path]:
    config = load_config("plan", [*words, f"output.dir={folder}"])
    assert isinstance(config, PlanConfig)
    where = plan(config)
    return json.loads((where / "plan.json").read_text()), where


def test_a_plan_needs_no_torch_and_no_network(tmp_path: Path) -> None:
    code = (
        "import sys; from app.config import run_verb; from app.plan import plan\n"
        "code = run_verb('plan', plan, words=sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'lightning', 'peft'} & set(sys.modules)\n"
        "sys.exit(code or len(heavy))"
    )
    words = ["+experiment=llama70b", "hardware=8xa100_80gb", f"output.dir={tmp_path / 'out'}"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == f"run: {tmp_path / 'out'}"
    assert any(line.startswith("fits: ") for line in lines)
    assert {"plan.html", "plan.json", "config.yaml"} <= {
        file.name for file in (tmp_path / "out").iterdir()
    }


OLMO2 = (
    "model.architecture={model_type: olmo2, hidden_size: 64, intermediate_size: 128, "
    "num_hidden_layers: 2, num_attention_heads: 2, vocab_size: 512, max_position_embeddings: 512}"
)


@pytest.mark.parametrize(("base", "is_guess"), [("model=llama3b", False), (OLMO2, True)])
def test_unchecked_activations_are_marked_as_a_guess(
    base: str, is_guess: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (base, "data=dolly", "hardware=h100", "data.sequence_len=512")
    facts, _ = plan_of(tmp_path, *words)
    assert facts["is_compared"] is not is_guess
    assert (
        "it was never compared with a simulated step of model type olmo2" in capsys.readouterr().out
    ) is is_guess


def test_overrides_that_make_a_run_fit(tmp_path: Path) -> None:
    """A run on two 24 GB cards that an earlier rule of thumb accepted."""
    words = ("+experiment=llama70b_qlora", "hardware=2xrtx4090")
    facts, _ = plan_of(tmp_path / "before", *words)
    assert not facts["fits"] and facts["gpu_total_gib"] > facts["gpu_usable_gib"]
    assert facts["to_fit"]
    typed = facts["to_fit"][0].split()
    after, _ = plan_of(tmp_path / "after", *words, *typed)
    assert after["fits"]


def test_more_gpus_are_suggested_if_nothing_fits(tmp_path: Path) -> None:
    words = ("+experiment=llama70b", "adapter=full", "hardware=l40s", "strategy=single")
    facts, _ = plan_of(tmp_path, *words, "recompute=auto")
    assert not any(row["fits"] for row in facts["advice"])
    recompute, packs = facts["chosen"]
    assert recompute.startswith("recompute: offload (no mode fits; this one takes the least")
    assert packs.startswith("micro-batch: 1 pack (not even one pack fits")
    assert any(words.startswith("hardware=") for words in facts["to_fit"])


def test_advice_is_sorted_and_its_overrides_work(tmp_path: Path) -> None:
    words = ("+experiment=llama8b", "hardware=4xl40s", "hardware.price_per_hour=1.5")
    facts, where = plan_of(tmp_path / "a", *words, "plan.tokens=10000000")
    speeds = [row["tokens_per_second"] for row in facts["advice"] if row["fits"]]
    assert speeds == sorted(speeds, reverse=True)
    best = facts["advice"][0]
    again, _ = plan_of(tmp_path / "b", *words, *best["type"].split())
    assert again["tokens_per_second"] == pytest.approx(best["tokens_per_second"])
    assert again["gpu_total_gib"] == pytest.approx(best["gpu_total_gib"])
    hours = 1e7 / facts["tokens_per_second"] / 3600
    assert (facts["hours"], facts["cost"]) == pytest.approx((hours, hours * 1.5 * 4))
    page = (where / "plan.html").read_text()
    assert "<svg" in page and "<script" not in page and "://" not in page


def test_a_base_that_nothing_else_fits_may_be_streamed(tmp_path: Path) -> None:
    words = ("+experiment=llama70b_qlora", "hardware=rtx4090", "optimizer=adamw8bit")
    facts, _ = plan_of(tmp_path / "a", *words, "strategy=single")
    assert not facts["fits"] and facts["to_fit"][0] == "model.stream=host"
    streamed, _ = plan_of(tmp_path / "b", *words, "strategy=single", "model.stream=host")
    assert streamed["fits"] and streamed["gpu_gib"]["weights"] < 5
    assert streamed["settings"]["stream"] == "host"


def test_a_teacher_too_large_for_a_gpu_fits_in_4_bits(tmp_path: Path) -> None:
    shape = yaml.safe_load((ROOT / "conf" / "model" / "llama70b.yaml").read_text())["architecture"]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    words = ("model=llama8b", "objective=distill", f"objective.teacher={tmp_path}", "hardware=h100")
    facts, _ = plan_of(tmp_path / "a", *words)
    assert not facts["fits"]
    typed = facts["to_fit"][0].split()
    assert typed[0] == "objective.teacher_quantization=nf4"
    facts, _ = plan_of(tmp_path / "b", *words, *typed)
    assert facts["fits"] and 30 < facts["gpu_gib"]["teacher"] < 45


def test_a_disk_too_small_for_checkpoints(tmp_path: Path) -> None:
    words = ("+experiment=llama8b_full", "hardware=h200")
    facts, where = plan_of(tmp_path / "a", *words)
    assert facts["fits_disk"] and facts["nvme_gib"] == pytest.approx(8 * 3840e9 / 2**30, rel=1e-3)
    facts, where = plan_of(tmp_path / "b", *words, "hardware.nvme_gib=100")
    assert facts["disk_gib"] > 100 and not facts["fits_disk"]
    assert "DOES NOT FIT: disk: " in (where / "plan.html").read_text()
    facts, _ = plan_of(tmp_path / "c", *words, "hardware.nvme_gib=0")  # not known
    assert facts["fits_disk"]


ON = {
    "falcon180b": "8xh100",
    "flan_t5_xl": "rtx4090",
    "gemma4_12b": "a100_40gb",
    "gpt_oss_20b": "h100",
    "llama405b_3d": "4x8xh100",
    "llama70b": "8xh100",
    "llama70b_3d": "8xh100",
    "llama70b_qlora": "2xl40s",
    "llama70b_zero3": "8xh100",
    "llama8b": "h100",
    "llama8b_128k": "8xh100",
    "llama8b_dora": "a100_40gb",
    "llama8b_dpo": "h100",
    "llama8b_full": "h100",
    "llama8b_ia3": "rtx4090",
    "llama8b_qlora": "rtx4090",
    "mistral7b": "a100_40gb",
    "qwen1_5b_distill": "a100_40gb",
    "qwen3_30b_a3b": "h100",
    "qwen3_5_9b_256k": "8xh100",
    "qwen3_5_9b_qlora": "rtx4090",
    "qwen7b": "a100_40gb",
    "qwen7b_kto": "a100_40gb",
    "reward_1b": "rtx4090",
}
"""experiment -> the least hardware that its header names, or some like it"""
SHOWS_A_STRATEGY = {"falcon180b", "llama70b_zero3", "llama70b_3d", "llama405b_3d"}
"""experiments that show a strategy, as their name or header says, where another one is faster"""
SPLITS_ROWS = {"qwen3_5_9b_256k"}


def test_every_experiment_for_gpus_is_planned() -> None:
    files = (ROOT / "conf" / "experiment").glob("*.yaml")
    assert {file.stem for file in files if "two CPU cores" not in file.read_text()} == set(ON)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ON.keys() - SHOWS_A_STRATEGY))
def test_an_experiment_is_as_fast_as_the_fastest_that_fits(name: str, tmp_path: Path) -> None:
    """With the same base and adapter, and nothing in host memory, whose links differ widely."""
    facts, _ = plan_of(tmp_path, f"+experiment={name}", f"hardware={ON[name]}")
    assert facts["fits"]
    method = facts["settings"]["quantization"]
    speeds = [
        each["tokens_per_second"]
        for each in facts["advice"]
        if each["fits"] and each["quantization"] == method and "offload" not in each["strategy"]
        if name not in SPLITS_ROWS or "context_parallel_size" in each["type"]
    ]
    assert facts["tokens_per_second"] >= 0.95 * max(speeds, default=0.0), facts["advice"][:3]


def test_the_best_variant_is_written_as_an_experiment(tmp_path: Path) -> None:
    file = tmp_path / "best run.yaml"
    words = ("+experiment=llama8b", "hardware=4xl40s", f"plan.write={file}")
    facts, _ = plan_of(tmp_path / "out", *words)
    config = load_config("train", [f"+experiment={file}"])
    best = facts["advice"][0]
    assert (config.strategy.name, config.recompute.mode) == (best["strategy"], best["recompute"])
    assert config.trainer.micro_batch_size == "auto"  # as it was asked: the GPU says
    assert (config.trainer.devices, config.trainer.num_nodes) == (4, 1)
    before = load_config("train", ["+experiment=llama8b"])
    for part in ("model", "adapter", "optimizer", "data", "schedule"):
        assert getattr(config, part) == getattr(before, part), part
    again, _ = plan_of(tmp_path / "again", f"+experiment={file}", "hardware=4xl40s")
    assert again["tokens_per_second"] == pytest.approx(best["tokens_per_second"])


def test_a_model_from_a_folder_with_config_json(tmp_path: Path) -> None:
    numbers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    numbers |= {"num_attention_heads": 4, "vocab_size": 512}
    folder = tmp_path / "base"
    folder.mkdir()
    config = numbers | {"model_type": "llama", "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    facts, _ = plan_of(tmp_path / "out", f"model.path={folder}", "hardware=h100")
    assert facts["settings"]["sequence_len"] == 256
    assert facts["fits"]


def refused(*words: str) -> str:
    config = load_config("plan", list(words))
    assert isinstance(config, PlanConfig)
    with pytest.raises(UserError) as caught:
        plan(config)
    return str(caught.value)


BAD = {
    "C11 a sequence beyond the context": (
        ("+experiment=qwen3_30b_a3b", "data.sequence_len=200000", "hardware=h100"),
        ("data.sequence_len=200000", "40960, or model.context_len=200000 to scale its rope"),
    ),
    "a context that is scaled already": (
        ("+experiment=llama8b", "model.context_len=200000", "hardware=h100"),
        ("model.context_len=200000", "(llama3, factor 8.0, to 131072 tokens); leave it out"),
    ),
    "rows of an encoder-decoder": (
        [
            "+experiment=flan_t5_xl",
            "hardware=2xh100",
            "strategy=fsdp",
            "strategy.context_parallel_size=2",
        ],
        ("t5 is an encoder-decoder", "strategy.context_parallel_size=1"),
    ),
    "C12 ranks that do not divide the heads": (
        ("+experiment=llama70b", "strategy=tp", "hardware=6xh100"),
        ("strategy.tensor_parallel_size=6", "64 / 6 leaves 4"),
    ),
    "C13 more devices than the hardware has": (
        ("+experiment=llama8b", "trainer.devices=8", "hardware=4xh100"),
        ("trainer.devices=8", "hardware=8xh100"),
    ),
    "C13 more nodes": (
        ("+experiment=llama8b", "trainer.num_nodes=2", "hardware=4xh100"),
        ("trainer.num_nodes=2", "hardware=2x4xh100"),
    ),
    "C14 no such folder": (
        ("model.path=./no_such_base", "hardware=h100"),
        ("model.path=./no_such_base", "no such folder"),
    ),
    "C14 a hub id that is not here": (
        ("model.path=nobody/unknown-7b", "hardware=h100"),
        ("nobody/unknown-7b", "model.architecture", "downloads nothing"),
    ),
    "a CPU": (("+experiment=llama8b", "trainer.accelerator=cpu", "hardware=h100"), ("for GPUs",)),
    "bf16 on a card without": (
        ("+experiment=llama8b", "hardware=v100_32gb"),
        ("trainer.precision=bf16", "fp16"),
    ),
    "settings that do not go together": (
        ("+experiment=llama8b", "adapter=full", "quantization=nf4", "hardware=h100"),
        ("quantization=nf4", "adapter=full"),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_a_fix(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    words, expected = BAD[case]
    message = refused(*words, f"output.dir={tmp_path / 'out'}")
    for word in expected:
        assert word in message
    assert not (tmp_path / "out").exists(), "nothing is left behind"


def test_an_incomplete_download_is_refused(tmp_path: Path) -> None:
    """C15: weights may be missing, but existing files must be complete."""
    folder = make_model(tmp_path / "base")
    words = (f"model.path={folder}", "hardware=h100", f"output.dir={tmp_path / 'out'}")
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert "model.safetensors" in refused(*words)
    weights.write_bytes(whole)
    config.write_text("{}")
    assert "no model_type" in refused(*words)
    config.unlink()
    assert "config.json" in refused(*words)


def test_host_memory_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=llama70b", "data=dolly", "hardware=8xRTX4090")
    facts, _ = plan_of(tmp_path, *words, "strategy=fsdp_offload")
    assert not facts["fits"] and not facts["fits_host"]
    assert facts["gpu_total_gib"] < facts["gpu_usable_gib"]
    assert "DOES NOT FIT: host memory per machine" in capsys.readouterr().out


def test_one_gpu_gets_only_single_gpu_strategies(tmp_path: Path) -> None:
    facts, _ = plan_of(tmp_path, "model=qwen3_0_6b", "data=dolly", "hardware=h100")
    strategies = {row["strategy"] for row in facts["advice"]}
    assert strategies <= {"auto", "single", "zero2_offload", "zero3_offload", "fsdp_offload"}
    quantizations = {row["quantization"]: row["is_assumed"] for row in facts["advice"]}
    assert quantizations == {"none": False, "nf4": False, "int8": False, "fp8": True}
    # As training would: no smaller micro-batch than what fits, since launches are not modelled.
    assert not any("micro_batch_size" in row["type"] for row in facts["advice"])


def test_states_on_a_disk_are_named_where_they_fit_nowhere_else(tmp_path: Path) -> None:
    words = ("model=llama3b", "adapter=full", "hardware=a100_40gb", "data=dolly")
    facts, _ = plan_of(tmp_path, *words, "hardware.host_memory_gib=24")
    change, more_gpus = facts["to_fit"]
    assert change.endswith(" strategy.offload_optimizer=disk")
    assert more_gpus.startswith("hardware=2xa100_40gb")
    fitting, _ = plan_of(tmp_path / "fits", *words, "hardware.host_memory_gib=24", *change.split())
    assert fitting["fits"] and fitting["disk_gib"] > facts["disk_gib"]


def test_auto_keeps_the_states_on_the_disk(tmp_path: Path) -> None:
    words = ("model=llama3b", "adapter=full", "hardware=2xl40s", "data=dolly")
    facts, _ = plan_of(tmp_path, *words, "strategy.offload_optimizer=disk")
    assert facts["settings"]["strategy"] == "fsdp_grad_op"
    assert facts["gpu_gib"]["optimizer"] == 0.125
    plain, _ = plan_of(tmp_path / "plain", *words)
    assert plain["settings"]["strategy"] == "fsdp_grad_op"
    assert plain["gpu_gib"]["optimizer"] > 10


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("best", "an experiment is a .yaml file; type best.yaml"),
        ("nosuch/best.yaml", "the folder nosuch does not exist; create it first"),
        ("here.yaml", "the file exists"),
    ],
)
def test_an_unwritable_plan_file_is_refused_first(
    file: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.yaml").write_text("x: 1\n")
    with pytest.raises(UserError, match=re.escape(message)):
        plan_of(tmp_path / "out", "+experiment=llama8b", "hardware=h100", f"plan.write={file}")
    assert (tmp_path / "here.yaml").read_text() == "x: 1\n"
