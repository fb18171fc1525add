"""The architecture of a base: its config.json and generation_config.json, and the class they name.

Needs no torch at its top.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.multimodal import language_model_class, outermost, tower_modules
from app.process.errors import UserError
from app.process.untrusted import reading

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

    from app.model.base import ModelConfig

DRAFTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""model types whose forward takes the hidden states of the model that they draft for (as of
transformers 5.23)"""

SCAN = "sum the chunks of a long document's scan wrongly without mamba-ssm"
RIGHT_SINCE = {
    "gemma3": ("5.6", "do not train on text alone"),
    "nemotron_h": ("5.15", SCAN),
    "zamba2": ("5.15", SCAN),
}
"""model_type -> the transformers whose layers are right, and what those of older ones do"""

TOKEN_IDS = {
    "eos_token_id": "the id that ends its answers",
    "decoder_start_token_id": "the id that its decoder starts with",
    "bos_token_id": "the id that its texts begin with, or null for none",
    "pad_token_id": "the id that fills rows, or null for none",
}
VOCAB_SIZES = ("vocab_size", "decoder_vocab_size")


def load_architecture(config: ModelConfig) -> PretrainedConfig:
    """Read config.json, or build it from `config.architecture` when from scratch."""
    with reading_base(config):
        architecture = _load_architecture(config)
    _check_version(config, architecture)
    if not config.from_scratch:
        file = f"{config.path}/generation_config.json"
        with reading(file, "fix it, or remove it"):
            generation = generation_config(config)
        numbers = {"vocab_size": architecture.get_text_config().vocab_size}
        if generation is not None and (
            problems := check_token_ids(file, "", generation.to_dict(), numbers)
        ):
            raise UserError(problems)
    return architecture


def _load_architecture(config: ModelConfig) -> PretrainedConfig:
    import transformers
    from transformers import AutoConfig

    if config.from_scratch:
        numbers = dict(config.architecture)
        architecture = AutoConfig.for_model(numbers.pop("model_type"), **numbers)
        if language_model_class(architecture) is not None:
            text = architecture.get_text_config().model_type
            raise UserError(
                f"model.from_scratch=true: {architecture.model_type} models are multimodal, and "
                "text trains their language model alone; type its numbers, with "
                f"model.architecture.model_type={text}"
            )
        return architecture
    numbers, _ = transformers.PreTrainedConfig.get_config_dict(
        config.path, revision=config.revision
    )
    where = f"{config.path}/config.json"
    problems = check_token_ids(where, "", numbers, numbers)
    if (text := text_numbers(numbers)) is not numbers:
        problems += check_token_ids(where, "text_config.", text, numbers)
    if problems:  # of a hub id; the files of a folder were checked at the start
        raise UserError(problems)
    model_type = numbers.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING and not config.trust_remote_code:
        raise UserError(
            f"model.path={config.path}: transformers {transformers.__version__} does not know "
            f"its model_type {model_type!r}; {_newer_transformers(numbers)}, or take another base"
        )
    if model_type in DRAFTS:
        raise UserError(
            f"model.path={config.path}: {model_type} models draft for another model and go on from "
            "its states, which a run does not have; type model.path=ANOTHER_BASE"
        )
    architecture = AutoConfig.from_pretrained(
        config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    if (
        not config.trust_remote_code
        and language_model_class(architecture) is None
        and model_class(architecture)._model_mapping.get(type(architecture), None) is None
    ):
        if type(architecture)().is_encoder_decoder != architecture.is_encoder_decoder:
            raise UserError(
                f"{where}: is_encoder_decoder={str(architecture.is_encoder_decoder).lower()}, "
                f"which {model_type} models are{' not' * architecture.is_encoder_decoder}; remove "
                "it, or download config.json again"
            )
        raise UserError(
            f"model.path={config.path}: {model_type} models are not language models to train: "
            f"transformers' {model_class(architecture).__name__} has none of that type; "
            "type model.path=ANOTHER_BASE"
        )
    if architecture.is_encoder_decoder and (
        getattr(architecture, "decoder_start_token_id", None) is None
    ):
        architecture.decoder_start_token_id = _start_of_generation(config)
    return architecture


def _newer_transformers(numbers: Mapping[str, Any]) -> str:
    """Return what to install for a model_type that this transformers does not know."""
    import transformers
    from packaging.version import InvalidVersion, Version

    try:
        wrote = Version(str(numbers.get("transformers_version")))
    except InvalidVersion:
        return "take a newer transformers"
    if wrote <= Version(transformers.__version__):
        return "take a newer transformers"
    return f"its config.json is of transformers {wrote}: type pip install 'transformers>={wrote}'"


def _check_version(config: ModelConfig, architecture: PretrainedConfig) -> None:
    """Raise UserError where this transformers is older than one whose layers are right."""
    import transformers
    from packaging.version import Version

    since, fault = RIGHT_SINCE.get(architecture.model_type, ("0", ""))
    if Version(transformers.__version__) < Version(since):
        where = "model.architecture" if config.from_scratch else f"model.path={config.path}"
        raise UserError(
            f"{where}: in transformers {transformers.__version__}, {architecture.model_type} "
            f"models {fault}: type pip install 'transformers>={since}'"
        )


def _start_of_generation(config: ModelConfig) -> int | None:
    """Read decoder_start_token_id from generation_config.json, where config.json lacks it."""
    numbers = generation_config(config)
    start: int | None = None if numbers is None else numbers.decoder_start_token_id
    return start


def generation_config(config: ModelConfig) -> GenerationConfig | None:
    """Read generation_config.json; None where there is none."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(str(config.path), revision=config.revision)
    except OSError:
        return None


def text_numbers(numbers: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the numbers of the language model in a config.json: its text_config's, else all.

    How its files are quantized stands beside text_config, and is kept.
    """
    text = numbers.get("text_config")
    if not isinstance(text, dict):
        return numbers
    stored = numbers.get("quantization_config")
    return text if stored is None else {"quantization_config": stored} | text


def check_token_ids(
    where: str, prefix: str, ids: Mapping[str, Any], numbers: Mapping[str, Any]
) -> list[str]:
    """List the token ids in a config.json or generation_config.json that cannot be embedded.

    `numbers` say how many rows the embedding has; where they do not, only types are checked. BOS
    and padding are the tokenizer's here, and published files name ids without a row for them
    (LLaMA's first ones -1, SmolVLM those of its whole model): only the padding of the text's own
    config must be one, with which the embedding is made.
    """
    text = text_numbers(numbers)
    rows = max((text[key] for key in VOCAB_SIZES if type(text.get(key)) is int), default=None)
    problems = []
    for key, means in TOKEN_IDS.items():
        named = ids.get(key)
        listed = [] if named is None else [named]
        if isinstance(named, list) and key != "pad_token_id":  # answers end in several ways
            listed = named
        least, most = 0, rows or math.inf
        if key == "pad_token_id" and ids is text:
            least = -(rows or 0)  # counted from the end, as torch does
        elif key in ("pad_token_id", "bos_token_id"):
            least, most = -sys.maxsize, math.inf
        odd = [one for one in listed if type(one) is not int or not least <= one < most]
        if odd:
            size = "" if rows is None else f", whose vocab_size is {rows:,}"
            problems.append(
                f"{where}: {prefix}{key}={shorten(named)}: {odd[0]!r:.80} is not a token of this "
                f"base{size}; write {means}, or download the file again"
            )
    return problems


def shorten(value: Any) -> str:
    """Return a value of a file as a message shows it."""
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def model_class(architecture: PretrainedConfig) -> Any:
    """Return the class that loads an architecture: encoder-decoder, multimodal without its towers,
    or causal.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    if (language_model := language_model_class(architecture)) is not None:
        return language_model
    return AutoModelForSeq2SeqLM if architecture.is_encoder_decoder else AutoModelForCausalLM


def context_len(architecture: PretrainedConfig) -> int | None:
    """Return a model's context length in tokens; None where it has no limit (BLOOM, MPT)."""
    # Not by `to_dict`: GPT-2 has another name, which only the attribute maps.
    return getattr(architecture.get_text_config(), "max_position_embeddings", None)


def decoder_start_token_id(architecture: PretrainedConfig) -> int | None:
    """Return the id that a decoder starts each answer with; None for causal models.

    UserError where neither config.json nor generation_config.json has it.
    """
    if not architecture.is_encoder_decoder:
        return None
    start: int | None = getattr(architecture, "decoder_start_token_id", None)
    if start is None:
        raise UserError(
            f"{architecture.name_or_path or 'model.architecture'}: no decoder_start_token_id, with "
            f"which {architecture.model_type} models begin each answer; write it into config.json "
            "(T5 models use the pad token, BART the EOS)"
        )
    return start


def base_folder(config: ModelConfig) -> Path:
    """Return the folder that a base was read from: its own, or one in the hub's cache."""
    from transformers.utils import cached_file

    return Path(cached_file(config.path, "config.json", revision=config.revision)).parent


def base_commit(config: ModelConfig) -> str | None:
    """Return the commit that a base of the hub is read at; None for a folder."""
    if config.path is None or Path(config.path).is_dir():
        return None
    folder = base_folder(config)
    return folder.name if folder.parent.name == "snapshots" else None


def reading_base(config: ModelConfig) -> AbstractContextManager[None]:
    """Report errors while a base's files are read as errors of these files."""
    if config.from_scratch:
        return reading(f"model.architecture={dict(config.architecture)}", "fix its values")
    where = (
        config.path
        if config.path is None or not Path(config.path).is_dir()
        else (f"{config.path} (config.json and the weights beside it)")
    )
    return reading(f"model.path={where}", "copy or download its files again, or take another base")


def reading_first_forward(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Report errors of a model's first forward pass as errors of its config.json."""
    import transformers

    name = model.config.name_or_path or "model.architecture"
    if towers := outermost(tower_modules(model)):
        return reading(
            f"{name}: its first forward pass fails on text alone, without {', '.join(towers)}",
            f"{model.config.model_type} models may need images or sound: type "
            "model.path=ANOTHER_BASE",
        )
    return reading(
        f"{name}: its first forward pass fails",
        f"its config.json may be of another model, or transformers {transformers.__version__} too "
        "old for it: download it again, install a newer one, or take another base; "
        "LOFT_TRACEBACK=1 shows where it failed",
    )
