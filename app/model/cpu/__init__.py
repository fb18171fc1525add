"""Kernels for the CPU, faster than PyTorch's own."""
