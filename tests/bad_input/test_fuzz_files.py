"""Random damage to each kind of file that comes from elsewhere: a message about it, or it is right.

Seeds are fixed: four of each kind, twenty where slow tests run, more by LOFT_FUZZ=NUMBER.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.config import load_config, load_run_config, save_config
from common.errors import exit_code
from common.installation import ROOT
from tests import mutations
from tests.bad_input.opened import LONGEST_SECONDS, at_most, open_run, settings_for

pytestmark = pytest.mark.filterwarnings("ignore")
SLOW = pytest.mark.slow
SEEDS = pytest.mark.parametrize(
    "seeds",
    [range(4), pytest.param(range(4, int(os.environ.get("LOFT_FUZZ", "20"))), marks=SLOW)],
    ids=["few", "many"],
)


KINDS: list[tuple[str, str, mutations.Mutate]] = [
    ("base", "config.json", mutations.mutate_json),
    ("base", "generation_config.json", mutations.mutate_json),
    ("base", "tokenizer.json", mutations.mutate_json),
    ("base", "tokenizer_config.json", mutations.mutate_json),
    ("base", "model.safetensors", mutations.mutate_safetensors),
    ("sharded", "model.safetensors.index.json", mutations.mutate_json),
    ("adapter", "adapter_config.json", mutations.mutate_json),
    ("adapter", "adapter_model.safetensors", mutations.mutate_safetensors),
]


@SEEDS
@pytest.mark.parametrize(("folder", "name", "mutate"), KINDS, ids=[kind[1] for kind in KINDS])
def test_damaged_files_are_refused_by_name_or_read_right(
    folder: str, name: str, mutate: mutations.Mutate, seeds: range, made: Path, tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(made / folder, tmp_path / folder))
    whole = (damaged / name).read_bytes()
    if folder == "adapter":
        config = settings_for(made / "base", made / "d.jsonl", f"adapter.path={damaged}")
    else:
        config = settings_for(damaged, made / "d.jsonl", "adapter=full")
    for seed in seeds:
        (damaged / name).write_bytes(mutate(whole, random.Random(f"{name} {seed}")))
        end = open_run(config)
        case = f"{name} {seed}: {end.code} {end.stderr} {end.error!r}"
        assert end.code in (0, 2, 3), case
        if "isolation probe" in end.stderr and name.endswith(".safetensors"):
            continue  # weights so large that nothing moves the logits, but weights
        if end.code:
            assert str(damaged) in end.stderr and "Traceback" not in end.stderr, case
        elif folder == "base":
            assert_holds(end.model, load_file(damaged / "model.safetensors"), case)


def assert_holds(model: Any, tensors: dict[str, torch.Tensor], case: str) -> None:
    """Compare every weight of a model with the file's; of what is in the file none is left out."""
    weights = dict(model.named_parameters())
    assert tensors.keys() == weights.keys(), case
    for name, tensor in tensors.items():
        assert torch.equal(weights[name].detach(), tensor.float()), f"{case}: {name}"


def read_run(folder: Path) -> Callable[[], Any]:
    """Write a run's settings; returns what reads them back."""
    save_config(load_config("train", ["+experiment=quickstart"]), folder / "config.yaml")
    return lambda: load_run_config(folder)


def read_experiment(folder: Path) -> Callable[[], Any]:
    """Copy conf/, with one experiment under the name `config`; returns what composes it."""
    conf = Path(shutil.copytree(ROOT / "conf", folder / "conf"))
    file = conf / "experiment" / "config.yaml"
    shutil.copy(conf / "experiment" / "quickstart.yaml", file)
    return lambda: load_config("train", ["+experiment=config"], conf)


@SEEDS
@pytest.mark.parametrize("prepare", [read_run, read_experiment])
def test_damaged_settings_are_refused_by_name_or_read_right(
    prepare: Callable[[Path], Callable[[], Any]], seeds: range, tmp_path: Path
) -> None:
    read = prepare(tmp_path)
    file = next(tmp_path.rglob("config.yaml"))
    whole = file.read_bytes()
    for seed in seeds:
        file.write_bytes(mutations.mutate_yaml(whole, random.Random(f"{prepare.__name__} {seed}")))
        try:
            with at_most(LONGEST_SECONDS):
                read()
        except Exception as error:  # noqa: BLE001  what it is told as is judged here
            case = f"{prepare.__name__} {seed}: {error!r}"
            assert exit_code(error) == 2, case
            assert (
                "config" in str(error) or "no model: " in str(error) or "no data" in str(error)
            ), case
