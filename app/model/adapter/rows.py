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


def sharing_embedding(model: PreTrainedModel) -> list[str]:
    """Return the full names of the modules that hold the input embedding's weight, itself too."""
    weight = model.get_input_embeddings().weight
    return [name for name, module in model.named_modules() if _own_weight(module) is weight]


def modules_to_save(model: PreTrainedModel, patterns: Sequence[str]) -> list[str]:
    """Return the full names of the modules that train whole; ValueError where peft would err."""
    if not patterns:
        return []
    modules = {name: module for name, module in model.named_modules() if name}
    names = targets.match(list(patterns), list(modules), KEY)
    sharing = sharing_embedding(model)
    for name in names:
        if next(modules[name].parameters(), None) is None:
            raise UserError(f"{KEY}: {name} has no weights")
        if targets.is_quantized(modules[name]):
            raise UserError(f"{KEY}: {name} is quantized and cannot train; leave it out")
        if len(sharing) > 1 and any(targets.is_inside(one, [name]) for one in sharing):
            # peft ties copies of some models' modules, and forgets to when it reads them again.
            raise UserError(
                f"{KEY}: {name} shares one weight with {', '.join(set(sharing) - {name})}, and "
                "peft would train it apart from them; type adapter.trainable_tokens=[...] to "
                "train the rows of some tokens, or adapter=full"
            )
    return names


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
