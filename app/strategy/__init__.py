"""Strategies: one device, DDP, DeepSpeed ZeRO, FSDP2, tensor parallelism, local SGD."""
