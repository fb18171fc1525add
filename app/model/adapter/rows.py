"""Embedding and head beside an adapter: some rows or all, and never half of a tied pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.model.adapter import targets
from app.process.errors import UserError

if TYPE_CHECKING:
    import peft
    from transformers import PreTrainedModel

KEY = "adapter.modules_to_save"


def declare_ties(model: PreTrainedModel) -> None:
    """Let a model name those of its weights as tied that are: peft believes the class.

    FLAN-T5's head is its own matrix, but T5's class calls it tied, and peft would put the
    embedding's rows into it.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    model._tied_weights_keys = {
        name: source
        for name, source in (model._tied_weights_keys or {}).items()
        if weights.get(name) is weights.get(source)
    }


def rows_to_train(
    model: PreTrainedModel, token_ids: Sequence[int], whole: Sequence[str]
) -> dict[str, list[int]]:
    """Return the rows that train, by full name of the embedding and, where it is untied, the head.

    What is in `whole` trains all its rows already.
    """
    if not token_ids:
        return {}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    num_rows = embedding.num_embeddings
    if not (min(token_ids) >= 0 and max(token_ids) < num_rows):
        raise UserError(
            f"token {max(token_ids)} has no row: the embedding has {num_rows}; "
            "name new tokens in model.added_tokens"
        )
    modules: list[Any] = [embedding] if targets.is_tied(model) else [embedding, head]
    names = [targets.name_of(model, module) for module in modules]
    rows = {name: list(token_ids) for name in names if name not in whole}
    if rows and head.bias is not None and targets.name_of(model, head) not in whole:
        raise UserError(
            "model.added_tokens, adapter.trainable_tokens: the head of this base has a bias, which "
            f"peft would lose; type {KEY}=[{','.join(names)}] to train all rows"
        )
    return rows


def check_rows(model: peft.PeftModel) -> None:
    """Raise ValueError if a module reads the embedding's weight past the rows that train."""
    import peft

    base = model.get_base_model()
    wrappers = [m for m in base.modules() if isinstance(m, peft.utils.other.TrainableTokensWrapper)]
    wrapped = {id(wrapper.original_module) for wrapper in wrappers}
    weights = {id(wrapper.original_module.weight) for wrapper in wrappers}
    for name, module in base.named_modules():
        if id(_own_weight(module)) in weights and id(module) not in wrapped:
            raise UserError(
                f"model.added_tokens, adapter.trainable_tokens: {name} shares the embedding's "
                "weight, and peft does not train its rows; type adapter=full"
            )


def check_rows_train(model: peft.PeftModel, token_ids: Sequence[int]) -> None:
    """Raise ValueError if the rows `token_ids` are not among those that an adapter trains."""
    import peft

    embedding = model.get_base_model().get_input_embeddings()
    if isinstance(embedding, peft.utils.other.ModulesToSaveWrapper):
        return
    is_partly = isinstance(embedding, peft.utils.other.TrainableTokensWrapper)
    trained = embedding.token_adapter.token_indices["default"] if is_partly else []
    if missing := sorted(set(token_ids) - set(trained)):
        raise UserError(
            f"model.added_tokens: the adapter of adapter.path trains no rows for tokens {missing}; "
            "start without adapter.path"
        )


def _own_weight(module: Any) -> Any:
    return module._parameters.get("weight")
