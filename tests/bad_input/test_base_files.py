"""Files of a base, a tokenizer and an adapter that do not hold what they should: one message each.

With the file, what is wrong with it and exit code 2, before the first step.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.model.architecture import load_architecture
from app.model.base import ModelConfig, check_described, load_base
from app.model.hub import check_hub, is_offline
from app.process.launch import read_launch
from common.errors import TrainingFault, UserError, exit_code
from common.untrusted import Limits, limits, read_header, read_json_object, reading
from data_modules import DataConfig, DatasetConfig
from tests.bad_input.opened import Opened, open_run, settings_for
from tests.tiny import save_with_tokenizer, tiny_llama, tiny_t5

WEIGHTS = "model.safetensors"


@pytest.fixture
def base(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "base", tmp_path / "base"))


@pytest.fixture
def adapter(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "adapter", tmp_path / "adapter"))


def open_base(base: Path, made: Path, *words: str) -> Opened:
    return open_run(settings_for(base, made / "d.jsonl", "adapter=full", *words))


def open_adapter(adapter: Path, made: Path) -> Opened:
    return open_run(settings_for(made / "base", made / "d.jsonl", f"adapter.path={adapter}"))


def change(file: Path, **values: Any) -> None:
    """Set keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refused(end: Opened, *fragments: str) -> None:
    assert end.code == 2, end.stderr or end.error
    for fragment in fragments:
        assert fragment in end.stderr, end.stderr
    assert "Traceback" not in end.stderr


CONFIGS: list[tuple[dict[str, Any], list[str]]] = [
    ({"hidden_size": 64}, ["describes a different model from the weights", "32 in the files"]),
    ({"vocab_size": 10**12}, ["would be 1000000000000 x 32, and is 768 x 32"]),
    ({"rms_norm_eps": float("nan")}, ["rms_norm_eps=nan: expected a number"]),
    ({"num_hidden_layers": 3},
     ["num_hidden_layers=3, but the weight files have 2 layers: those from layer 2 on are "
      "missing; write num_hidden_layers=2"]),
    ({"quantization_config": 3}, ["quantization_config is not an object"]),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0, "factor": 1.0,
      "short_factor": [1.0], "long_factor": [1.0, 2.0]}},
     ["short_factor has 1 numbers; expected 4"]),
    ({"architectures": 7}, ["architectures=7: expected a list of class names"]),
    ({"eos_token_id": 10**9},
     ["config.json: eos_token_id=1000000000: 1000000000 is not a token id of this base, whose "
      "vocab_size is 768; write the id that ends an answer"]),
    ({"pad_token_id": 768}, ["pad_token_id=768: 768 is not a token", "or null for none"]),
    ({"is_encoder_decoder": True},
     ["config.json: is_encoder_decoder=true, but llama models are not encoder-decoders; remove "]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "fragments"), CONFIGS, ids=[str(row[0])[:40] for row in CONFIGS]
)
def test_values_of_a_config(
    base: Path, made: Path, values: dict[str, Any], fragments: list[str]
) -> None:
    change(base / "config.json", **values)
    refused(open_base(base, made), str(base), *fragments)


@pytest.mark.parametrize(
    "values",
    [{"pad_token_id": -1}, {"bos_token_id": 90000}, {"_attn_implementation_autoset": True}],
)
def test_what_published_files_hold_passes(base: Path, made: Path, values: dict[str, Any]) -> None:
    change(base / "config.json", **values)
    end = open_base(base, made)
    assert end.code == 0, end.stderr


TEXTS: list[tuple[str, bytes, list[str]]] = [
    ("config.json", b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", ["nested too deep (limit 64"]),
    ("config.json", b'{"a": "caf\xe9"}', ["not UTF-8 text (byte 10)"]),
    ("config.json", b"[]", ["expected a JSON object"]),
    ("generation_config.json", b'{"eos_token_id": [2, 1000000000]}',
     ["eos_token_id=[2, 1000000000]: 1000000000 is not a token", "vocab_size is 768"]),
    ("tokenizer_config.json", b'{"model_max_length": -5}',
     ["tokenizer_config.json: model_max_length=-5: expected a number of tokens (1 or more)"]),
    ("tokenizer.json", b"{}", ["tokenizer.json cannot be read"]),
    ("tokenizer_config.json", b'{"eos_token": "<|nope|>"}',
     ["its eos_token '<|nope|>' has id 768, the model's embedding has 768 rows; add"]),
    ("config.json", b'{"model_type": "llama", "attn_implementation": "flash_attention_2"}',
     ["config.json: attn_implementation selects the attention code"]),
    ("chat_template.jinja", b"\xff", ["chat_template.jinja: not UTF-8"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "fragments"), TEXTS)
def test_contents_of_a_file(
    base: Path, made: Path, name: str, content: bytes, fragments: list[str]
) -> None:
    (base / name).write_bytes(content)
    refused(open_base(base, made), str(base), *fragments)


def repack(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit the header of a safetensors file."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    edit(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])


HEADERS: list[Callable[[dict[str, Any]], Any]] = [
    lambda tensor: tensor.update(dtype="X9"),
    lambda tensor: tensor.update(shape=[-1, 1]),
    lambda tensor: tensor.update(data_offsets=[0]),
    lambda tensor: tensor.update(data_offsets=[tensor["data_offsets"][0], 1e3]),
]


@pytest.mark.parametrize("edit", HEADERS)
def test_headers_that_safetensors_would_refuse(
    base: Path, made: Path, edit: Callable[[dict[str, Any]], Any]
) -> None:
    repack(base / WEIGHTS, lambda header: edit(header["model.norm.weight"]))
    end = open_base(base, made)
    refused(end, f"{base / WEIGHTS}: its safetensors header is damaged", "download it again")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_that_are_not_floats(base: Path, made: Path, dtype: torch.dtype) -> None:
    tensors = load_file(base / WEIGHTS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, base / WEIGHTS, {"format": "pt"})
    refused(open_base(base, made), f"{base / WEIGHTS}: 'model.norm.weight' is ", "expected F32")
    with pytest.raises(UserError, match="no quantization_config"):
        load_base(ModelConfig(path=str(base)), "eager", torch.float32)


def test_weights_of_an_adapter_that_are_not_floats(adapter: Path, made: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(file).items()}, file)
    refused(open_adapter(adapter, made), f"{file}: ", "is I8, but an adapter's weights must be F32")


def test_weights_of_another_framework(base: Path, made: Path) -> None:
    save_file(load_file(base / WEIGHTS), base / WEIGHTS, {"format": "flax"})
    refused(open_base(base, made), f"{base / WEIGHTS}: its header has format=flax")


def test_a_header_beyond_the_limit(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOFT_LIMITS", "header_mib=1")
    (base / WEIGHTS).write_bytes((3 << 20).to_bytes(8, "little") + b"{".ljust(4 << 20))
    (problem,) = read_header(base / WEIGHTS)[1]
    assert "a header of 3,145,728 bytes (limit 1; LOFT_LIMITS=header_mib=NUMBER" in problem


@pytest.mark.parametrize("name", [3, "..", "a\0b"])
def test_an_index_names_files(base: Path, made: Path, name: Any) -> None:
    weight_map: dict[str, Any] = dict.fromkeys(load_file(base / WEIGHTS), WEIGHTS)
    weight_map["model.norm.weight"] = name
    index = base / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    refused(open_base(base, made), str(index))


NORMALIZERS = [
    ("normalizer", {"type": "Replace", "pattern": {"Regex": "[a-q]"}, "content": ""}, "17 of 72"),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "[A-Z]"}, "behavior": "Removed",
     "invert": False}, "26 of 72"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "changed", "lost"), NORMALIZERS)
def test_a_tokenizer_that_drops_letters(
    base: Path, made: Path, part: str, changed: dict[str, Any], lost: str
) -> None:
    change(base / "tokenizer.json", **{part: changed})
    refused(
        open_base(base, made),
        f"{base / 'tokenizer.json'}: its normalizer or pre_tokenizer drops or changes {lost} "
        "letters and digits",
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
         "strip_accents": True, "lowercase": True},
        {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "NFKC"}, {"type": "Strip",
             "strip_left": True, "strip_right": True},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
    ],
)  # fmt: skip
def test_a_tokenizer_that_only_folds_letters_passes(
    base: Path, made: Path, changed: dict[str, Any]
) -> None:
    change(base / "tokenizer.json", normalizer=changed)
    end = open_base(base, made)
    assert end.code == 0, end.stderr


@pytest.mark.parametrize(
    ("name", "values", "fragment"),
    [
        (
            "config.json",
            {"eos_token_id": 10**9},
            "1000000000 is not a token id of this base, whose",
        ),
        (
            "generation_config.json",
            {"eos_token_id": [2, 768]},
            "768 is not a token id of this base",
        ),
        ("config.json", {"num_labels": 30_000_000}, "num_labels=30000000: expected a whole"),
        ("generation_config.json", {"save_pretrained": 1}, "this is the name"),
        ("config.json", {"eos_token_id": 2}, ""),
    ],
)
def test_files_of_a_base_of_the_hub(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    values: dict[str, Any],
    fragment: str,
) -> None:
    """Its files are seen once they are here, as a copy in the hub's cache."""
    (base / "generation_config.json").write_text("{}")
    change(base / name, **values)
    cache = tmp_path / "hub" / "models--org--name"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("a" * 40)
    shutil.copytree(base, cache / "snapshots" / ("a" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache.parent))
    config = ModelConfig(path="org/name")
    with pytest.raises(UserError, match=fragment) if fragment else nullcontext():
        load_architecture(config)


@pytest.mark.parametrize(
    ("name", "is_tied"), [("LlamaForSequenceClassification", True), ("LlamaRewardModel", False)]
)
def test_a_model_that_labels_texts(name: str, is_tied: bool, tmp_path: Path, made: Path) -> None:
    """Where the embedding serves as head, it would train all the same."""
    base = save_with_tokenizer(
        tiny_llama(vocab_size=768, tie_word_embeddings=is_tied), tmp_path / "base"
    )
    change(base / "config.json", architectures=[name])
    tensors = load_file(base / WEIGHTS)
    has_head = tensors.pop("lm_head.weight", None) is not None
    assert has_head != is_tied
    if has_head:  # one that labels beside it does no harm
        assert open_base(base, made).code == 0
    save_file(tensors | {"score.weight": torch.ones(2, 32)}, base / WEIGHTS, {"format": "pt"})
    refused(
        open_base(base, made),
        f"{base / 'config.json'}: architectures={name}: this model classifies or rates texts, and "
        "its files have no language-model head; type model.path=FOLDER_OR_HUB_ID",
    )
    with pytest.raises(UserError, match="classifies or rates texts"):  # as of a base of the hub
        check_described(model := ModelConfig(path=str(base)), load_architecture(model))


def test_what_the_files_lack_is_said_from_their_headers(
    base: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.model import base as loading

    tensors = load_file(base / WEIGHTS)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, base / WEIGHTS, {"format": "pt"})
    monkeypatch.setattr(loading, "_read_weights", None)
    refused(
        open_base(base, made),
        f"{base / 'config.json'} describes a different model from the weights beside it: "
        "1 tensors are not in the files, first model.layers.0.mlp.up_proj.weight",
    )


LEFT_OUT: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any], list[str]]] = {
    "a tied head": (
        tiny_llama, {"tie_word_embeddings": True}, {"tie_word_embeddings": False},
        ["1 tensors are not in the files, first lm_head.weight"]),
    "layers": (
        tiny_llama, {}, {"num_hidden_layers": 1},
        ["config.json: num_hidden_layers=1, but the weight files have 2 layers",
         "9 tensors would not be used, model.layers.1.input_layernorm.weight is the first",
         "write num_hidden_layers=2"]),
    "layers of one of two stacks": (
        tiny_t5, {}, {"num_decoder_layers": 1},
        ["would not be used, first decoder.block.1.layer.0"]),
    "a bias": (
        tiny_llama, {"attention_bias": True}, {"attention_bias": False},
        ["8 tensors in its files would not be used", "self_attn.k_proj.bias"]),
}  # fmt: skip
"""what would be left out of a model whose config is changed so -> what is said of it"""


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_a_changed_config_would_leave_out(name: str, tmp_path: Path, made: Path) -> None:
    make, numbers, changed, fragments = LEFT_OUT[name]
    base = save_with_tokenizer(make(vocab_size=768, **numbers), tmp_path / "base")
    assert name != "a tied head" or "lm_head.weight" not in load_file(base / WEIGHTS)
    assert open_base(base, made).code == 0
    change(base / "config.json", **changed)
    refused(open_base(base, made), str(base), *fragments)


def test_parts_that_this_kind_of_model_has_not_are_only_counted(base: Path, made: Path) -> None:
    tensors = load_file(base / WEIGHTS)
    extra = {f"vision_tower.layers.{i}.mlp.weight": torch.ones(2, 2) for i in range(3)}
    mask = {"model.layers.0.self_attn.bias": torch.ones(1, 1, 4, 4)}
    save_file(tensors | extra | mask, base / WEIGHTS, {"format": "pt"})
    assert open_base(base, made).code == 0


def test_a_layer_that_predicts_further_tokens_is_not_a_layer_of_the_model(
    base: Path, made: Path
) -> None:
    tensors = load_file(base / WEIGHTS)
    further = {
        name.replace("layers.1.", "layers.2."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.1." in name
    }
    save_file(tensors | further, base / WEIGHTS, {"format": "pt"})
    refused(open_base(base, made), "num_hidden_layers=2, but")
    change(base / "config.json", num_nextn_predict_layers=1)
    assert open_base(base, made).code == 0


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), torch.float32), (float("-inf"), torch.bfloat16)]
)
def test_weights_that_are_not_finite(
    base: Path, made: Path, value: float, dtype: torch.dtype
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(base / WEIGHTS).items()}
    save_file(tensors, base / WEIGHTS, {"format": "pt"})
    assert open_base(base, made).code == 0
    tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = value
    save_file(tensors, base / WEIGHTS, {"format": "pt"})
    refused(
        open_base(base, made),
        f"{base / WEIGHTS}: model.layers.1.mlp.up_proj.weight contains NaN or infinity",
    )


@pytest.mark.parametrize("local", ["0", "1"])
def test_each_machine_checks_its_own_copy(
    local: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(base / WEIGHTS)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, base / WEIGHTS, {"format": "pt"})
    rank = {"RANK": "8", "WORLD_SIZE": "16", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**rank, "LOCAL_RANK": local}.items():
        monkeypatch.setenv(name, value)
    read_launch.cache_clear()
    try:
        with pytest.raises(UserError) if local == "0" else nullcontext():
            load_base(ModelConfig(path=str(base)), "eager", torch.float32)
    finally:
        read_launch.cache_clear()


def test_weights_that_a_precision_cannot_hold(base: Path) -> None:
    tensors = load_file(base / WEIGHTS)
    tensors["model.norm.weight"][0] = 1e5
    save_file(tensors, base / WEIGHTS, {"format": "pt"})
    config = ModelConfig(path=str(base))
    load_base(config, "eager", torch.bfloat16)
    with pytest.raises(UserError, match=r"norm.weight contains 1e\+05, which overflows"):
        load_base(config, "eager", torch.float16)


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_an_adapter_beside_a_base(base: Path, made: Path, adapter: Path, verb: str) -> None:
    for file in adapter.iterdir():
        shutil.copy(file, base)
    end = open_run(settings_for(base, made / "d.jsonl", verb=verb))
    refused(end, f"{base / 'adapter_config.json'}: an adapter in the folder of a base")


def test_an_adapter_beside_a_base_is_seen_by_the_loader_too(base: Path, adapter: Path) -> None:
    """As with a base of the hub, of which nothing is seen before it is loaded."""
    for file in adapter.iterdir():
        shutil.copy(file, base)
    with pytest.raises(UserError, match="transformers has applied that adapter"):
        load_base(ModelConfig(path=str(base)), "eager", torch.float32)


@pytest.mark.parametrize("name", ["tokenizer.json", WEIGHTS])
def test_a_pipe_in_the_place_of_a_file(base: Path, made: Path, name: str) -> None:
    (base / name).unlink(missing_ok=True)
    os.mkfifo(base / name)
    started = time.monotonic()
    refused(open_base(base, made), f"{base / name} is a named pipe, not a file")
    assert time.monotonic() - started < 10


ADAPTERS: list[tuple[dict[str, Any], list[str]]] = [
    ({"lora_alpha": 0}, ["lora_alpha=0: expected a number above 0"]),
    ({"r": 0}, ["r=0: expected a rank from 1 to 65,536"]),
    ({"r": 8}, ["has shape [4, 32]"]),
    ({"task_type": "TOKEN_CLS"}, ["task_type='TOKEN_CLS': expected CAUSAL_LM, SEQ_2_SEQ_LM"]),
    ({"target_modules": ["nope"]}, ["nope"]),
    ({"rank_pattern": {"(": 4}}, ["rank_pattern: ( is not a valid regular expression"]),
    ({"lora_alfa": 3}, ["'lora_alfa'=3 is not supported", "did you mean lora_alpha?"]),
    ({"trainable_token_indices": [10**12]}, ["trainable_token_indices"]),
]


@pytest.mark.parametrize(
    ("values", "fragments"), ADAPTERS, ids=[str(row[0])[:40] for row in ADAPTERS]
)
def test_values_of_an_adapter_config(
    adapter: Path, made: Path, values: dict[str, Any], fragments: list[str]
) -> None:
    change(adapter / "adapter_config.json", **values)
    refused(open_adapter(adapter, made), str(adapter), *fragments)


def test_values_of_an_adapter_config_that_mean_nothing_here(adapter: Path, made: Path) -> None:
    values = {"of_a_newer_peft": None, "use_something": False, "peft_version": "9.9"}
    change(adapter / "adapter_config.json", **values, corda_config={"a": 1}, megatron_core="os")
    assert open_adapter(adapter, made).code == 0


@pytest.mark.slow
def test_an_expression_without_end_from_an_adapter(
    adapter: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOFT_LIMITS", "regex_seconds=1")
    change(adapter / "adapter_config.json", rank_pattern={"((\\w|\\.)+)+!": 4})
    started = time.monotonic()
    refused(open_adapter(adapter, made), str(adapter), "takes more than 1 s")
    assert time.monotonic() - started < 10


def test_an_expression_without_end_from_a_tokenizer(base: Path, made: Path) -> None:
    """Its library gives up after a while, and would do so in the middle of the data."""
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    change(base / "tokenizer.json", pre_tokenizer=split | {"pattern": {"Regex": "(a+)+$"}})
    end = open_base(base, made)
    refused(end, f"{base / 'tokenizer.json'}", "(a+)+$", "retry-limit-in-match")


def test_limits_are_typed_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"key": "' + "x" * (1 << 20) + '"}')
    assert read_json_object(file)[1] is None
    monkeypatch.setenv("LOFT_LIMITS", "json_mib=1,json_depth=200")
    assert limits() == Limits(json_mib=1, json_depth=200)
    assert "more than 1 MiB (limit 1; LOFT_LIMITS=json_mib=NUMBER" in str(read_json_object(file)[1])
    monkeypatch.setenv("LOFT_LIMITS", "json_string=1000")
    assert "a string of 1,048,576 characters" in str(read_json_object(file)[1])
    for words in ("json_mb=1", "json_mib", "json_mib=0"):
        monkeypatch.setenv("LOFT_LIMITS", words)
        with pytest.raises(UserError, match=r"is not understood; expected NAME=NUMBER, .*json_mib"):
            limits()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyError("nope"), 2),
        (OSError("org/name is not a valid model identifier"), 2),
        (OSError(28, "No space left on device"), 3),
        (ImportError("needs the tiktoken package"), 3),
        (ConnectionResetError(104, "Connection reset by peer"), 3),
        (RuntimeError("CUDA error: out of memory"), 3),
        (TrainingFault("loss is nan"), 4),
        (UserError("already told"), 2),
    ],
)
def test_what_is_raised_while_a_file_is_read(error: Exception, code: int) -> None:
    with pytest.raises(Exception) as caught, reading("FILE", "mend it"):
        raise error
    assert exit_code(caught.value) == code
    is_ours = isinstance(error, (UserError, TrainingFault))
    assert (caught.value is error) if is_ours else caught.value.__cause__ is error
    assert is_ours or str(caught.value).startswith("FILE: ")


@pytest.mark.parametrize("answers", ["refuses", "is silent"])
def test_a_hub_id_without_network(
    answers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("app.model.hub.CONNECT_SECONDS", 0.2)

    def connect(*_: Any, **__: Any) -> None:
        if answers == "is silent":
            time.sleep(60)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", connect)
    model = ModelConfig(path="org/name")
    started = time.monotonic()
    with pytest.raises(OSError, match=r"model\.path=org/name: no network") as caught:
        is_offline(model, DataConfig())
    assert time.monotonic() - started < 30
    assert exit_code(caught.value) == 3
    assert str(tmp_path) in str(caught.value) and "--local-dir FOLDER" in str(caught.value)
    (tmp_path / "models--org--name").mkdir()
    assert is_offline(model, DataConfig())  # what is in the cache is not asked for
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    data = DataConfig(datasets=[DatasetConfig(path="Owner/rows")])
    started = time.monotonic()
    with pytest.raises(OSError, match=r"Owner/rows: no such file here, .* cannot be reached"):
        is_offline(model, data)
    assert time.monotonic() - started < 30
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match=r"Owner/rows: .* HF_HUB_OFFLINE is set"):
        is_offline(model, data)
    (tmp_path / "datasets" / "Owner___rows").mkdir(parents=True)
    assert not is_offline(model, data)


def test_a_reachable_hub_is_asked_once_by_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    class Connection:
        def close(self) -> None: ...

    def connect(address: tuple[str, int], **_: Any) -> Connection:
        asked.append(address)
        return Connection()

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr("app.model.hub.find_refusal", lambda *_: None)  # tests/model/test_hub.py
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert check_hub({"model.path": "org/name", "model.tokenizer_path": "org/other"})
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    assert check_hub({"model.path": "org/name"})
    monkeypatch.delenv("https_proxy")
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example:8000")
    assert check_hub({"model.path": "org/name"})
    expected = [("huggingface.co", 443), ("proxy.example", 3128), ("mirror.example", 8000)]
    assert asked == expected
    assert not check_hub({})


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_file_that_may_not_be_read_is_the_one_that_is_named(
    name: str, base: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = io.open

    def refuse(file: Any, *args: Any, **kwargs: Any) -> Any:
        if str(file).endswith(f"base/{name}"):
            raise PermissionError(13, "Permission denied", str(file))
        return opened(file, *args, **kwargs)

    monkeypatch.setattr(io, "open", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    end = open_base(base, made)
    assert end.code in (2, 3) and f"{base / name}: cannot be read: Permission denied" in end.stderr
    assert name == "config.json" or "config.json" not in end.stderr
