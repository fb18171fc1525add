"""`python -m app.plan`: estimates from the settings alone, with overrides as advice."""

from __future__ import annotations

import json
import re
import shlex
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
    page = (tmp_path / "out" / "plan.html").read_text()
    assert "<svg" in page and "<script" not in page and "://" not in page


def test_a_base_that_no_simulation_was_compared_with_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    numbers |= {"num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(numbers | {"model_type": "olmo2"}))
    facts, _ = plan_of(tmp_path / "out", f"model.path={tmp_path}", "hardware=h100")
    assert facts["fits"] and facts["settings"]["sequence_len"] == 256
    assert not facts["is_compared"] and "step of model type olmo2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "change"),
    [
        # Two 24 GB cards that an earlier rule of thumb accepted.
        ("+experiment=llama70b_qlora hardware=2xrtx4090", "strategy="),
        (
            "+experiment=llama70b_qlora hardware=rtx4090 optimizer=adamw8bit strategy=single",
            "model.stream=host",
        ),
        pytest.param(
            "model=llama8b objective=distill objective.teacher={teacher} hardware=h100",
            "objective.teacher_quantization=nf4",
            marks=pytest.mark.slow,
        ),
        (
            "model=llama3b adapter=full hardware=a100_40gb hardware.host_memory_gib=24 data=dolly",
            "strategy.offload_optimizer=disk",
        ),
    ],
)
def test_the_change_that_a_plan_suggests_makes_a_run_fit(
    words: str, change: str, tmp_path: Path
) -> None:
    shape = yaml.safe_load((ROOT / "conf" / "model" / "llama70b.yaml").read_text())["architecture"]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    typed = words.format(teacher=tmp_path).split()
    facts, _ = plan_of(tmp_path / "before", *typed)
    assert not facts["fits"] and change in facts["to_fit"][0]
    after, _ = plan_of(tmp_path / "after", *typed, *facts["to_fit"][0].split())
    assert after["fits"] and not after["to_fit"]


def test_more_gpus_are_suggested_if_nothing_fits(tmp_path: Path) -> None:
    words = ("+experiment=llama70b", "adapter=full", "hardware=l40s", "strategy=single")
    facts, _ = plan_of(tmp_path, *words, "recompute=auto")
    assert not any(row["fits"] for row in facts["advice"])
    assert facts["settings"]["recompute"] == "offload"
    assert any(words.startswith("hardware=") for words in facts["to_fit"])


def test_the_fastest_variant_comes_first_and_is_written_as_an_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "it's best.yaml"
    words = ("+experiment=llama8b", "hardware=4xl40s", "hardware.price_per_hour=1.5")
    facts, _ = plan_of(tmp_path / "out", *words, "plan.tokens=10000000", f"plan.write={file}")
    (printed,) = re.findall(r"^written: .*?; (.*)", capsys.readouterr().out, re.MULTILINE)
    assert shlex.split(printed)[-1] == f"+experiment={file}"
    speeds = [row["tokens_per_second"] for row in facts["advice"] if row["fits"]]
    assert speeds == sorted(speeds, reverse=True)
    hours = 1e7 / facts["tokens_per_second"] / 3600
    assert (facts["hours"], facts["cost"]) == pytest.approx((hours, hours * 1.5 * 4))
    config, best = load_config("train", [f"+experiment={file}"]), facts["advice"][0]
    assert config.trainer.micro_batch_size == "auto"  # as it was asked: the GPU says
    assert (config.trainer.devices, config.trainer.num_nodes) == (4, 1)
    before = load_config("train", ["+experiment=llama8b"])
    for part in ("model", "adapter", "optimizer", "data", "schedule"):
        assert getattr(config, part) == getattr(before, part), part
    for name, *typed in (
        ("a", f"+experiment={file}", words[1]),
        ("b", *words, *best["type"].split()),
    ):
        again, _ = plan_of(tmp_path / name, *typed)
        for figure in ("tokens_per_second", "gpu_total_gib"):
            assert again[figure] == pytest.approx(best[figure])


@pytest.mark.parametrize("typed", ["recompute.num_layers=16", "recompute.every=2"])
def test_advice_against_recompute_also_resets_its_other_settings(
    typed: str, tmp_path: Path
) -> None:
    words = ("+experiment=llama8b", "hardware=rtx4090", "recompute=full", typed)
    file = tmp_path / "best.yaml"
    facts, _ = plan_of(tmp_path / "out", *words, f"plan.write={file}")
    best = facts["advice"][0]
    assert best["recompute"] == "none"
    written = plan_of(tmp_path / "a", f"+experiment={file}", words[1])[0]
    for again in (written, plan_of(tmp_path / "b", *words, *best["type"].split())[0]):
        assert again["tokens_per_second"] == pytest.approx(best["tokens_per_second"])
        assert again["fits"] and "not even one" not in " ".join(again["chosen"])


@pytest.mark.parametrize(("gib", "fits"), [(100, False), (0, True)])
def test_a_disk_too_small_for_checkpoints(gib: int, fits: bool, tmp_path: Path) -> None:
    """0: not known."""
    words = ("+experiment=llama8b_full", "hardware=h200", f"hardware.nvme_gib={gib}")
    facts, where = plan_of(tmp_path / "a", *words)
    assert facts["disk_gib"] > 100 and facts["fits_disk"] is fits
    assert ("DOES NOT FIT: disk: " in (where / "plan.html").read_text()) is not fits


BAD = [
    (
        "+experiment=qwen3_30b_a3b data.sequence_len=200000 hardware=h100",
        "40960, or model.context_len=200000 to scale its rope",
    ),
    (
        "+experiment=llama8b model.context_len=200000 hardware=h100",
        "(llama3, factor 8.0, to 131072 tokens); leave it out",
    ),
    ("+experiment=llama70b strategy=tp hardware=6xh100", "64 / 6 leaves 4"),
    ("+experiment=llama8b trainer.devices=8 hardware=4xh100", "type hardware=8xh100"),
    ("+experiment=llama8b trainer.num_nodes=2 hardware=4xh100", "type hardware=2x4xh100"),
    ("model.path=./no_such_base hardware=h100", "model.path=./no_such_base: no such folder"),
    ("model.path=nobody/unknown-7b hardware=h100", "nobody/unknown-7b: a plan downloads nothing"),
    ("+experiment=llama8b trainer.accelerator=cpu hardware=h100", "a plan is for GPUs"),
    ("+experiment=llama8b hardware=v100_32gb", "does not support bf16; type trainer.precision=fp1"),
    ("+experiment=llama8b quantization=fp8 hardware=a100_80gb", "a100_80gb has no FP8 products"),
    (
        "+experiment=llama8b adapter=full trainer.precision=fp8 hardware=a100_80gb",
        "(hardware.fp8_tflops=0); type trainer.precision=bf16",
    ),
    (
        "+experiment=qwen3_30b_a3b quantization=int8 hardware=h200",
        "would leave the experts of Qwen/Qwen3-30B-A3B as they are",
    ),
    ("+experiment=llama8b adapter=full quantization=nf4 hardware=h100", "quantization=nf4"),
    ("+experiment=llama8b hardware=h100 plan.write=best", "type best.yaml"),
    ("+experiment=llama8b hardware=h100 plan.write=no/best.yaml", "no does not exist; create it"),
    ("+experiment=llama8b hardware=h100 plan.write=here.yaml", "the file exists"),
]


def refused(*words: str) -> str:
    config = load_config("plan", list(words))
    assert isinstance(config, PlanConfig)
    with pytest.raises(UserError) as caught:
        plan(config)
    return str(caught.value)


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_input_is_refused_with_a_fix(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("here.yaml").write_text("x: 1\n")
    assert message in refused(*words.split(), "output.dir=out")
    assert [file.name for file in tmp_path.iterdir()] == ["here.yaml"], "nothing is left behind"
    assert Path("here.yaml").read_text() == "x: 1\n"


def test_an_incomplete_download_is_refused(tmp_path: Path) -> None:
    """Weights may be missing, but existing files must be complete."""
    folder = make_model(tmp_path / "base")
    words = (f"model.path={folder}", "hardware=h100", f"output.dir={tmp_path / 'out'}")
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert "model.safetensors" in refused(*words)
    weights.write_bytes(whole)
    config.write_text("{}")
    assert "no model_type" in refused(*words)


def test_one_gpu_gets_only_single_gpu_strategies(tmp_path: Path) -> None:
    facts, _ = plan_of(tmp_path, "model=qwen3_0_6b", "data=dolly", "hardware=h100")
    strategies = {row["strategy"] for row in facts["advice"]}
    assert strategies <= {"auto", "single", "zero2_offload", "zero3_offload", "fsdp_offload"}
    quantizations = {row["quantization"]: row["is_assumed"] for row in facts["advice"]}
    assert quantizations == {"none": False, "nf4": False, "int8": False, "fp8": True}
    # As training would: no smaller micro-batch than what fits, since launches are not modelled.
    assert not any("micro_batch_size" in row["type"] for row in facts["advice"])
