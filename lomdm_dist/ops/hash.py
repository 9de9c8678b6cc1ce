"""SplitMix64: random numbers by index alone, on any device, for values too many to draw in order.

Integers are signed, as torch has them, and wrap.
"""

import torch
from torch import Tensor


def signed(number: int, bits: int) -> int:
    """The signed integer of the same bits."""
    return number - (1 << bits) if number >> (bits - 1) else number


GOLDEN = signed(0x9E3779B97F4A7C15, 64)  # the increment of SplitMix64, then its two multipliers
MULTIPLIERS = signed(0xBF58476D1CE4E5B9, 64), signed(0x94D049BB133111EB, 64)


def mix(z: Tensor) -> Tensor:
    """The end of SplitMix64: int64 to int64, one to one, every bit of the result hangs on every bit."""
    z = (z ^ _shifted(z, 30)) * MULTIPLIERS[0]
    z = (z ^ _shifted(z, 27)) * MULTIPLIERS[1]
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """The logical right shift; torch's own is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def hashed_uniforms(key: int, index: Tensor) -> Tensor:
    """Uniforms in [0, 1) of (key, index), on the index' device.

    key: 64 bits; index: int64, any shape -> float64 of that shape, multiples of 2**-53.
    """
    z = mix((index + signed(key, 64)) * GOLDEN)
    return _shifted(z, 11).to(torch.float64) * 2.0**-53
