"""The LightningDataModule: prepares the data sets once and serves the batches of a run.

Decides which rows are for validation and how batches reach the trainer. The order of batches is
planned here, so the trainer must be built with `use_distributed_sampler=False`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from common.errors import DataError, Origin
from common.redaction import redacted
from common.text import percent
from common.untrusted import ProcessLimits
from data_modules import packing
from data_modules.audit.findings import Audit
from data_modules.collator import Batch, Collator
from data_modules.format import KTO, label_text
from data_modules.packing import MicroBatch, Mixture, StepPlan
from data_modules.settings import dataset_names
from data_modules.stream import StreamedSteps, StreamPlan, TokenStream
from data_modules.template import ChatTemplate, MaskConfig, Prompt
from data_modules.tokens.datasets import DataSpec, PreparedData, ReferenceStore, token_spec
from data_modules.tokens.encode import PAIRED, ChunkEncoder, chunks_of, find_format
from data_modules.tokens.prepare import hash_of
from data_modules.tokens.store import Examples
from data_modules.types import BatchSpec

_WITHOUT_CHATS = ("pretokenized",)
"""formats whose rows never go through the chat template"""
_PROBE_TOKENS = 64
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepRow:
    """A row of a global step and the rank that trains on it; `rank` and `micro_batch` from 0."""

    rank: int
    micro_batch: int
    dataset: str
    origin: Origin


class FinetuneDataModule(lightning.LightningDataModule):
    """Serve the training steps and the validation pass of a run.

    Available after `setup`: `train_examples`, `val_examples`, `report`, `template`,
    `total_steps` and `plan`. `first_step` is the global step at which the training
    loader starts. A loader serves the share of the trainer's rank; the trainer must be built with
    `use_distributed_sampler=False`.
    """

    def __init__(self, spec: DataSpec) -> None:
        super().__init__()
        if spec.packing.method != "none" and spec.model.packing_error is not None:
            log.info("packing: none, padded rows of like lengths (%s)", spec.model.packing_error)
            spec = replace(spec, packing=replace(spec.packing, method="none"))
        self._spec, self._config, self.batching = spec, spec.config, spec.batching
        self._decoder_start = spec.model.decoder_start_token_id
        self.sequence_len = spec.sequence_len
        self.dataset_names = dataset_names(spec.config.loss_datasets)
        self.first_step = 0
        self._data: PreparedData | None = None
        self._references: ReferenceStore | None = None
        self._prompts: dict[int, dict[str, list[Prompt]]] = {}
        self.val_order: list[int] = []
        """indices of the validation rows, in the order of the last validation loader's batches"""

    @property
    def trained_names(self) -> list[str]:
        """Return the names of the data sets to train on, which come first."""
        return self.dataset_names[: len(self._config.datasets)]

    @property
    def cache_dir(self) -> Path:
        """Return the folder that caches tokens and reference log-probabilities."""
        return Path(self._config.cache_dir).expanduser()

    @property
    def is_packed(self) -> bool:
        return self._spec.packing.method != "none"

    def setup(self, stage: str | None = None) -> None:
        """Tokenize the data sets, or find them in the cache, and split them; raises DataError."""
        if self._data is not None:
            return
        config = self._config
        is_encoder_decoder = self._decoder_start is not None
        if is_encoder_decoder and config.on_long == "split":
            raise DataError(
                "data.on_long=split: an encoder-decoder model needs question and answer "
                "together; use drop, truncate_left or truncate_right"
            )
        if is_encoder_decoder and any(one.format in PAIRED for one in config.loss_datasets):
            raise DataError(
                "preferences need a causal model; type objective=sft, or another model.path"
            )
        self.template = ChatTemplate.resolve(
            self._spec.tokenizer,
            config.chat_template,
            MaskConfig.of(config),
            is_encoder_decoder=is_encoder_decoder,
            limits=ProcessLimits(
                seconds=config.template_seconds, memory_mb=config.template_memory_mb
            ),
            template_kwargs=config.chat_template_kwargs,
            renders_chats=any(
                dataset.format not in _WITHOUT_CHATS
                for dataset in (*config.loss_datasets, *config.test_datasets)
            ),
        )
        data = PreparedData(self._spec, self.template)
        self.train_examples, self.val_examples = data.train_examples, data.val_examples
        self._data, self.report = data, data.report()
        if not config.streaming:
            self._check_labels()
            if len(config.datasets) > 1:
                self.report.mixture = packing.describe_mixture(self.mixture_report())

    def _check_labels(self) -> None:
        """Raise DataError if all verdicts are the same, or a class is in validation rows only."""
        if self._has_verdicts:
            num_rows = len(self.train_examples)
            num_wanted = int(self.train_examples.row_labels.sum())
            if num_wanted in (0, num_rows):
                verdict = "true" if num_wanted else "false"
                other = "false, or type objective=sft" if num_wanted else "true"
                raise DataError(
                    f"all {num_rows:,} rows to train on have the label {verdict}: objective=kto "
                    f"learns from both kinds of answers; add rows with the label {other}"
                )
        labels = self._spec.model.labels
        if len(labels) < 2:
            return
        trained, validated = (
            {int(each) for each in np.unique(examples.row_labels)}
            for examples in (self.train_examples, self.val_examples)
        )
        if self._spec.model.is_multi_label:
            trained, validated = (
                {index for index in range(len(labels)) if any(each >> index & 1 for each in of)}
                for of in (trained, validated)
            )
        if unknown := [labels[index] for index in sorted(validated - trained)]:
            raise DataError(
                f"validation rows have the label {', '.join(unknown)}, and no row to train on has: "
                "add such rows, or take these out of data.val_datasets or data.datasets"
            )

    def label_text(self, label: float) -> str:
        """Return the class, classes or number of a row of `classification` as text."""
        spec = self._spec.model
        return label_text(label, spec.labels, is_multi_label=spec.is_multi_label)

    def summary(self) -> list[str]:
        """Return the lines that a run prints about its data at start: a table and the warnings."""
        reports, mixture = self.report.datasets, self.mixture_report()
        columns = {
            "format": [f"{one.format}{' (guessed)' * one.format_guessed}" for one in reports]
        }
        if any(row.epochs != 1 for row in mixture):
            columns["epochs"] = [f"{row.epochs:.3g}" for row in mixture]
        if any(row.requested is not None for row in mixture):
            columns["requested"] = [percent(row.requested or 0) for row in mixture]
        if len(mixture) > 1:
            columns["of tokens"] = [percent(row.share_of_tokens) for row in mixture]
        blank = [""] * (len(reports) - len(mixture))  # data sets for validation only
        columns = {name: [*cells, *blank][: len(reports)] for name, cells in columns.items()}
        own = columns if len(self.audit.datasets) == len(reports) else {}
        lines = self.audit.lines(own, only_warnings=True)
        lines += filter(None, (one.remark() for one in reports))
        if self._config.val_datasets and self._config.val_set_size:
            lines.append(
                "validation: data.val_datasets only; data.val_set_size="
                f"{self._config.val_set_size:g} is not applied"
            )
        return lines + [line for line in self.report.mixture if line.startswith("warning:")]

    def write_reports(self, folder: Path) -> None:
        """Write the audit, the mixture and the quarantined rows into a run's folder."""
        self.audit.write(folder)
        mixture = [dataclasses.asdict(row) for row in self.mixture_report()]
        (folder / "mixture.json").write_text(json.dumps(redacted(mixture), indent=2) + "\n")
        self._ready.write_rejected(folder)

    @property
    def audit(self) -> Audit:
        """Return the audit of the training data; `setup` must have run."""
        return self._ready.audit

    def fingerprints(self) -> dict[str, str]:
        """Return hashes of template, tokenizer and, except for a stream, of all trained tokens."""
        found = {
            "template_sha256": self.template.hash,
            "tokenizer_sha256": hash_of(self._spec.tokenizer),
        }
        if not self._config.streaming:
            digest, examples = hashlib.sha256(), self.train_examples
            for column in (examples.digests, examples.label_weights, examples.datasets):
                digest.update(column.tobytes())
            if self._has_verdicts:
                digest.update(examples.row_labels.tobytes())
            found["tokens_sha256"] = digest.hexdigest()
        return found

    @property
    def stop_token_ids(self) -> set[int]:
        """Return the tokens that end an answer, in the template and in the rows."""
        return self.template.stop_token_ids | self._ready.stop_token_ids

    def probe(self) -> dict[str, list[int]]:
        """Return the first tokens of a document as keyword arguments of the model.

        A saved model is verified by its logits on them.
        """
        example = (
            next(self._stream().examples()) if self._config.streaming else self.train_examples[0]
        )
        probe = {"input_ids": example.input_ids[:_PROBE_TOKENS].tolist()}
        if self._decoder_start is not None and example.target_ids is not None:
            targets = example.target_ids[: _PROBE_TOKENS - 1].tolist()
            probe["decoder_input_ids"] = [self._decoder_start, *targets]
        return probe

    @property
    def total_steps(self) -> int:
        return self.plan.num_steps

    def set_micro_batch_size(self, size: int) -> None:
        """Change the micro-batch size to `size` packs before a loader is built.

        The packs of a rank's step stay the same; `size` must divide their number.
        """
        batching = self.batching
        packs = batching.micro_batch_size * batching.accumulation_steps
        if packs % size:
            raise ValueError(f"{packs} packs do not divide into micro-batches of {size}")
        self.set_batching(
            replace(batching, micro_batch_size=size, accumulation_steps=packs // size)
        )

    def adapt_to_small_data(self) -> str | None:
        """Accumulate less if an epoch would have too few steps; return a sentence that says so."""
        plan = self.plan
        if isinstance(plan, StreamPlan):
            return None
        before, fewer = self.batching.accumulation_steps, plan.accumulation_for_small_data()
        if fewer == before:
            return None
        self.set_accumulation(fewer)
        return (
            f"global batch: {self.plan.packs_per_step}, not {plan.packs_per_step}, for more steps "
            f"in an epoch of little data; trainer.gradient_accumulation_steps={before} keeps it"
        )

    def set_accumulation(self, steps: int) -> None:
        """Change how many micro-batches a step accumulates, before a loader is built."""
        self.set_batching(replace(self.batching, accumulation_steps=steps))

    def set_batching(self, batching: BatchSpec) -> None:
        """Change how rows become the steps of the run, before a loader is built."""
        if batching == self.batching:
            return
        self.batching = batching
        self._spec = replace(self._spec, batching=batching)
        for cached in ("plan", "_collator"):
            self.__dict__.pop(cached, None)

    @property
    def is_streamed(self) -> bool:
        """Whether rows are read in the order in which steps use them, and no step is known."""
        return isinstance(self.plan, StreamPlan)

    def fullest_batch(self, num_steps: int = 100) -> Batch:
        """Return the largest micro-batch, in tokens, of this rank's next `num_steps` steps."""
        if isinstance(self.plan, StreamPlan):
            raise ValueError("the steps of a stream are not known in advance")
        lengths, plan = self.train_examples.lengths, self.plan
        last = min(self.first_step + num_steps, plan.num_steps)

        def num_tokens(micro_batch: MicroBatch) -> int:
            rows = [lengths[pack] for pack in micro_batch.packs if len(pack)]
            if self.is_packed:
                return sum(int(row.sum()) for row in rows)
            return len(rows) * max((int(row.max()) for row in rows), default=0)

        micro_batches = (
            micro_batch
            for step in range(self.first_step, last)
            for micro_batch in plan.micro_batches(step, self._rank)
        )
        return _Batches(self.train_examples, self._collator)[max(micro_batches, key=num_tokens)]

    @cached_property
    def mixture(self) -> Mixture:
        """Return the mixture, which decides the rows of each epoch; `setup` must have run."""
        examples, datasets = self.train_examples, self._config.datasets
        return Mixture(
            [np.flatnonzero(examples.datasets == index) for index in range(len(datasets))],
            [dataset.weight for dataset in datasets],
            self._spec.seed,
            self._config.mixture,
            examples.lengths,
        )

    def mixture_report(self) -> list[packing.MixtureRow]:
        """Return each data set's share of the first epoch; empty for a stream."""
        return [] if self._config.streaming else self.mixture.report(self.trained_names)

    @cached_property
    def plan(self) -> StepPlan | StreamPlan:
        """Return the plan of all steps; `setup` must have run."""
        batching, examples = self.batching, self.train_examples
        if self._config.streaming:
            if batching.max_steps is None:
                raise DataError("data.streaming=true: a stream has no end; type trainer.max_steps")
            packs = batching.micro_batch_size * batching.accumulation_steps * batching.num_ranks
            return StreamPlan(batching.max_steps, packs)
        return StepPlan(
            examples.lengths,
            examples.label_weights,
            self.mixture.epoch,
            batching,
            datasets=examples.datasets,
            window=self._spec.packing.window,
            capacity=self.sequence_len,
            method=self._spec.packing.method,
            seed=self._spec.seed,
        )

    def train_dataloader(self) -> PlannedSteps | StreamedSteps:
        """Return the micro-batches of this rank, by step from `first_step` on, as one epoch."""
        if isinstance(self.plan, StreamPlan):
            if self.first_step:
                log.info("data: the stream is read again up to step %d", self.first_step)
            loader = self._loader(self._stream(), None)
            accumulation = self.batching.accumulation_steps
            return StreamedSteps(
                loader, self.plan, accumulation, self.first_step, self._sum_over_ranks
            )
        sampler = packing.StepSampler(self.plan, self._rank, self.first_step)
        loader = self._loader(_Batches(self.train_examples, self._collator), sampler)
        return PlannedSteps(loader, self.batching.accumulation_steps)

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        """Return this rank's share of the validation rows, in a fixed order.

        Returns an empty list when there are no validation rows.
        """
        if not self.val_examples:
            return []
        return self.whole_val_dataloader(self.batching.num_ranks, self._rank)

    def whole_val_dataloader(self, num_ranks: int = 1, rank: int = 0) -> DataLoader[Batch]:
        """Return a loader of all validation rows, or of one of `num_ranks` equal shares."""
        loader, self.val_order = self.ordered_loader(self.val_examples, num_ranks, rank)
        return loader

    def ordered_loader(
        self, examples: Examples, num_ranks: int = 1, rank: int = 0
    ) -> tuple[DataLoader[Batch], list[int]]:
        """Return a loader of a share of `examples`, and their indices in the order of its batches.

        All ranks get equally many batches.
        """
        method = self._spec.packing.method
        packs = packing.pack_documents(
            examples.lengths, self.sequence_len, self._spec.seed, 0, method
        )
        batches = packing.shard_packs(packs, self.batching.micro_batch_size, num_ranks, rank)
        order = [int(row) for batch in batches for pack in batch.packs for row in pack]
        return self._loader(_Batches(examples, self._collator), batches), order

    def read_references(self, identity: str, *, by_token: bool = False) -> bool:
        """Give each row what is stored of a base or teacher; return whether anything is.

        `identity`: everything besides the tokens that determines it; `by_token` as in
        `ReferenceStore`.
        """
        self._references = ReferenceStore(
            self.cache_dir, self._ready.datasets, identity, by_token=by_token
        )
        return self._take_references()

    def referenced_examples(self) -> Examples:
        """Return all rows whose values `store_references` expects, in its order."""
        assert self._references is not None
        stores = [ready.data.store for ready in self._ready.datasets]
        return Examples(stores, self._references.places)

    def store_references(self, values: npt.NDArray[Any]) -> None:
        """Store the values of `referenced_examples` in the cache; each row gets its own."""
        assert self._references is not None
        self._references.write(values)
        is_stored = self._take_references()
        assert is_stored, "the stored log-probabilities cannot be read back"

    def _take_references(self) -> bool:
        assert self._references is not None
        values = self._references.read()
        if values is None:
            return False
        for examples in (self.train_examples, self.val_examples):
            examples.take_references(values)
        return True

    def rows_of_step(self, step: int) -> Iterator[StepRow]:
        """Yield the rows that all ranks train on in global step `step`, counted from 1.

        Yields nothing for a stream, which has no plan.
        """
        if isinstance(self.plan, StreamPlan):
            return
        for rank in range(self.batching.num_ranks):
            for number, micro_batch in enumerate(self.plan.micro_batches(step - 1, rank)):
                for index in (int(i) for pack in micro_batch.packs for i in pack):
                    name = self.dataset_names[int(self.train_examples.datasets[index])]
                    yield StepRow(rank, number, name, self.train_examples.origin(index))

    def prompts(self, max_rows: int) -> dict[str, list[Prompt]]:
        """Return the prompts of the first `max_rows` rows with an answer, by data set.

        They come from `test_datasets` if there are any, else from the validation rows. Prompts of
        more than `sequence_len` tokens are left out with a warning.
        """
        if max_rows in self._prompts:
            return self._prompts[max_rows]
        found: dict[str, list[Prompt]] = {}
        for name, items in self._ready.prompt_items(max_rows):
            prompts = [p for item in items if (p := self.template.prompt(item))]
            fitting = [p for p in prompts if len(p.input_ids) <= self.sequence_len]
            if len(fitting) < len(prompts):
                longest = max(prompts, key=lambda prompt: len(prompt.input_ids))
                log.warning(
                    f"data: {name}: {len(prompts) - len(fitting):,} of {len(prompts):,} prompts "
                    f"are longer than {self.sequence_len:,} tokens and are left out; the longest, "
                    f"{longest.origin}, has {len(longest.input_ids):,}; raise data.sequence_len"
                )
            if fitting:
                found[name] = fitting
        self._prompts[max_rows] = found
        return found

    def transfer_batch_to_device(
        self, batch: Batch | list[Batch], device: torch.device, dataloader_idx: int
    ) -> Batch | list[Batch]:
        """Move a validation batch to the device, to a GPU without waiting for it.

        The micro-batches of a step stay on the host until their turn comes.
        """
        if isinstance(batch, list):
            return batch
        return batch.to(device, non_blocking=device.type == "cuda")

    @property
    def _ready(self) -> PreparedData:
        if self._data is None:
            raise RuntimeError("the data module is not set up")
        return self._data

    def _loader(
        self, dataset: Dataset[Batch], sampler: Sequence[MicroBatch] | packing.StepSampler | None
    ) -> DataLoader[Batch]:
        is_on_gpu = torch.cuda.is_available()
        if self.trainer:
            is_on_gpu = self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            dataset,
            sampler=sampler,
            batch_size=None,
            num_workers=self._config.num_workers,
            persistent_workers=self._config.num_workers > 0,
            worker_init_fn=_ignore_group_sigterm,
            pin_memory=is_on_gpu,
            # Without a generator of its own the loader draws from the global one, and a validation
            # pass would change the dropout masks of later steps.
            generator=torch.Generator(),
        )

    def _stream(self) -> TokenStream:
        held_out = frozenset(self.val_examples.digests.tolist())
        return TokenStream(
            self._spec, self._encoders, self._collator, rank=self._rank, held_out=held_out
        )

    @cached_property
    def _encoders(self) -> list[ChunkEncoder]:
        """The encoder of each data set of a stream; all ranks detect the same format."""
        spec = token_spec(self._spec, self.template)
        return [
            ChunkEncoder(
                dataset, find_format(dataset, chunks_of(dataset, spec.config))[0] or "", spec
            )
            for dataset in spec.config.datasets
        ]

    def _sum_over_ranks(self, number: float) -> float | torch.Tensor:
        num_ranks = self.batching.num_ranks
        if num_ranks == 1:
            return number
        # Created and kept on the device: copying or reading it, as the strategy's reduce does,
        # would wait for all queued work.
        total = torch.full((), number, device=self.trainer.strategy.root_device)
        torch.distributed.all_reduce(total)
        # Ranks that read the same rows have each counted all of them.
        return total * (num_ranks / self.trainer.world_size)

    @cached_property
    def _collator(self) -> Collator:
        tokenizer, batching = self._spec.tokenizer, self.batching
        pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        # The embedding of a causal model's pad token may be all zeros, whose gradient can be NaN
        # (Gemma 3n takes a square root), and padding in a pack has nothing else in its document.
        if pad is None or (self._decoder_start is None and eos is not None):
            pad = eos
        packed = self.is_packed
        # Encoder and decoder rows fill up at different packs, so neither is padded to full length.
        has_row_len = packed and self._decoder_start is None
        full = batching.micro_batch_size * self.sequence_len
        chunks = 1 if batching.row_slices == 1 else 2 * batching.row_slices
        return Collator(
            0 if pad is None else pad,
            packed,
            self._decoder_start,
            full if has_row_len and batching.pad_packs else None,
            math.lcm(batching.row_multiple if has_row_len else 1, chunks),
            has_verdicts=self._has_verdicts,
        )

    @property
    def _has_verdicts(self) -> bool:
        return any(dataset.format == KTO for dataset in self._config.loss_datasets)

    @property
    def _rank(self) -> int:
        if not self.trainer:
            return 0
        replica = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        if replica["num_replicas"] != self.batching.num_ranks:
            raise ValueError(
                f"the steps are planned for {self.batching.num_ranks} ranks (num_ranks), "
                f"the trainer has {replica['num_replicas']}"
            )
        return int(replica["rank"])


class PlannedSteps:
    """The steps of a run; a loader reads their micro-batches one by one, ahead of their step."""

    def __init__(self, batches: DataLoader[Batch], accumulation_steps: int) -> None:
        self._batches, self._accumulation_steps = batches, accumulation_steps

    def __len__(self) -> int:
        return len(self._batches) // self._accumulation_steps

    def __iter__(self) -> Iterator[list[Batch]]:
        batches = iter(self._batches)
        while step := list(itertools.islice(batches, self._accumulation_steps)):
            yield step


class _Batches(Dataset[Batch]):
    """Collate the micro-batch that a sampler yields."""

    def __init__(self, examples: Examples, collator: Collator) -> None:
        self._examples, self._collator = examples, collator

    def __getitem__(self, micro_batch: MicroBatch) -> Batch:
        packs = [[self._examples[i] for i in pack] for pack in micro_batch.packs]
        return self._collator(packs, micro_batch.step_weight)


def _ignore_group_sigterm(worker_id: int) -> None:
    """Ignore a SIGTERM sent to the whole process group: the current step still needs batches.

    `worker_init_fn` of the loaders. A SIGTERM from the training process still ends the worker.
    """
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_on_parent_sigterm, daemon=True).start()


def _exit_on_parent_sigterm() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
