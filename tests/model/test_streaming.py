"""A base whose layers are streamed trains bit for bit as one on the device, with few copies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from app.assembly.base import open_base
from app.config import load_config
from app.model import streaming
from app.model.adapter import AdapterConfig, FullConfig, Ia3Config, LoraConfig
from app.model.base import ModelConfig
from app.model.build import load_tuned
from app.model.streaming import LayerStream
from common.errors import UserError
from tests.conftest import ROOT
from tests.model.test_experts import tiny_mixture
from tests.model.test_quantization import save_quantized
from tests.model.test_recompute import assert_equal
from tests.runs import check_same_run
from tests.tiny import TINY_BASE, built, move, tiny_gpt2, tiny_llama, tiny_t5, train_into
from tools.simulate.device import find_obstacle

LAYERS, STEPS = 5, 2
WEIGHTS = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
LAYER_BYTES = {"none": 2 * WEIGHTS, "nf4": WEIGHTS // 2 + 7 * streaming.WEIGHT_ALIGNMENT}
"""bytes of the seven matrices of a layer in bf16, and packed with scales of a few bytes each"""


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[LayerStream]:
    """The streams that are made during a test."""
    made: list[LayerStream] = []

    class Recorded(LayerStream):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            made.append(self)

    monkeypatch.setattr(streaming, "LayerStream", Recorded)
    return made


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    numbers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS}
    tiny_llama(**numbers).bfloat16().save_pretrained(folder)
    return folder


def build(
    folder: Path,
    stream: str | None,
    adapter: AdapterConfig | None = None,
    method: str = "none",
    recompute: str = "none",
    precision: str = "bf16-pure",
) -> Any:
    config = ModelConfig(path=str(folder), stream=stream)
    return built(config, method, precision, adapter or LoraConfig(dropout=0.1), recompute)


def gradients(model: Any, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Return the losses of micro-batches, and the sums of their gradients."""
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach())
    trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in trained.values())
    return {"losses": torch.stack(losses), **trained}


@pytest.mark.parametrize(
    ("stream", "method", "recompute"),
    [
        ("host", "none", "none"),
        ("disk", "none", "none"),
        ("disk", "none", "full"),
        ("host", "none", "selective"),
        ("host", "nf4", "full"),
        ("host", "nf4", "none"),
    ],
)
def test_gradients_are_bit_identical_and_each_pass_copies_each_layer_once(
    llama: Path, streams: list[LayerStream], stream: str, method: str, recompute: str
) -> None:
    """A micro-batch copies every layer for each of its passes, but for two that are still there."""
    settings = {"method": method, "recompute": recompute}
    assert_equal(
        gradients(build(llama, stream, **settings)), gradients(build(llama, None, **settings))
    )
    made = streams[0]
    layers = made.num_copied / (made.num_bytes / LAYERS)
    assert layers == 2 + STEPS * (2 * LAYERS - 4)
    assert made.num_bytes == LAYERS * LAYER_BYTES[method]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_backward_pass_that_ends_early_copies_one_layer_below(
    llama: Path, streams: list[LayerStream], recompute: str
) -> None:
    adapter = LoraConfig(layers="top 2", dropout=0.0)
    own = gradients(build(llama, "host", adapter, recompute=recompute))
    assert_equal(own, gradients(build(llama, None, adapter, recompute=recompute)))
    layers = streams[0].num_copied / (streams[0].num_bytes / LAYERS)
    assert layers == STEPS * LAYERS + STEPS


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_t5])
def test_other_layers_and_encoder_decoders(tmp_path: Path, make: Any) -> None:
    make().save_pretrained(tmp_path)
    for adapter in (LoraConfig(dropout=0.0, use_dora=True), Ia3Config()):
        assert_equal(
            gradients(build(tmp_path, "host", adapter, precision="fp32")),
            gradients(build(tmp_path, None, adapter, precision="fp32")),
        )


def test_experts(tmp_path: Path) -> None:
    model = tiny_mixture("qwen3_moe", num_hidden_layers=3, head_dim=16)
    model.bfloat16().save_pretrained(tmp_path)
    assert_equal(*(gradients(build(tmp_path, stream)) for stream in ("host", None)))
    with pytest.raises(UserError, match=r"type model\.stream=host"):  # fused from several tensors
        build(tmp_path, "disk")


def test_a_trained_adapter_answers_as_on_the_device(llama: Path, tmp_path: Path) -> None:
    trained = move(build(llama, None))
    trained.save_pretrained(tmp_path)
    ids = torch.arange(3, 9).unsqueeze(0)
    answers, logits = [], []
    for stream in ("host", "disk", None):
        config = ModelConfig(path=str(llama), stream=stream)
        model: Any = load_tuned(config, tmp_path, "sdpa", torch.bfloat16).eval()
        answers.append(model.generate(input_ids=ids, max_new_tokens=6, do_sample=False).tolist())
        with torch.inference_mode():
            logits.append(model(input_ids=ids).logits)
    assert answers[0] == answers[1] == answers[2]
    assert torch.equal(logits[0], logits[2]) and torch.equal(logits[1], logits[2])


def test_a_base_of_files_in_4_bits_is_streamed_in_its_packed_form(
    tmp_path: Path, streams: list[LayerStream]
) -> None:
    config = save_quantized(tmp_path, "nf4", num_hidden_layers=LAYERS)
    base = Path(str(config.path))
    resident, from_host, from_disk = (
        gradients(build(base, stream)) for stream in (None, "host", "disk")
    )
    assert_equal(from_host, resident)
    assert_equal(from_disk, resident)
    assert streams[0].num_bytes == LAYERS * LAYER_BYTES["nf4"]


def test_what_is_not_in_a_file_is_not_read_from_a_disk(llama: Path) -> None:
    with pytest.raises(UserError, match=r"converted to torch\.float32 .*type model\.stream=host"):
        build(llama, "disk", precision="fp32")


def test_a_whole_trained_model_is_not_streamed(llama: Path) -> None:
    config: Any = load_config("evaluate", [f"model.path={llama}", "model.stream=host"])
    unused: Any = None
    with pytest.raises(UserError, match=r"adapter=full has trained it; type model\.stream=null"):
        open_base(config, unused, FullConfig())


def test_weights_in_int8_are_refused(tmp_path: Path) -> None:
    config = save_quantized(tmp_path, "int8")
    with pytest.raises(UserError, match=r"stored in int8.*type model\.stream=null"):
        build(Path(str(config.path)), "host")


def test_a_run_with_a_streamed_base_equals_one_on_the_device(tmp_path: Path) -> None:
    words = [f"model.path={TINY_BASE}", "trainer.precision=bf16", "recompute=full", "logger=csv"]
    words += ["trainer.max_steps=3", "trainer.checkpoint.every_steps=2", "adapter.dropout=0.1"]
    train_into(tmp_path / "resident", *words)
    train_into(tmp_path / "streamed", *words, "model.stream=disk")
    check_same_run(tmp_path / "streamed", tmp_path / "resident")


ON_A_GPU = """
from tools.simulate.device import Event, Stream, install, install_fake_streams
install()
install_fake_streams()
from collections import Counter
from unittest.mock import patch
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from app.model.streaming import stream_layers
from tools.simulate.step import place

torch.set_default_dtype(torch.bfloat16)
counts, copied = Counter(), []

class Count(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        counts[function.overloadpacket.__name__] += 1
        if function.overloadpacket.__name__ == "copy_" and args[1].device.type == "cpu":
            assert args[0].device.type == "cuda" and args[1].is_pinned() and args[2:] == (True,)
            copied.append(args[1].nbytes)
        return out

config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=5, vocab_size=64,
                     num_attention_heads=4, num_key_value_heads=2)
with FakeTensorMode(allow_non_fake_inputs=True):
    model = LlamaForCausalLM(config).requires_grad_(False)
    with patch.object(LlamaForCausalLM, "to", place):
        stream = stream_layers(model, "host", torch.device("cuda", 0))
    embedded = torch.zeros(1, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    Stream.synchronize = Event.synchronize = None
    with Count():
        for _ in range(2):
            model(inputs_embeds=embedded).logits.sum().backward()
matrices = [w for w in model.model.layers.parameters() if w.ndim == 2]
assert {w.device.type for w in model.parameters()} == {"cuda"}
print(sum(copied), stream.num_copied, counts["_local_scalar_dense"],
      sum({w.untyped_storage()._cdata: w.untyped_storage().nbytes() for w in matrices}.values()))
"""


@pytest.mark.slow
def test_a_gpu_gets_pinned_copies_into_two_buffers_and_never_waits_on_the_host() -> None:
    """On the fake device: bytes of two micro-batches, host syncs, and bytes of all matrices."""
    if (obstacle := find_obstacle()) is not None:
        pytest.skip(obstacle)
    command = [sys.executable, "-c", ON_A_GPU]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    layer = LAYER_BYTES["none"]
    copied = (2 + STEPS * (2 * LAYERS - 4)) * layer
    assert ended.stdout.split() == [str(n) for n in (copied, copied, 0, 2 * layer)]
