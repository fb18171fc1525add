"""Local SGD: nodes or sites train independently and average their weights every few steps.

Post-local SGD (arXiv 1808.07217): the first steps average gradients over all nodes. Then each node
steps by its own gradients, sharded over its ranks by FSDP2, with its own optimizer states. Every
`sync_every_steps` steps, and after the last one, the trainable weights become their mean over the
nodes, or the result of an outer Nesterov step towards that mean (DiLoCo, arXiv 2311.08105).

Between two averages, validations and saved models use the mean. A checkpoint holds the mean, which
any strategy can resume from, and the state of each rank, which makes a resume bit-identical.

Sites keep their rows, and share nothing but trained weights: each is a run of its own, with its
files, folder, metrics and checkpoints. The mean is weighted by the tokens that each site has
trained on since the last one (federated averaging, arXiv 1602.05629). The first site sums: it
receives the weights and the number of tokens of each other site, which receive the mean only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from app.model.adapter import trainable_weights
from app.process.heartbeat import refresh_liveness
from app.process.launch import is_first_rank
from app.process.signals import signal_received
from app.strategy.fsdp import Fsdp
from app.strategy.mixin import ShardedTensor, StateTensor, local
from app.strategy.rendezvous import STORE_POLL_SECONDS, listen
from app.strategy.settings import TIMEOUT, LocalSgdConfig
from common.errors import Interrupted, UserError

if TYPE_CHECKING:
    from data_modules import Batch

log = logging.getLogger(__name__)

_BUCKET_SIZE = 2**24
"""elements that nodes average in one message: 64 MiB in fp32"""
_T = TypeVar("_T")
_MESSAGE_SIZE = 2**20
"""elements of a message: 4 MiB, of the 8 MiB that a value of the store may have"""
_SIGNAL_SECONDS = 5.0
"""how long a site that is to end still waits for another, to save a step that all have made"""
_SHARED = ("train/loss", "val/loss", "train/tokens")
"""what each site sends with strategy.share_counts"""
_AGAIN = "end all sites, and type the same commands with resume=auto"


class LocalSgd(Fsdp):
    """FSDP2 within each node, local SGD between nodes."""

    norms_differ = True

    def __init__(self, config: LocalSgdConfig) -> None:
        super().__init__(config)
        self.local_config = config
        self._weights_differ = False
        """whether nodes have stepped independently since their last average"""
        self._moments_differ = False
        """whether nodes have ever stepped independently: optimizer states are never averaged"""
        self._own_weights: dict[torch.nn.Parameter, Tensor] = {}
        """this rank's weights while the model holds the mean"""
        self._anchor: dict[torch.nn.Parameter, Tensor] = {}
        """fp32 weights after the last outer step; empty without an outer optimizer"""
        self._momentum: dict[torch.nn.Parameter, Tensor] = {}
        """momentum of the outer optimizer"""

    @property
    def _gradient_mesh(self) -> DeviceMesh:
        """The ranks of this node: FSDP averages gradients within a node only."""
        return self.device_mesh["shard"]

    def _sum_over_ranks(self, squares: Tensor) -> None:
        dist.all_reduce(squares, group=self.device_mesh["shard"].get_group())

    def _num_copies(self, weight: Tensor) -> int:
        return super()._num_copies(weight) // self.device_mesh["replicate"].size()

    def _weights(self) -> list[torch.nn.Parameter]:
        return [weight for weight in self.model_root.parameters() if weight.requires_grad]

    # Step

    @torch.no_grad()
    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip by the norm over all ranks in synchronous steps, else by this node's norm."""
        weights = self._weights()
        if self._num_steps() < self.local_config.synchronous_steps:
            for weight in weights:
                if weight.grad is None:  # no token of this node has reached this weight
                    weight.grad = torch.zeros_like(weight)
            self._average(local(weight.grad) for weight in weights if weight.grad is not None)
        else:
            if not self._weights_differ and not self._anchor:
                self._set_anchor()
            self._weights_differ = self._moments_differ = True
        return super().clip(optimizer, max_norm)

    def _num_steps(self) -> int:
        step: int = self.lightning_module.trainer.global_step
        return step

    @torch.no_grad()
    def end_step(self, step: int, *, is_last: bool) -> None:
        """Average the weights over the nodes every `sync_every_steps` and after the last step."""
        if self._weights_differ and (is_last or self._averages_after(step)):
            self._average(local(weight.detach()) for weight in self._weights())
            self._take_outer_step()
            self._weights_differ = False

    def _averages_after(self, step: int) -> bool:
        config = self.local_config
        return (step - config.synchronous_steps) % config.sync_every_steps == 0

    def _average(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their fp32 means over the nodes; all ranks pass the same tensors."""
        mesh = self.device_mesh["replicate"]
        for bucket in _split_into_buckets(tensors):
            flat = torch.cat([tensor.reshape(-1).float() for tensor in bucket])
            dist.all_reduce(flat, group=mesh.get_group())
            flat /= mesh.size()
            parts = flat.split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def _set_anchor(self) -> None:
        if not self.local_config.uses_outer_optimizer:
            return
        for weight in self._weights():
            self._anchor[weight] = local(weight.detach()).to(torch.float32, copy=True)
            self._momentum[weight] = torch.zeros_like(self._anchor[weight])

    def _take_outer_step(self) -> None:
        """Step from the anchor towards the mean, which the model holds, by SGD with Nesterov."""
        if not self._anchor:  # also if a run has resumed between two averages without an anchor
            self._set_anchor()
            return
        config = self.local_config
        for weight in self._weights():
            mean, anchor = local(weight.detach()), self._anchor[weight]
            pseudo_gradient = anchor - mean
            momentum = self._momentum[weight].mul_(config.outer_momentum).add_(pseudo_gradient)
            update = pseudo_gradient.add_(momentum, alpha=config.outer_momentum)
            anchor.sub_(update, alpha=config.outer_lr)
            mean.copy_(anchor)

    # Evaluation

    @torch.no_grad()
    def load_averaged_weights(self) -> None:
        """Load the mean over the nodes into the model, for evaluation or saving."""
        if self._weights_differ and not self._own_weights:
            weights = {weight: local(weight.detach()) for weight in self._weights()}
            self._own_weights = {weight: own.clone() for weight, own in weights.items()}
            self._average(weights.values())

    @torch.no_grad()
    def load_local_weights(self) -> None:
        for weight, own in self._own_weights.items():
            local(weight.detach()).copy_(own)
        self._own_weights = {}

    # State

    def weight_state(self, weight: torch.nn.Parameter) -> StateTensor:
        """Return the mean of a weight over the nodes, for a checkpoint."""
        if self._weights_differ and not self._own_weights:
            return self._mean_state(weight.detach())
        return super().weight_state(weight)

    def optimizer_state_of(
        self, optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter
    ) -> dict[str, Any]:
        """Return the optimizer state of a weight by key, averaged over the nodes."""
        if not self._moments_differ:
            return super().optimizer_state_of(optimizer, weight)
        return {
            key: self._mean_state(value) if value.shape == weight.shape else value
            for key, value in optimizer.state.get(weight, {}).items()
        }

    def _mean_state(self, tensor: Tensor) -> ShardedTensor:
        return ShardedTensor(tensor.shape, tensor.dtype, partial(self._full_mean, tensor))

    @torch.no_grad()
    def _full_mean(self, tensor: Tensor) -> Tensor:
        mean = tensor.clone()
        self._average([local(mean)])
        return self._full(mean, None)

    def local_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return this rank's weights and states without a copy; empty in synchronous steps."""
        return self._own_state(optimizer) if self._moments_differ else {}

    def _own_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        own: dict[str, Tensor] = {}
        for trained in trainable_weights(self.model_root):
            weight = trained.parameter
            states = {"weight": self._own_weights.get(weight, weight.detach())}
            states |= optimizer.state.get(weight, {})
            if self._anchor:
                states |= {"anchor": self._anchor[weight], "momentum": self._momentum[weight]}
            own |= {f"{key}/{trained.name}": local(value) for key, value in states.items()}
        return own

    @torch.no_grad()
    def restore_local_state(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]
    ) -> None:
        """Restore this rank's weights and states.

        If any rank has none in the checkpoint, or shards of another size, all nodes start from the
        mean.
        """
        num_steps = self._num_steps()
        # The checkpoint of another strategy has other tensors here.
        has_own = any(name.startswith("weight/") for name in state)
        if has_own and any(name.startswith("anchor/") for name in state):
            self._set_anchor()
        own = self._own_state(optimizer)
        fits = has_own and all(
            own[name].shape == state[name].shape for name in own.keys() & state.keys()
        )
        fits_everywhere = torch.tensor(int(fits), device=self.root_device)
        dist.all_reduce(fits_everywhere, op=dist.ReduceOp.MIN)  # all ranks take the same branch
        if not fits_everywhere.item():
            self._anchor, self._momentum = {}, {}
            if num_steps > self.local_config.synchronous_steps and is_first_rank():
                log.info("RESUME: every node starts from the mean of the nodes' weights")
            return
        if differing := sorted(own.keys() ^ state.keys()):
            places = ("this run", "the checkpoint")
            present, missing = places if differing[0] in own else reversed(places)
            raise UserError(
                f"resume: this rank's tensor {differing[0]!a} is in {present}, but not in {missing}"
                "; resume with the settings that the checkpoint was made with (the run's "
                "config.yaml)"
            )
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self._moments_differ = True
        self._weights_differ = not self._averages_after(num_steps)


def _split_into_buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(member.numel() for member in bucket) >= _BUCKET_SIZE:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


class SiteSgd(LocalSgd):
    """FSDP2 within a site, federated averaging between sites.

    Between two means a site validates and saves its own weights, so that it waits for the others
    nowhere else.
    """

    def __init__(self, config: LocalSgdConfig) -> None:
        super().__init__(config)
        self._link: _Link
        self._has_compared = False
        self._step_weight: float | Tensor = 0.0
        """weight of the tokens of this site's current step"""
        self._round_weight = torch.zeros((), dtype=torch.float64)
        """weight of the tokens of this site's steps since the last mean"""

    def setup_environment(self) -> None:
        """Connect the ranks of this site, and each of them with the first site."""
        super().setup_environment()
        self._link = _Link(self.local_config, self.global_rank)

    def setup(self, trainer: Any) -> None:
        """Name what the first site logs of the others."""
        super().setup(trainer)
        if self.local_config.share_counts and self.local_config.site == 1:
            others = range(2, self.local_config.sites + 1)
            self.lightning_module.metrics.add_columns(
                [f"sites/{site}/{name}" for site in others for name in _SHARED]
            )

    def run_micro_batches(
        self, batches: Sequence[Batch], loss: Callable[[Batch], Tensor]
    ) -> Tensor:
        """Run the passes of a step, and remember the weight of the site's tokens in it."""
        self._step_weight = batches[0].step_weight
        return super().run_micro_batches(batches, loss)

    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip by the norm of this site's gradients."""
        if not self._has_compared:
            self._compare_sites()
        self._round_weight += float(self._step_weight)
        return super().clip(optimizer, max_norm)

    def _compare_sites(self) -> None:
        config, step, digest = self.local_config, self._num_steps(), hashlib.sha256()
        weights = [local(each.parameter.detach()) for each in trainable_weights(self.model_root)]
        for weight in weights:
            digest.update(weight.cpu().contiguous().view(torch.uint8).numpy())
        self._link.compare(
            step,
            {
                "strategy.sites": config.sites,
                "strategy.sync_every_steps": config.sync_every_steps,
                "strategy.outer_lr": config.outer_lr,
                "strategy.outer_momentum": config.outer_momentum,
                "strategy.share_counts": config.share_counts,
                "trainer.max_steps": self.lightning_module.total_steps,
                "the number of a rank's trainable weights": sum(map(Tensor.numel, weights)),
                "the first weights (model, adapter, seed)": None if step else digest.hexdigest(),
            },
        )
        self._has_compared = True

    def end_step(self, step: int, *, is_last: bool) -> None:
        """Average the weights over the sites every `sync_every_steps` and after the last step."""
        self._link.step = step
        averages = self._weights_differ and (is_last or self._averages_after(step))
        super().end_step(step, is_last=is_last)
        if averages and self.local_config.share_counts:
            self._share_counts(step)
        if not self._weights_differ:
            self._round_weight.zero_()
        if is_last:
            self._link.close()

    def _share_counts(self, step: int) -> None:
        """Send this site's losses and tokens before `step`; log those of the others."""
        module = self.lightning_module
        module.metrics.flush(module.sum_over_ranks)
        if self.global_rank != 0:
            return
        latest = module.metrics.latest | {"train/tokens": float(module.metrics.num_tokens)}
        others = self._link.gather({name: latest[name] for name in _SHARED if name in latest})
        for logger in module.metrics.loggers if others else ():
            logger.log_metrics(
                {
                    f"sites/{site}/{name}": value
                    for site, facts in others.items()
                    for name, value in facts.items()
                },
                step=step,
            )

    def _average(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their weighted fp32 means over the sites."""
        tensors = list(tensors)
        own = torch.cat([tensor.reshape(-1).float().cpu() for tensor in tensors])
        mean = self._link.mean(own, float(self._round_weight))
        for tensor, part in zip(tensors, mean.split(list(map(Tensor.numel, tensors))), strict=True):
            tensor.copy_(part.view_as(tensor))

    # Between two means

    def load_averaged_weights(self) -> None:
        """Keep this site's own weights."""

    def weight_state(self, weight: torch.nn.Parameter) -> StateTensor:
        """Return this site's own weight."""
        return Fsdp.weight_state(self, weight)

    def optimizer_state_of(
        self, optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter
    ) -> dict[str, Any]:
        """Return this site's own optimizer state of a weight by key."""
        return Fsdp.optimizer_state_of(self, optimizer, weight)

    def _own_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        return super()._own_state(optimizer) | {"tokens/since the last mean": self._round_weight}


class _Link:
    """One rank's messages to the same rank of other sites, through a store at the first site.

    Only the first site listens. OSError if a site is lost, or sends nothing for `TIMEOUT`.
    """

    def __init__(self, config: LocalSgdConfig, rank: int) -> None:
        assert config.meeting_point is not None
        host, port = config.meeting_point
        self._site, self._sites, self._address = config.site, config.sites, f"{host}:{port}"
        self.step = 0
        """the step after which the sites average"""
        self._start = 0
        """the step that this site starts or resumes from"""
        self._sent: list[str] = []
        """keys of the last mean"""
        listening: dict[str, Any] = {}
        if self._site == 1 and rank == 0:
            listening["master_listen_fd"] = listen(port, host)
        store = self._ask(
            lambda: dist.TCPStore(
                host,
                port,
                is_master=bool(listening),
                timeout=TIMEOUT,
                wait_for_workers=False,
                **listening,
            )
        )
        self._store = dist.PrefixStore(f"rank {rank}", store)

    def compare(self, step: int, facts: dict[str, Any]) -> None:
        """Tell the others where this site starts; UserError if their facts differ from its own."""
        self._start = step
        self._set_past(step)
        self._set(f"facts/{self._site}", json.dumps(facts).encode())
        for site in range(1, self._sites + 1):
            others = json.loads(self._get(f"facts/{site}", site))
            for name, value in facts.items():
                if others[name] != value and None not in (others[name], value):
                    raise UserError(
                        f"sites: {name} is {value} on site {self._site}, and {others[name]} on "
                        f"site {site}; type the same on every site, but for data, strategy.site "
                        "and output.dir"
                    )

    def mean(self, own: Tensor, weight: float) -> Tensor:
        """Return the mean of the sites' fp32 vectors in proportion to their weights."""
        parts = own.split(_MESSAGE_SIZE)
        if self._site == 1:
            self._sum(parts, weight)
        else:
            self._set(self._key("weight", self._site), str(weight).encode())
            for number, part in enumerate(parts):
                self._set(self._key(number, self._site), part.numpy().tobytes())
        keys = [self._key(number, "mean") for number in range(len(parts))]
        return torch.cat([_vector(self._get(key)) for key in keys])

    def _sum(self, own: Sequence[Tensor], weight: float) -> None:
        """Receive the vectors of the other sites, and send the mean."""
        others = range(2, self._sites + 1)
        weights = [float(self._get(self._key("weight", site), site)) for site in others]
        total = weight + sum(weights)
        sent = []
        for number, part in enumerate(own):
            mean = part * (weight / total)
            for site, each in zip(others, weights, strict=True):
                key = self._key(number, site)
                mean += _vector(self._get(key, site)) * (each / total)
                self._remove(key)
            sent.append(self._key(number, "mean"))
            self._set(sent[-1], mean.numpy().tobytes())
        # Every site has the mean before this one, since it has sent weights after it.
        for key in self._sent:
            self._remove(key)
        if self._sent:
            self._set_past(int(self._sent[0].partition("/")[0]))
        self._sent = sent

    def gather(self, facts: dict[str, float]) -> dict[int, dict[str, float]]:
        """Send facts to the first site, which gets those of the others, by site."""
        if self._site != 1:
            self._set(self._key("counts", self._site), json.dumps(facts).encode())
            return {}
        keys = {site: self._key("counts", site) for site in range(2, self._sites + 1)}
        found = {site: json.loads(self._get(key, site)) for site, key in keys.items()}
        for key in keys.values():
            self._remove(key)
        return found

    def close(self) -> None:
        """Wait at the first site until the others have the last mean."""
        self._set(f"done/{self._site}", b"")
        for site in range(2, self._sites + 1) if self._site == 1 else ():
            self._get(f"done/{site}", site)

    def _key(self, what: int | str, whose: int | str) -> str:
        return f"{self.step}/{what}/{whose}"

    def _set_past(self, step: int) -> None:
        """Say that this site neither gives nor needs what belongs to steps up to `step`."""
        self._set(f"past/{self._site}", str(step).encode())

    def _set(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(key, value))

    def _remove(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key))

    def _get(self, key: str, site: int = 1) -> bytes:
        """Return what a site sets, once it has."""
        unsignalled = time.monotonic()
        until = unsignalled + TIMEOUT.total_seconds()
        of_step = key.startswith(f"{self.step}/")
        while not self._ask(lambda: self._store.check([key])):
            refresh_liveness()
            if of_step and (past := int(self._get(f"past/{site}", site))) >= self.step:
                raise UserError(
                    f"sites: site {site} has gone on from step {past}, and this one from step "
                    f"{self._start}: end all sites, remove the checkpoints that not every site has "
                    f"(on site {site} those after step {self._start}), and type the same commands "
                    "with resume=auto"
                )
            if time.monotonic() > until:
                raise OSError(f"sites: site {site} has sent nothing for {TIMEOUT}; {_AGAIN}")
            if (signum := signal_received()) is None:
                unsignalled = time.monotonic()
            elif time.monotonic() - unsignalled > _SIGNAL_SECONDS:
                raise Interrupted(signum, f"site {site} did not answer; this step is not saved")
            time.sleep(STORE_POLL_SECONDS)
        value: bytes = self._ask(lambda: self._store.get(key))
        return value

    def _ask(self, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except (dist.DistError, OSError) as error:
            raise OSError(f"sites: no answer at {self._address} ({error}); {_AGAIN}") from error


def _vector(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.float32)
