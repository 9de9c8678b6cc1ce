"""Chains of pointwise operations as one kernel each, by torch.compile, on the devices where that pays."""

import functools
from collections.abc import Callable

import torch

COMPILED_ON = {"cuda"}  # types of device; `kernels.compile` changes it


def compiled(function: Callable, device: torch.device) -> Callable:
    """The function, or its compiled form, made when a device first needs it; sizes may change.

    torch 2.13 compiles two things wrongly, which such functions must leave to their callers: a number
    computed from one that changes, and a range times a large number (taken for an index).
    """
    return _compile(function) if device.type in COMPILED_ON else function


@functools.cache
def _compile(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True)
