"""Steps of ranks that hold stages of a model, and the same steps in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from app.model.adapter import AdapterConfig, FullConfig, LoraConfig
from app.model.base import ModelConfig
from app.model.kernels import fuse_layers
from app.model.layers import eval_mode
from app.strategy.mixin import local
from app.strategy.settings import PipelineConfig, cut_layers, num_stages
from app.training.checkpoint.state import model_state, optimizer_state, trainable_parameters
from app.training.objective.objective import DatasetSums, Sft, batch_loss, head_inputs
from common.errors import Origin
from data_modules import Batch, Example
from data_modules.collator import Collator
from tests.ranks import connect
from tests.strategy.fsdp_training import ARCHITECTURE, gradient
from tests.tiny import built

TOKENS, STEPS, CLIP = 64, 2, 0.5
SIZES = {"vocab_size": 128, "num_hidden_layers": 4, "head_dim": 8, "max_position_embeddings": 128}
TIED: dict[str, Any] = ARCHITECTURE | SIZES
LLAMA = TIED | {"tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": TIED,
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3"},
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 12},
    "gemma3": TIED
    | {
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 12,
    },
    "olmo2": LLAMA | {"model_type": "olmo2"},
    "phi3": LLAMA | {"model_type": "phi3"},
    "granite": LLAMA | {"model_type": "granite", "logits_scaling": 2.0},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 128,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 128,
        "initializer_range": 0.2,
        **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    },
}
LORA = LoraConfig(r=2, dropout=0.0)
ADAPTERS: dict[str, AdapterConfig] = {
    "full": FullConfig(),
    "lora": LORA,
    "top layers": LoraConfig(r=2, dropout=0.0, layers="top 2"),
    "dora": LoraConfig(r=2, dropout=0.0, use_dora=True),
    "nf4": LORA,
}
Case = tuple[str, str, str]
"""family, adapter (nf4: LoRA on a 4-bit base), recompute mode"""


def builder(case: Case) -> Callable[..., Any]:
    """Return what builds the model of a case, as a run passes it to its module."""
    family, adapter, recompute = case
    if adapter == "nf4":
        return partial(build_quantized, case)

    base = ModelConfig(from_scratch=True, architecture=FAMILIES[family])
    return partial(built, base, adapter=ADAPTERS[adapter], recompute=recompute)


def build_quantized(case: Case, **options: Any) -> Any:
    """Build a model with a 4-bit base, which is read from files."""
    family, adapter, recompute = case
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES[family]))
    with tempfile.TemporaryDirectory() as folder:
        # Not by `save_pretrained`, which writes on one rank only.
        base.config.to_json_file(f"{folder}/config.json", use_diff=False)
        save_model(base, f"{folder}/model.safetensors", metadata={"format": "pt"})
        return built(folder, "nf4", adapter=ADAPTERS[adapter], recompute=recompute, **options)


def make_documents(lengths: Sequence[int], random: np.random.Generator) -> list[Example]:
    """Return documents of random tokens, of which two thirds are trained, in two data sets."""
    return [
        Example(
            input_ids=random.integers(3, 128, length).astype(np.int32),
            weights=(np.arange(length) > length // 3).astype(np.float32),
            dataset=number % 2,
            origin=Origin("rows.jsonl", number + 1),
        )
        for number, length in enumerate(lengths)
    ]


def make_batches(step: int, count: int) -> list[Batch]:
    """Return packed micro-batches of one length, with the weight of their step."""
    random = np.random.default_rng(step)
    collate = Collator(0, packed=True, row_len=TOKENS)
    batches = []
    for lengths in random.permuted(np.tile([5, 21, 17, 12], (count, 1)), axis=1):
        batches.append(collate([make_documents(lengths, random)], 1.0))
    weight = sum(batch.own_weight for batch in batches)
    for batch in batches:
        batch.step_weight = weight
    return batches


class Module:
    """What a strategy asks of the module that it trains."""

    def __init__(self, model: Any) -> None:
        self.model, self.sums = model, DatasetSums(2)
        self.calls, self.times = 0, 1
        weights = list(trainable_parameters(model).values())
        groups = [{"params": weights, "name": "all"}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, fused=True)

    def loss(self, batch: Batch) -> Tensor:
        self.calls += 1
        total = batch_loss(Sft(), self.model, batch, "sdpa", self.sums)
        return total / batch.step_weight * self.times

    def run_layers(self, batch: Batch) -> None:
        self.calls += 1
        self.model(**head_inputs(self.model, batch, "sdpa").inputs)


class Saved:
    """Bytes of tensors that are saved for backward passes, and not yet released."""

    def __init__(self, weights: Any) -> None:
        own = (local(each) for each in weights if not each.is_meta)
        self.own = {each.untyped_storage().data_ptr() for each in own}
        self.now = self.peak = 0
        self._counts: dict[int, int] = {}

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(
            partial(self._Held, self), lambda held: held.tensor
        )

    class _Held:
        def __init__(self, saved: Saved, tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            self.saved, self.tensor, self.key = saved, tensor, storage.data_ptr()
            self.size = 0 if self.key in saved.own else storage.nbytes()
            if not saved._counts.setdefault(self.key, 0):
                saved.now += self.size
                saved.peak = max(saved.peak, saved.now)
            saved._counts[self.key] += 1

        def __del__(self) -> None:
            self.saved._counts[self.key] -= 1
            if not self.saved._counts[self.key]:
                self.saved.now -= self.size


def gradients_of(model: Any, strategy: Any) -> dict[str, Tensor]:
    """Return the full gradients of the weights of this rank's stages."""
    return {
        name: (weight.grad if strategy is None else gradient(strategy, weight)).clone()
        for name, weight in trainable_parameters(model).items()
        if weight.grad is not None
    }


def steps(module: Module, strategy: Any, count: int) -> dict[str, Any]:
    """Take steps; return losses, sums, norms, the first gradients and what was saved."""
    saved = Saved(module.model.parameters())
    found: dict[str, Any] = {"losses": [], "norms": [], "sums": [], "logits": None}
    for step in range(STEPS):
        batches = make_batches(step, count)
        module.optimizer.zero_grad()
        with saved.hooks():
            if strategy is None:
                loss = torch.zeros(())
                for batch in batches:
                    part = module.loss(batch)
                    part.backward()
                    loss += part.detach()
                    del part
            else:
                own = batches[strategy.data_rank :: strategy.num_data_ranks]
                loss = strategy.run_micro_batches(own, module.loss)
                loss = strategy.reduce(loss, reduce_op="sum")
                loss /= strategy.num_averaged_ranks * strategy.num_loss_copies
        if step == 0:
            found["gradients"] = gradients_of(module.model, strategy)
        if strategy is None:
            weights = list(trainable_parameters(module.model).values())
            norm = torch.nn.utils.clip_grad_norm_(weights, CLIP)
        else:
            norm = strategy.clip(module.optimizer, CLIP)
        if step == 0:
            found["clipped"] = gradients_of(module.model, strategy)
        module.optimizer.step()
        if strategy is not None:
            strategy.end_step(step + 1, is_last=False)
        found["losses"].append(loss.item())
        found["norms"].append(norm.item())
        if module.sums.sums is not None:
            found["sums"].append(module.sums.take())
    with eval_mode(module.model):
        batch = make_batches(9, 1)[0]
        found["logits"] = module.model(**head_inputs(module.model, batch, "sdpa").inputs).logits
        found["validation"] = module.loss(batch).item() / module.times
    return found | {"peak": saved.peak, "left": saved.now, "calls": module.calls}


@cache
def train_alone(case: Case, count: int) -> dict[str, Any]:
    """Take the steps of a case in one process."""
    module = Module(builder(case)())
    fuse_layers(module.model)
    found = steps(module, None, count)
    tensors, _ = optimizer_state(module.model, module.optimizer)
    return found | {"weights": model_state(module.model), "states": tensors}


def train_cases(config: PipelineConfig, cases: list[tuple[Case, int]]) -> list[dict[str, Any]]:
    """Take the steps of each case, on a rank of a pipeline."""
    results = []
    for case, count in cases:
        bounds = cut_layers([1.0] * LLAMA["num_hidden_layers"], num_stages(config))
        results.append(_train(connect(config, stages=bounds), case, count))
    return results


def _train(strategy: Any, case: Case, count: int) -> dict[str, Any]:
    model = strategy.build_model(builder(case))
    if strategy.fuses_adapters:
        fuse_layers(model, strategy.gathered, strategy.root_device)
    module = Module(model)
    module.times = strategy.num_averaged_ranks
    strategy._lightning_module = strategy.model = module
    strategy.precision_plugin.post_backward = lambda *_: None  # there is no trainer with callbacks
    found = steps(module, strategy, count)
    states, _ = optimizer_state(model, module.optimizer, strategy)
    for name, tensors in (("weights", model_state(model, strategy)), ("states", states)):
        found[name] = {key: tensor.gather().clone() for key, tensor in sorted(tensors.items())}
    return found
