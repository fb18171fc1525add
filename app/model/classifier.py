"""A head for the classes of a text, or for its reward, in place of the language model's.

The classes are those of transformers' AutoModelForSequenceClassification, so that a saved model
opens without this project. Their own forward looks for the last token of a row, and would see one
document of a pack; here the caller says which tokens are rated.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any

from app.model.contexts import replaced
from app.model.multimodal import from_config, language_model_class
from common.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

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
