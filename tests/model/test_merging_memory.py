"""A merge holds one weight, not a model: measured on a base of three files of over 200 MB each."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from app.process import environment
from tests.conftest import ROOT
from tests.processes import LONGEST

MERGE = """
import resource, sys, threading, time
from pathlib import Path
import torch
from app.model.adapter import read_weight_changes
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


def test_the_verb_gives_freed_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(
        environment, "return_freed_memory", lambda: called.append("return_freed_memory")
    )
    monkeypatch.setattr(environment, "run_program", lambda work: called.append(work()))
    monkeypatch.setattr(sys, "argv", ["merge", "--help"])
    runpy.run_path(str(ROOT / "app" / "merge.py"), run_name="__main__")
    assert called == ["return_freed_memory", 0]


@pytest.mark.slow
def test_memory_grows_by_less_than_the_largest_file(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from app.model.adapter import LoraConfig, apply_adapter, save_adapter
    from app.model.base import ModelConfig, load_base
    from tests.tiny import move

    base, adapter, folder = (tmp_path / name for name in ("base", "adapter", "merged"))
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=1536,
        intermediate_size=6144,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=6,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    model.save_pretrained(base, max_shard_size="230MB")
    del model
    sizes = [file.stat().st_size for file in base.glob("*.safetensors")]
    assert len(sizes) == 3 and sum(sizes) >= 600e6
    adapted = apply_adapter(
        load_base(ModelConfig(path=str(base)), "sdpa", torch.bfloat16),
        LoraConfig(r=8),
        half_precision=False,
    )
    move(adapted, scale=0.01)
    save_adapter(adapted, adapter)
    del adapted
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
    assert growth <= 1.3 * max(sizes)
    index = "model.safetensors.index.json"
    before, after = (json.loads((one / index).read_text()) for one in (base, folder))
    assert before["weight_map"] == after["weight_map"]
