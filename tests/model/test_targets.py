"""Which modules and layers an adapter's settings select, and how those that match nothing end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from app.model import layers
from app.model.adapter.apply import apply_adapter
from app.model.adapter.saved import load_adapter
from app.model.adapter.settings import AdapterConfig, FreezeConfig, Ia3Config, LoraConfig
from app.model.adapter.targets import Targets, find_targets
from app.model.description import BaseDescription, describe_model
from common.errors import UserError
from tests.families import tiny_family
from tests.tiny import move, tiny_bart, tiny_gpt2, tiny_llama, tiny_t5

TIED, UNTIED = describe_model(tiny_llama()), describe_model(tiny_llama(tie_word_embeddings=False))
KINDS: dict[str, type[Any]] = {"lora": LoraConfig, "ia3": Ia3Config, "freeze": FreezeConfig}


def find(kind: str, base: BaseDescription = TIED, **settings: Any) -> Targets:
    config: AdapterConfig = KINDS[kind](**settings)
    return find_targets(config, base)


REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    # adapter, settings, text of each problem
    ("lora", {"target_modules": ["q_proj", "v_prj"]},
     ["no linear module; did you mean v_proj? (the model has down_proj,"]),
    ("lora", {"target_modules": "q_proj"},
     ["by its full name; type adapter.target_modules=[q_proj]"]),
    ("lora", {"target_modules": "(q_proj"}, ["(q_proj is not a valid regular expression"]),
    ("lora", {"target_modules": []},
     ["expected all-linear, a list like [q_proj, v_proj], or a reg"]),
    ("lora", {"target_modules": ["embed_tokens"]}, ["embed_tokens is the embedding"]),
    ("lora", {"target_modules": ["lm_head"]}, ["lm_head is tied to this base's embedding"]),
    ("lora", {"rank_pattern": {"down_prj": 2}},
     ["rank_pattern: down_prj matches no module that gets an adapter; did you"]),
    ("lora", {"alpha_pattern": {"up_proj": 2.0}, "target_modules": ["q_proj"]},
     ["no module that gets an adapter; did you mean q_proj? (the adapter has q_proj)"]),
    ("lora", {"rank_pattern": {"up_proj": 0}},
     ["adapter.rank_pattern.up_proj=0: expected a rank of 1 or more"]),
    ("lora", {"rank_pattern": {"down_proj": 99}},
     [".down_proj (32 x 48); type adapter.rank_pattern.down_proj=32 or less"]),
    ("lora", {"modules_to_save": ["lm_head"]},
     ["lm_head is tied to model.embed_tokens"]),
    ("lora", {"layers": "top 3"}, ["adapter.layers='top 3', but the model has 2 layers"]),
    ("ia3", {"feedforward_modules": ["down_prj"]},
     ["feedforward_modules: down_prj matches no linear module"]),
    ("ia3", {"target_modules": ["k_proj"], "feedforward_modules": ["down_proj"]},
     ["['k_proj'] does not match; type adapter.target_modules=[k_proj,down_proj]"]),
    ("freeze", {"layers": "none"}, ["nothing would be trained; type 'adapter.layers=top 2'"]),
    ("freeze", {"modules": ["lm_hed"]},
     ["modules: lm_hed matches no module with weights; did you mean lm_head?"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings", "problems"), REFUSED, ids=[f"{r[0]} {r[1]}" for r in REFUSED]
)
def test_settings_that_match_nothing_are_refused_with_existing_names(
    kind: str, settings: dict[str, Any], problems: list[str]
) -> None:
    found = find(kind, **settings).problems
    assert len(found) == len(problems), found
    for problem, fragment in zip(found, problems, strict=True):
        assert fragment in problem


FOUND: list[tuple[str, dict[str, Any], set[str]]] = [
    # adapter, settings, selected names in layer 1 and outside of layers
    ("lora", {"target_modules": ["v_proj", "self_attn.q_proj"]},
     {"self_attn.q_proj", "self_attn.v_proj"}),
    ("lora", {"target_modules": r".*\.1\..*_proj", "layers": [0]}, set()),
    ("lora", {"target_modules": ["lm_head"]}, {"lm_head"}),
    ("lora", {"r": 16, "target_modules": ["k_proj"], "rank_pattern": {"k_proj": 16, ".*": 99}},
     {"self_attn.k_proj"}),
    ("lora", {"target_modules": ["up_proj"], "modules_to_save": ["norm"]},
     {"mlp.up_proj", "model.norm"}),
    ("ia3", {}, {"mlp.down_proj", "self_attn.k_proj", "self_attn.v_proj"}),
    ("ia3", {"target_modules": ["k_proj", "mlp.down_proj"], "feedforward_modules": ["down_proj"]},
     {"mlp.down_proj", "self_attn.k_proj"}),
    ("freeze", {"layers": "none", "modules": ["norm", r".*\.1\..*layernorm"]},
     {"input_layernorm", "model.norm", "post_attention_layernorm"}),
    ("freeze", {"layers": [1], "modules": ["lm_head"]}, {"lm_head", "model.layers.1"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "names"), FOUND, ids=[str(row[1]) for row in FOUND])
def test_settings_select_these_modules(
    kind: str, settings: dict[str, Any], names: set[str]
) -> None:
    found = find(kind, UNTIED, **settings)
    all_names = [*found.matrices, *found.full_modules]
    if names:
        assert found.problems == []
        in_layer_1 = {name.removeprefix("model.layers.1.") for name in all_names}
        assert {name for name in in_layer_1 if not name.startswith("model.layers.0")} == names
    else:
        assert "matches no linear module" in found.problems[0]


def test_all_linear_skips_the_head_and_thin_matrices() -> None:
    model = tiny_llama(hidden_size=128)
    model.model.layers[0].mlp.gate = torch.nn.Linear(128, 1)
    base = describe_model(model)
    found = find("lora", base, r=4)
    assert found.thin == ["model.layers.0.mlp.gate"]
    assert "lm_head" not in found.matrices and len(found.matrices) == 14
    assert find("lora", base, r=1).thin == []
    router = replace(TIED, linear={**(TIED.linear or {}), "model.layers.0.mlp.gate": (8, 32)})
    assert find("lora", router, r=16).thin == ["model.layers.0.mlp.gate"]
    assert "mlp.gate (8 x 32)" in find("lora", router, target_modules=["gate"]).problems[0]


@pytest.mark.parametrize("family", ["falcon_h1", "mamba2"])
def test_a_linear_module_read_by_a_kernel_is_skipped(family: str) -> None:
    """peft refuses LoRA on the weight that Mamba's kernel reads."""
    model = tiny_family(family)
    base = describe_model(model)
    assert any(name.endswith(".out_proj") for name in base.linear or ())
    adapted = apply_adapter(model, LoraConfig(r=2), half_precision=False)
    names = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert any(".in_proj." in name for name in names)
    assert not any(".out_proj." in name for name in names)
    (problem,) = find("lora", base, target_modules=["in_proj", "out_proj"]).problems
    assert f"out_proj of {family} models cannot take an adapter" in problem


@pytest.mark.parametrize("family", ["jamba", "mamba"])
def test_a_linear_module_that_is_never_called_is_skipped(family: str) -> None:
    """An adapter on dt_proj, which is never called, would have no effect and not train."""
    model = tiny_family(family)
    adapted = apply_adapter(model, LoraConfig(r=2, dropout=0.0), half_precision=False)
    trained = {name: one for name, one in adapted.named_parameters() if one.requires_grad}
    assert any(".x_proj." in name for name in trained)
    adapted(input_ids=torch.arange(3, 9)[None], use_cache=False).logits.sum().backward()
    assert all(one.grad is not None for one in trained.values())
    base = describe_model(tiny_family(family))
    assert all(n.endswith((".dt_proj", ".out_proj")) for n in find("lora", base, r=2).not_plain)
    for kind in ("lora", "ia3"):
        inputs = {"feedforward_modules": []} if kind == "ia3" else {}
        (problem,) = find(kind, base, target_modules=["dt_proj"], **inputs).problems
        assert f"dt_proj of {family} models cannot take an adapter" in problem


def test_the_bases_own_adapters_are_skipped() -> None:
    found = find("lora", describe_model(tiny_family("zamba2")), r=2)
    assert found.own_adapters and not any("adapter_list" in name for name in found.matrices)


def test_a_saved_adapter_on_an_uncalled_module_is_not_continued(tmp_path: Path) -> None:
    family = "mamba"
    settings = peft.LoraConfig(r=2, target_modules=["x_proj", "dt_proj"])
    model = move(peft.get_peft_model(tiny_family(family), settings))
    model.save_pretrained(tmp_path)
    load_adapter(tiny_family(family), tmp_path)  # to be used, as stock peft does
    with pytest.raises(UserError, match=f"dt_proj of {family} models cannot take an adapter"):
        load_adapter(tiny_family(family), tmp_path, trainable=True)


def test_bypassed_linears_by_model_type() -> None:
    assert layers.find_bypassed_linears("longcat_flash") == ("classifier",)  # its router
    assert not any(map(layers.find_bypassed_linears, ("llama", "new", None)))


def test_unknown_properties_of_a_base_are_not_checked() -> None:
    for settings in ({"target_modules": ["v_prj"]}, {"modules_to_save": ["lm_head"]}, {"r": 999}):
        found = find("lora", BaseDescription(), **settings)
        assert found.problems == found.matrices == found.full_modules == []
    without_layers = replace(TIED, layers=None)
    assert find("lora", without_layers, layers="top 99").problems == []


def test_the_three_pattern_rules() -> None:
    names = ["a.q_proj", "a.b.q_proj", "a.xq_proj", "q_proj"]
    assert layers.by_ending("q_proj", names) == ["a.q_proj", "a.b.q_proj", "q_proj"]
    assert layers.by_ending("b.q_proj", names) == ["a.b.q_proj"]
    assert layers.by_expression("q_proj", names) == ["q_proj"]
    assert layers.by_expression(r"a\..*q_proj", names) == names[:3]
    assert layers.by_key("q_proj", names) == ["a.q_proj", "a.b.q_proj", "q_proj"]
    assert layers.by_key(r"b\..*", names) == ["a.b.q_proj"]


def test_a_pattern_leaves_out_up_to_eight_prefixes() -> None:
    ends = ("q_proj", "k_proj")
    names = [f"model.layers.{n}.self_attn.{end}" for n in range(12) for end in ends]
    assert layers.pattern_without([*names[::2], names[1]], names[3::2]) is None
    for excluded in (names[2:4], names[1::2]):  # a layer, and all of a kind
        kept = [name for name in names if name not in excluded]
        pattern = layers.pattern_without(kept, excluded)
        assert pattern is not None
        assert layers.by_expression(pattern, names) == kept


def test_a_catastrophic_expression_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOFT_LIMITS", "regex_seconds=1")
    (problem,) = find("lora", target_modules=r"((\w|\.)+)+!").problems
    assert problem.startswith("adapter.target_modules: ")
    assert " is a regular expression that takes more than 1 s" in problem


def test_encoder_layers_come_before_decoder_layers() -> None:
    t5 = layers.decoder_layers(tiny_t5(num_decoder_layers=3))
    assert t5 == [
        *("encoder.block.0", "encoder.block.1"),
        *("decoder.block.0", "decoder.block.1", "decoder.block.2"),
    ]
    bart = layers.decoder_layers(tiny_bart())
    assert bart == [f"model.{side}.layers.{n}" for side in ("encoder", "decoder") for n in (0, 1)]


def test_layers_are_found_below_an_adapter() -> None:
    adapted = apply_adapter(tiny_gpt2(), LoraConfig(r=2), half_precision=False)
    names = layers.decoder_layers(adapted)
    assert names == [f"base_model.model.transformer.h.{number}" for number in range(2)]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("all", [0, 1, 2, 3]),
        ("top 1", [3]),
        ("top 4", [0, 1, 2, 3]),
        (" top  2 ", [2, 3]),
        ([2, 0, 2], [0, 2]),
    ],
)
def test_layers_selected_out_of_four(setting: Any, expected: list[int]) -> None:
    assert list(layers.layer_numbers(setting, 4)) == expected


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("top 40", r"'top 40', but the model has 32 layers; type a number from 1 to 32"),
        (8, r"'adapter\.layers=top 8' or adapter\.layers=\[8\]"),
        ([31, 32], "has no layer 32; its 32 layers are numbered 0 to 31"),
        ([], r"=\[\] is not valid; type all"),
        (None, "None is not valid"),
    ],
)
def test_an_invalid_selection_is_refused(setting: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layers.layer_numbers(setting, 32)
