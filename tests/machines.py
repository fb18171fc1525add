"""Machines with GPUs that are made up."""

from __future__ import annotations

from app.process.gpus import Gpu, Machine

H100 = Gpu(name="NVIDIA H100 80GB HBM3", memory_gib=79.2, capability=(9, 0))
TWO = Machine(
    num_files=2,
    driver="580.65.06",
    cuda=(13, 0),
    gpus=(H100, H100),
    torch="2.13.0",
    torch_cuda=(13, 0),
)
"""two of them, and nothing wrong"""
