"""docs/patches.md lists every patch of another library; what the patched libraries do today."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import peft
import torch
import transformers
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

from app.model.quantization import QuantizationConfig, quantization_settings
from tests.conftest import ROOT
from tests.model.test_experts import tiny_mixture
from tests.tiny import tiny_t5

OWN = ("app", "common", "data_modules")
SETS_ATTRIBUTES = ("app/model", "app/strategy")
"""where `setattr` is called on what other libraries made"""


def patches_of(file: str, text: str) -> set[tuple[str, str]]:
    """Return the assignments to classes, forwards, globals and private names of other libraries."""
    found = set()
    tree = ast.parse(text)
    # Calls of `replaced` are looked at, not the function itself.
    tree.body = [each for each in tree.body if getattr(each, "name", "") != "replaced"]
    nodes = list(ast.walk(tree))
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and not (getattr(node, "module", None) or "").startswith(OWN)
        for alias in node.names
    } - {"os"}
    assigned = [t for node in nodes if isinstance(node, ast.Assign) for t in node.targets]
    for node in nodes:
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        changes = [node.args] if called == "setattr" else []
        if called == "replaced":
            listed = node.args[0]
            parts = listed.elts if isinstance(listed, ast.List) else [listed.elt]
            changes = [part.elts for part in parts]
        for holder, name, _ in changes:
            if called == "replaced" and isinstance(name, ast.Constant):
                assigned.append(ast.Attribute(holder, name.value))
            elif ast.unparse(holder) != "self" and file.startswith(SETS_ATTRIBUTES):
                found.add((file, f"setattr({ast.unparse(holder)}, {ast.unparse(name)})"))
    for target in assigned:
        place = ast.unparse(target)
        if place.startswith("sys.modules["):
            found.add((file, place))
        if not isinstance(target, ast.Attribute) or place.startswith(("self.", "sys.std")):
            continue
        root = re.split(r"[.(\[]", place)[0]
        if root in imported or re.match(r"__class__|forward|_[^_]", target.attr):
            found.add((file, place))
    return found


def test_every_patch_is_listed_with_its_test() -> None:
    found: set[tuple[str, str]] = set()
    for path in (path for room in OWN for path in (ROOT / room).rglob("*.py")):
        found |= patches_of(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    page = (ROOT / "docs/patches.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\S+\.py)` `(.+?)` \|.*\| `([^`]+)` \|$", page, re.MULTILINE)
    assert sorted((file, place) for file, place, _ in rows) == sorted(found)
    for test in {test for *_, test in rows if not test.startswith("make ")}:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text("utf-8"), test


def test_peft_rewrites_the_targets_of_mixtures() -> None:
    model = tiny_mixture("deepseek_v3")
    settings = peft.LoraConfig(target_modules=["gate_proj", "up_proj", "q_a_proj"])
    convert_peft_config_for_transformers(settings, model=model, conversions=None)
    assert "gate_proj" not in settings.target_modules


def test_peft_imports_bitsandbytes_for_any_base() -> None:
    source = inspect.getsource(import_module("peft.tuners.lora.model"))
    assert re.search(r"if is_bnb_available\(\):\n +from \.bnb import", source)


def test_transformers_lists_an_untied_head_as_tied() -> None:
    model = tiny_t5()
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    model.config.tie_word_embeddings = False
    assert "lm_head.weight" in model._tied_weights_keys


def test_peft_copies_the_output_of_4_bit_layers() -> None:
    bnb = import_module("peft.tuners.lora.bnb")
    assert "result = result.clone()" in inspect.getsource(bnb.Linear4bit.forward)


def test_transformers_does_not_quantize_the_linear_layers_of_falcon(tmp_path: Path) -> None:
    config = transformers.FalconConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.FalconForCausalLM(config).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=quantization_settings(QuantizationConfig(method="nf4"), torch.float32),
    )
    kinds = {type(module).__name__ for module in model.transformer.h.modules()}
    assert "FalconLinear" in kinds and "Linear4bit" not in kinds


def test_bitsandbytes_quantizes_where_the_weight_is() -> None:
    quantize = import_module("bitsandbytes.functional").quantize_4bit
    assert "device" not in inspect.signature(quantize).parameters


def test_deepspeed_builds_its_operator_for_shared_memory() -> None:
    backend = import_module("deepspeed.comm.torch")
    assert "build_shm_op()" in inspect.getsource(backend.TorchBackend.__init__)


def test_lightning_broadcasts_a_sigterm_at_each_micro_batch() -> None:
    source = inspect.getsource(_TrainingEpochLoop.advance)
    assert "self._broadcast_sigterm_tensor()" in source
