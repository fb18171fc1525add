"""What a run minimizes: a batch and the model's head in, the sum to differentiate out.

An objective computes the losses of a micro-batch and never sees a step: the mean over a global
step is exact because the sum of each micro-batch is divided by the weight of the whole step. Here
are also a batch as arguments of a model's forward pass, for logits at its trained positions only,
the exact sums of losses over many micro-batches, by data set and by row, on the device, and the
objectives of single texts: answers, classes, rewards; and the auxiliary loss of trained routers.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid

from app.model.adapter import AdapterConfig
from app.model.architecture import hidden_as_logits
from app.model.attention.documents import to_device
from app.model.attention.inputs import attention_inputs, pair_inputs
from app.model.attention.probes import check_isolation, check_padded_rows
from app.model.experts import has_experts
from app.model.head import check_head_loss, head_loss
from app.model.quantization import quantize_tokens_independently
from app.training.objective.settings import ClassifyConfig, RewardConfig
from common.errors import UserError
from data_modules import Batch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a micro-batch; a unit is what their mean is over: a position, or a pair.

    total        the sum of loss times weight, to differentiate
    losses       float32 [units], detached
    weights      float32 [units], 0 if masked
    dataset_ids  int64 [units]
    rows         returns the row of each unit, int64 [units], and the number of rows of the batch
    """

    total: Tensor
    losses: Tensor
    weights: Tensor
    dataset_ids: Tensor
    rows: Callable[[], tuple[Tensor, int]]
    tokens: Tensor | None = None
    """trained tokens of each unit [units], None for one"""
    figures: Sequence[Tensor] = ()
    """what else is measured of each unit [units], detached"""
    outputs: Tensor | None = None
    """what a head for classes says of each unit [units, classes], detached"""


def losses_of_units(
    losses: Tensor,
    weights: Tensor,
    batch: Batch,
    figures: Sequence[Tensor],
    *,
    tokens: Tensor | None = None,
    outputs: Tensor | None = None,
) -> Losses:
    """Return the losses of documents, or of pairs of two documents each; arguments as `Losses`."""
    documents, count = document_numbers(batch)
    numbers = documents.flatten()
    datasets = numbers.new_zeros(count + 1).scatter_(0, numbers, batch.dataset_ids.flatten())[:-1]
    return Losses(
        (losses * weights).sum(),
        losses.detach(),
        weights,
        datasets[:: max(1, len(datasets) // max(1, len(losses)))],
        lambda: (torch.arange(len(losses), device=losses.device), len(losses)),
        tokens,
        figures,
        outputs,
    )


def wins(margins: Tensor) -> Tensor:
    """Return the accuracy of each unit: 1 if its margin is positive, a half if it is exactly 0."""
    return torch.heaviside(margins, torch.full_like(margins, 0.5))


def labels_of_units(batch: Batch, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return labels and weights [units], empty and `like` another for a micro-batch without any."""
    nothing = like.new_zeros(0)
    labels, weights = batch.unit_labels, batch.unit_weights
    return (nothing if labels is None else labels, nothing if weights is None else weights)


class Objective(Protocol):
    """What a run minimizes."""

    figures: tuple[str, ...]
    """names of the further figures of its metrics"""
    classes: Sequence[str] = ()
    """names of the classes that it tells apart"""
    is_multi_label: bool = False
    """whether a text may have several of them, or none: bits of its label"""
    is_likelihood: bool
    """whether its loss is a mean of -log p, of which a perplexity can be told"""

    def begin(
        self,
        model: Any,
        batches: Iterable[Batch],
        backend: str,
        device: torch.device,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Measure what the losses of a step or a validation needs of its batches: here nothing."""
        return

    def reference(self, model: Any, batch: Batch, backend: str) -> Tensor | None:
        """Return what the model without its adapter says of the batch: here nothing."""
        return None

    def losses(self, model: Any, batch: Batch, backend: str, reference: Tensor | None) -> Losses:
        """Return the losses of a micro-batch, whose attention is computed by `backend`."""


class Sft(Objective):
    """Supervised fine-tuning: cross-entropy of each trained token, times its weight."""

    figures: tuple[str, ...] = ()
    is_likelihood = True

    def losses(self, model: Any, batch: Batch, backend: str, reference: Tensor | None) -> Losses:
        head = head_inputs(model, batch, backend)
        total, losses = head_loss(model, head.inputs, head.labels, head.weights)
        rows = rows_of_positions(batch, head)
        return Losses(total, losses, head.weights.flatten(), head.dataset_ids.flatten(), rows)


def batch_loss(
    objective: Objective,
    model: Any,
    batch: Batch,
    backend: str,
    sums: DatasetSums,
    rows: RowSums | None = None,
    reference: Tensor | None = None,
) -> Tensor:
    """Return the sum of loss times weight over a micro-batch.

    Adds it to `sums` by data set, and to `rows` by row. `reference`: that of the objective, None to
    compute it here.
    """
    if reference is None:
        reference = objective.reference(model, batch, backend)
    found = objective.losses(model, batch, backend, reference)
    sums.add(found.losses, found.weights, found.dataset_ids, found.tokens, found.figures)
    if rows is not None:
        rows.add(found.losses, found.weights, *found.rows(), found.outputs)
    return found.total


@torch.no_grad()
def validate(
    objective: Objective,
    model: Any,
    batches: Iterable[Batch],
    backend: str,
    dataset_names: list[str],
    device: torch.device | None = None,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    *,
    is_packed: bool = False,
    rows: RowSums | None = None,
) -> dict[str, float]:
    """Return exact validation losses over all batches, on `device` or the model's own.

    With `sum_over_ranks` each rank has a share of the batches, and all ranks return equal metrics.
    `is_packed`: rows may hold several documents, which the model must isolate from each other. The
    sums of this rank's rows of data are added to `rows`. Some objectives iterate over `batches`
    twice.
    """
    sums = DatasetSums(len(dataset_names))
    device = device or model.device
    if not model.config.is_encoder_decoder:
        with quantize_tokens_independently(model), hidden_as_logits(model):
            (check_isolation if is_packed else check_padded_rows)(model, backend, device)
    check_head_loss(model, backend, device)
    model.eval()
    objective.begin(model, batches, backend, device, sum_over_ranks)
    for batch in batches:
        batch_loss(objective, model, batch.to(device, non_blocking=True), backend, sums, rows)
    taken = sums.take()
    total = taken if sum_over_ranks is None else sum_over_ranks(taken)
    return losses_by_dataset(total.cpu(), dataset_names, "val", objective.figures)


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """What the head computes from: the model's arguments, and the positions that are trained.

    inputs       arguments of the forward pass, for logits [rows, columns, vocabulary]
    labels       int64 [rows, columns], -100 if masked
    weights      float32 [rows, columns]
    dataset_ids  int64 [rows, columns]
    columns      the trained columns of the batch
    """

    inputs: dict[str, Any]
    labels: Tensor
    weights: Tensor
    dataset_ids: Tensor
    columns: Tensor | slice


def head_inputs(model: Any, batch: Batch, backend: str) -> HeadInputs:
    """Return the arguments of a forward pass, and the labels and weights of its logits."""
    columns: Tensor | slice = slice(None)  # a decoder trains on nearly all positions
    if batch.decoder is None:
        # The head runs only on trained positions: prompts cost no logits.
        columns = batch.trained_columns
        inputs = causal_inputs(model, batch, backend)
    else:
        ids, lengths = batch.input_ids, batch.document_lengths
        decoder_ids, decoder_lengths = batch.decoder.input_ids, batch.decoder.document_lengths
        inputs = {"input_ids": ids, "decoder_input_ids": decoder_ids, "use_cache": False}
        inputs |= pair_inputs(model, backend, lengths, decoder_lengths, ids, decoder_ids)
    return HeadInputs(
        inputs,
        batch.labels[:, columns],
        batch.loss_weights[:, columns],
        batch.dataset_ids[:, columns],
        columns,
    )


def document_numbers(batch: Batch) -> tuple[Tensor, int]:
    """Return the document of each label [rows, tokens], and the number of documents of the batch.

    Documents are counted over the whole batch; padding has the index after the last document.
    """
    rows = (batch if batch.decoder is None else batch.decoder).document_lengths
    last = sum(map(len, rows))
    num_rows, columns = batch.labels.shape
    if batch.sequence is not None:
        columns = batch.sequence.chunks[-1].stop
    numbers = torch.full((num_rows, columns), last)
    first = 0
    for row, lengths in enumerate(rows):
        row_numbers = torch.arange(first, first + len(lengths))
        repeats = torch.tensor(lengths).long()
        whole = row_numbers.repeat_interleave(repeats, output_size=sum(lengths))
        numbers[row, : len(whole)] = whole[:columns]
        first += len(lengths)
    if batch.sequence is not None:
        numbers = batch.sequence.take(numbers)
    return to_device(numbers, batch.labels.device), last


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


def rows_of_positions(batch: Batch, head: HeadInputs) -> Callable[[], tuple[Tensor, int]]:
    """Return `Losses.rows` of losses of the positions of the head."""

    def rows() -> tuple[Tensor, int]:
        numbers, num_rows = document_numbers(batch)
        return numbers[:, head.columns].flatten(), num_rows

    return rows


def causal_inputs(model: Any, batch: Batch, backend: str) -> dict[str, Any]:
    """Return a causal model's inputs, for logits [rows, trained columns, vocabulary]."""
    inputs = {
        "input_ids": batch.input_ids,
        "use_cache": False,
        "logits_to_keep": batch.trained_columns,
    }
    # Single documents get their positions from the model: not every model starts at 0 (RoBERTa).
    is_packed = any(len(lengths) > 1 for lengths in batch.document_lengths)
    if is_packed or batch.sequence is not None:
        inputs["position_ids"] = batch.position_ids
    return inputs | attention_inputs(
        model, backend, batch.document_lengths, batch.input_ids, batch.sequence
    )


class DatasetSums:
    """Running sums by data set, on the device: weighted losses, weights, tokens, figures."""

    def __init__(self, num_datasets: int) -> None:
        self.num_datasets = num_datasets
        self.sums: Tensor | None = None

    def add(
        self,
        losses: Tensor,
        weights: Tensor,
        dataset_ids: Tensor,
        tokens: Tensor | None = None,
        figures: Sequence[Tensor] = (),
    ) -> None:
        """Add units; all arguments are [units], with weight 0 if the loss is masked.

        `tokens`: trained tokens of each, None for one; `figures`: what is averaged as the loss is,
        NaN for the units that a figure says nothing of.
        """
        if tokens is None:
            tokens = weights > 0
        columns = [losses * weights, weights, tokens.to(losses.dtype)]
        for figure in figures:
            counts = torch.where(figure.isnan(), 0, weights)
            columns += [figure.nan_to_num() * counts, counts]
        # fp64: the sum of millions of validation losses must not depend on their order.
        parts = torch.stack(columns).double()
        if self.sums is None:
            self.sums = parts.new_zeros(len(parts), self.num_datasets)
        self.sums.index_add_(1, dataset_ids, parts)

    def add_nothing(self, num_sums: int, device: torch.device) -> None:
        """Begin with zeros, on a rank whose rows are counted by another one."""
        self.sums = torch.zeros(num_sums, self.num_datasets, dtype=torch.double, device=device)

    def scale_losses(self, datasets: Tensor, value: float) -> None:
        """Multiply the sums of losses of `datasets` [k] by `value`, which may be NaN."""
        assert self.sums is not None
        self.sums[0, datasets] *= value

    def take(self) -> Tensor:
        """Return the sums [3 + 2 figures, data sets] and reset them; RuntimeError without any."""
        if self.sums is None:
            raise RuntimeError("no batch was added since the last step")
        taken, self.sums = self.sums, None
        return taken


class RowSums:
    """Weighted losses and weights of each validation row, on the device.

    `keeps_outputs`: also what a head for classes says of each row.
    """

    def __init__(self, *, keeps_outputs: bool = False) -> None:
        self._parts: list[Tensor] = []
        self._keeps_outputs = keeps_outputs

    def add(
        self,
        losses: Tensor,
        weights: Tensor,
        rows: Tensor,
        num_rows: int,
        outputs: Tensor | None = None,
    ) -> None:
        """Add a batch of `num_rows` rows; `rows` [positions] is the row of each loss.

        Losses of `num_rows` are those of padding. `outputs` [positions, classes], one a row.
        """
        kept = outputs.unbind(1) if self._keeps_outputs and outputs is not None else ()
        parts = torch.stack([weights * losses, weights, *kept]).double()
        sums = parts.new_zeros(len(parts), num_rows + 1)
        self._parts.append(sums.index_add_(1, rows, parts)[:, :-1])

    def take(self, places: Sequence[int], num_rows: int) -> Tensor:
        """Return the sums [2 + kept outputs, num_rows] and reset them.

        `places`: index of each added row, in order; rows never added have sums of 0.
        """
        added, self._parts = torch.cat(self._parts, dim=1), []
        sums = added.new_zeros(len(added), num_rows)
        sums[:, torch.tensor(places, dtype=torch.long, device=added.device)] = added
        return sums


def losses_by_dataset(
    sums: Tensor, names: list[str], prefix: str, figures: Sequence[str] = ()
) -> dict[str, float]:
    """Turn sums [3 + 2 figures, data sets] on the host into `PREFIX/loss` and metrics of data sets.

    Each data set has a loss, tokens, a share and the means of its figures; without trained tokens
    it has no loss and no figures.
    """
    losses, weights, tokens, *summed = sums.tolist()
    metrics = {f"{prefix}/loss": sum(losses) / sum(weights)} if sum(weights) else {}
    for name, loss, weight, count in zip(names, losses, weights, tokens, strict=True):
        if weight:
            metrics[f"{prefix}/loss/{name}"] = loss / weight
        metrics[f"{prefix}/tokens/{name}"] = count
        metrics[f"{prefix}/share/{name}"] = count / max(1.0, sum(tokens))
    for figure, values, counts in zip(figures, summed[::2], summed[1::2], strict=True):
        if sum(counts):
            metrics[f"{prefix}/{figure}"] = sum(values) / sum(counts)
        for name, value, weight in zip(names, values, counts, strict=True):
            if weight:
                metrics[f"{prefix}/{figure}/{name}"] = value / weight
    return metrics


def _outputs_of_documents(model: Any, batch: Batch, backend: str) -> Tensor:
    """Return the head's outputs at the last token of each document, fp32 [documents, outputs]."""
    # On the host, where the lengths are: nothing waits for the device.
    ends = [
        (row, end - 1)
        for row, lengths in enumerate(batch.document_lengths)
        for end in itertools.accumulate(lengths)
    ]
    columns = sorted({column for _, column in ends}) or [0]
    places = [(row, columns.index(column)) for row, column in ends]
    device = batch.input_ids.device
    rows, kept = to_device(torch.tensor([*places, (0, 0)]), device).unbind(1)
    inputs = causal_inputs(model, batch, backend)
    inputs["logits_to_keep"] = to_device(torch.tensor(columns), device)
    logits = model(**inputs).logits.float()
    # The last one is no document: without it, an empty micro-batch would have no graph.
    found: Tensor = logits[rows, kept]
    return found[:-1] + 0 * found[-1:].sum()


class Classify(Objective):
    """Cross-entropy of a text's class, times the weight of the class; or squared error of a number.

    As torch.nn.functional.cross_entropy and mse_loss of the logits of single texts. Of several
    classes for a text the mean over classes of binary_cross_entropy_with_logits.
    """

    is_likelihood = False

    def __init__(
        self, config: ClassifyConfig, labels: Sequence[str], *, is_multi_label: bool = False
    ) -> None:
        self.is_multi_label = is_multi_label
        self.classes = labels if len(labels) > 1 else ()
        self.class_weights = config.class_weights
        self.figures: tuple[str, ...] = ("absolute_error",)
        if self.classes:
            kinds = [f"{kind}_{name}" for name in labels for kind in ("recall", "precision")]
            self.figures = ("accuracy", *kinds)

    def losses(self, model: Any, batch: Batch, backend: str, reference: Tensor | None) -> Losses:
        outputs = _outputs_of_documents(model, batch, backend)
        labels, weights = labels_of_units(batch, outputs)
        if not self.classes:
            differences = outputs[:, 0] - labels
            losses, figures = differences.square(), [differences.detach().abs()]
        else:
            scale = outputs.new_tensor(self.class_weights or [1.0] * len(self.classes))
            numbers, own = torch.arange(len(self.classes), device=labels.device), labels.long()
            if self.is_multi_label:
                of = (own[:, None] >> numbers) & 1 > 0
                binary = binary_cross_entropy_with_logits(outputs, of.float(), reduction="none")
                losses, guessed = (binary * scale).mean(1), outputs > 0
            else:
                losses = cross_entropy(outputs, own, reduction="none") * scale[own]
                of, guessed = own[:, None] == numbers, outputs.argmax(1)[:, None] == numbers
            figures = _figures_of_classes(of, guessed)
        said = outputs.detach() if self.classes else None
        return losses_of_units(losses, weights, batch, figures, outputs=said)


class Reward(Objective):
    """-log sigmoid(r_chosen - r_rejected - margin) + centering (r_chosen + r_rejected)^2.

    Bradley and Terry's model as in equation 2 of arXiv 2203.02155, the margin of a row as in
    equation 2 of arXiv 2307.09288, centering as in arXiv 2312.09244.
    """

    figures: tuple[str, ...] = ("accuracy", "margin", "chosen_reward", "rejected_reward")
    is_likelihood = False

    def __init__(self, config: RewardConfig) -> None:
        self.centering = config.centering

    def losses(self, model: Any, batch: Batch, backend: str, reference: Tensor | None) -> Losses:
        outputs = _outputs_of_documents(model, batch, backend)
        chosen, rejected = outputs[:, 0].view(-1, 2).unbind(1)
        labels, weights = labels_of_units(batch, outputs)
        margins = chosen - rejected
        losses = -logsigmoid(margins - labels.nan_to_num())
        losses = losses + self.centering * (chosen + rejected).square()
        figures = [each.detach() for each in (margins, chosen, rejected)]
        figures.insert(0, wins(figures[0]))
        return losses_of_units(losses, weights, batch, figures)


def _figures_of_classes(of: Tensor, guessed: Tensor) -> list[Tensor]:
    """Return accuracy, and by class recall (of its texts) and precision (of its guesses).

    Both are bool [texts, classes]; a text is right if all of its classes are.
    """
    figures = [(of == guessed).all(1).float()]
    for each, guess in zip(of.unbind(1), guessed.unbind(1), strict=True):
        is_right = (each & guess).float()
        figures += [torch.where(those, is_right, torch.nan) for those in (each, guess)]
    return figures


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
        chosen = layer_logits.topk(num_chosen, dim=-1).indices
        chosen = (chosen + documents.unsqueeze(1) * num_experts).flatten()
        chosen_sum.index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.float32))
        probability_sum = probability_sum.index_add(0, documents, probabilities)
    if batch.sequence is not None and batch.sequence.ranks is not None:
        # Of whole documents; the sum over ranks of what is linear in the probabilities is exact.
        for counted in (sizes, weights, chosen_sum):
            dist.all_reduce(counted, group=batch.sequence.ranks)
    rows = (sizes * len(logits)).clamp(min=1).unsqueeze(1)
    shares = chosen_sum.view(-1, num_experts) / rows
    by_document = num_experts * (shares * (probability_sum / rows)).sum(1)
    return (by_document * weights)[:num_documents].sum()


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
