"""A model cut into pipeline stages: each rank computes some of its layers, by the model's forward.

Every rank has all modules under their own names. Those of other stages hold weights on `meta`, and
a `forward` that only passes hidden states on, so that rotary embeddings, masks and documents are
computed as in the whole model, without a line per family. A later stage starts behind a module of
an earlier one, which returns the hidden states that it has received: as a forward of its own, not a
hook on the next layer, whose recompute would read those of a later micro-batch.

A pass runs one section, for a schedule, or all of them in turn, without gradients: each rank then
sends its hidden states on, and all ranks return the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.model.head import LossHead
from app.model.layers import decoder_layers
from common.errors import UserError


@dataclass(frozen=True, slots=True)
class Section:
    """A stage: the layers [first, stop), computed by a rank of the pipeline."""

    number: int
    first: int
    stop: int
    rank: int


class Stages:
    """The sections of a model on this rank of a pipeline, whose other modules it replaces.

    `group`: the ranks of the pipeline, in the order of their first stages. `bounds`: the layers
    [first, stop) of each stage. `dtype`: that of the hidden states between two stages.
    """

    def __init__(
        self,
        model: Any,
        group: dist.ProcessGroup,
        bounds: Sequence[tuple[int, int]],
        dtype: torch.dtype,
    ) -> None:
        self.model, self.dtype = model, dtype
        self.group, self.rank = group, group.rank()
        names = decoder_layers(model, "model.wrap_class=NAME")
        self.layers = [model.get_submodule(name) for name in names]
        self._slots = [model.get_submodule(name.rpartition(".")[0]) for name in names]
        self.first_ends, self.last_ends = _ends(model, names)
        self.sections = [
            Section(number, *bound, number % group.size()) for number, bound in enumerate(bounds)
        ]
        self.own = [section for section in self.sections if section.rank == self.rank]
        self.active: Section | None = None
        """the section that runs alone; None if all ranks run the whole model"""
        self._passed: Tensor | None = None
        """hidden states on their way into the active section, or out of it"""
        head = model.get_output_embeddings()
        if not isinstance(head, LossHead):
            raise UserError(
                f"strategy.pipeline_parallel_size: the head is a {type(head).__name__}, and the "
                "last stage can only hold one without an adapter; type strategy=fsdp"
            )
        self._replace(head)

    @property
    def has_first(self) -> bool:
        return self.rank == self.sections[0].rank

    @property
    def has_last(self) -> bool:
        return self.rank == self.sections[-1].rank

    def foreign_modules(self) -> list[torch.nn.Module]:
        """Return the layers and ends that other ranks compute."""
        kept = {number for section in self.own for number in range(section.first, section.stop)}
        layers = [layer for number, layer in enumerate(self.layers) if number not in kept]
        first = [] if self.has_first else self.first_ends
        return [*layers, *first, *([] if self.has_last else self.last_ends)]

    def modules_of(self, section: Section) -> list[torch.nn.Module]:
        """Return the layers of a section, and the end before or after them."""
        layers = self.layers[section.first : section.stop]
        first = [] if section.number else self.first_ends
        return [*first, *layers, *(self.last_ends if section == self.sections[-1] else [])]

    def own_ends(self) -> list[torch.nn.Module]:
        """Return the ends that this rank computes."""
        first = self.first_ends if self.has_first else []
        return [*first, *(self.last_ends if self.has_last else [])]

    def sources(self) -> list[tuple[torch.nn.Module, int]]:
        """Return each layer and end with its rank; of a tied weight, the first one counts."""
        first, last = self.sections[0].rank, self.sections[-1].rank
        found = [(end, first) for end in self.first_ends]
        for section in self.sections:
            found += [(layer, section.rank) for layer in self.layers[section.first : section.stop]]
        return found + [(end, last) for end in self.last_ends]

    @property
    def width(self) -> int:
        """Width of the hidden states between two stages."""
        return int(self.model.get_input_embeddings().embedding_dim)

    def trains_before(self, number: int) -> bool:
        """Return whether weights below the layer `number` train, so that gradients reach them."""
        below = (*self.first_ends, *self.layers[:number]) if number else ()
        return any(weight.requires_grad for module in below for weight in module.parameters())

    @contextmanager
    def running(self, section: Section, hidden: Tensor) -> Iterator[None]:
        """Run only `section` in this context, on `hidden` [rows, tokens, width].

        Afterwards `take_output` returns what it passes on, unless it is the last one.
        """
        others = {
            number: _Skip(self.layers[number])
            for other in self.own
            if other is not section
            for number in range(other.first, other.stop)
        }
        for number, skip in others.items():
            self._put(number, skip)
        self.active, self._passed = section, hidden
        try:
            yield
        finally:
            self.active = None
            for number in others:
                self._put(number, self.layers[number])

    def take_output(self) -> Tensor:
        """Return the hidden states behind the last section that ran."""
        passed, self._passed = self._passed, None
        assert passed is not None
        return passed

    def pass_on(self, number: int, hidden: Tensor) -> Tensor:
        """Return the input of the layer after `number`, which another rank computes."""
        section = self.active
        if section is not None:
            if number == section.stop:
                self._passed = hidden
            return self.take_output() if number == section.first - 1 else hidden
        for own in self.own:
            if number == own.stop:
                rank = self.sections[own.number + 1].rank
                assert hidden.dtype == self.dtype
                dist.send(hidden.contiguous(), group=self.group, group_dst=rank)
            if number == own.first - 1:
                rank = self.sections[own.number - 1].rank
                hidden = hidden.new_empty(hidden.shape)
                dist.recv(hidden, group=self.group, group_src=rank)
        return hidden

    def share(self, tensor: Tensor) -> Tensor:
        """Return the last stage's `tensor` on all ranks; others pass an empty one of its shape."""
        dist.broadcast(tensor, group=self.group, group_src=self.sections[-1].rank)
        return tensor

    def _put(self, number: int, module: torch.nn.Module) -> None:
        # Not with `setattr`, which would look for it among parameters and buffers as well.
        numbers = [n for n, slot in enumerate(self._slots) if slot is self._slots[number]]
        self._slots[number]._modules[str(numbers.index(number))] = module

    def _replace(self, head: Any) -> None:
        foreign: Any
        for number, layer in enumerate(self.layers):
            if not any(own.first <= number < own.stop for own in self.own):
                layer.forward = _ForeignLayer(self, number)
        for foreign in () if self.has_first else self.first_ends:
            foreign.forward = _ForeignEmbedding(foreign, self.dtype)
        for foreign in () if self.has_last else self.last_ends:
            foreign.forward = _same
        head.forward = _Head(self, head)


def _same(hidden: Tensor) -> Tensor:
    """Pass hidden states on: the norm of the last stage, on other ranks."""
    return hidden


class _Skip(torch.nn.Module):
    """Stands for an own layer of another section, with the attributes that models read of it."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, str):
                setattr(self, name, value)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


@dataclass(frozen=True, slots=True)
class _ForeignLayer:
    """Forward of a layer of another rank."""

    stages: Stages
    number: int

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if (cache := kwargs.get("past_key_values")) is not None:
            # Models read the number of earlier tokens from the cache of their first layer.
            length = hidden[:, None, :, :1]
            cache.update(length, length, self.number)
        return self.stages.pass_on(self.number, hidden)


@dataclass(frozen=True, slots=True)
class _ForeignEmbedding:
    """Forward of the first stage's embedding on other ranks: zeros, which take no memory."""

    module: torch.nn.Embedding
    dtype: torch.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        zero = torch.zeros((), dtype=self.dtype, device=ids.device)
        return zero.expand(*ids.shape, self.module.embedding_dim)


@dataclass(frozen=True, slots=True)
class _Head:
    """Forward of the head: its loss or logits on the rank of the last stage, sent to the others.

    Nothing while another section runs alone.
    """

    stages: Stages
    head: Any

    def __call__(self, hidden: Tensor) -> Tensor:
        stages, head = self.stages, self.head
        if stages.active not in (None, stages.sections[-1]):
            return hidden.new_empty(*hidden.shape[:2], 0)
        targets = head.targets if isinstance(head, LossHead) else None
        if stages.has_last:
            output: Tensor = type(head).forward(head, hidden)
            if stages.active is not None:
                return output
            if targets is None:
                return stages.share(output.contiguous())
            stages.share(head.computed[1])
            return output
        if targets is None:
            dtype, device = head.weight.dtype, hidden.device.type
            if torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)
            shape = *hidden.shape[:-1], len(head.weight)
            return stages.share(hidden.new_empty(shape, dtype=dtype))
        head.targets = None
        found = stages.share(hidden.new_empty(targets.labels.numel(), dtype=torch.float32))
        weights = targets.loss_weights  # none: they are log-probabilities
        head.computed = (found if weights is None else (found * weights.flatten()).sum()), found
        return hidden.new_empty(*hidden.shape[:2], 0)


def _ends(model: Any, names: Sequence[str]) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """Return the modules with weights outside of the layers: before the first, after the last."""
    ends: tuple[list[torch.nn.Module], list[torch.nn.Module]] = [], []
    found, is_after = [*names], False
    for name, module in model.named_modules():
        is_after = is_after or name == names[0]
        holds_layers = not name or any(layer.startswith(f"{name}.") for layer in names)
        is_inside = any(name == each or name.startswith(f"{each}.") for each in found)
        if holds_layers or is_inside or not any(True for _ in module.parameters()):
            continue
        found.append(name)
        ends[is_after].append(module)
        if not is_after and not isinstance(module, torch.nn.Embedding):
            raise UserError(
                f"strategy.pipeline_parallel_size: {name} is a {type(module).__name__}, and the "
                "first stage can only hold embeddings that train as they are; type strategy=fsdp"
            )
    return ends
