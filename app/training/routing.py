"""Expert load of a mixture of experts, and the auxiliary loss that balances it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from app.model.adapter import AdapterConfig
from app.model.experts import expert_modules, has_experts
from app.training.objective.objective import document_numbers
from common.errors import UserError
from data_modules import Batch

log = logging.getLogger(__name__)

NUMBER = re.compile(r"\.(\d+)\.")


def choose_router_aux_loss(
    architecture: PretrainedConfig, adapter: AdapterConfig, typed: float | None
) -> float:
    """Return the coefficient of the auxiliary loss, and log whether the routers are trained.

    `typed`: model.router_aux_loss, which overrides the config.json of the base.
    """
    if not has_experts(architecture):
        if typed:
            raise UserError(
                f"model.router_aux_loss={typed:g} has no effect: {architecture.model_type} models "
                "have no experts; leave it out"
            )
        return 0.0
    if adapter.name != "full":
        log.info("router: frozen, routes as in the base model (adapter=%s)", adapter.name)
        return 0.0
    stored = getattr(architecture.get_text_config(), "router_aux_loss_coef", None)
    weight = float((stored or 0.0) if typed is None else typed)
    source = "config.json" if typed is None else "model.router_aux_loss"
    log.info("router: trained, auxiliary loss %g (%s)", weight, source)
    return weight


class ExpertLoad:
    """Count the tokens routed to each expert in training, on the device and without padding."""

    def __init__(self, model: torch.nn.Module) -> None:
        found = list(expert_modules(model))
        widest = max((module.num_experts for _, module in found), default=0)
        self.layers = [_layer_of(name) for name, _ in found]
        self._shape = (len(found), widest)
        self._counts: Tensor | None = None
        self._is_token: Tensor | None = None
        for place, (_, module) in enumerate(found):
            module.register_forward_pre_hook(partial(self._count, place), with_kwargs=True)

    @property
    def names(self) -> list[str]:
        """Names of the metrics: per layer, the largest load of an expert over the mean load."""
        return [f"experts/load_max/{layer}" for layer in self.layers]

    @contextmanager
    def counting(self, batch: Batch) -> Iterator[None]:
        """Count the forward pass inside the context, without the recomputed ones after it."""
        if self.layers:
            self._is_token = is_token(batch).flatten()
        try:
            yield
        finally:
            self._is_token = None

    def take(self) -> Tensor | None:
        """Return the token counts [layers x experts] since the last call; None without experts."""
        counts, self._counts = self._counts, None
        return None if counts is None else counts.flatten()

    def metrics(self, counts: Tensor) -> dict[str, float]:
        """Return the metrics of counts [layers x experts], summed over ranks, on the host."""
        by_layer = counts.view(self._shape)
        largest, mean = by_layer.amax(1), by_layer.mean(1).clamp(min=1e-9)
        return dict(zip(self.names, (largest / mean).tolist(), strict=True))

    def _count(
        self, place: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._is_token is None:
            return
        chosen = args[1] if len(args) > 1 else kwargs["top_k_index"]
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.float64, device=chosen.device)
        counted = self._is_token.double().unsqueeze(1).expand_as(chosen)
        self._counts[place].scatter_add_(0, chosen.flatten(), counted.flatten())


class RouterBalance:
    """The auxiliary loss of a mixture's routers (Switch, arXiv 2101.03961, equations 4 to 6).

    It is computed per document, as in transformers, and weighted by the loss weights of the
    document: the sum over documents does not depend on packing, padding or accumulation.
    """

    def __init__(self, model: Any, coefficient: float) -> None:
        numbers = model.config.get_text_config()
        self.coefficient = coefficient
        self.num_chosen = int(numbers.num_experts_per_tok)
        self._logits: list[Tensor] | None = None
        found = routers(model)
        if not found:
            raise UserError(
                f"model.router_aux_loss={coefficient:g}: {model.config.model_type} models do not "
                "expose the logits of their routers; type model.router_aux_loss=0"
            )
        for router, place in found:
            router.register_forward_hook(partial(self._record, place))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the routers' logits of the forward pass inside the context."""
        self._logits = []
        try:
            yield
        finally:
            self._logits = None

    def loss(self, batch: Batch) -> Tensor:
        """Return the auxiliary loss of the recorded pass, weighted by document."""
        assert self._logits is not None
        return self.coefficient * balance_loss(self._logits, batch, self.num_chosen)

    def _record(self, place: int, module: Any, args: Any, output: Any) -> None:
        if self._logits is not None:
            self._logits.append(output[place] if isinstance(output, tuple) else output)


def balance_loss(logits: list[Tensor], batch: Batch, num_chosen: int) -> Tensor:
    """Return the sum over documents of weight * experts * sum(share chosen * mean probability).

    `logits`: [rows x tokens, experts] of each layer.
    """
    is_real = is_token(batch).flatten()
    num_documents = sum(map(len, batch.document_lengths))
    if batch.sequence is None:
        starts = (batch.position_ids.flatten() == 0) & is_real
        documents = starts.cumsum(0).sub(1).where(is_real, num_documents)  # padding is one more
    else:
        documents = document_numbers(batch)[0].flatten()
    num_experts = logits[0].shape[-1]
    sizes = logits[0].new_zeros(num_documents + 1, dtype=torch.float32)
    weights = torch.zeros_like(sizes).index_add_(0, documents, batch.loss_weights.flatten())
    sizes.index_add_(0, documents, torch.ones_like(documents, dtype=torch.float32))
    chosen_sum = sizes.new_zeros((num_documents + 1) * num_experts)
    probability_sum = sizes.new_zeros(num_documents + 1, num_experts)
    for layer_logits in logits:
        probabilities = layer_logits.float().softmax(-1)
        chosen = (
            layer_logits.topk(num_chosen, dim=-1).indices + documents.unsqueeze(1) * num_experts
        )
        chosen_sum.index_add_(
            0, chosen.flatten(), torch.ones_like(chosen, dtype=torch.float32).flatten()
        )
        probability_sum = probability_sum.index_add(0, documents, probabilities)
    if batch.sequence is not None and batch.sequence.ranks is not None:
        # Of whole documents; the sum over ranks of what is linear in the probabilities is exact.
        for counted in (sizes, weights, chosen_sum):
            dist.all_reduce(counted, group=batch.sequence.ranks)
    rows = (sizes * len(logits)).clamp(min=1).unsqueeze(1)
    shares = chosen_sum.view(-1, num_experts) / rows
    by_document = num_experts * (shares * (probability_sum / rows)).sum(1)
    return (by_document * weights)[:num_documents].sum()


def is_token(batch: Batch) -> Tensor:
    """Return a mask of tokens that are not padding: bool [rows, tokens], on the batch's device."""
    if batch.sequence is not None:
        numbers, padding = document_numbers(batch)
        return numbers != padding
    real = torch.ones_like(batch.input_ids, dtype=torch.bool)
    for row, lengths in enumerate(batch.document_lengths):
        if (end := sum(lengths)) < real.shape[1]:
            real[row, end:] = False
    return real


def routers(model: Any) -> list[tuple[torch.nn.Module, int]]:
    """Return a model's routers, each with the index of the logits in its output."""
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import OutputRecorder

    found = []
    for part in [module for module in model.modules() if isinstance(module, PreTrainedModel)]:
        recorder = (part._can_record_outputs or {}).get("router_logits")
        if isinstance(recorder, OutputRecorder):
            found += [
                (module, recorder.index)
                for module in part.modules()
                if isinstance(module, recorder.target_class)
            ]
    return list(dict.fromkeys(found))


def _layer_of(name: str) -> str:
    number = NUMBER.search(name)
    return number[1] if number else name
