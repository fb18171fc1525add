"""Files of conf/model/ describe their models: sizes, positions, tied embeddings."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    Gemma3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from app.config import conf_files, load_config
from app.model.architecture import context_len, load_architecture, model_class
from app.model.base import ModelConfig, load_base
from app.model.build import build_model
from app.model.families import shapes_of_config
from app.model.quantization import QuantizationConfig
from data_modules import TEMPLATE_NAMES

pytestmark = [pytest.mark.slow, pytest.mark.versions]

NAMES = conf_files.list_groups(conf_files.CONF)["model"]
OURS = ("tiny", "tiny_base_scratch")
# hidden size, layers, heads, context, weights. From public sources, not from our files:
# - sizes, layers, heads and contexts: litgpt's config.py for Llama (including 3.3 and its R1
#   distillations), Qwen 2.5 and 3, Mistral 7B, Gemma 1 and 2, Phi and Falcon; maxtext's
#   hf_model_configs.py for Gemma 3 and 4, gpt-oss, OLMo 3, DeepSeek-V3, Qwen3 30B and Qwen3.5 35B;
#   slime's scripts/models for the dense Qwen3.5, GLM-4 and GLM-4.5 Air; transformers' own config
#   defaults, which document their checkpoint, for Llama 4 Scout, SmolLM3, Ministral 3 8B, FLAN-T5,
#   BART, GPT-2; t5x's base.gin for T5; copies of the hub's config.json or printed models for
#   Mistral Nemo and Small, Gemma 4 12B, Qwen3.6, Granite 4, Ministral 3 3B, BLOOM 560M and Phi-4; a
#   GGUF header for Gemma 3 1B's context; benchmark tables for the other BLOOMs;
# - weights: the hub's own counts, Keras Hub's presets for T5, FLAN-T5, GPT-2 and Gemma, printed
#   models for BART and BLOOM. Comments name what the hub counts twice or in addition. None if no
#   source was found. Ids of special tokens: BLOOM, FLAN-T5 and BART only.
# Compared again on 2026-11-23 with other files, including head and feed-forward sizes, key heads,
# vocabularies, experts, epsilons and rotary bases: maxtext's configs/models for 40 of them (Llama 2
# to 4, Qwen 2.5 and 3, Qwen3.5 35B, Gemma 1 to 4, gpt-oss, OLMo 3, DeepSeek-V3, Phi-4 mini,
# Mistral), torchtune's model builders for 29 (Llama 2 to 3.2, Qwen 2.5 and 3, Gemma 1 and 2, Phi,
# Mistral), model cards for Qwen3.5 9B. None contradicts, except for differently padded vocabularies
# (Gemma 1 to 3), the vocabulary of Mistral 7B 0.1, layers in pairs (Gemma 2), and the rotary base
# of a later version of Qwen3 30B.
PUBLISHED: dict[str, tuple[int, int, int, int | None, int | None]] = {
    "llama2_7b": (4096, 32, 32, 4096, 6_738_415_616),  # the hub's 6,738,417,664 include 32 x 64
    "llama2_13b": (5120, 40, 40, 4096, 13_015_864_320),  # rotary frequencies, and 13B's
    "llama2_70b": (8192, 80, 64, 4096, 68_976_648_192),  # and 70B's 40 x 64 and 80 x 64
    "llama3_8b": (4096, 32, 32, 8192, 8_030_261_248),
    "llama8b": (4096, 32, 32, 131072, 8_030_261_248),
    "llama70b": (8192, 80, 64, 131072, 70_553_706_496),
    "llama405b": (16384, 126, 128, 131072, 405_853_388_800),
    "llama1b": (2048, 16, 32, 131072, 1_235_814_400),
    "llama3b": (3072, 28, 24, 131072, 3_212_749_824),
    "qwen0_5b": (896, 24, 14, 32768, 494_032_768),
    "qwen1_5b": (1536, 28, 12, 131072, 1_543_714_304),
    "qwen7b": (3584, 28, 28, 131072, 7_615_616_512),
    "qwen14b": (5120, 48, 40, 131072, 14_770_033_664),
    "qwen32b": (5120, 64, 40, 131072, 32_763_876_352),
    "qwen72b": (8192, 80, 64, 131072, 72_706_203_648),
    # The hub counts the tied head of the two smallest twice: 751,632,384 and 2,031,739,904.
    "qwen3_0_6b": (1024, 28, 16, 40960, 751_632_384 - 151936 * 1024),
    "qwen3_1_7b": (2048, 28, 16, 40960, 2_031_739_904 - 151936 * 2048),
    "qwen3_4b": (2560, 36, 32, 40960, 4_022_468_096),
    "qwen3_8b": (4096, 36, 32, 40960, 8_190_735_360),
    "qwen3_14b": (5120, 40, 40, 40960, 14_768_307_200),
    "qwen3_32b": (5120, 64, 64, 40960, 32_762_123_264),
    "mistral7b": (4096, 32, 32, 32768, 7_248_023_552),
    "mistral_nemo_12b": (5120, 40, 32, 131072, 12_247_782_400),
    "gemma2b": (2048, 18, 8, 8192, 2_506_172_416),
    "gemma7b": (3072, 28, 16, 8192, 8_537_680_896),
    "gemma2_2b": (2304, 26, 8, 8192, 2_614_341_888),
    "gemma2_9b": (3584, 42, 16, 8192, 9_241_705_984),
    "gemma2_27b": (4608, 46, 32, 8192, 27_227_128_320),
    "gemma3_1b": (1152, 26, 4, 32768, 999_885_952),
    "phi2": (2560, 32, 32, 2048, 2_779_683_840),
    "phi3_mini": (3072, 32, 32, 4096, 3_821_079_552),
    "phi4": (5120, 40, 40, 16384, 14_659_507_200),
    "falcon7b": (4544, 32, 71, 2048, 7_217_189_760 - 65024 * 4544),  # its tied head counted twice
    "falcon40b": (8192, 60, 128, 2048, 41_303_293_952),  # the hub: 41_835_970_560
    "falcon180b": (14848, 80, 232, 2048, 179_522_565_120),
    "bloom560m": (1024, 24, 16, None, 559_214_592),
    "bloom7b": (4096, 30, 32, None, 7_069_016_064),
    "bloom176b": (14336, 70, 112, None, 176_247_271_424),
    "gpt2": (768, 12, 12, 1024, 124_439_808),
    "gpt2_xl": (1600, 48, 25, 1024, 1_557_611_200),
    "t5_small": (512, 6, 8, None, 60_506_624),
    "flan_t5_small": (512, 8, 6, None, 76_961_152),
    "flan_t5_base": (768, 12, 12, None, 247_577_856),
    "flan_t5_large": (1024, 24, 16, None, 783_150_080),
    "flan_t5_xl": (2048, 24, 32, None, 2_849_757_184),
    "flan_t5_xxl": (4096, 24, 64, None, 11_135_332_352),
    "bart_base": (768, 6, 12, 1024, 139_420_416),
    "bart_large": (1024, 12, 16, 1024, 406_291_456),
    "qwen3b": (2048, 36, 16, 32768, 3_085_938_688),
    "qwen3_30b_a3b": (2048, 48, 32, 40960, 30_532_122_624),
    "qwen3_5_4b": (2560, 32, 16, 262144, None),
    "qwen3_5_9b": (4096, 32, 16, 262144, None),
    "qwen3_5_27b": (5120, 64, 24, 262144, None),
    "qwen3_5_35b_a3b": (2048, 40, 16, 262144, None),
    "qwen3_6_27b": (5120, 64, 24, 262144, None),
    "qwen3_6_35b_a3b": (2048, 40, 16, 262144, None),
    "llama3_3_70b": (8192, 80, 64, 131072, 70_553_706_496),
    "llama4_scout": (5120, 48, 40, 262144, None),
    "r1_distill_llama_8b": (4096, 32, 32, 131072, 8_030_261_248),
    "r1_distill_llama_70b": (8192, 80, 64, 131072, 70_553_706_496),
    "r1_distill_qwen_7b": (3584, 28, 28, 131072, 7_615_616_512),
    "r1_distill_qwen_32b": (5120, 64, 40, 131072, 32_763_876_352),
    "gemma3_4b": (2560, 34, 8, 131072, None),
    "gemma3_12b": (3840, 48, 16, 131072, None),
    "gemma3_27b": (5376, 62, 32, 131072, None),
    "gemma4_e2b": (1536, 35, 8, 131072, None),
    "gemma4_e4b": (2560, 42, 8, 131072, None),
    "gemma4_12b": (3840, 48, 16, 262144, None),
    "gemma4_26b_a4b": (2816, 30, 16, 262144, None),
    "gemma4_31b": (5376, 60, 32, 262144, None),
    "gpt_oss_20b": (2880, 24, 64, 131072, 20_914_757_184),
    "gpt_oss_120b": (2880, 36, 64, 131072, 116_829_156_672),
    "ministral3_3b": (3072, 26, 32, 262144, None),
    "ministral3_8b": (4096, 34, 32, 262144, None),
    "mistral_small_24b": (5120, 40, 32, 32768, 23_572_403_200),
    "olmo3_7b": (4096, 32, 32, 65536, 7_298_011_136),
    "olmo3_32b": (5120, 64, 40, 65536, None),
    "granite4_h_tiny": (1536, 40, 12, 131072, None),
    "smollm3_3b": (2048, 36, 16, 65536, 3_075_098_624),
    "phi4_mini": (3072, 32, 24, 131072, 3_836_021_760),
    # The hub also counts the bias of each expert's score, which is not a parameter here.
    "deepseek_v3": (7168, 61, 128, 163840, 671_026_419_200 - 58 * 256),
    "glm4_9b": (4096, 40, 32, 32768, 9_400_279_040),
    "glm4_5_air": (4096, 46, 96, 131072, None),
}
# The hub also counts the vision tower; with it, transformers builds exactly that count.
MULTIMODAL = {
    "gemma3_4b": 4_300_079_472,
    "gemma3_12b": 12_187_325_040,
    "gemma3_27b": 27_432_406_640,
}
TIED = {
    *("llama1b", "llama3b", "qwen0_5b", "qwen1_5b"),
    *("qwen3_0_6b", "qwen3_1_7b", "qwen3_4b"),
    *("gemma2b", "gemma7b", "gemma2_2b", "gemma2_9b", "gemma2_27b", "gemma3_1b"),
    *("falcon7b", "falcon40b", "bloom560m", "bloom7b", "bloom176b", "gpt2", "gpt2_xl"),
    *("t5_small", "bart_base", "bart_large"),
    *("qwen3b", "qwen3_5_4b", "gemma3_4b", "gemma3_12b", "gemma3_27b", "gemma4_e2b", "gemma4_e4b"),
    *("gemma4_12b", "gemma4_26b_a4b", "gemma4_31b", "ministral3_3b", "granite4_h_tiny"),
    *("smollm3_3b", "phi4_mini"),
}
SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
SIGLIP |= {"num_attention_heads": 16, "image_size": 896, "patch_size": 14, "vision_use_head": False}
# Their layers differ or have experts: shapes are known once the model is built.
SHAPES_OF_THE_BUILT = (
    *("qwen3_30b_a3b", "qwen3_5_4b", "qwen3_5_9b", "qwen3_5_27b", "qwen3_5_35b_a3b"),
    *("qwen3_6_27b", "qwen3_6_35b_a3b", "llama4_scout", "gemma4_e2b", "gemma4_e4b", "gemma4_12b"),
    *("gemma4_26b_a4b", "gemma4_31b", "gpt_oss_20b", "gpt_oss_120b", "granite4_h_tiny"),
    *("deepseek_v3", "glm4_9b", "glm4_5_air", "ministral3_3b", "ministral3_8b", "olmo3_7b"),
    *("olmo3_32b", "smollm3_3b"),
)
ON_THE_HUB = [
    name
    for name in conf_files.list_groups(conf_files.CONF)["experiment"]
    if name not in ("quickstart", "dpo_quickstart", "classify_tiny", "tiny_base", "tiny_long")
]


def text_of(name: str) -> str:
    return (conf_files.CONF / "model" / f"{name}.yaml").read_text()


@cache
def settings(name: str) -> ModelConfig:
    """Compose a file of conf/model; not called during collection, which every worker repeats."""
    model: ModelConfig = load_config("train", [f"model={name}", "data=skills"]).model
    return model


def unloaded(model: ModelConfig) -> ModelConfig:
    """Return settings that build the model from its architecture, without weights."""
    return replace(model, path=None, from_scratch=True)


@cache
def built(name: str) -> Any:
    architecture = load_architecture(unloaded(settings(name)))
    with torch.device("meta"):
        return model_class(architecture).from_config(architecture, dtype=torch.bfloat16)


def is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_every_model_has_published_numbers() -> None:
    assert sorted([*PUBLISHED, *OURS]) == NAMES


@pytest.mark.parametrize("name", PUBLISHED)
def test_architectures_equal_the_published_numbers(name: str) -> None:
    hidden, layers, heads, context, weights = PUBLISHED[name]
    model = built(name)
    config = model.config
    assert config.hidden_size == hidden
    assert (config.num_hidden_layers, config.num_attention_heads) == (layers, heads)
    assert context_len(config) == context
    counted = sum(parameter.numel() for parameter in model.parameters())
    if name.startswith("flan") and is_tied(model):
        # transformers ties every T5 that it builds without weights; see the last test of this file.
        counted += config.vocab_size * hidden
    else:
        assert is_tied(model) == (name in TIED)
    assert weights is None or counted == weights


@pytest.mark.parametrize(
    ("name", "besides"),
    [
        ("gpt2", set()),
        ("bart_large", {"attention_dropout"}),
        ("t5_small", {"decoder_start_token_id"}),
        ("falcon7b", {"rope_theta"}),
    ],
)
def test_architectures_equal_the_defaults_of_transformers(name: str, besides: set[str]) -> None:
    """The defaults of a transformers config are those of the checkpoint in its docstring."""
    numbers = dict(settings(name).architecture)
    kind = CONFIG_MAPPING[numbers.pop("model_type")]
    assert str(settings(name).path) in str(kind.__doc__)
    assert {key for key, value in numbers.items() if getattr(kind(), key, None) != value} == besides


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_fit_the_model(name: str) -> None:
    model = settings(name)
    assert model.path is not None
    assert model.path.count("/") == 1
    split = built(name)._no_split_modules
    assert model.wrap_class in split if model.wrap_class else len(split) > 1
    assert model.chat_template is None or model.chat_template in TEMPLATE_NAMES
    assert all(token and token == token.strip() for token in model.stop_tokens)
    assert text_of(name).startswith("# ")
    # transformers knows every key: it would keep an unknown one without an error.
    config = built(name).config
    known = type(config)().to_dict().keys() | config.attribute_map.keys()
    known |= {"rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern"}
    known |= {"partial_rotary_factor", "tie_word_embeddings", "decoder_start_token_id", "head_dim"}
    # Gemma 4 keeps sizes per kind of layer with the layers.
    known |= {"num_global_key_value_heads", "global_head_dim", "hidden_size_per_layer_input"}
    assert set(model.architecture) <= known


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "\n  rope_theta:" in text_of(name)])
def test_rotary_settings_reach_the_model(name: str) -> None:
    numbers = settings(name).architecture
    rope = built(name).config.rope_parameters
    if "rope_local_base_freq" in numbers:
        assert rope["sliding_attention"]["rope_theta"] == numbers["rope_local_base_freq"]
    rope = rope.get("full_attention", rope)
    assert rope["rope_theta"] == numbers["rope_theta"]
    assert rope.get("partial_rotary_factor", 1.0) == numbers.get("partial_rotary_factor", 1.0)
    scaling = numbers.get("rope_scaling", {"rope_type": "default"})
    assert {key: rope[key] for key in scaling} == scaling


@pytest.mark.parametrize("name", MULTIMODAL)
def test_language_models_equal_those_of_multimodal_checkpoints(name: str) -> None:
    language_model = built(name).config
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(
            Gemma3Config(text_config=language_model.to_dict(), vision_config=SIGLIP)
        )
    assert sum(parameter.numel() for parameter in whole.parameters()) == MULTIMODAL[name]
    count = sum(parameter.numel() for parameter in whole.model.language_model.parameters())
    assert sum(parameter.numel() for parameter in built(name).parameters()) == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_from_the_architecture_equal_those_of_the_model(name: str) -> None:
    """Or are unknown before it is built, if its layers differ or have experts."""
    shapes = shapes_of_config(settings(name).architecture)
    assert (shapes is None) == (name in SHAPES_OF_THE_BUILT)
    if shapes is None:
        return
    parameters = built(name).named_parameters(remove_duplicate=False)
    matrices = {
        full_name.removesuffix(".weight"): tuple(parameter.shape)
        for full_name, parameter in parameters
        if parameter.dim() == 2
    }
    assert shapes == matrices


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_experiments_adapt_every_layer(name: str) -> None:
    config = load_config("train", [f"experiment={name}"])
    with torch.device("meta"):
        model = build_model(
            unloaded(config.model),
            QuantizationConfig(),  # nothing is quantized without weights
            "eager",  # supported by every model
            config.adapter,
            config.recompute,
            "bf16",
        )
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    layers = model.config.num_hidden_layers
    in_layers = {int(part) for full in trained for part in full.split(".") if part.isdigit()}
    assert in_layers == set(range(layers)), "every layer has trainable parameters"


def test_an_untied_flan_t5_keeps_its_saved_head(tmp_path: Path) -> None:
    """transformers 5 ties every T5, but a FLAN-T5 has a separate head in its file."""
    torch.manual_seed(0)
    numbers = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 1}
    numbers |= {"num_heads": 4, "decoder_start_token_id": 0}
    flan = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    model = T5ForConditionalGeneration(T5Config(**numbers, **flan))
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights["lm_head.weight"] = torch.randn(64, 32)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = T5Config(**numbers, **flan)
    config.save_pretrained(tmp_path)
    for new_ids in ([], [64, 65]):
        loaded = load_base(ModelConfig(path=str(tmp_path)), "sdpa", torch.float32, new_ids=new_ids)
        assert loaded.lm_head.weight.shape == (64 + len(new_ids), 32)
        assert torch.equal(loaded.lm_head.weight[:64], weights["lm_head.weight"])
        assert torch.equal(loaded.shared.weight[:64], weights["shared.weight"])
        assert loaded.config.tie_word_embeddings is False
