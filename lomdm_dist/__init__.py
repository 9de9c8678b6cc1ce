"""lomdm_dist: a trainer for learnable-order masked diffusion language models."""

__version__ = "0.1.0"
