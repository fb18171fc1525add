"""Plans compared with published rows.

Their programs are not ours: settings that a row does not state are taken as its program has them by
default, and are named. Nothing of the arithmetic was fitted to these rows.
`python -m benchmarks.planning.published` prints the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.config import load_config, settings_of
from app.planning.memory import GIB, estimate_gpu_memory
from app.planning.planned import on_hardware, plan_run
from app.planning.speed import estimate_speed
from app.strategy.settings import FAMILIES
from common.text import percent


@dataclass(frozen=True, slots=True)
class Row:
    """One published row."""

    source: str
    words: str
    gib: float | None = None
    tokens_per_second: float | None = None
    """a GPU"""
    note: str = ""


FMS = "fms-acceleration a100_80gb_liger.csv"
AUTOMODEL = "NeMo AutoModel performance-summary"
ROWS = (
    Row(
        f"{AUTOMODEL}: Llama 3 8B LoRA, 1 x H100",
        "model=llama3_8b hardware=h100 recompute=none trainer.micro_batch_size=2 "
        "data.sequence_len=4096",
        tokens_per_second=12473,
        note="Transformer Engine and Triton",
    ),
    Row(
        f"{AUTOMODEL}: Qwen2.5 7B LoRA, 1 x H100",
        "model=qwen7b hardware=h100 recompute=none trainer.micro_batch_size=2 "
        "data.sequence_len=4096",
        tokens_per_second=14110,
        note="Transformer Engine and Triton",
    ),
    Row(
        f"{AUTOMODEL}: Llama 3 70B LoRA, 8 x H100",
        "model=llama70b hardware=8xh100 strategy=fsdp_tp strategy.tensor_parallel_size=2 "
        "recompute=full trainer.micro_batch_size=2 data.sequence_len=4096",
        tokens_per_second=1092,
        note="recompute not stated: full is taken",
    ),
    Row(
        f"{AUTOMODEL}: Qwen2.5 32B LoRA, 8 x H100",
        "model=qwen32b hardware=8xh100 strategy=fsdp_tp strategy.tensor_parallel_size=2 "
        "recompute=full trainer.micro_batch_size=2 data.sequence_len=4096",
        tokens_per_second=2250,
        note="recompute not stated: full is taken",
    ),
    Row(
        f"{FMS}: Llama 3 8B full, 1 x A100, batch 8",
        "model=llama3_8b hardware=a100_80gb adapter=full trainer.precision=bf16-pure "
        "recompute=full trainer.micro_batch_size=8 data.sequence_len=4096",
        gib=74.8,
        tokens_per_second=3409,
        note="length not stated: 4,096 is taken; weights in bf16",
    ),
    Row(
        f"{FMS}: Llama 3 8B LoRA, 1 x A100, batch 8",
        "model=llama3_8b hardware=a100_80gb recompute=full trainer.micro_batch_size=8 "
        "data.sequence_len=4096",
        gib=31.3,
        tokens_per_second=3879,
        note="length not stated: 4,096 is taken",
    ),
    Row(
        f"{FMS}: Llama 3 8B QLoRA, 1 x A100, batch 8",
        "model=llama3_8b hardware=a100_80gb quantization=nf4 recompute=full "
        "trainer.micro_batch_size=8 data.sequence_len=4096",
        gib=21.4,
        tokens_per_second=4105,
        note="length not stated: 4,096 is taken",
    ),
    Row(
        "torchtune README: Llama 3.2 3B full, 1 x A100",
        "model=llama3b hardware=a100_80gb adapter=full trainer.precision=bf16-pure "
        "recompute=none trainer.micro_batch_size=2 data.sequence_len=4096",
        gib=51.0,
        tokens_per_second=8998,
        note="packed, compiled",
    ),
    Row(
        "PEFT method_comparison: Llama 3.2 3B LoRA r 32, 1 x L40S",
        "model=llama3b hardware=l40s adapter.r=32 recompute=none trainer.micro_batch_size=4 "
        "data.sequence_len=768 trainer.kernels=torch",
        gib=20.8,
        tokens_per_second=7245,
        note="targets not stated: all-linear is taken; padded rows",
    ),
    Row(
        "LLaMA-Factory wiki: Llama 2 7B LoRA r 8, 1 x A100, Unsloth + FA2",
        "model=llama2_7b hardware=a100_80gb adapter.r=8 recompute=full "
        "trainer.micro_batch_size=4 data.sequence_len=1024",
        gib=16.0,
        tokens_per_second=4007,
        note="recompute not stated: full is taken",
    ),
    Row(
        "llm-foundry: 7B full, 8 x A100, 2,048 tokens",
        "model=llama2_7b hardware=8xa100_80gb adapter=full strategy=fsdp recompute=none "
        "trainer.micro_batch_size=1 data.sequence_len=2048",
        tokens_per_second=4641,
        note="an MPT, taken as Llama 2 7B; micro-batch not stated",
    ),
    Row(
        "torchtitan: Llama 3.1 8B full, 8 x H100, 8,192 tokens, compiled",
        "model=llama8b hardware=8xh100 adapter=full strategy=fsdp recompute=selective "
        "trainer.micro_batch_size=2 data.sequence_len=8192",
        gib=77.0,
        tokens_per_second=6667,
        note="a 96 GB card of 500 W; its selective recompute is of every second product",
    ),
    Row(
        "PEFT docs: Llama 70B LoRA, ZeRO-3, 8 x 80 GB",
        "model=llama2_70b hardware=8xa100_80gb strategy=zero3 recompute=full "
        "trainer.micro_batch_size=8 data.sequence_len=2048",
        gib=64.0,
        note="batch 8 and 2,048 tokens, as in its example",
    ),
    Row(
        "PEFT docs: Llama 70B QLoRA, FSDP, 2 x 24 GB, without offload",
        "model=llama2_70b hardware=2xrtx4090 strategy=fsdp quantization=nf4 recompute=full "
        "trainer.micro_batch_size=2 data.sequence_len=2048",
        gib=35.6,
        note="batch 2 and 2,048 tokens, as in its example",
    ),
)


@dataclass(frozen=True, slots=True)
class Said:
    """The plan of a row."""

    row: Row
    gib: float
    tokens_per_second: float

    @property
    def memory_error(self) -> float | None:
        """The relative error."""
        return None if self.row.gib is None else self.gib / self.row.gib - 1

    @property
    def speed_ratio(self) -> float | None:
        """Modelled over published speed: above 1, since launches and hosts are not modelled."""
        known = self.row.tokens_per_second
        return None if known is None else self.tokens_per_second / known


def compare() -> list[Said]:
    """Return the plan of every row."""
    said = []
    for row in ROWS:
        typed = row.words.split()
        precision = [] if "trainer.precision" in row.words else ["trainer.precision=bf16"]
        config = load_config("plan", ["data=dolly", *precision, *typed])
        hardware = on_hardware(config, config.hardware)  # type: ignore[union-attr, arg-type]
        names = [name for name in FAMILIES if name not in ("auto", "zero3_nvme")]
        run, _ = plan_run(
            config,  # type: ignore[arg-type]
            hardware,
            config.model.architecture,
            strategies={name: settings_of("strategy", name) for name in names},
        )
        run = replace(run, accumulation=max(1, run.accumulation))
        memory = estimate_gpu_memory(run).total / GIB
        said.append(Said(row, memory, estimate_speed(run).tokens_per_second / run.num_ranks))
    return said


def main() -> None:
    """Print a Markdown table."""
    print("| row | GiB | said | error | tokens/s a GPU | said | said / published | taken |")
    print("|---|---|---|---|---|---|---|---|")
    for each in compare():
        row = each.row
        memory = "-" if each.memory_error is None else percent(each.memory_error, 0, sign="+")
        speed = "-" if each.speed_ratio is None else f"{each.speed_ratio:.2f}"
        published = "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        print(
            f"| {row.source} | {row.gib or '-'} | {each.gib:.1f} | {memory} | {published} | "
            f"{each.tokens_per_second:,.0f} | {speed} | {row.note} |"
        )


if __name__ == "__main__":
    main()
