"""Rows on the device: precision, attention, and how many ranks may be on it."""

from __future__ import annotations

import importlib.util

from app.model.attention import IN_HALF, ON_GPU, PACKAGES
from app.preflight.couplings.situation import Coupling, Situation

DEVICE_ROWS = (
    Coupling(
        "trainer.accelerator",
        lambda s: s.config.trainer.accelerator == "gpu" and s.num_gpus == 0,
        lambda s: "trainer.accelerator=gpu, but no GPU was found",
        lambda s: "trainer.accelerator=cpu (CUDA_VISIBLE_DEVICES hides GPUs, too)",
        is_of_machine=True,
    ),
    Coupling(
        "trainer.precision trainer.accelerator",
        lambda s: s.config.trainer.precision == "fp16" and not s.on_gpu,
        lambda s: f"trainer.precision=fp16 needs a GPU, and this run is on {s.device}",
        lambda s: "trainer.precision=fp32 or bf16",
        is_of_machine=True,
    ),
    Coupling(
        "attention.backend trainer.accelerator",
        lambda s: s.config.attention.backend in ON_GPU and not s.on_gpu,
        lambda s: (
            f"attention={s.config.attention.backend} {_needs_gpu(s)}, and this run is on "
            f"{s.device}: attention that knows nothing of documents would let those of a pack see "
            "each other"
        ),
        lambda s: "attention=sdpa (document by document there, which keeps them apart, too)",
        is_of_machine=True,
    ),
    Coupling(
        "attention.backend trainer.precision",
        lambda s: s.config.attention.backend in IN_HALF and s.config.trainer.precision == "fp32",
        lambda s: (
            f"attention={s.config.attention.backend} computes in half precision alone, but "
            "trainer.precision=fp32"
        ),
        lambda s: "trainer.precision=bf16, or attention=sdpa",
    ),
    Coupling(
        "attention.backend trainer.accelerator",
        lambda s: s.config.attention.backend in PACKAGES and s.on_gpu and not _is_installed(s),
        lambda s: (
            f"attention={s.config.attention.backend} needs the package "
            f"{PACKAGES[s.config.attention.backend][1]}, which is not installed"
        ),
        lambda s: "attention=varlen, which comes with PyTorch, or install the package",
        is_of_machine=True,
    ),
    Coupling(
        "strategy.name trainer.accelerator trainer.devices trainer.num_nodes",
        lambda s: s.config.strategy.name == "single" and s.num_ranks > 1,
        lambda s: f"strategy=single runs on one device, but {s.num_ranks} ranks were asked for",
        lambda s: "strategy=ddp, or trainer.devices=1 trainer.num_nodes=1",
    ),
)


def _needs_gpu(situation: Situation) -> str:
    if situation.config.attention.backend == "flex":
        return "has a gradient on NVIDIA GPUs alone"
    return "runs on NVIDIA GPUs alone"


def _is_installed(situation: Situation) -> bool:
    module, _ = PACKAGES[situation.config.attention.backend]
    return importlib.util.find_spec(module) is not None
