"""The quickstart on a quantized base learns as much as on the full-precision base.

parity/test_qlora.py and model/test_fp8.py: a step is that of the dequantized weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.config import run_verb
from app.evaluate import evaluate
from tests.reliability.shell import Shell
from tests.tiny import SAMPLES

METHODS = ("none", "nf4")
LISTS, LISTS_TEST = SAMPLES / "lists.json", SAMPLES / "lists_test.json"
SHORT = (
    f"data.datasets=[{{path: {LISTS}, name: lists}}]",
    f"data.test_datasets=[{{path: {LISTS_TEST}, name: lists}}]",
    "trainer.max_steps=60",
    "evaluation.max_rows=60",
)
EXACT, LOSS = "exact_match/lists", "val/loss/lists"
NOISE = ("gemm_4bit", "bitsandbytes")
"""parts of bitsandbytes warnings, which are filtered"""


@pytest.fixture(scope="module")
def runs(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """A part of the quickstart by quantization method: run folder and printed text."""
    parent = tmp_path_factory.mktemp("qlora")
    return {
        method: (
            parent / method,
            shell.train_into(
                parent / method, "+experiment=quickstart", f"quantization={method}", *SHORT
            ),
        )
        for method in METHODS
    }


def metrics_of(folder: Path) -> dict[str, float]:
    measured: dict[str, float] = json.loads((folder / "metrics.json").read_text())
    return measured


@pytest.mark.slow
def test_qlora_learns_what_lora_learns(runs: dict[str, tuple[Path, str]]) -> None:
    lora = metrics_of(runs["none"][0])
    assert lora[f"tuned/{EXACT}"] > 0.5
    folder, screen = runs["nf4"]
    measured = metrics_of(folder)
    assert measured[f"tuned/{EXACT}"] > lora[f"tuned/{EXACT}"] - 0.05
    assert measured[f"base/{EXACT}"] < 0.10
    assert "adapter verified: reloaded logits match" in screen
    assert not any(word in screen for word in NOISE)


@pytest.mark.slow
def test_evaluate_measures_the_quantized_model_of_the_run(
    runs: dict[str, tuple[Path, str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, _ = runs["nf4"]
    typed = [f"run={folder}", f"output.dir={tmp_path / 'again'}"]
    assert run_verb("evaluate", evaluate, words=typed) == 0
    screen = capfd.readouterr().out
    assert "exact match" in screen and not any(word in screen for word in NOISE)
    at_training = metrics_of(folder)
    for name, value in metrics_of(tmp_path / "again").items():
        assert value == pytest.approx(at_training[name], rel=1e-6), name


@pytest.mark.slow
def test_an_adapter_of_a_quantized_base_is_evaluated_on_the_full_base(
    runs: dict[str, tuple[Path, str]], tmp_path: Path
) -> None:
    words = [f"run={runs['nf4'][0]}", "quantization=none", f"output.dir={tmp_path}"]
    assert run_verb("evaluate", evaluate, words=words) == 0
    measured, quantized = metrics_of(tmp_path), metrics_of(runs["nf4"][0])
    base = metrics_of(runs["none"][0])
    name = f"tuned/{EXACT}"
    assert measured[name] > quantized[name] - 0.10  # two standard errors of 60 rows
    # The base was not quantized.
    loss = measured[f"base/{LOSS}"]
    assert loss == pytest.approx(base[f"base/{LOSS}"], rel=1e-5)
    assert loss != pytest.approx(quantized[f"base/{LOSS}"], rel=1e-5)
