"""Kernels for the CPU: what PyTorch does there in more passes over memory than it needs."""
