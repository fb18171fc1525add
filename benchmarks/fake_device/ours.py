"""One micro-batch and one optimizer step of a run, with the parts of `app.train`, on FakeTensors.

Settings, data, attention, model, adapter, kernels, loss, clipping and optimizer are those that the
verb would take; only what compares numbers before the fit is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tools.simulate.counting import Counted, OperatorCounter
from tools.simulate.step import DEVICE, place, start_fit

if TYPE_CHECKING:
    import lightning as L

    from app.config import TrainConfig
    from app.training.module import FinetuneModule
    from data_modules import FinetuneDataModule

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "data_modules" / "samples" / "tiny_base"


@dataclass(frozen=True, slots=True)
class Traced:
    """A run with its model on the fake device."""

    config: TrainConfig
    module: FinetuneModule
    data: FinetuneDataModule
    trainer: L.Trainer
    optimizer: torch.optim.Optimizer
    fakes: FakeTensorMode

    def count(self, number: int, *, is_later: bool = False) -> Counted:
        """Count a micro-batch, forward and backward, and its optimizer step.

        is_later: gradients of other micro-batches and optimizer states are there before.
        """
        from app.model.attention import restore_kernel
        from app.model.kernels import unfuse_layers

        batch = list(chain.from_iterable(self.data.train_dataloader()))[number]
        count = OperatorCounter(
            num_pairs=float(sum(n * n for row in batch.document_lengths for n in row))
        )
        weights = list(self.module.model.parameters())
        if is_later:
            with self.fakes, OperatorCounter(num_pairs=0):
                take_first_step(weights, self.optimizer)
        with self.fakes, count, count.watching_modules(), count.without_gradients(weights):
            moved = batch.to(DEVICE, non_blocking=True)
            with self.trainer.precision_plugin.forward_context():
                module = self.module
                module.objective.begin(module.model, [moved], module.backend, DEVICE)
                loss = module.micro_batch_loss(moved)
            count.phase = "backward"
            self.trainer.strategy.run_backward(loss)
            count.phase = "step"
            self.module.configure_gradient_clipping(
                self.optimizer, self.config.trainer.max_grad_norm
            )
            self.optimizer.step()
        unfuse_layers(self.module.model)  # including layers fused for a whole model class
        restore_kernel("varlen")  # a process-wide setting that a plain step does not use
        return Counted(
            tally=count.tally,
            model=self.module.model,
            optimizer=self.optimizer,
            num_tokens=batch.num_tokens,
            num_trained=len(batch.trained_columns),
        )

    def graphs(self) -> list[int]:
        """Compile the layers and train on every batch; return the number of graphs after each.

        AssertionError if a layer could not be compiled.
        """
        from app.training import compilation as compiling
        from app.training.compilation import Compilation

        compiling.BACKEND = "aot_eager"  # Inductor would generate kernels for a real device
        compilation, found = Compilation(), []
        batches = list(chain.from_iterable(self.data.train_dataloader()))
        with self.fakes:
            compilation.on_train_start(self.trainer, self.module)
            assert compilation.layers is not None
            for batch in batches:
                moved = batch.to(DEVICE, non_blocking=True)
                with self.trainer.precision_plugin.forward_context():
                    loss = self.module.micro_batch_loss(moved)
                loss.backward()
                assert compilation.layers.failure is None, compilation.layers.failure
                found.append(compiling.num_compiled_graphs())
        return found


def take_first_step(
    weights: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Create the gradients and the optimizer's states."""
    for weight in weights:
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    optimizer.step()


def open_run(
    words: Sequence[str],
    architecture: dict[str, Any],
    num_layers: int,
    lengths: Sequence[int],
    folder: Path,
) -> Traced:
    """Prepare what `app.train WORDS` would train, for a model of `architecture`.

    All is chosen for the whole model, of which then only `num_layers` are built.
    Documents have `lengths` tokens, each of which is trained on; with objective=dpo two make a
    pair, and with objective=kto each is an answer with a verdict; prompts have 3. `folder` must be
    empty.
    """
    from app.config import load_config
    from app.model.adapter import hold_transposed

    base_folder, data_file = folder / "base", folder / "rows.jsonl"
    base_folder.mkdir()
    architecture_file = base_folder / "config.json"
    architecture_file.write_text(json.dumps(architecture))
    of_objective = {"objective=dpo": ("preference", _pairs), "objective=kto": ("kto", _verdicts)}
    plain = "pretokenized", _documents
    row_format, make_rows = next(filter(None, map(of_objective.get, words)), plain)
    data_file.write_text("\n".join(map(json.dumps, make_rows(lengths))))
    config: Any = load_config(
        "train",
        [
            *words,
            f"model.path={base_folder}",
            f"model.tokenizer_path={TOKENIZER}",
            "model.stop_tokens=[]",
            f"data.datasets=[{{path: {data_file}, format: {row_format}}}]",
            f"data.cache_dir={folder / 'cache'}",
            "data.val_set_size=0",
            "data.num_workers=0",
            "plan.enforce=off",  # configurations that do not fit are measured too
            f"output.dir={folder / 'run'}",
        ],
    )
    module, data = before_fit(config)
    architecture_file.write_text(json.dumps(architecture | {"num_hidden_layers": num_layers}))
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    model = module.model = module.build(on_meta=True)
    if config.trainer.precision == "fp8":
        model.bfloat16()  # as FSDP gathers them: fp32 weights and states of an 8B need several GPUs
    with fakes, OperatorCounter(num_pairs=0):  # answers queries of device values
        place(model)
        start_fit(module, joins_adapters=True)
        hold_transposed(model)
        optimizer = module.build_optimizer(model)
    return Traced(config, module, data, module.trainer, optimizer, fakes)


def _documents(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield rows of valid token ids; a unique first token keeps them from being duplicates."""
    for index, length in enumerate(lengths):
        ids = [index % 256, *[0] * (length - 1)]
        yield {"input_ids": ids, "labels": ids}


def _pairs(lengths: Sequence[int]) -> Iterator[dict[str, str]]:
    """Yield pairs of texts; a digit is a token of TOKENIZER, and its end token follows."""
    for index, (chosen, rejected) in enumerate(zip(lengths[::2], lengths[1::2], strict=True)):
        answers = {"chosen": "1" * (chosen - 4), "rejected": "2" * (rejected - 4)}
        yield {"prompt": f"{index:03}", **answers}


def _verdicts(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield answers of such tokens that are wanted, or not."""
    for index, length in enumerate(lengths):
        answer = "1" * (length - 4)
        yield {"prompt": f"{index:03}", "completion": answer, "label": index % 2 == 0}


class FitReached(Exception):
    """Stop the command where it would start to fit."""


def before_fit(config: TrainConfig) -> tuple[FinetuneModule, FinetuneDataModule]:
    """Run `app.train` up to its fit; return module, data and trainer."""
    import lightning as L

    from app.train import train

    reached: list[Any] = []

    def fit(trainer: L.Trainer, module: Any, data: Any, **_: Any) -> None:
        module.trainer, trainer.datamodule = trainer, data
        trainer.strategy.connect(module)
        reached.extend((module, data))
        raise FitReached

    with patch.object(L.Trainer, "fit", fit), suppress(FitReached):
        train(config)
    module, data = reached
    return module, data
