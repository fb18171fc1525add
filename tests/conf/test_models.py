"""Every file of conf/model/ describes the model that it names: sizes, positions, tied or not."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from app.config import conf_files, load_config
from app.model.base import ModelConfig, context_len, load_architecture, load_base, model_class
from app.model.build import build_model
from app.model.quantization import QuantizationConfig
from app.preflight.base_model import BaseModel
from app.preflight.files import check_sequence_len
from app.preflight.shapes import shapes_of_architecture
from data_modules import TEMPLATE_NAMES

pytestmark = pytest.mark.slow

NAMES = conf_files.groups(conf_files.CONF)["model"]
OURS = ("tiny", "tiny_base_scratch")
# hidden size, layers, heads, context, weights. From public sources, none of them our files:
# - sizes, layers, heads and contexts: litgpt's config.py for Llama, Qwen, Mistral 7B, Gemma, Phi
#   and Falcon; copies of the hub's config.json or prints of the loaded model for Mistral Nemo (of
#   July 2024; later ones say 131072), BLOOM 560M, FLAN-T5 small, large and xl, BART base, Phi-4; a
#   GGUF header for Gemma 3 1B's context; benchmark tables for the other BLOOMs. No copy was found
#   for the heads of T5 small, FLAN-T5 base, BART large and GPT-2: those are their papers';
# - weights: the hub's own counts, Keras Hub's presets for T5, FLAN-T5, GPT-2 and Gemma, prints of
#   loaded models for BART and BLOOM. It is said where the hub counts something twice. None where
#   no source was found. Ids of special tokens were found for BLOOM, FLAN-T5 and BART only.
PUBLISHED: dict[str, tuple[int, int, int, int | None, int | None]] = {
    "llama2_7b": (4096, 32, 32, 4096, 6_738_415_616),  # the hub's 6,738,417,664 has 32 x 64
    "llama2_13b": (5120, 40, 40, 4096, 13_015_864_320),  # rotary frequencies besides, and 13B's
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
    "mistral_nemo_12b": (5120, 40, 32, 128000, 12_247_782_400),
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
    "falcon40b": (8192, 60, 128, 2048, None),
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
}
TIED = {
    *("llama1b", "llama3b", "qwen0_5b", "qwen1_5b"),
    *("qwen3_0_6b", "qwen3_1_7b", "qwen3_4b"),
    *("gemma2b", "gemma7b", "gemma2_2b", "gemma2_9b", "gemma2_27b", "gemma3_1b"),
    *("falcon7b", "falcon40b", "bloom560m", "bloom7b", "bloom176b", "gpt2", "gpt2_xl"),
    *("t5_small", "bart_base", "bart_large"),
}
LLAMA_3 = ["llama8b", "llama70b", "llama405b", "llama1b", "llama3b"]
ON_THE_HUB = [
    name
    for name in conf_files.groups(conf_files.CONF)["experiment"]
    if name not in ("quickstart", "tiny_base")
]


@cache
def settings(name: str) -> ModelConfig:
    model: ModelConfig = load_config("train", [f"model={name}", "data=skills"]).model
    return model


def unloaded(model: ModelConfig) -> ModelConfig:
    """Return settings that make a model of its numbers alone."""
    return replace(model, path=None, from_scratch=True)


@cache
def built(name: str) -> Any:
    architecture = load_architecture(unloaded(settings(name)))
    with torch.device("meta"):
        return model_class(architecture).from_config(architecture, dtype=torch.bfloat16)


def is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_every_model_is_one_that_is_known_here() -> None:
    assert sorted([*PUBLISHED, *OURS]) == NAMES


@pytest.mark.parametrize("name", PUBLISHED)
def test_numbers_are_the_published_ones(name: str) -> None:
    hidden, layers, heads, context, weights = PUBLISHED[name]
    model = built(name)
    config = model.config
    assert config.hidden_size == hidden
    assert (config.num_hidden_layers, config.num_attention_heads) == (layers, heads)
    assert context_len(config) == context
    counted = sum(parameter.numel() for parameter in model.parameters())
    if name.startswith("flan") and is_tied(model):
        # This transformers ties every T5 that it makes without weights; see the last test here.
        counted += config.vocab_size * hidden
    else:
        assert is_tied(model) == (name in TIED)
    assert weights is None or counted == weights


@pytest.mark.parametrize("name", PUBLISHED)
def test_facts_are_of_that_model(name: str) -> None:
    model = settings(name)
    assert model.path is not None
    assert model.path.count("/") == 1
    split = built(name)._no_split_modules
    assert model.wrap_class in split if model.wrap_class else len(split) > 1
    assert model.chat_template is None or model.chat_template in TEMPLATE_NAMES
    assert all(token and token == token.strip() for token in model.stop_tokens)
    text = (conf_files.CONF / "model" / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    # Every number is one that this transformers knows: it keeps what it does not know, and goes on.
    config = built(name).config
    known = type(config)().to_dict().keys() | config.attribute_map.keys()
    known |= {"rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern"}
    known |= {"partial_rotary_factor", "tie_word_embeddings", "decoder_start_token_id"}
    assert set(model.architecture) <= known


@pytest.mark.parametrize(
    "name", [name for name in PUBLISHED if "rope_theta" in settings(name).architecture]
)
def test_rotary_positions_arrive(name: str) -> None:
    numbers = settings(name).architecture
    rope = built(name).config.rope_parameters
    if "rope_local_base_freq" in numbers:
        assert rope["sliding_attention"]["rope_theta"] == numbers["rope_local_base_freq"]
        rope = rope["full_attention"]
    assert rope["rope_theta"] == numbers["rope_theta"]
    assert rope.get("partial_rotary_factor", 1.0) == numbers.get("partial_rotary_factor", 1.0)
    scaling = numbers.get("rope_scaling", {"rope_type": "default"})
    assert {key: rope[key] for key in scaling} == scaling


@pytest.mark.parametrize("name", LLAMA_3)
def test_llama_3_stretches_its_slow_positions_alone(name: str) -> None:
    numbers = settings(name).architecture
    frequencies = LlamaRotaryEmbedding(built(name).config).inv_freq
    head = numbers.get("head_dim") or numbers["hidden_size"] // numbers["num_attention_heads"]
    slowest = numbers["rope_theta"] ** -((head - 2) / head)
    assert frequencies[0].item() == 1.0
    expected = slowest / numbers["rope_scaling"]["factor"]
    assert math.isclose(frequencies[-1].item(), expected, rel_tol=1e-5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_by_numbers_are_those_of_the_model(name: str) -> None:
    parameters = built(name).named_parameters(remove_duplicate=False)
    matrices = {
        full_name.removesuffix(".weight"): tuple(parameter.shape)
        for full_name, parameter in parameters
        if parameter.dim() == 2
    }
    assert shapes_of_architecture(settings(name).architecture) == matrices


def test_shapes_are_unknown_where_a_number_is_missing() -> None:
    numbers = settings("flan_t5_xl").architecture
    assert shapes_of_architecture(numbers | {"model_type": "rwkv"}) is None
    del (fewer := dict(numbers))["d_ff"]
    assert shapes_of_architecture(fewer) is None


def test_t5_has_no_context_that_a_length_could_exceed() -> None:
    hub_numbers = settings("t5_small").architecture | {"n_positions": 512}
    assert check_sequence_len(4096, BaseModel("t5", hub_numbers)) == []
    assert check_sequence_len(4096, BaseModel("gpt2", settings("gpt2").architecture)) != []


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_the_adapter_of_an_experiment_fits_its_model(name: str) -> None:
    config = load_config("train", [f"experiment={name}"])
    with torch.device("meta"):
        model = build_model(
            unloaded(config.model),
            QuantizationConfig(),  # nothing is quantized without weights
            "eager",  # which every model has
            config.adapter,
            config.recompute,
            "bf16",
        )
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    layers = model.config.num_hidden_layers
    in_layers = {int(part) for full in trained for part in full.split(".") if part.isdigit()}
    assert in_layers == set(range(layers)), "every layer trains"


def test_a_flan_t5_keeps_the_head_of_its_file(tmp_path: Path) -> None:
    """transformers 5 calls every T5 tied; a FLAN-T5's head is its own and comes from its file."""
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
