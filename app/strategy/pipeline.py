"""Pipeline parallelism: ranks hold stages of the model, and pass micro-batches through them.

Every rank has all modules under their own names. Those of other stages hold weights on `meta`, and
a `forward` that only passes hidden states on, so that rotary embeddings, masks and documents are
computed as in the whole model, without a line per family. A later stage starts behind a module of
an earlier one, which returns the hidden states that it has received: as a forward of its own, not a
hook on the next layer, whose recompute would read those of a later micro-batch.

The schedules are PyTorch's (1F1B, arXiv 2006.09503; interleaved, arXiv 2104.04473). The mesh of
FSDP has one more dimension, the outermost: a stage may itself be sharded over its ranks. A pass
runs one section, for a schedule, or all of them in turn, without gradients: each rank then sends
its hidden states on, and all ranks return the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from app.model.head import LossHead
from app.model.layers import decoder_layers
from app.strategy.fsdp import Fsdp
from app.strategy.mixin import Allocate, BuildModel, ShardedTensor, StateTensor, local
from app.strategy.settings import PipelineConfig
from common.errors import UserError
from data_modules import Batch

_Described = dict[str, tuple[torch.Size, torch.dtype]]
"""shape and dtype of each optimizer state of a weight"""


@dataclass(frozen=True, slots=True)
class _Section:
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
            _Section(number, *bound, number % group.size()) for number, bound in enumerate(bounds)
        ]
        self.own = [section for section in self.sections if section.rank == self.rank]
        self.active: _Section | None = None
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
        return [module for module, rank in self.sources() if rank != self.rank]

    def modules_of(self, section: _Section) -> list[torch.nn.Module]:
        """Return the layers of a section, and the end before or after them."""
        layers = self.layers[section.first : section.stop]
        first = [] if section.number else self.first_ends
        return [*first, *layers, *(self.last_ends if section == self.sections[-1] else [])]

    def sources(self) -> list[tuple[torch.nn.Module, int]]:
        """Return each layer and end with its rank; of a tied weight, the first one counts."""
        first, last = self.sections[0].rank, self.sections[-1].rank
        found = [(end, first) for end in self.first_ends]
        for section in self.sections:
            found += [(layer, section.rank) for layer in self.layers[section.first : section.stop]]
        return found + [(end, last) for end in self.last_ends]

    def trains_before(self, number: int) -> bool:
        """Return whether weights below the layer `number` train, so that gradients reach them."""
        below = (*self.first_ends, *self.layers[:number]) if number else ()
        return any(weight.requires_grad for module in below for weight in module.parameters())

    @contextmanager
    def running(self, section: _Section, hidden: Tensor) -> Iterator[None]:
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
        others = self.foreign_modules()
        for number, layer in enumerate(self.layers):
            if layer in others:
                layer.forward = _ForeignLayer(self, number)
        for foreign in () if self.has_first else self.first_ends:
            foreign.forward = _ForeignEmbedding(foreign, self.dtype)
        for foreign in () if self.has_last else self.last_ends:
            foreign.forward = lambda hidden: hidden
        head.forward = _Head(self, head)


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


class Pipeline(Fsdp):
    """Stages of a model, each on a rank of a pipeline, or on the ranks that shard it.

    All ranks hold all modules; weights of other stages are on `meta`, and have no gradients. Names,
    parameter groups and checkpoints are therefore those of one process.
    """

    def __init__(self, config: PipelineConfig, bounds: Sequence[tuple[int, int]]) -> None:
        super().__init__(config)
        self.pipeline_size = config.pipeline_parallel_size
        self._bounds = bounds
        self._is_interleaved = config.schedule == "interleaved"
        self.stages: Stages
        self._sources: dict[torch.nn.Parameter, int] = {}
        """rank of the pipeline that holds a weight; of a tied one, the first"""
        self._tied: list[torch.nn.Parameter] = []
        """weights of both the first and the last stage"""
        self._described: dict[torch.nn.Parameter, _Described] = {}
        """optimizer states of the weights of other stages"""
        self._schedules: dict[tuple[int, torch.Size], Any] = {}
        self._step: tuple[Sequence[Batch], Callable[[Batch], Tensor]]
        """micro-batches of the current step, and their loss"""

    @property
    def holds_loss(self) -> bool:
        return self.stages.has_last

    @property
    def _group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.device_mesh["pipe"].get_group()
        return group

    # Model

    def build_model(self, build: BuildModel) -> Any:
        """Build the model and keep the weights of this rank's stages, read layer by layer."""

        def build_stages(**options: Any) -> Any:
            model = build(**options)
            embedding = model.get_input_embeddings()
            # Layers add to the hidden states of the embedding, in its dtype.
            is_sharded = self._gradient_mesh.size() > 1
            casts = is_sharded and self._computes_in_bf16(embedding)
            dtype = torch.bfloat16 if casts else embedding.weight.dtype
            self.stages = Stages(model, self._group, self._bounds, dtype)
            return model

        model = super().build_model(build_stages)
        for module, rank in self.stages.sources():
            for weight in module.parameters():
                self._sources.setdefault(weight, rank)
        first, last = (
            {weight for end in ends for weight in end.parameters()}
            for ends in (self.stages.first_ends, self.stages.last_ends)
        )
        self._tied = [weight for weight in model.parameters() if weight in first & last]
        return model

    def _shard(self, module: Any, *, reshard_after_forward: bool = True) -> None:
        """Free the weights of other stages; shard the others."""
        stages, foreign = self.stages, self.stages.foreign_modules()
        if module is stages.model:  # last: all weights have arrived, and tied ones are one object
            ends = (*stages.first_ends, *stages.last_ends)
            kept = {w for end in ends if end not in foreign for w in end.parameters()}
            freed: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
            for end in ends:
                _free_weights(end, kept, freed)
        elif module in foreign:
            if module in stages.layers:
                _free_weights(module, set(), {})
            return
        super()._shard(module, reshard_after_forward=reshard_after_forward)

    def setup(self, trainer: L.Trainer) -> None:
        """Set up optimizers as Lightning does, which would allocate all weights on `meta`."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    # Step

    def run_micro_batches(
        self, batches: Sequence[Batch], loss: Callable[[Batch], Tensor]
    ) -> Tensor:
        """Run the schedule of an optimizer step; return the sum of the losses of the last stage.

        Other ranks return 0. All micro-batches of a step have the same shape.
        """
        shape = batches[0].input_ids.shape
        assert all(batch.input_ids.shape == shape for batch in batches), "packs are padded"
        schedule = self._schedule(len(batches), shape)
        self._step = batches, loss
        for section in self.stages.own:
            self._set_last_backward(section, is_last=False)
        numbers = torch.arange(len(batches))
        first = [torch.zeros(len(batches), 1)] if self.stages.has_first else []
        losses: list[Tensor] = []
        options = {"target": numbers, "losses": losses} if self.holds_loss else {}
        schedule.step(*first, **options, return_outputs=False, number=numbers)
        total = torch.zeros((), device=self.root_device)
        return sum((each.detach().squeeze() for each in losses), total)

    def _schedule(self, num_batches: int, shape: torch.Size) -> Any:
        key = num_batches, shape
        if key not in self._schedules:
            stages = [self._stage(section, shape) for section in self.stages.own]
            build: Any = ScheduleInterleaved1F1B if self._is_interleaved else Schedule1F1B
            parts = stages if self._is_interleaved else stages[0]
            # The last stage has computed the loss already. Gradients of a step add up: by default,
            # PyTorch would divide them by their number.
            self._schedules[key] = build(
                parts, num_batches, loss_fn=lambda output, _: output.sum(), scale_grads=False
            )
        return self._schedules[key]

    def _stage(self, section: _Section, shape: torch.Size) -> PipelineStage:
        """Return PyTorch's stage of a section, with the shapes that it receives and sends.

        Without them PyTorch would run a further pass to see them, which draws random numbers and
        keeps its activations for good.
        """
        count = len(self.stages.sections)
        width = self.stages.model.get_input_embeddings().embedding_dim
        hidden = torch.empty(*shape, width, dtype=self.stages.dtype, device="meta")
        is_first, is_last = section.number == 0, section.number == count - 1
        trains_before = self.stages.trains_before(section.first)
        trains = self.stages.trains_before(section.stop)
        given = torch.empty(1, 1, device="meta")
        taken = torch.empty(1, device="meta", requires_grad=True)
        return PipelineStage(
            _Stage(partial(self._run_section, section)),
            *(section.number, count, self.root_device),
            input_args=(given if is_first else hidden.clone().requires_grad_(trains_before),),
            output_args=(taken if is_last else hidden.clone().requires_grad_(trains),),
            input_grads=(None if is_first or not trains_before else hidden,),
            output_grads=(None if is_last or not trains else hidden,),
            group=self._group,
        )

    def _run_section(self, section: _Section, hidden: Tensor, number: int) -> Tensor:
        """Return what a section makes of a micro-batch: hidden states, or the loss [1]."""
        batches, loss = self._step
        batch = batches[number].to(self.root_device, non_blocking=True)
        with self.stages.running(section, hidden):
            if section == self.stages.sections[-1]:
                output = self.run_forward(loss, batch).reshape(1).float()
            else:
                self.run_forward(self.lightning_module.run_layers, batch)
                output = self.stages.take_output()
        if number == len(batches) - 1 and output.requires_grad:
            output.register_hook(lambda _: self._set_last_backward(section, is_last=True))
        self.precision_plugin.post_backward(output, self.lightning_module)  # a sign of life
        return output

    def _set_last_backward(self, section: _Section, *, is_last: bool) -> None:
        """Have FSDP reduce a section's gradients in its last backward pass of a step only.

        Until then they are unsharded, and so are its weights.
        """
        for end in self.stages.modules_of(section):
            owner = self._owners.get(end)
            for module in {owner, *end.modules()}:
                if isinstance(module, FSDPModule):
                    module.set_requires_gradient_sync(is_last, recurse=False)
                    reshards = is_last or self.config.reshard_after_forward
                    module.set_reshard_after_backward(reshards, recurse=False)
        if isinstance(self.model_root, FSDPModule):
            self.model_root.set_is_last_backward(is_last)

    @torch.no_grad()
    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip by the norm over all stages; gradients of tied weights are summed before."""
        ends = self.stages.sections[0].rank, self.stages.sections[-1].rank
        if self._group.rank() in ends:
            other = ends[self._group.rank() == ends[0]]
            for gradient in (w.grad for w in self._tied if w.grad is not None):
                own = local(gradient)
                theirs = torch.empty_like(own)
                sent = dist.P2POp(dist.isend, own, group=self._group, group_peer=other)
                came = dist.P2POp(dist.irecv, theirs, group=self._group, group_peer=other)
                for work in dist.batch_isend_irecv([sent, came]):
                    work.wait()
                own += theirs
        return super().clip(optimizer, max_norm)

    def _num_copies(self, weight: Tensor) -> int:
        is_tied = any(weight is each for each in self._tied)
        return super()._num_copies(weight) * (1 + is_tied)

    def end_step(self, step: int, *, is_last: bool) -> None:
        """Tell the other stages the states of this one's weights, once there are any."""
        if self._described:
            return
        trained = [w for w in self.lightning_module.model.parameters() if w.requires_grad]
        optimizer = self.lightning_module.optimizer
        own = {
            number: {
                key: (value.shape, value.dtype)
                for key, value in super(Pipeline, self).optimizer_state_of(optimizer, w).items()
            }
            for number, w in enumerate(trained)
            if w in optimizer.state
        }
        found: list[dict[int, _Described]] = [{} for _ in range(self.pipeline_size)]
        dist.all_gather_object(found, own, group=self._group)
        for number, described in (pair for each in found for pair in each.items()):
            self._described.setdefault(trained[number], described)

    # State

    def full_tensor(self, weight: Tensor) -> Tensor:
        return self._gather(self._sources[weight], super().weight_state(weight))

    def weight_state(self, weight: torch.nn.Parameter) -> StateTensor:
        """Return a weight for a checkpoint, which its stage sends to the others."""
        return self._from_stage(weight, super().weight_state(weight))

    def optimizer_state_of(
        self, optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter
    ) -> dict[str, Any]:
        """Return the optimizer state of a weight by key, which its stage sends to the others."""
        states: Mapping[str, StateTensor] = super().optimizer_state_of(optimizer, weight)
        if weight.is_meta:
            states = {
                key: torch.empty(shape, dtype=dtype, device="meta")
                for key, (shape, dtype) in self._described.get(weight, {}).items()
            }
        return {key: self._from_stage(weight, value) for key, value in states.items()}

    def restore_weight(self, weight: torch.nn.Parameter, value: Tensor) -> None:
        """Copy this rank's part of a full tensor into a weight of its stages."""
        if not weight.is_meta:
            super().restore_weight(weight, value)

    def restore_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        weight: torch.nn.Parameter,
        states: Mapping[str, Tensor],
        allocate: Allocate,
    ) -> None:
        """Restore the states of a weight of this rank's stages; note those of others."""
        self._described[weight] = {key: (v.shape, v.dtype) for key, v in states.items()}
        if not weight.is_meta:
            super().restore_optimizer_state(optimizer, weight, states, allocate)

    def _from_stage(self, weight: torch.nn.Parameter, value: StateTensor) -> ShardedTensor:
        gather = partial(self._gather, self._sources[weight], value)
        return ShardedTensor(value.shape, value.dtype, gather)

    def _gather(self, source: int, value: StateTensor) -> Tensor:
        if self._group.rank() == source:
            full = value.gather() if isinstance(value, ShardedTensor) else value
            full = full.detach().to(self.root_device).contiguous()
        else:
            full = torch.empty(value.shape, dtype=value.dtype, device=self.root_device)
        dist.broadcast(full, group=self._group, group_src=source)
        return full


class _Stage(torch.nn.Module):
    """A section as a module of PyTorch's schedules, without the model as a submodule."""

    def __init__(self, run: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, hidden: Tensor, number: Tensor) -> Tensor:
        return self.run(hidden, int(number))


def _free_weights(
    root: torch.nn.Module,
    kept: set[torch.nn.Parameter],
    freed: dict[torch.nn.Parameter, torch.nn.Parameter],
) -> None:
    """Replace weights by ones on `meta`, except those in `kept`; tied ones stay tied by `freed`."""
    for module in root.modules():
        for name, weight in list(module._parameters.items()):
            if weight is None or weight in kept:
                continue
            if weight not in freed:
                meta = weight.detach().to("meta")
                freed[weight] = torch.nn.Parameter(meta, requires_grad=weight.requires_grad)
            module.register_parameter(name, freed[weight])
