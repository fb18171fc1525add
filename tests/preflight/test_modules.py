"""What is known of a base's modules before it is loaded is what the loaded model has."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest

from app.model import adapter
from app.model.base import ModelConfig
from app.model.description import describe_config, describe_files, describe_model
from app.model.layers import last_parts
from app.preflight.base_model import inspect_base
from tests.tiny import tiny_bart, tiny_gpt2, tiny_llama, tiny_t5

MODELS = {
    "llama": tiny_llama(num_hidden_layers=3),
    "untied llama": tiny_llama(tie_word_embeddings=False),
    "gpt2": tiny_gpt2(),
    "t5": tiny_t5(num_decoder_layers=3),
    "bart": tiny_bart(),
}
IN_MAKE_TEST = ("llama", "gpt2")
"""tied and by matrices, and by Conv1D; those of an encoder and of an untied head take as long"""
NUM_CONFIGS = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for name, model in MODELS.items():
        model.save_pretrained(folder / name)
    return folder


def reached(model: Any) -> tuple[set[str], set[str]]:
    """Return the modules that an adapter has weights of its own on, and those trained whole."""
    on, whole = set(), set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        module = name.removeprefix("base_model.model.").replace(".base_layer", "")
        for part in (".lora_", ".ia3_l"):
            if part in module:
                on.add(module.partition(part)[0])
                break
        else:
            whole.add(module.partition(".modules_to_save")[0].rpartition(".weight")[0] or module)
    return on, {name.removesuffix(".bias") for name in whole}


def random_config(
    random: random.Random, linear: list[str], others: list[str]
) -> adapter.AdapterConfig:
    """Return settings of which some mean nothing on a model with these modules."""

    def pattern() -> str:
        parts = random.choice(random.choice([linear, linear, linear, others])).split(".")
        ending = ".".join(parts[-random.randint(1, len(parts)) :])
        return random.choice([ending] * 9 + [parts[-1][:-1]])

    def patterns(most: int = 3) -> list[str]:
        return [pattern() for _ in range(random.randint(1, most))]

    def expression() -> str:
        number = random.randint(0, 3)
        part = pattern()
        return random.choice([rf".*\.{number}\..*", rf".*{part}", rf".*\.{number}\..*{part}", part])

    layers = random.choice(["all", "all", "top 1", "top 2", "top 5", [0], [1, 0], [7]])
    kind = random.choice(["lora", "lora", "ia3", "freeze"])
    if kind == "freeze":
        modules = random.choice([[], patterns(1), [expression()]])
        return adapter.FreezeConfig(layers=random.choice([layers, "none"]), modules=modules)
    if kind == "ia3":
        targets = random.choice(["auto", patterns()])
        return adapter.Ia3Config(
            layers=layers,
            target_modules=targets,
            feedforward_modules=random.choice(["auto", [], targets, patterns(1)]),
        )
    return adapter.LoraConfig(
        r=random.choice([2, 4, 33]),
        layers=layers,
        target_modules=random.choice(["all-linear", patterns(), patterns(1), expression()]),
        rank_pattern=random.choice([{}, {}, {pattern(): 3}, {expression(): 1}]),
        alpha_pattern=random.choice([{}, {}, {pattern(): 8.0}]),
        modules_to_save=random.choice([[], [], patterns(1)]),
    )


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in IN_MAKE_TEST else pytest.mark.slow) for kind in MODELS],
)
def test_what_the_headers_reach_is_what_the_adapter_reaches(kind: str, folders: Path) -> None:
    base, _ = inspect_base(ModelConfig(path=str(folders / kind)))
    model = MODELS[kind]
    linear = list(describe_model(model).linear or ())
    others = [name for name, _ in model.named_modules() if name and name not in linear]
    num_accepted = 0
    for seed in range(NUM_CONFIGS):
        config = random_config(random.Random(f"{kind} {seed}"), linear, others)
        found = adapter.find_targets(config, base)
        try:
            adapted = adapter.apply_adapter(copy.deepcopy(model), config, half_precision=False)
        except ValueError as error:
            assert found.problems, f"{config}: only the model says {error}"
            continue
        assert not found.problems, config
        num_accepted += 1
        on, whole = reached(adapted)
        assert on == set(found.matrices), config
        # A tied weight is one parameter of several modules.
        tied = set(base.embeddings) if len(base.embeddings) > 1 else set()
        for name in whole - tied:
            assert any(name == one or name.startswith(f"{one}.") for one in found.full_modules), (
                config
            )
        for name in found.full_modules:
            assert any(name == one or one.startswith(f"{name}.") for one in whole), config
    assert NUM_CONFIGS // 8 < num_accepted < NUM_CONFIGS


@pytest.mark.parametrize("kind", MODELS)
def test_files_and_numbers_describe_the_modules_of_the_model(kind: str, folders: Path) -> None:
    model, (files, _) = MODELS[kind], inspect_base(ModelConfig(path=str(folders / kind)))
    loaded, numbers = describe_model(model), describe_config("", model.config.to_dict())
    assert files.linear is not None and loaded.linear is not None and files.weighted is not None
    assert files.linear == numbers.linear == loaded.linear
    assert files.tables == numbers.tables == loaded.tables
    assert files.layers == numbers.layers == loaded.layers
    assert files.head == numbers.head == loaded.head
    assert files.model_type == numbers.model_type == loaded.model_type
    assert set(files.embeddings) == set(loaded.embeddings)
    assert files.embeddings[0] == numbers.embeddings[0] == loaded.embeddings[0]
    assert set(files.weighted) == set(loaded.weighted or ())


def test_names_that_a_file_leaves_out_are_added() -> None:
    model = tiny_gpt2()
    tensors = {
        name.removeprefix("transformer."): tuple(weight.shape)
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"
    }
    assert (
        describe_files("", model.config.to_dict(), tensors).linear == describe_model(model).linear
    )
    unknown = describe_files("", {"model_type": "new"}, tensors)
    assert (unknown.linear, unknown.layers, unknown.weighted) == (None, None, None)


def test_of_packed_weights_the_names_are_known_and_the_shapes_from_the_numbers() -> None:
    model = tiny_llama()
    packed = {name: (8, 1) for name in model.state_dict() if "norm" not in name}
    for numbers, linear in (
        (model.config.to_dict(), describe_model(model).linear),
        ({"model_type": "new"}, None),
    ):
        known = describe_files("", numbers, packed, is_packed=True)
        assert known.linear == linear
        assert known.layers == ["model.layers.0", "model.layers.1"]
        assert "q_proj" in last_parts(known.weighted or ())


@pytest.mark.parametrize(
    ("names", "numbers", "layers"),
    [
        (["a.layers.10.x.w", "a.layers.9.x.w"], {}, ["a.layers.9", "a.layers.10"]),
        (["a.layers.0.x.w", "a.layers.1.x.w"], {"num_hidden_layers": 1}, ["a.layers.0"]),
        (["decoder.0.w.w", "encoder.0.w.w"], {}, ["encoder.0", "decoder.0"]),
        (["vision.0.w.w", "text.0.w.w"], {}, None),
        (["norm.weight"], {}, None),
    ],
)
def test_layers_are_counted_in_forward_order(
    names: list[str], numbers: dict[str, int], layers: list[str] | None
) -> None:
    assert describe_files("", numbers, dict.fromkeys(names, (2,))).layers == layers
