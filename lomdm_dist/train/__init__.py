"""Training: the two-sample step, the loop, checkpoints, metrics."""
