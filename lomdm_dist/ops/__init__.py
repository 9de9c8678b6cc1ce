"""Fused operations, each with a plain PyTorch reference beside it."""
