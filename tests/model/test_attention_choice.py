"""The choice of the attention backend, on simulated machines."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen
from transformers import (
    AutoConfig,
    BloomConfig,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PretrainedConfig,
)

from app.model.architecture import model_class
from app.model.attention import AttentionConfig, backends, choose_backend
from app.model.attention.inputs import attention_inputs
from common.errors import ENVIRONMENT_ERROR, USER_ERROR, UserError, exit_code
from tests.model.test_attention_varlen import varlen_2_10, varlen_2_13
from tests.tiny import tiny_llama, tiny_t5

AMPERE, HOPPER, BLACKWELL, TURING = (8, 0), (9, 0), (10, 0), (7, 5)
IMPORT = importlib.import_module
MISSING_SYMBOL = "flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E"


@dataclass
class Machine:
    """A simulated GPU machine; packages: module -> the error of its import, or None."""

    monkeypatch: pytest.MonkeyPatch

    def __post_init__(self) -> None:
        self.is_of()

    def is_of(self, capability: tuple[int, int] = AMPERE, **packages: Exception | None) -> None:
        def load(module: str, *rest: Any) -> Any:
            if module not in packages:
                return IMPORT(module, *rest)
            if (error := packages[module]) is not None:
                raise error
            return None

        def version(package: str) -> str | None:
            modules = {"flash-attn": "flash_attn", "flash-attn-3": "flash_attn_interface"}
            return "2.8.3" if modules[package] in packages else None

        patch = self.monkeypatch.setattr
        patch(torch.cuda, "get_device_capability", lambda *_: capability)
        patch(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        patch(backends, "package_version", version)
        patch(importlib, "import_module", load)
        patch(backends, "_transformers_accepts", lambda backend: True)
        patch(varlen, "varlen_attn", varlen_2_13)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def choose(
    backend: str = "auto",
    model: PretrainedConfig | None = None,
    accelerator: str = "gpu",
    precision: str = "bf16",
) -> backends.AttentionChoice:
    return choose_backend(
        AttentionConfig(backend=backend), model or LlamaConfig(), accelerator, precision
    )


WORKS: dict[str, Any] = {"flash_attn": None}
BOTH: dict[str, Any] = {"flash_attn": None, "flash_attn_interface": None}
BROKEN = {"flash_attn": ImportError(MISSING_SYMBOL)}


@pytest.mark.parametrize(
    ("capability", "packages", "backend", "message"),
    [
        (AMPERE, WORKS, "flash2", "flash-attn 2.8.3"),
        (HOPPER, {}, "varlen", "flash-attn-3 is not installed; flash-attn is not installed"),
        (HOPPER, BOTH, "flash3", "flash-attn-3 2.8.3"),
        (TURING, BOTH, "sdpa", "needs an Ampere GPU (sm80) or a newer one, and this is sm75"),
        (AMPERE, BROKEN, "varlen", f"its import fails ({MISSING_SYMBOL})"),
    ],
)
def test_a_gpu_in_half_precision_gets_the_fastest_available_backend(
    machine: Machine,
    capability: tuple[int, int],
    packages: dict[str, Any],
    backend: str,
    message: str,
) -> None:
    machine.is_of(capability, **packages)
    for precision in ("bf16", "bf16-pure", "fp16"):
        chosen = choose(precision=precision)
        assert chosen.backend == backend
        assert message in str(chosen) and "\n" not in str(chosen)


def test_the_cpu_and_fp32_attend_by_document(machine: Machine) -> None:
    machine.is_of(HOPPER, **BOTH)
    on_cpu, in_fp32 = choose(accelerator="cpu"), choose(precision="fp32")
    assert on_cpu.backend == in_fp32.backend == "sdpa"
    assert "document by document; flash attention needs an NVIDIA GPU" in str(on_cpu)
    assert "half precision only, and the precision is fp32" in str(in_fp32)


def gemma4() -> PretrainedConfig:
    numbers = {"head_dim": 256, "global_head_dim": 512, "num_hidden_layers": 6}
    return AutoConfig.for_model("gemma4_unified_text", **numbers)


MODELS = [
    # model, backend with flash-attn and without it, reason
    (GPT2Config(), "flash2", "sdpa", "varlen has no attention dropout, and this model has 0.1"),
    (Gemma2Config(head_dim=256), "flash2", "eager", "sdpa has no softcap of attention logits"),
    (LlamaConfig(head_dim=512), "sdpa", "sdpa", "head dimensions up to 256, not 512"),
    (GptOssConfig(), "varlen", "varlen", "transformers has no flash2 for gpt_oss models"),
    (gemma4(), "sdpa", "sdpa", "head dimensions up to 256, not 512"),
    (tiny_t5().config, "sdpa", "sdpa", "an encoder and a decoder"),
]


@pytest.mark.parametrize(("model", "with_flash", "without", "message"), MODELS)
def test_auto_chooses_a_backend_that_supports_the_model(
    machine: Machine, model: PretrainedConfig, with_flash: str, without: str, message: str
) -> None:
    assert choose(model=model).backend == without
    assert message in str(choose(model=model))
    machine.is_of(**WORKS)
    assert choose(model=model).backend == with_flash


def test_encoder_decoder_models_of_older_transformers_run_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The first import of a model's code replaces the module `transformers`.
    importlib.import_module("transformers.models.umt5.modeling_umt5")
    for version, backend in (("5.17.0", "eager"), ("5.18.0", "sdpa")):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        assert choose(model=AutoConfig.for_model("umt5")).backend == backend


def test_a_window_needs_a_pytorch_with_windows(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", varlen_2_10)
    windowed = MistralConfig(sliding_window=4096)
    assert choose().backend == "varlen"
    assert choose(model=windowed).backend == "sdpa"
    assert "no sliding window before PyTorch 2.11" in str(choose(model=windowed))


@pytest.mark.parametrize(
    ("backend", "changes", "message"),
    [
        ("varlen", {"accelerator": "cpu"}, "needs an NVIDIA GPU; type attention=sdpa"),
        ("flash2", {"precision": "fp32"}, "half precision only"),
        ("flash3", {}, "for Hopper GPUs; type attention=varlen"),
        ("varlen", {"model": GPT2Config()}, "has no attention dropout"),
        ("sdpa", {"model": Gemma2Config()}, "type attention=eager"),
        ("sdpa", {"model": GptOssConfig()}, "computed on a CPU only, and without dropout; type"),
    ],
)
def test_a_typed_backend_that_cannot_run_is_refused(
    machine: Machine, backend: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"attention={backend}: ") as caught:
        choose(backend, **changes)
    assert message in str(caught.value)
    assert exit_code(caught.value) == USER_ERROR


def test_a_broken_or_missing_package_is_an_environment_error(machine: Machine) -> None:
    machine.is_of(AMPERE, **BROKEN)
    with pytest.raises(ImportError, match="undefined symbol") as caught:
        choose("flash2")
    assert "attention=flash2: flash-attn 2.8.3 is installed, but" in str(caught.value)
    assert "type attention=varlen" in str(caught.value)
    assert exit_code(caught.value) == ENVIRONMENT_ERROR
    machine.is_of(HOPPER)
    with pytest.raises(ImportError, match="flash-attn-3 is not installed; type attention=varlen"):
        choose("flash3")


def test_falcon_has_separate_layers_for_flash_attention(machine: Machine) -> None:
    machine.is_of(**WORKS)
    falcon = FalconConfig(new_decoder_architecture=True)
    assert choose("flash2", model=falcon).backend == "flash2"
    assert choose(model=falcon).backend == "eager", "which takes any number of rows"
    with pytest.raises(ValueError, match="flash2 for bloom models"):
        choose("flash2", model=BloomConfig())
    numbers = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    model = FalconForCausalLM(FalconConfig(num_hidden_layers=1, **numbers))
    with pytest.raises(UserError, match=r"see each other .* type trainer\.micro_batch_size=1"):
        attention_inputs(model, "flash2", [[8], [3, 5]], torch.zeros(2, 8))


def test_a_package_that_cannot_be_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The actual check, on a package that was built for another PyTorch."""
    (tmp_path / "flash_attn.py").write_text(f"raise ImportError({MISSING_SYMBOL!r})")
    (tmp_path / "flash_attn-2.8.3.dist-info").mkdir()
    (tmp_path / "flash_attn-2.8.3.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    fault = backends.find_package_problem("flash2")
    assert fault == f"flash-attn 2.8.3 is installed, but its import fails ({MISSING_SYMBOL})"


def test_a_loaded_model_is_checked(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers replaces attention that a model does not list, and only logs it."""
    from app.model.base import ModelConfig, load_base

    tiny_llama().save_pretrained(tmp_path)
    monkeypatch.setattr(
        LlamaForCausalLM, "_check_and_adjust_attn_implementation", lambda *_, **__: "eager"
    )
    for config in (
        ModelConfig(path=str(tmp_path)),
        ModelConfig(from_scratch=True, architecture=tiny_llama().config.to_dict()),
    ):
        said = "should run sdpa, but transformers replaced it by eager"
        with pytest.raises(ValueError, match=said):
            load_base(config, "sdpa", torch.float32)


def test_a_tower_without_sdpa_does_not_affect_the_language_model() -> None:
    """Gemma 4's audio tower: transformers would refuse to build it, but it does not run."""
    gemma4 = pytest.importorskip("transformers.models.gemma4")
    with_audio = gemma4.Gemma4Config(audio_config=gemma4.Gemma4AudioConfig())
    assert choose_backend(AttentionConfig(), with_audio, "cpu", "fp32").backend == "sdpa"
    assert choose_backend(AttentionConfig(), gemma4.Gemma4Config(), "cpu", "fp32").backend == "sdpa"
    with torch.device("meta"):
        built = model_class(with_audio).from_config(with_audio, attn_implementation="sdpa")
    assert built.model.audio_tower is None
