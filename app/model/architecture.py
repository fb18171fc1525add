"""Load and check the architecture of a base: config.json, generation_config.json, model class.

A head for the classes of a text, or for its reward, may stand in place of the language model's. Its
classes are those of transformers' AutoModelForSequenceClassification, so that a saved model opens
without this project. Their own forward looks for the last token of a row, and would see one
document of a pack; here the caller says which tokens are rated.

Importing this module does not import torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.config_values import check_keys, check_numbers, newer_transformers
from app.model.layers import replaced
from app.model.multimodal import from_config, language_model_class, outermost, tower_modules
from app.model.rope import DEFAULT_SCALING, dynamic_factor, extend_context
from common.errors import UserError
from common.text import shortened
from common.untrusted import read_json_object, reading

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

    from app.model.base import ModelConfig

DRAFTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""model types of draft models, whose forward takes the hidden states of their target model
(transformers 5.23)"""

_SCAN = "sum the chunks of a long document's scan wrongly without mamba-ssm"
CORRECT_SINCE = {
    "gemma3": ("5.6", "do not train on text alone"),
    "nemotron_h": ("5.15", _SCAN),
    "zamba2": ("5.15", _SCAN),
}
"""model_type -> first version of transformers with correct layers, and the fault of older ones"""

_TOKEN_IDS = {
    "eos_token_id": "the id that ends an answer",
    "decoder_start_token_id": "the id that starts the decoder's input",
    "bos_token_id": "the id that starts a text, or null for none",
    "pad_token_id": "the id that pads rows, or null for none",
}
"""keys of token ids -> what to write there, for messages"""
_VOCAB_SIZES = ("vocab_size", "decoder_vocab_size")


def load_architecture(config: ModelConfig) -> PretrainedConfig:
    """Read config.json, or build it from `config.architecture` when from scratch."""
    from packaging.version import Version

    with reading_base(config):
        architecture = _load_architecture(config)
    import transformers  # the first import of a model's code replaces this module

    since, fault = CORRECT_SINCE.get(architecture.model_type, ("0", ""))
    if Version(transformers.__version__) < Version(since):
        where = "model.architecture" if config.from_scratch else f"model.path={config.path}"
        raise UserError(
            f"{where}: in transformers {transformers.__version__}, {architecture.model_type} "
            f"models {fault}: type pip install 'transformers>={since}'"
        )
    if config.context_len is not None:
        extend_context(architecture, config.context_len, config.rope_scaling or DEFAULT_SCALING)
    if config.labels:
        describe_outputs(architecture, config.labels, is_multi_label=config.multi_label)
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
        return _architecture_from_scratch(config)
    numbers, _ = transformers.PreTrainedConfig.get_config_dict(
        config.path, revision=config.revision
    )
    where = f"{config.path}/config.json"
    problems = check_numbers(where, numbers) + check_token_ids(where, "", numbers, numbers)
    if (text := text_numbers(numbers)) is not numbers:
        problems += check_token_ids(where, "text_config.", text, numbers)
    if problems:  # only for a hub id: the files of a folder were checked before
        raise UserError(problems)
    model_type = numbers.get("model_type")
    if model_type in transformers.CONFIG_MAPPING and (
        problems := check_keys(where, numbers, transformers.CONFIG_MAPPING[model_type])
    ):
        raise UserError(problems)
    if model_type not in transformers.CONFIG_MAPPING and not config.trust_remote_code:
        raise UserError(
            f"model.path={config.path}: transformers {transformers.__version__} does not know "
            f"its model_type {model_type!r}; {newer_transformers(numbers)}, or take another base"
        )
    if model_type in DRAFTS:
        raise UserError(
            f"model.path={config.path}: {model_type} models are draft models, which need the "
            "hidden states of their target model; type model.path=ANOTHER_BASE"
        )
    architecture = AutoConfig.from_pretrained(
        config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    architecture.problem_type = None  # that of a classifier is of the head that model.labels names
    if (
        not config.trust_remote_code
        and language_model_class(architecture) is None
        and model_class(architecture)._model_mapping.get(type(architecture), None) is None
    ):
        if type(architecture)().is_encoder_decoder != architecture.is_encoder_decoder:
            raise UserError(
                f"{where}: is_encoder_decoder={str(architecture.is_encoder_decoder).lower()}, but "
                f"{model_type} models are {'not ' * architecture.is_encoder_decoder}"
                "encoder-decoders; remove the key, or download config.json again"
            )
        raise UserError(
            f"model.path={config.path}: {model_type} models are not language models: "
            f"transformers' {model_class(architecture).__name__} does not support that type; "
            "type model.path=ANOTHER_BASE"
        )
    if architecture.is_encoder_decoder and (
        getattr(architecture, "decoder_start_token_id", None) is None
    ):
        # Some models have it only in generation_config.json.
        generation = generation_config(config)
        start = None if generation is None else generation.decoder_start_token_id
        architecture.decoder_start_token_id = start
    return architecture


def _architecture_from_scratch(config: ModelConfig) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING, AutoConfig

    numbers = dict(config.architecture)
    if (known := CONFIG_MAPPING.get(numbers["model_type"])) and (
        problems := check_keys("model.architecture", numbers, known)
    ):
        raise UserError(problems)
    architecture = AutoConfig.for_model(numbers.pop("model_type"), **numbers)
    if language_model_class(architecture) is not None:
        text = architecture.get_text_config().model_type
        raise UserError(
            f"model.from_scratch=true: {architecture.model_type} models are multimodal, and only "
            "their language model is trained on text; type its values, with "
            f"model.architecture.model_type={text}"
        )
    return architecture


def generation_config(config: ModelConfig) -> GenerationConfig | None:
    """Read generation_config.json; None if the base has none."""
    from transformers import GenerationConfig
    from transformers.utils import cached_file

    name = "generation_config.json"
    try:
        found = cached_file(str(config.path), name, revision=config.revision)
    except OSError:
        return None
    values, problem = read_json_object(Path(found))
    where = f"{config.path}/{name}"
    problems = check_keys(where, values, GenerationConfig) + check_numbers(where, values)
    if problems := [problem] if problem else problems:
        raise UserError(problems)
    return GenerationConfig.from_pretrained(str(config.path), revision=config.revision)


def text_numbers(numbers: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values in config.json for the language model: those of text_config, else all.

    `quantization_config`, which is next to text_config, is included.
    """
    text = numbers.get("text_config")
    if not isinstance(text, dict):
        return numbers
    stored = numbers.get("quantization_config")
    return text if stored is None else {"quantization_config": stored} | text


def num_experts(numbers: Mapping[str, Any]) -> int:
    """Return the number of experts of a layer, from the values of a language model; 0 without."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return max(numbers.get(name) or 0 for name in names)


def check_token_ids(
    where: str, prefix: str, ids: Mapping[str, Any], numbers: Mapping[str, Any]
) -> list[str]:
    """List problems of the token ids in a config.json or generation_config.json.

    Ids must have a row in the embedding, whose size `numbers`, the values of config.json, contain;
    otherwise only types are checked. BOS and padding ids are read from the tokenizer instead, and
    published files contain some without a row (-1 in the first LLaMA, those of the multimodal
    vocabulary in SmolVLM): only the padding id of the text config must have a row, since the
    embedding is built with it.
    """
    text = text_numbers(numbers)
    rows = max((text[key] for key in _VOCAB_SIZES if type(text.get(key)) is int), default=None)
    problems = []
    for key, meaning in _TOKEN_IDS.items():
        value = ids.get(key)
        token_ids = [] if value is None else [value]
        if isinstance(value, list) and key != "pad_token_id":  # several ids may end an answer
            token_ids = value
        least, end = 0, rows or math.inf
        if key == "pad_token_id" and ids is text:
            least = -(rows or 0)  # torch counts negative indices from the end
        elif key in ("pad_token_id", "bos_token_id"):
            least, end = -sys.maxsize, math.inf
        invalid = [each for each in token_ids if type(each) is not int or not least <= each < end]
        if invalid:
            size = "" if rows is None else f", whose vocab_size is {rows:,}"
            problems.append(
                f"{where}: {prefix}{key}={shortened(value)}: {invalid[0]!r:.80} is not a token id "
                f"of this base{size}; write {meaning}, or download the file again"
            )
    return problems


def model_class(architecture: PretrainedConfig) -> Any:
    """Return the class that loads an architecture.

    AutoModel's for causal models and encoder-decoders, a multimodal class without its towers, or
    one with a head for classes.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    if (classifier := classifier_class(architecture)) is not None:
        return classifier
    if (language_model := language_model_class(architecture)) is not None:
        return language_model
    return AutoModelForSeq2SeqLM if architecture.is_encoder_decoder else AutoModelForCausalLM


def context_len(architecture: PretrainedConfig) -> int | None:
    """Return a model's context length in tokens; None if it has no limit (BLOOM, MPT)."""
    # Not from `to_dict`: only attribute access maps the different name of GPT-2.
    text = architecture.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    return None if context is None else round(context * dynamic_factor(vars(text)))


def decoder_start_token_id(architecture: PretrainedConfig) -> int | None:
    """Return the id that starts the decoder's input; None for causal models.

    UserError if neither config.json nor generation_config.json has it.
    """
    if not architecture.is_encoder_decoder:
        return None
    start: int | None = getattr(architecture, "decoder_start_token_id", None)
    if start is None:
        raise UserError(
            f"{architecture.name_or_path or 'model.architecture'}: no decoder_start_token_id, "
            f"which starts each answer of {architecture.model_type} models; write it into "
            "config.json (T5 models use the pad token, BART the EOS)"
        )
    return start


def base_folder(config: ModelConfig) -> Path:
    """Return the folder of a base's files: `config.path`, or the snapshot in the hub's cache."""
    from transformers.utils import cached_file

    return Path(cached_file(config.path, "config.json", revision=config.revision)).parent


def base_commit(config: ModelConfig) -> str | None:
    """Return the commit of a base from the hub; None for a folder."""
    if config.path is None or Path(config.path).is_dir():
        return None
    folder = base_folder(config)
    return folder.name if folder.parent.name == "snapshots" else None


def reading_base(config: ModelConfig) -> AbstractContextManager[None]:
    """Return a context that reports errors as caused by the base's files."""
    if config.from_scratch:
        return reading(f"model.architecture={dict(config.architecture)}", "fix its values")
    where = f"model.path={config.path}"
    if config.path is not None and Path(config.path).is_dir():
        where += " (config.json and the weights next to it)"
    return reading(where, "copy or download its files again, or use another base")


def reading_first_forward(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Return a context that reports errors of a model's first forward pass with likely causes."""
    import transformers

    name = model.config.name_or_path or "model.architecture"
    if towers := outermost(tower_modules(model)):
        return reading(
            f"{name}: its first forward pass fails on text alone, without {', '.join(towers)}",
            f"{model.config.model_type} models may need images or audio: type "
            "model.path=ANOTHER_BASE",
        )
    return reading(
        f"{name}: its first forward pass fails",
        f"its config.json may belong to another model, or transformers {transformers.__version__} "
        "may be too old for it: download it again, install a newer transformers, or use another "
        "base; LOFT_TRACEBACK=1 shows the traceback",
    )


HEAD = "score"
"""name of the head's module, in all classes that are supported"""
MULTI_LABEL = "multi_label_classification"
"""transformers' `problem_type` of texts with several classes"""
_LOSES_WEIGHTS = ("zamba2",)
"""model types whose class is saved without the weights that its layers share (transformers 5.23)"""


def describe_outputs(
    architecture: PretrainedConfig, labels: Sequence[str], *, is_multi_label: bool = False
) -> None:
    """Write the outputs of a head into a config: one is a number, several are classes.

    `is_multi_label`: a text may have several classes, or none.

    UserError if transformers has no such class for the architecture.
    """
    found = _sequence_class(architecture)
    if found is None:
        raise UserError(
            f"model.labels=[{', '.join(labels)}]: transformers has no working class "
            f"of {architecture.model_type} models with one head for a whole text; type "
            "model.path=ANOTHER_BASE"
        )
    architecture.id2label = dict(enumerate(labels))
    architecture.label2id = {label: index for index, label in enumerate(labels)}
    several = MULTI_LABEL if is_multi_label else "single_label_classification"
    architecture.problem_type = several if len(labels) > 1 else "regression"
    architecture.architectures = [found.__name__]


def classifier_class(architecture: PretrainedConfig) -> Any:
    """Return the class of a model whose outputs were described; None for a language model."""
    if architecture.problem_type is None:
        return None
    return _rating_tokens(_sequence_class(architecture))


def has_reward(architecture: PretrainedConfig) -> bool:
    """Return whether the files of a config are a classifier with one output, as others save it."""
    kinds = architecture.architectures or []
    is_classifier = any(kind.endswith("ForSequenceClassification") for kind in kinds)
    return is_classifier and architecture.num_labels == 1


def output_names(architecture: PretrainedConfig) -> tuple[str, ...]:
    """Return the names of the outputs of a head, none of a language model."""
    if architecture.problem_type is None:
        return ()
    return tuple(architecture.id2label[index] for index in range(architecture.num_labels))


class RatesTokens:
    """Marks the classes that are derived here."""

    returns_hidden = False
    """whether a forward pass returns hidden states in place of logits"""


def hidden_as_logits(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Let a classifier return hidden states in this context, of which attention is verified.

    A head of few outputs, or of one, would hide most of what one token does to another.
    """
    found = (module for module in model.modules() if isinstance(module, RatesTokens))
    return replaced((module, "returns_hidden", True) for module in found)


def is_classifier(model: Any) -> bool:
    """Return whether a model has a head for classes or a reward."""
    return model.config.problem_type is not None


def init_head(model: PreTrainedModel) -> None:
    """Draw the head of a base that has none, the same for every seed."""
    import torch

    weight = model.get_submodule(HEAD).weight
    if not isinstance(weight, torch.Tensor) or weight.device.type == "meta":
        return
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(weight.shape, generator=generator, device="cpu") * weight.shape[1] ** -0.5
    weight.data.copy_(drawn)


def _sequence_class(architecture: PretrainedConfig) -> Any:
    from transformers import AutoModelForSequenceClassification

    if architecture.is_encoder_decoder or architecture.model_type in _LOSES_WEIGHTS:
        return None
    if language_model_class(architecture) is not None:
        return None
    return AutoModelForSequenceClassification._model_mapping.get(type(architecture), None)


@cache
def _rating_tokens(whole: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Derive a class that rates the tokens asked for; it has the same name, which is saved."""
    import torch
    from transformers.modeling_outputs import SequenceClassifierOutputWithPast

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, config, *args, **kwargs)
        if not isinstance(getattr(self, HEAD, None), torch.nn.Linear):
            raise UserError(
                f"model.labels: {whole.__name__} has no head that is one linear layer; type "
                "model.path=ANOTHER_BASE"
            )

    def get_output_embeddings(self: Any) -> torch.nn.Module:
        return self.get_submodule(HEAD)

    def forward(
        self: Any, input_ids: Any = None, logits_to_keep: Any = 0, **kwargs: Any
    ) -> SequenceClassifierOutputWithPast:
        """Return the logits [rows, tokens, outputs], or those of the columns to keep."""
        # peft's wrapper passes arguments of the class's own forward, all None.
        given = {name: value for name, value in kwargs.items() if value is not None}
        given.pop("return_dict", None)
        hidden = self.base_model(input_ids=input_ids, **given).last_hidden_state
        is_count = isinstance(logits_to_keep, int)
        kept = hidden[:, slice(-logits_to_keep, None) if is_count else logits_to_keep]
        logits = kept if self.returns_hidden else self.get_submodule(HEAD)(kept)
        return SequenceClassifierOutputWithPast(logits=logits)

    members = {
        "__init__": __init__,
        "from_config": classmethod(from_config),
        "get_output_embeddings": get_output_embeddings,
        "forward": forward,
        "__module__": whole.__module__,
    }
    return type(whole.__name__, (RatesTokens, whole), members)
