"""Save checkpoints: when, what each rank contributes, and writing in the background.

All ranks stop after the same optimizer step when any of them has received a signal.
The checkpoint to resume from is passed in; this module never searches for one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from app.process import faults, signals
from app.process.heartbeat import waiting_for_thread
from app.process.launch import is_first_rank
from app.strategy.mixin import ShardedTensor, StateTensor
from app.training.checkpoint.checkpoint import Checkpoint, file_bytes, file_order, write_share
from app.training.checkpoint.disk import SaveError, check_space
from app.training.checkpoint.documents import (
    MODEL,
    OPTIMIZER,
    TRAINING,
    Json,
    local_state_name,
    random_state_name,
    read_training,
)
from app.training.checkpoint.state import random_state
from app.training.checkpoint.store import CHECKPOINTS, CheckpointStore
from app.training.metrics import Metrics, check_finite_state, is_measured_at
from app.training.trainer import (
    DEFAULT_MONITOR,
    CheckpointConfig,
    TrainerConfig,
    validation_interval,
)
from common.errors import Interrupted, TrainingFault, UserError

SAVES_PER_RUN = 10
"""checkpoints per run by default, in addition to those at the ends of epochs"""
_STORED_AS_TENSORS = ("state_dict", "optimizer_states")
_DERIVED_FROM_STEP = ("epoch", "global_step", "loops", "lr_schedulers")
_ALIGNMENT = 64
"""tensors in a buffer start at multiples of so many bytes"""
_ADDED_BY_US = ("pytorch-lightning_version", "training", "metric", "details")


class SignalSync:
    """Check once per optimizer step whether any rank has received a signal.

    The ranks exchange four bytes between their hosts; no GPU waits for them.
    """

    def __init__(self) -> None:
        self._hosts: Any = None
        """a gloo process group; None with a single rank"""

    def start(self, trainer: L.Trainer) -> None:
        """Defer signals to the end of a step from now on; all ranks must call this."""
        if trainer.world_size > 1:
            self._hosts = dist.new_group(backend="gloo")
            # Private API, tested with Lightning 2.6: it synchronizes ranks and GPUs at every
            # micro-batch to broadcast a SIGTERM (its #21487), and cannot be switched off.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        signals.restore_handlers()
        signals.defer_signals(True)

    def poll(self) -> int | None:
        """Return the signal that ends the run after this step, the same on all ranks, or None."""
        signum = signals.signal_received()
        if self._hosts is None:
            return signum
        highest = torch.tensor([signum or 0], dtype=torch.int32)
        torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX, group=self._hosts)
        return int(highest) or None


class CheckpointSaver(L.Callback):
    """Save checkpoints after optimizer steps, and after the validation of a step that has one.

    `is_due` returns whether a step is saved, `validates_after` whether a validation follows it.
    """

    def __init__(
        self,
        checkpoints: StoredCheckpoints,
        *,
        is_due: Callable[[int], bool],
        validates_after: Callable[[int], bool],
    ) -> None:
        self.checkpoints, self.store = checkpoints, checkpoints.store
        self.is_due, self.validates_after = is_due, validates_after
        self._checked_full_size = self._checked_local_state = False
        self._saved = 0 if checkpoints.source is None else checkpoints.source.step
        """step of the newest checkpoint"""
        self.signals = SignalSync()

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Reinstall our signal handlers, which Lightning has just replaced."""
        signals.restore_handlers()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Raise SaveError if the disk has no room for the states that already exist."""
        self._check_disk_space(trainer, pl_module)
        self.signals.start(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Wait for the last save; from then on signals end the process at once."""
        self._wait_for_all(trainer)
        if trainer.is_global_zero:  # it still has work to do
            signals.defer_signals(False)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        if not self.validates_after(trainer.global_step):
            self._finish_step(trainer, pl_module)

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Interrupt a validation on a signal; the resumed run starts with that validation."""
        if trainer.sanity_checking:
            return
        if (signum := self.signals.poll()) is not None:
            self._prepare(trainer, pl_module)
            pl_module.has_pending_validation = True
            self.save(trainer, pl_module)
            self._interrupt(trainer, signum)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._finish_step(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Save if a signal has interrupted the wait for the next step's data, or an evaluation.

        With several ranks, only if all have agreed to end: otherwise the others would be inside
        that step, waiting for this one.
        """
        agreed = signals.MeasurementInterrupted if trainer.world_size > 1 else signals.DataStalled
        if not isinstance(exception, agreed):
            return
        step, is_within_step = trainer.global_step, bool(pl_module.step_losses)
        if step > self._saved and not (is_within_step or trainer.sanity_checking):
            signals.suspend_deadline()
            pl_module.has_pending_validation = trainer.validating
            self._prepare(trainer, pl_module)
            self.save(trainer, pl_module)
            self._wait_for_all(trainer)
        signals.exit_after_grace()
        if self._saved:
            exception.message = f"{exception.message}; step {self._saved} is saved"

    def _finish_step(self, trainer: L.Trainer, module: Any) -> None:
        self.checkpoints.check()
        self._prepare(trainer, module)
        step = trainer.global_step
        is_saved = self.is_due(step) or module.stops_early or self._is_best(trainer, module.metrics)
        if is_saved:
            self.save(trainer, module)
        faults.fault_point("step", step)
        if (signum := self.signals.poll()) is not None:
            if not is_saved:
                self.save(trainer, module)
            self._interrupt(trainer, signum)

    def _is_best(self, trainer: L.Trainer, metrics: Metrics) -> bool:
        """Return, on all ranks alike, whether this step would be among the best that are kept."""
        metric = metrics.monitored_at(trainer.global_step)
        if metric is None or not self.store.keep_best:
            return False
        self._wait()
        is_best = trainer.is_global_zero and self.store.would_keep(metric)
        return bool(trainer.strategy.broadcast(is_best))

    def _prepare(self, trainer: L.Trainer, module: Any) -> None:
        """Check the disk space and reserve buffers once the optimizer's state exists."""
        if not self._checked_full_size:
            self._check_disk_space(trainer, module)
            self._checked_full_size = True
            if trainer.is_global_zero:
                self.checkpoints.reserve(*module.checkpoint_tensors())
        # With local SGD, ranks have a local state only from a later step on.
        if not self._checked_local_state and trainer.strategy.local_state(module.optimizer):
            self._check_disk_space(trainer, module)
            self._checked_local_state = True

    def _interrupt(self, trainer: L.Trainer, signum: int) -> None:
        self._wait_for_all(trainer)
        raise Interrupted(signum, f"step {trainer.global_step} is saved")

    def _wait_for_all(self, trainer: L.Trainer) -> None:
        """Wait on all ranks until rank 0 has written; the first rank to exit ends the others."""
        self._wait()
        trainer.strategy.barrier("the last checkpoint is written")

    def _wait(self) -> None:
        with waiting_for_thread():
            self.checkpoints.wait()

    def _check_disk_space(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            num_bytes = sum(map(file_bytes, module.checkpoint_tensors()))
            local = trainer.strategy.local_state(module.optimizer)
            num_bytes += trainer.world_size * file_bytes(local)
            check_space(self.store.folder, num_bytes, self.store.keep_last + self.store.keep_best)

    def save(self, trainer: L.Trainer, module: Any) -> None:
        """Save a checkpoint; all ranks must call this at the same step.

        TrainingFault if a value is not finite.
        """
        step, strategy = trainer.global_step, trainer.strategy
        # A step is saved only after its loss is known to be finite.
        module.metrics.flush(module.sum_over_ranks, pause=True)
        tensors = dict(zip((MODEL, OPTIMIZER), module.checkpoint_tensors(), strict=True))
        self._wait()
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                self.checkpoints.do_before_commit(logger.save)
            self.store.begin(step)
        else:
            faults.fault_point("save", step)
        strategy.barrier("a checkpoint has started")
        rank, device = trainer.global_rank, strategy.root_device
        random = random_state(device)
        local = strategy.local_state(module.optimizer)
        self._add_files(trainer, step, random, tensors, local)
        if rank == 0:
            self.checkpoints.receive_states(step, trainer.world_size, device)
        elif self.checkpoints.sends_states(rank):
            _send_state(random, local, device)
        strategy.barrier("all ranks have added their files")
        trainer.save_checkpoint(self.store.folder / f"step-{step}")
        self._saved = step

    def _add_files(
        self,
        trainer: L.Trainer,
        step: int,
        random: Json,
        tensors: Mapping[str, Mapping[str, StateTensor]],
        local: Mapping[str, Tensor],
    ) -> None:
        """Add this rank's files; if tensors are sharded, all ranks raise if one of them fails."""
        rank, num_ranks = trainer.global_rank, trainer.world_size
        failure: SaveError | TrainingFault | None = None
        try:
            # First, because other ranks gather with this one even if it cannot write.
            self.checkpoints.add_tensors(step, tensors, rank=rank, num_ranks=num_ranks)
            if self.checkpoints.sends_states(rank):
                check_finite_state(step, local)
            else:
                add_random = partial(self.store.add_document, step, random_state_name(rank), random)
                self.checkpoints.add_local_state(step, local, rank=rank)
                if rank == 0:
                    self.checkpoints.do_before_commit(add_random)
                else:
                    add_random()
        except (SaveError, TrainingFault) as error:
            failure = error
        everything = (tensor for named in tensors.values() for tensor in named.values())
        if num_ranks > 1 and any(isinstance(tensor, ShardedTensor) for tensor in everything):
            # A rank that cannot write fails the save of all ranks.
            failures: list[SaveError | TrainingFault | None] = [None] * num_ranks
            torch.distributed.all_gather_object(failures, failure)
            failure = next((error for error in failures if error is not None), None)
        if failure is not None:
            if trainer.is_global_zero:
                self.store.abandon(step)
            raise failure


def signals_of(trainer: L.Trainer) -> SignalSync:
    """Return what tells all ranks of a trainer whether any of them has received a signal."""
    (saver,) = (one for one in trainer.callbacks if isinstance(one, CheckpointSaver))
    return saver.signals


def build_checkpoints(
    config: CheckpointConfig,
    run: Path,
    source: Checkpoint | None,
    identity: Mapping[str, Any] | None = None,
    *,
    ends_with_best: bool = False,
    num_writers: int | None = None,
) -> StoredCheckpoints:
    """Build the CheckpointIO that writes to the folder `run` and reads `source`.

    `identity`: id and plan of the run, which its checkpoints record. `ends_with_best`: whether the
    run needs its best checkpoint at its end. `num_writers`: ranks, from 0 on, that see rank 0's
    folder; None: all do.
    """
    keep_best = max(config.keep_best, int(ends_with_best))
    store = CheckpointStore(run / CHECKPOINTS, keep_last=config.keep_last, keep_best=keep_best)
    writer = BackgroundWriter() if config.asynchronous else None
    return StoredCheckpoints(store, source, writer, identity, num_writers)


def build_saver(
    config: TrainerConfig,
    checkpoints: StoredCheckpoints,
    plan: Any,
    *,
    has_validation: bool,
    measure_every: int | None = None,
    loss_names: Collection[str] = (),
) -> CheckpointSaver:
    """Build the callback that saves checkpoints of a run with the given `plan` of steps.

    `measure_every`: optimizer steps between evaluations of tasks and generations; None without.
    `loss_names`: metrics that every validation measures, besides val/loss.
    """
    every, total_steps = config.checkpoint.every_steps, plan.num_steps
    validate_every = validation_interval(config, total_steps)
    # The default interval equals that of validations, whose losses can then rank the checkpoints.
    default_every = math.ceil(total_steps / SAVES_PER_RUN)

    def is_due(step: int) -> bool:
        if every is not None:
            return step % every == 0 or step == total_steps
        return step % default_every == 0 or plan.ends_epoch(step) or step == total_steps

    def validates_after(step: int) -> bool:
        return has_validation and (step == total_steps or step % validate_every == 0)

    if config.checkpoint.keep_best and total_steps > 1:
        validated = range(validate_every, total_steps, validate_every) if has_validation else ()
        is_loss = config.checkpoint.monitor in (DEFAULT_MONITOR, *loss_names)
        measured = validate_every if is_loss or measure_every is None else measure_every
        if not any(is_measured_at(step, measured, validate_every) for step in validated):
            raise UserError(_ranking_error(config, validate_every, has_validation, bool(validated)))
    return CheckpointSaver(checkpoints, is_due=is_due, validates_after=validates_after)


def _ranking_error(
    config: TrainerConfig, validate_every: int, has_validation: bool, is_validated: bool
) -> str:
    monitor = config.checkpoint.monitor
    if not has_validation:
        why, fix = "there are no validation rows", "data.val_set_size=0.05"
    elif not is_validated:
        smaller = max(1, validate_every // 2)
        why, fix = "only the last step is validated", f"trainer.validate_every_steps={smaller}"
    else:
        why, fix = "only the last step is evaluated", "a smaller evaluation.every_steps"
    return (
        f"trainer.checkpoint.keep_best ranks by {monitor}, but {why}; type {fix} or "
        "trainer.checkpoint.keep_best=0"
    )


class StoredCheckpoints(CheckpointIO):
    """Write checkpoints to `store` and read `source`, on every rank.

    With `writer`, training waits only for a copy to host memory, which a thread then writes; its
    errors are raised by the next `check`, `wait` or `teardown`.
    """

    def __init__(
        self,
        store: CheckpointStore,
        source: Checkpoint | None = None,
        writer: BackgroundWriter | None = None,
        identity: Mapping[str, Any] | None = None,
        num_writers: int | None = None,
    ) -> None:
        """`num_writers`: ranks, from 0 on, that see the store's folder; None: all do."""
        self.store, self.source, self.writer = store, source, writer
        self.num_writers = num_writers
        self.details = {} if identity is None else {"run": dict(identity)}
        self._before_commit: list[Callable[[], object]] = []
        """functions that the writer's thread calls before it commits the current save"""

    def reserve(
        self, model: Mapping[str, StateTensor], optimizer: Mapping[str, StateTensor]
    ) -> None:
        """Allocate host buffers for snapshots of these tensors; called on rank 0."""
        if self.writer is not None:
            self.writer.reserve({MODEL: model, OPTIMIZER: optimizer})

    def do_before_commit(self, work: Callable[[], object]) -> None:
        """Call `work` before the current save is committed: now, or in the writer's thread."""
        if self.writer is None:
            work()
        else:
            self._before_commit.append(work)

    def add_tensors(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, StateTensor]],
        *,
        rank: int,
        num_ranks: int,
    ) -> None:
        """Write this rank's share of `tensors`, by file and name, before the save is committed.

        All ranks must call this. TrainingFault if a value is not finite; the save is then removed.
        """
        if self.writer is not None:
            if rank == 0:  # asynchronous saves are refused with sharding strategies
                copies = {name: self.writer.snapshot(name, each) for name, each in tensors.items()}
                self._before_commit.append(partial(self._write_copies, step, copies))
            return
        write, check = partial(self.store.add_tensors, step), partial(check_finite_state, step)
        # If this rank fails, the others still need it for their gathers.
        failures: list[SaveError | TrainingFault] = []
        replicated = [
            {name: each for name, each in named.items() if not isinstance(each, ShardedTensor)}
            for named in tensors.values()
        ]
        try:
            check_finite_state(step, *replicated)
        except TrainingFault as failure:
            failures.append(failure)
        for name, named in tensors.items():
            try:
                num_writers = self.num_writers or num_ranks
                write_share(write, name, named, check, rank=rank, num_ranks=num_writers)
            except (SaveError, TrainingFault) as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def sends_states(self, rank: int) -> bool:
        """Return whether a rank sends its own state to rank 0, which writes it."""
        return self.num_writers is not None and rank >= self.num_writers

    def receive_states(self, step: int, num_ranks: int, device: torch.device) -> None:
        """Write, on rank 0, what the ranks that see another folder send by `_send_state`."""
        for rank in filter(self.sends_states, range(num_ranks)):
            document, tensors = _receive_state(rank, device)
            self.store.add_document(step, random_state_name(rank), document)
            if tensors:
                self.store.add_tensors(step, local_state_name(rank), tensors)

    def add_local_state(self, step: int, tensors: Mapping[str, Tensor], *, rank: int) -> None:
        """Write the tensors that only this rank holds, if any, before the save is committed."""
        name = local_state_name(rank)
        if tensors and self.writer is not None and rank == 0:
            copies = {name: self.writer.snapshot(name, tensors)}
            self._before_commit.append(partial(self._write_copies, step, copies))
        elif tensors:
            check_finite_state(step, tensors)
            self.store.add_tensors(step, name, tensors)

    def _write_copies(self, step: int, copies: Mapping[str, Mapping[str, Tensor]]) -> None:
        try:
            check_finite_state(step, *copies.values())
        except TrainingFault:
            self.store.abandon(step)
            raise
        for name, named in copies.items():
            self.store.add_tensors(step, name, named)

    def wait(self) -> None:
        """Wait for a background save; call it before the next one starts."""
        if self.writer is not None:
            self.writer.wait()

    def check(self) -> None:
        """Raise the error of a background save that has failed; called after each step."""
        if self.writer is not None:
            self.writer.check()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Commit the current save, on rank 0, with what `on_save_checkpoint` added.

        Called once every rank has added its files.
        """
        if not is_first_rank():
            return
        known = (*_STORED_AS_TENSORS, *_DERIVED_FROM_STEP, *_ADDED_BY_US)
        lightning_state = {key: value for key, value in checkpoint.items() if key not in known}
        training = checkpoint["training"] | {"lightning": lightning_state}
        metric, details = checkpoint["metric"], checkpoint["details"] | self.details
        step = training["step"]
        needed = [random_state_name(rank) for rank in range(details["num_ranks"])]

        def write() -> None:
            self.store.add_document(step, TRAINING, training)
            self.store.commit(step, needed=needed, metric=metric, details=details)

        if self.writer is None:
            write()
        else:
            training = copy.deepcopy(training)  # training extends its lists while the thread writes
            before_commit, self._before_commit = self._before_commit, []

            def write_all() -> None:
                for work in before_commit:
                    work()
                write()

            self.writer.submit(write_all)

    def teardown(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state that Lightning and the module restore; tensors are memory-mapped."""
        if self.source is None or Path(path) != self.source.folder:
            raise ValueError(f"{path} is not the checkpoint that this run resumes from")
        training = read_training(self.source)
        return training["lightning"] | {
            "pytorch-lightning_version": L.__version__,
            "state_dict": self.source.tensors(MODEL),
            "optimizer_states": [],
            "lr_schedulers": [],
            "training": training,
            "source": self.source,
        }

    def remove_checkpoint(self, path: Any) -> None:
        raise NotImplementedError(f"{path}: only the store removes checkpoints")


def _send_state(document: Json, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Send a rank's own document and tensors to rank 0, one tensor at a time."""
    ordered = file_order(tensors)
    facts = {name: (tensor.shape, tensor.dtype) for name, tensor in ordered.items()}
    dist.send_object_list([document, facts], dst=0, device=device)
    for tensor in ordered.values():
        assert isinstance(tensor, Tensor)
        sent = tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)
        if len(sent):
            dist.send(sent, dst=0)


def _receive_state(rank: int, device: torch.device) -> tuple[Json, dict[str, ShardedTensor]]:
    """Return what `rank` sends; the tensors must be gathered in the order of a file."""
    received: list[Any] = [None, None]
    dist.recv_object_list(received, src=rank, device=device)

    def receive(shape: torch.Size, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if tensor.numel():
            dist.recv(tensor.view(-1).view(torch.uint8), src=rank)
        return tensor

    document, facts = received
    return document, {
        name: ShardedTensor(shape, dtype, partial(receive, shape, dtype))
        for name, (shape, dtype) in facts.items()
    }


class BackgroundWriter:
    """Write one snapshot at a time in a thread, which the process joins before it exits.

    An error in the thread is raised by the next call of any method.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._buffers: dict[str, Tensor] = {}

    def reserve(self, snapshots: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Allocate buffers for `snapshots` by name, in the thread.

        The first write to a memory page is slow; without this the first snapshot would pay for it.
        """
        sizes = {name: _buffer_size(tensors.values()) for name, tensors in snapshots.items()}

        def allocate() -> None:
            for name, (num_bytes, is_pinned) in sizes.items():
                self._buffers[name] = _new_buffer(num_bytes, is_pinned).zero_()

        self.submit(allocate)

    def snapshot(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy `tensors` into the buffer of `name`, after the current write has ended.

        GPU tensors are copied into pinned memory without a host sync: the copy is complete when
        `submit` calls its function, and later GPU work is queued behind it.
        """
        self.wait()
        num_bytes, is_pinned = _buffer_size(tensors.values())
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) != num_bytes:
            buffer = self._buffers[name] = _new_buffer(num_bytes, is_pinned)
        copies, start = {}, 0
        for key, tensor in tensors.items():
            copy = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[key] = copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            start += _aligned(tensor)
        return copies

    def submit(self, write: Callable[[], None]) -> None:
        """Call `write` in the thread, after the current write has ended."""
        self.wait()
        copied = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None

        def write_after_copy() -> None:
            if copied is not None:
                copied.synchronize()
            write()

        self._pending = self._executor.submit(write_after_copy)

    def wait(self) -> None:
        """Wait for the current write; raise its error, if any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """Raise the error of a write that has ended, without waiting."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def close(self) -> None:
        """Wait for the current write and end the thread; raise its error, if any."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()


def _buffer_size(tensors: Iterable[Tensor]) -> tuple[int, bool]:
    """Return the size of a buffer for `tensors` in bytes, and whether a GPU copies into it."""
    tensors = list(tensors)
    return sum(map(_aligned, tensors)), any(tensor.is_cuda for tensor in tensors)


def _new_buffer(num_bytes: int, is_pinned: bool) -> Tensor:
    """Allocate one buffer for all tensors, since pinning memory is slower than copying into it."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)


def _aligned(tensor: Tensor) -> int:
    return math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT
