"""Where it runs: one device, DDP, DeepSpeed ZeRO, FSDP2, tensor parallelism, local SGD."""
