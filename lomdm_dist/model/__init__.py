"""The network: the DiT backbone (theta), the scheduler heads (phi, psi), and the joint model.

Single-device code; parallel forms are applied from outside. Shape letters: B sequences,
L positions, D width, H heads, V vocabulary, N masked positions of a batch.
"""

from lomdm_dist.model.lomdm import LoMDM

__all__ = ["LoMDM"]
