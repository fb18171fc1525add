from __future__ import annotations

import io
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from app.config import TrainConfig, load_config
from app.model.base import ModelConfig
from app.model.description import BaseDescription
from app.model.recompute import RecomputeConfig
from app.preflight import base_model, describe_base
from app.preflight.files import check_recompute
from common.errors import UserError
from common.installation import ROOT
from tests.in_process import (
    accepted,
    make_adapter,
    make_data,
    make_model,
    refused,
    run_command,
    write_safetensors,
)

TINY_BASE = ROOT / "data_modules" / "samples" / "tiny_base"


def check_refused(words: list[str], *fragments: str) -> None:
    said = refused(*words)
    for fragment in fragments:
        assert fragment in said
    assert "Traceback" not in said


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def words(tmp_path: Path, model: Path) -> list[str]:
    """The words of a run that is right, on files of this test."""
    return [f"model.path={model}", f"data.datasets=[{{path: {make_data(tmp_path / 'd.jsonl')}}}]"]


WEIGHTS, CONFIG = "model.safetensors", "config.json"
QUERY = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"


def change(folder: Path, files: dict[str, str | None]) -> None:
    """Write files into a folder, or remove those whose content is None."""
    for name, content in files.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(content)


def shard(model: Path, weight_map: dict[str, str]) -> None:
    """Leave weights in two files, and an index that names what is where."""
    index = json.dumps({"weight_map": {QUERY: "a.safetensors", NORM: "b.safetensors"} | weight_map})
    change(model, {WEIGHTS: None, "model.safetensors.index.json": index})
    write_safetensors(model / "a.safetensors", {QUERY: [32, 32]})
    write_safetensors(model / "b.safetensors", {NORM: [32]})


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n"
AUTO_MAP = '{"model_type": "llama", "auto_map": {"AutoModel": "x.Y"}}'
DAMAGES: dict[str, tuple[dict[str, str | None], list[str]]] = {
    "a pointer": ({WEIGHTS: LFS}, ["is a git-lfs pointer", "git lfs pull"]),
    "a pickle": ({WEIGHTS: None, "pytorch_model.bin": ""}, ["pytorch_model.bin is a pickle",
        "save_pretrained"]),
    "partial": ({WEIGHTS: None, f"{WEIGHTS}.incomplete": ""}, ["download is incomplete",
        ".incomplete"]),
    "no config": ({CONFIG: None}, ["has no config.json, only model.safetensors, tokenizer."]),
    "an adapter": ({CONFIG: None, "adapter_config.json": "{}"}, ["is an adapter, not a base"]),
    "no tokenizer": ({"tokenizer.json": None}, ["no tokenizer found", "model.tokenizer_path="]),
    "python": ({"modeling_llama.py": "raise SystemExit"},
        ["contains its own Python code (modeling_llama.py)", "model.trust_remote_code=true"]),
    "auto_map": ({CONFIG: AUTO_MAP}, ["auto_map in config.json", "model.trust_remote_code=true"]),
}  # fmt: skip


@pytest.mark.parametrize(("files", "fragments"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_model_folder_is_refused_with_the_reason(
    model: Path, words: list[str], files: dict[str, str | None], fragments: list[str]
) -> None:
    change(model, files)
    check_refused(words, *fragments)


def test_damaged_weights_are_refused_with_the_reason(model: Path, words: list[str]) -> None:
    file = model / WEIGHTS
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    check_refused(words, "model.safetensors has", "its header describes", "cut off")
    shard(model, {})
    assert run_command(*words).code == 0
    (model / "b.safetensors").unlink()
    check_refused(words, "b.safetensors is missing")
    for weight_map, fragment in (
        ({"lm_head.weight": "b.safetensors"}, "1 tensors are in no file, lm_head.weight"),
        ({NORM: "../../secret.safetensors"}, "is outside of the folder"),
    ):
        file.write_bytes(whole)
        shard(model, weight_map)
        check_refused(words, fragment)


def test_a_tokenizer_that_brings_python_is_refused(
    tmp_path: Path, model: Path, words: list[str]
) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text('{"model": {}}')
    words = [*words, f"model.tokenizer_path={tokenizer}"]
    assert run_command(*words).code == 0
    for name, text in (("mine.py", ""), ("tokenizer_config.json", '{"auto_map": {}}')):
        (tokenizer / name).write_text(text)
        assert f"model.tokenizer_path={tokenizer} contains its own Python code" in refused(*words)
        assert run_command(*words, "model.trust_remote_code=true").code == 0
        (tokenizer / name).unlink()


def test_a_base_is_known_by_its_config_and_headers(model: Path) -> None:
    config = ModelConfig(path=str(model))
    before = describe_base(config)
    assert before["path"] == str(model)
    assert before == describe_base(config)
    fingerprints = {before["fingerprint"]}
    change(model, {CONFIG: "{}"})
    fingerprints.add(describe_base(config)["fingerprint"])
    write_safetensors(model / "model.safetensors", {"a.weight": [2, 3]})
    fingerprints.add(describe_base(config)["fingerprint"])
    assert len(fingerprints) == 3
    same = make_model(model.parent / "same")
    assert describe_base(ModelConfig(path=str(same))) == before | {"path": str(same)}
    assert describe_base(ModelConfig(path="org/name", revision="v1")) == {
        "path": "org/name",
        "revision": "v1",
        "fingerprint": None,
        "weights": None,
    }


def weights_of(folder: Path) -> str | None:
    return describe_base(ModelConfig(path=str(folder)))["weights"]


def write(file: Path, offset: int, content: bytes) -> None:
    """Write into a file, whose time of change moves on even where its clock is coarse."""
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(content)
    changed = file.stat().st_mtime_ns + 1_000_000
    os.utime(file, ns=(changed, changed))


def test_any_byte_of_a_small_base_is_noticed(tmp_path: Path) -> None:
    base = shutil.copytree(TINY_BASE, tmp_path / "base")
    file = base / "model.safetensors"
    whole, before = file.read_bytes(), weights_of(base)
    start = 8 + int.from_bytes(whole[:8], "little")
    for offset in random.Random(0).sample(range(start, len(whole)), 30):
        write(file, offset, bytes([whole[offset] ^ 1]))
        assert weights_of(base) != before, offset
        write(file, offset, whole[offset : offset + 1])
        assert weights_of(base) == before


def test_any_tensor_of_a_large_base_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_model, "WHOLE_BYTES", 1 << 20)
    file = tmp_path / "model.safetensors"
    shapes = {f"{number}.weight": [number % 5 * 16 + 1, 256] for number in range(64)}
    write_safetensors(file, shapes)
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])
    write(file, start, random.Random(0).randbytes(len(whole) - start))
    whole, before = file.read_bytes(), weights_of(tmp_path)
    for tensor in header.values():
        begin, end = (start + place for place in tensor["data_offsets"])
        for first, last in ((begin, end), (begin, begin + 1), (end - 1, end)):
            write(file, first, bytes(byte ^ 255 for byte in whole[first:last]))
            assert weights_of(tmp_path) != before
            write(file, first, whole[first:last])
    assert weights_of(tmp_path) == before


def test_of_a_large_base_little_is_read_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 4 << 30
    tensors = {
        f"{number}.weight": {
            "dtype": "U8",
            "shape": [size // 256],
            "data_offsets": [size // 256 * number, size // 256 * (number + 1)],
        }
        for number in range(256)
    }
    header = json.dumps(tensors).encode()
    for number in range(4):
        file = tmp_path / f"{number}.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(file, 8 + len(header) + size)
    read = []

    class Counted(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            read.append(len(content := super().read(size)))
            return content

    monkeypatch.setattr(Path, "open", lambda path, *_, **__: Counted(path))
    before = weights_of(tmp_path)
    blocks = 4 * 256 * 3 * base_model.TENSOR_BLOCK_BYTES
    assert blocks < sum(read) < blocks + 10 * len(header)
    read.clear()
    assert weights_of(tmp_path) == before
    assert sum(read) < 5 * len(header)


@pytest.mark.parametrize(
    "header",
    [
        b"\0",
        b'{"a": {"data_offsets": [-9, 1e9]}}',
        b'{"a": {"data_offsets": [9, Infinity]}}',
    ],
    ids=["no json", "offsets beyond it", "no end"],
)
def test_a_damaged_large_base_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: bytes
) -> None:
    """What is wrong with it is said elsewhere, with all else."""
    monkeypatch.setattr(base_model, "WHOLE_BYTES", 0)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert weights_of(tmp_path) is not None


@pytest.mark.parametrize(
    ("bad", "fragment", "good"),
    [
        ("adapter.target_modules=[qproj]", "qproj matches no linear", "[q_proj]"),
        ("adapter.layers=top 3", "the model has 2 layers", "top 2"),
        ("adapter.modules_to_save=[norms]", "norms matches no module", "[norm]"),
    ],
)
def test_an_adapter_is_compared_with_the_headers(
    words: list[str], bad: str, fragment: str, good: str
) -> None:
    """`tests/model/test_targets.py` has all that is refused."""
    check_refused([*words, bad], fragment)
    accepted(*words, f"{bad.partition('=')[0]}={good}")


def test_an_adapter_on_a_hub_model_is_compared_with_its_architecture() -> None:
    check_refused(["experiment=llama8b", "adapter.target_modules=[q_pro]"], "did you mean q_proj?")


def test_a_length_above_the_context_is_refused_with_both_numbers(words: list[str]) -> None:
    check_refused([*words, "data.sequence_len=513"], "data.sequence_len=513", "512 tokens")
    assert run_command(*words, "data.sequence_len=512").code == 0


def test_a_missing_model_folder_is_named_with_the_nearest(
    tmp_path: Path, model: Path, words: list[str]
) -> None:
    for typed, fragment in (
        (tmp_path / "modle", f"did you mean {model}?"),
        (tmp_path / "none" / "here", "no such folder"),
        (model / "config.json", "this is a file"),
        (tmp_path, f"did you mean {model}?"),
        ("https://example.org/model", "URLs are not supported"),
        ("model", "a hub id has the form org/name"),
    ):
        check_refused([*words, f"model.path={typed}"], fragment)


def test_a_hub_id_passes_unless_offline(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert run_command(*words, "model.path=org/name").code == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check_refused([*words, "model.path=org/name"], "HF_HUB_OFFLINE is set")
    (tmp_path / "cache" / "models--org--name").mkdir(parents=True)
    assert run_command(*words, "model.path=org/name").code == 0


def test_a_model_from_scratch_needs_its_shape_and_a_tokenizer(
    words: list[str], model: Path
) -> None:
    scratch = [words[1], "model.from_scratch=true", "adapter=full"]
    check_refused(scratch, "needs the shape of the model", "needs model.tokenizer_path")
    scratch += ["model.architecture={model_type: llama}", f"model.tokenizer_path={model}"]
    accepted(*scratch)
    result = run_command(*scratch, f"model.path={model}")
    assert "reads no weights" in result.stderr
    assert "adapter=full" in run_command(*scratch, "adapter=lora").stderr


def test_an_unknown_chat_template_is_named(words: list[str], tmp_path: Path) -> None:
    expected = "data.chat_template=chatlm: expected plain or chatml"
    check_refused([*words, "data.chat_template=chatlm"], expected, "did you mean chatml?")
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    for good in ("chatml", "plain", "null", tmp_path / "mine.jinja"):
        accepted(*words, f"data.chat_template={good}")


def test_problems_of_model_and_data_are_listed_together(
    tmp_path: Path, words: list[str], model: Path
) -> None:
    change(model, {"tokenizer.json": None})
    said = run_command(
        words[0],
        f"data.datasets=[{{path: {tmp_path / 'e.jsonl'}}}]",
        "adapter.target_modules=[qproj]",
        "trainer.precision=fp16",
    ).stderr
    for fragment in ("error: 4 problems", "no tokenizer", "qproj", "fp16", "e.jsonl"):
        assert fragment in said


def test_an_adapter_folder_is_looked_at(tmp_path: Path, words: list[str]) -> None:
    run, base = tmp_path / "run", tmp_path / "model"
    adapter = make_adapter(run / "adapter")
    for path, fragment in (
        (run, f"is a run, not an adapter; type adapter_path={adapter}"),
        (base, f"a whole model, not an adapter; type model.path={base}"),
        (base / "config.json", f"is a file; type adapter_path={base}"),
    ):
        said = run_command(*words, f"adapter_path={path}", verb="evaluate").stderr
        assert fragment in said
    typed = [*words, f"adapter_path={adapter}"]
    assert accepted(*typed, verb="evaluate").tuned_path == str(adapter)


@pytest.mark.parametrize(
    ("numbers", "layers"),
    [
        ({"num_hidden_layers": 4}, 4),
        ({"text_config": {"num_hidden_layers": 3}}, 3),
        ({"num_layers": 4, "num_decoder_layers": None, "is_encoder_decoder": True}, 8),
    ],
)
def test_recomputing_every_nth_layer_of_fewer_is_refused(
    numbers: dict[str, Any], layers: int
) -> None:
    base = BaseDescription(name="base", config=numbers)
    assert (
        check_recompute(RecomputeConfig(every=layers, num_layers=layers), base)
        == check_recompute(RecomputeConfig(every=99), BaseDescription(name="hub/id"))
        == []
    )
    (problem,) = check_recompute(RecomputeConfig(every=layers + 1), base)
    assert f"recompute.every={layers + 1} has no effect: base has {layers} layers" in problem
    (problem,) = check_recompute(RecomputeConfig(num_layers=layers + 1), base)
    assert f"recompute.num_layers={layers + 1}: base has {layers} layers; type a sma" in problem


def test_a_base_on_the_hub_is_checked_for_its_layers_once_it_is_open() -> None:
    """Before that, nothing is known of it but its name."""
    from app.assembly.base import open_base
    from app.training.trainer import resolve_single_device

    env = resolve_single_device("cpu", "fp32")
    words = [f"model.path={TINY_BASE}", "recompute=full", "recompute.every=99"]
    config = load_config("train", words)
    assert isinstance(config, TrainConfig)
    with pytest.raises(UserError, match=r"^recompute.every=99 has no effect: .*tiny_base has \d+"):
        open_base(config, env, config.adapter)


def test_a_commit_of_a_folder_is_refused(model: Path) -> None:
    """What is typed for a folder; an option's or an experiment's may be of the hub id it had."""
    with pytest.raises(UserError, match=r"^model.revision has no effect: .*model is not a hub id"):
        load_config("train", [f"model.path={model}", "model.revision=v1"])
    load_config("train", ["model.path=org/name", "model.revision=v1"])


def test_an_architecture_beside_a_config_file_is_refused(tmp_path: Path) -> None:
    base, typed = make_model(tmp_path / "base"), "model.architecture={model_type: llama}"
    file = tmp_path / "mine.yaml"
    file.write_text("# @package _global_\nmodel: {architecture: {model_type: llama}}\n")
    for words in ([typed], ["+model.architecture.num_hidden_layers=2"], [f"+experiment={file}"]):
        assert "model.architecture has no effect: " in refused(f"model.path={base}", *words)
    load_config("train", [f"model.path={base}", typed, "model.from_scratch=true"])
    load_config("train", [f"model.path={base}", "model=llama8b"])  # the option describes a hub id


BROKEN = "{% for m in messages %}"


def test_templates_are_parsed_before_transformers_is_imported(
    tmp_path: Path, model: Path, words: list[str]
) -> None:
    file = tmp_path / "broken.jinja"
    file.write_text(BROKEN)
    check_refused([*words, f"data.chat_template={file}"], f"data.chat_template={file} is not a")
    (model / "chat_template.jinja").write_text(BROKEN)
    check_refused(words, "the tokenizer's own chat template is not a valid template: line 1")
    assert run_command(*words, "data.chat_template=plain").code == 0
