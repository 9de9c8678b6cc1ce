"""The process grid, and the engine that shards parameters, gradients and optimiser over it."""
