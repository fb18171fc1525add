"""Peak bytes that training steps allocate on this machine, compared with the plan.

A tracker adds up the storages that are alive after each operation of PyTorch: what an allocator
would hand out, without its rounding; memory inside of an operation is not seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from common.text import percent

if TYPE_CHECKING:
    from app.planning.memory import PlannedRun

ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
QWEN = ARCHITECTURE | {
    "model_type": "qwen3",
    "head_dim": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 1024,
    "tie_word_embeddings": True,
}
LAST, FIRST = "backward pass of the last layer", "backward pass of the first layer"
WIDE = ARCHITECTURE | {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
}
BASES = {
    "llama": ARCHITECTURE,
    "qwen3": QWEN,
    "wide": WIDE,
    "mistral": ARCHITECTURE | {"model_type": "mistral"},
    "qwen2": ARCHITECTURE | {"model_type": "qwen2", "tie_word_embeddings": True},
}


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration."""

    base: str
    adapter: str
    recompute: str
    documents: tuple[int, ...]
    """tokens of each document of a pack"""
    micro_batch_size: int
    precision: str
    num_layers: int | None = None
    """recomputed layers; None: all"""

    def __str__(self) -> str:
        docs = "+".join(map(str, self.documents))
        recompute = f"{self.recompute} {self.num_layers or ''}".strip()
        return (
            f"{self.base} {self.adapter} {recompute} {self.micro_batch_size}x({docs}) "
            f"{self.precision}"
        )


HELD_OUT = (
    Case("wide", "lora", "none", (384,), 2, "fp32"),
    Case("wide", "full", "full", (320, 192), 1, "bf16-pure"),
    Case("qwen3", "full", "full", (512,), 2, "fp32"),
    Case("qwen3", "full", "none", (256, 256), 1, "bf16-pure"),
    Case("mistral", "lora", "none", (256, 128), 3, "fp32"),
    Case("qwen2", "full", "none", (512,), 1, "fp32"),
    Case("llama", "lora", "selective", (512,), 1, "fp32"),
    Case("llama", "full", "selective", (512,), 2, "bf16-pure"),
    Case("qwen2", "freeze", "full", (512,), 4, "fp32"),
    Case("llama", "full", "selective", (512,), 2, "fp32", num_layers=4),
    Case("llama", "lora", "full", (512,), 2, "fp32", num_layers=3),
    Case("wide", "full", "full", (384,), 1, "bf16-pure", num_layers=2),
)
"""cases that were measured after the formulas were written"""


def other_bases() -> Iterator[Case]:
    """Yield cases of every other base, for which the formulas were not changed."""
    bases = ("qwen3", "wide", "mistral", "qwen2")
    ways = itertools.product(bases, ("lora", "full"), ("none", "full", "selective"))
    for number, (base, adapter, recompute) in enumerate(ways):
        documents = ((256, 256), (384,), (640, 128))[number % 3]
        precision = ("bf16-pure", "fp32")[number // 2 % 2]
        yield Case(base, adapter, recompute, documents, 1 + number % 2, precision)
    for number, (base, adapter) in enumerate(itertools.product(bases, ("ia3", "freeze"))):
        recompute = ("none", "full")[number // 2 % 2]
        yield Case(base, adapter, recompute, (512,), 1 + number % 3, "fp32")


def cases() -> Iterator[Case]:
    """Yield model x adapter x recompute x packing x micro-batch, in the precisions of a CPU."""
    ways = itertools.product(("lora", "full"), ("none", "full"), ((512,), (256, 128, 128)), (1, 2))
    for number, (adapter, recompute, documents, size) in enumerate(ways):
        precision = ("fp32", "bf16-pure")[number % 2]
        yield Case("llama", adapter, recompute, documents, size, precision)
    yield Case("llama", "ia3", "none", (512,), 1, "fp32")
    yield Case("llama", "ia3", "full", (512,), 2, "fp32")
    yield Case("llama", "freeze", "none", (512,), 1, "fp32")
    yield Case("qwen3", "lora", "none", (1024,), 1, "fp32")
    yield Case("llama", "full", "none", (1024,), 1, "fp32")
    yield from HELD_OUT
    yield from other_bases()


def settings_of_case(case: Case) -> Any:
    """Return the settings of a run of the case."""
    from app.config import load_config

    architecture = dict(BASES[case.base])
    words = [f"{key}: {str(value).lower()}" for key, value in architecture.items()]
    return load_config(
        "plan",
        [
            "data=skills",
            f"model.architecture={{{', '.join(words)}}}",
            "model.path=null",
            "model.from_scratch=true",
            f"adapter={case.adapter}",
            f"recompute={case.recompute}",
            f"recompute.num_layers={'null' if case.num_layers is None else case.num_layers}",
            f"trainer.precision={case.precision}",
            f"trainer.micro_batch_size={case.micro_batch_size}",
            f"data.sequence_len={sum(case.documents)}",
            "hardware=h100",
            "trainer.kernels=torch",
        ],
    )


def predict(case: Case) -> float:
    """Return the peak bytes of a step: the plan's, plus those saved by the CPU's attention."""
    from app.planning.planned import plan_run

    config = settings_of_case(case)
    run, _ = plan_run(
        replace(config, strategy=replace(config.strategy, name="single")),
        config.hardware,
        config.model.architecture,
        strategies={},
    )
    run = replace(run, is_on_gpu=False, groups_documents=False, accumulation=1)
    return on_a_cpu(run, case.documents * case.micro_batch_size)


def on_a_cpu(run: PlannedRun, documents: Sequence[int]) -> float:
    """Return the plan's bytes at the peak of a step, and what a CPU's attention keeps of a
    micro-batch of documents of so many tokens.
    """
    from app.planning.memory import estimate_moments

    of_layer = (
        sum(map(_probabilities, documents)) * run.model.widths.heads * run.execution.value_bytes
    )
    saved = run.model.trained_layers - run.recomputed_layers
    keeping = {"loss": saved, LAST: max(1, saved), FIRST: 1}
    return max(
        each.total + of_layer * keeping.get(each.moment, 0) for each in estimate_moments(run)
    )


def _probabilities(length: int) -> int:
    """Count a head's probabilities that `causal_attention` keeps; kernels of GPUs keep none."""
    from app.model.cpu import BLOCK

    return sum(BLOCK * end for end in range(BLOCK, length + 1, BLOCK))


def measure(case: Case) -> int:
    """Return the peak of two training steps of real numbers, in bytes."""
    import torch

    from app.model.attention.inputs import attention_inputs
    from app.model.build import build_model
    from app.model.head import head_loss
    from app.model.quantization import QuantizationConfig
    from benchmarks.planning.live import Live

    config = settings_of_case(case)
    torch.manual_seed(0)
    with Live() as live:
        model: Any = build_model(
            config.model,
            QuantizationConfig(),
            "sdpa",
            config.adapter,
            config.recompute,
            case.precision,
        )
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        live.keep(model.parameters())
        live.keep(model.buffers())
        optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
        rows = case.micro_batch_size
        ids = torch.randint(0, 4096, (rows, sum(case.documents)))
        positions = torch.cat([torch.arange(length) for length in case.documents])
        inputs = {
            "input_ids": ids,
            "position_ids": positions.expand(rows, -1),
            "use_cache": False,
        } | attention_inputs(model, "sdpa", [list(case.documents)] * rows, ids)
        for _ in range(2):
            live.peak = 0
            optimizer.zero_grad()  # first, as the module's training_step
            total, _ = head_loss(model, inputs, ids, torch.ones(ids.shape))
            total.backward()
            optimizer.step()
            del total
        return live.peak


@dataclass(frozen=True, slots=True)
class Compared:
    """Planned and measured bytes of a case."""

    case: object
    said: float
    found: float

    @property
    def error(self) -> float:
        """The relative error; below 0 the plan promised too much room."""
        return self.said / self.found - 1

    def show(self) -> None:
        sizes = f"{self.said / 2**20:7.1f} said {self.found / 2**20:7.1f} MiB found"
        print(f"{percent(self.error, sign='+'):>8} {sizes}  {self.case}", flush=True)


def compare() -> list[Compared]:
    """Return every case; each is printed when it ends."""
    compared = []
    for case in cases():
        each = Compared(case, predict(case), measure(case))
        compared.append(each)
        each.show()
    return compared


if __name__ == "__main__":
    compare()
