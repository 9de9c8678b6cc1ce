"""From masks, or a prompt, to text."""

from lomdm_dist.sample.ancestral import Samples, sample

__all__ = ["Samples", "sample"]
