"""Plans compared with published rows.

Their programs are not ours: settings that a row does not state are taken as its program has them by
default, and are named. Nothing of the arithmetic was fitted to these rows.
`python -m benchmarks.planning.published` prints the table.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from app.config import load_config, settings_of
from app.planning.memory import GIB, PlannedRun, estimate_gpu_memory
from app.planning.planned import load_strategies, on_hardware, plan_run
from app.planning.speed import estimate_speed
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
    fuses: bool = False
    """whether its compiler or library fuses norms where our kernels do not: under tensor
    parallelism"""
    reserved: bool = False
    """whether the memory holds what PyTorch's allocator keeps beyond what is in use"""
    padded: bool = False
    """whether its tokens are those of padded rows, or it is not said"""


class FusedRun(PlannedRun):
    """A run of a program that fuses norms under tensor parallelism too."""

    fuses_layers = True  # type: ignore[assignment]


FMS = "fms-acceleration a100_80gb_liger.csv"
AUTOMODEL = "NeMo AutoModel performance-summary"
FOUNDRY = "llm-foundry scripts/train/benchmarking"
KEMPNER = "KempnerForge mfu_scaling 2026-04-05"
IBM = "PyTorch and IBM, maximizing-training 2024-03-13"
TITAN = "torchtitan llama3_h100_202412"
TITAN_A100 = "torchtitan docs/performance of 2024"
NVIDIA = "NVIDIA dgxc-benchmarking 25.03"

ONE = "data.sequence_len=4096 trainer.gradient_accumulation_steps=1"
FULL_FSDP = f"adapter=full strategy=fsdp {ONE}"
LORA_TP = (
    "strategy=fsdp_tp strategy.tensor_parallel_size=2 recompute=full trainer.micro_batch_size=2 "
    "data.sequence_len=4096"
)
IN_STAGES = (
    "model=llama3_3_70b strategy=fsdp_pp strategy.pipeline_parallel_size=4 "
    "strategy.schedule=interleaved recompute=none trainer.micro_batch_size=1 "
    "data.sequence_len=4096"
)
ITS_H100 = "hardware.half_tflops=835 hardware.memory_gb_per_second=2400"
"""HBM2e of 2.4 TB/s and 500 W: its authors place the peak between those of SXM and NVL, 989 and 835
TFLOPS"""
OLD = "trainer.kernels=torch"
"""a program of before fused norms and gates"""
A100_CLUSTER = "hardware=16x8xa100_80gb hardware.network_gb_per_second=50"
H100_CLUSTER = "hardware=12x8xh100 hardware.network_gb_per_second=100"
FULL_H200 = (
    "model=llama3_8b adapter=full recompute=full trainer.micro_batch_size=4 "
    "trainer.gradient_accumulation_steps=2 data.sequence_len=4096"
)
ROWS = (
    Row(
        f"{AUTOMODEL}: Llama 3 8B LoRA, 1 x H100",
        "model=llama3_8b hardware=h100 recompute=none trainer.micro_batch_size=2 "
        "trainer.gradient_accumulation_steps=16 data.sequence_len=4096 " + OLD,
        tokens_per_second=12473,
        note="norms and LoRA fused, rope and gate not: nothing fused is taken",
    ),
    Row(
        f"{AUTOMODEL}: Qwen2.5 7B LoRA, 1 x H100",
        "model=qwen7b hardware=h100 recompute=none trainer.micro_batch_size=2 "
        "trainer.gradient_accumulation_steps=16 data.sequence_len=4096 " + OLD,
        tokens_per_second=14110,
        note="norms and LoRA fused, rope and gate not: nothing fused is taken",
    ),
    *(
        Row(
            f"{AUTOMODEL}: {name} LoRA, {gpus} x H100",
            f"model={model} hardware={hardware} {LORA_TP} "
            f"trainer.gradient_accumulation_steps={32 // gpus}",
            tokens_per_second=speed,
            note="compiled",
            fuses=True,
        )
        for name, model, gpus, hardware, speed in (
            ("Llama 3 70B", "llama70b", 8, "8xh100", 1092),
            ("Llama 3 70B", "llama70b", 16, "2x8xh100", 985),
            ("Qwen2.5 32B", "qwen32b", 8, "8xh100", 2250),
            ("Qwen2.5 32B", "qwen32b", 16, "2x8xh100", 2073),
        )
    ),
    Row(
        f"{AUTOMODEL}: Llama 3 70B full, 64 x H100, two ranks a row of 8,192 tokens",
        "model=llama70b hardware=8x8xh100 adapter=full trainer.precision=bf16-pure strategy=fsdp "
        "strategy.context_parallel_size=2 recompute=full trainer.micro_batch_size=1 "
        "data.sequence_len=8192 trainer.gradient_accumulation_steps=4",
        tokens_per_second=867,
        note="compiled",
    ),
    Row(
        f"{NVIDIA}: Llama 3 8B LoRA, 8 x H100",
        f"model=llama3_8b hardware=8xh100 strategy=ddp recompute=none trainer.micro_batch_size=1 "
        f"{ONE}",
        tokens_per_second=17809,
        note="short documents packed to 4,096 tokens: less attention than is taken",
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
        f"data.sequence_len=768 {OLD}",
        gib=20.8,
        tokens_per_second=7245,
        note="targets not stated: all-linear is taken",
        reserved=True,
        padded=True,
    ),
    Row(
        "LLaMA-Factory wiki: Llama 2 7B LoRA r 8, 1 x A100, Unsloth + FA2",
        "model=llama2_7b hardware=a100_80gb adapter.r=8 recompute=full "
        "trainer.micro_batch_size=4 data.sequence_len=1024",
        gib=16.0,
        tokens_per_second=4007,
        note="recompute not stated: full is taken; nor the memory of its A100",
        padded=True,
    ),
    *(
        Row(
            f"{FOUNDRY}: MPT {size}, {gpus} x {card}, 2,048 tokens",
            f"model=llama2_{size} hardware={hardware} adapter=full strategy=fsdp recompute=none "
            f"trainer.micro_batch_size={batch} trainer.gradient_accumulation_steps={steps} "
            f"data.sequence_len=2048 {OLD}",
            tokens_per_second=speed,
            note="taken as the Llama 2 of its size",
        )
        for size, gpus, card, hardware, batch, steps, speed in (
            ("7b", 8, "A100", "8xa100_80gb", 6, 2, 4641),
            ("13b", 8, "A100", "8xa100_80gb", 2, 3, 2262),
            ("7b", 8, "H100", "8xh100", 6, 1, 10643),
            ("13b", 8, "H100", "8xh100", 2, 1, 4792),
            ("13b", 64, "H100", "8x8xh100", 2, 1, 4800),
        )
    ),
    *(
        Row(
            f"{IBM}: Llama 2 {size}, {words}",
            f"model=llama2_{size} {hardware} trainer.micro_batch_size=2 {recompute} "
            f"{FULL_FSDP} {OLD}",
            tokens_per_second=speed,
        )
        for size, words, hardware, recompute, speed in (
            ("7b", "128 x A100", A100_CLUSTER, "recompute=none", 3700),
            ("13b", "128 x A100", A100_CLUSTER, "recompute=full recompute.every=2", 1800),
            ("70b", "128 x A100", A100_CLUSTER, "recompute=full", 370),
            ("7b", "96 x H100", H100_CLUSTER, "recompute=none", 7500),
            ("13b", "96 x H100", H100_CLUSTER, "recompute=full recompute.every=2", 3800),
            ("70b", "96 x H100", H100_CLUSTER, "recompute=full", 800),
        )
    ),
    *(
        Row(
            f"{TITAN}: Llama 3.1 8B full, {gpus} x H100, 8,192 tokens, compiled",
            f"model=llama8b hardware={hardware} {ITS_H100} adapter=full strategy=fsdp "
            "recompute=selective trainer.micro_batch_size=2 data.sequence_len=8192 "
            "trainer.gradient_accumulation_steps=1",
            tokens_per_second=speed,
            note="recomputes every second product, and keeps whole logits: memory not compared",
        )
        for gpus, hardware, speed in ((8, "8xh100", 6667), (128, "16x8xh100", 6514))
    ),
    Row(
        f"{TITAN_A100}: Llama 2 13B full, 64 x A100",
        f"model=llama2_13b hardware=8x8xa100_80gb trainer.micro_batch_size=2 recompute=none "
        f"{FULL_FSDP} {OLD}",
        tokens_per_second=2162,
        note="4,096 tokens are taken",
    ),
    Row(
        f"{TITAN_A100}: Llama 2 70B full, 64 x A100",
        f"model=llama2_70b hardware=8x8xa100_80gb trainer.micro_batch_size=2 recompute=full "
        f"{FULL_FSDP} {OLD}",
        tokens_per_second=353,
        note="4,096 tokens are taken",
    ),
    *(
        Row(
            f"{KEMPNER}: Llama 3 8B full, {words}",
            f"hardware={hardware} {strategy} {FULL_H200}",
            tokens_per_second=speed,
            note="compiled",
            fuses=True,
        )
        for words, hardware, strategy, speed in (
            ("1 x H200", "h200", "", 10471),
            ("2 x H200", "2xh200", "strategy=fsdp", 9364),
            ("4 x H200", "4xh200", "strategy=fsdp", 9746),
            ("4 x H200, tensor parallel", "4xh200", "strategy=tp", 6284),
        )
    ),
    *(
        Row(
            f"{NVIDIA}: Llama 3 70B {adapter}, {hardware}, 4 stages x tensor parallel {split}",
            f"{IN_STAGES} hardware={hardware} adapter={adapter} "
            f"strategy.tensor_parallel_size={split} strategy.stages_per_rank={stages} "
            f"trainer.global_batch_size={batch}",
            tokens_per_second=speed,
            note="global batch and recompute not stated: 32 rows for 8 GPUs with LoRA, none",
            fuses=True,
        )
        for hardware, adapter, split, stages, batch, speed in (
            ("8xh100", "lora", 2, 10, 32, 1797),  # 20 stages a rank, of one layer each
            ("2x8xh100", "lora", 2, 10, 64, 1743),
            ("4x8xh100", "lora", 2, 10, 128, 1677),
            ("4x8xh100", "full", 4, 5, 32, 1219),
        )
    ),
    Row(
        "PEFT docs: Llama 70B LoRA, ZeRO-3, 8 x 80 GB",
        "model=llama2_70b hardware=8xa100_80gb strategy=zero3 recompute=full "
        "trainer.micro_batch_size=8 data.sequence_len=2048",
        gib=64.0,
        note="batch 8 and 2,048 tokens, as in its example",
        reserved=True,
    ),
    Row(
        "PEFT docs: Llama 70B QLoRA, FSDP, 2 x 24 GB, without offload",
        "model=llama2_70b hardware=2xrtx4090 strategy=fsdp quantization=nf4 recompute=full "
        "trainer.micro_batch_size=2 data.sequence_len=2048",
        gib=35.6,
        note="batch 2 and 2,048 tokens, as in its example",
        reserved=True,
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
        """The relative error; None where the published memory is not what is in use."""
        known = None if self.row.reserved else self.row.gib
        return None if known is None else self.gib / known - 1

    @property
    def speed_ratio(self) -> float | None:
        """Planned over published speed; None where tokens are not counted alike."""
        known = None if self.row.padded else self.row.tokens_per_second
        return None if known is None else self.tokens_per_second / known


def compare() -> list[Said]:
    """Return the plan of every row."""
    said = []
    for row in ROWS:
        typed = row.words.split()
        precision = [] if "trainer.precision" in row.words else ["trainer.precision=bf16"]
        config = load_config("plan", ["data=dolly", *precision, *typed])
        hardware = on_hardware(config, config.hardware)  # type: ignore[union-attr, arg-type]
        run, _ = plan_run(
            config,  # type: ignore[arg-type]
            hardware,
            config.model.architecture,
            strategies=load_strategies(settings_of),
        )
        run = replace(run, accumulation=max(1, run.accumulation))
        if row.fuses:
            run = FusedRun(**{one.name: getattr(run, one.name) for one in fields(run)})
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
