"""Reads DCP's part of a checkpoint without running what may stand in it.

DCP keeps its `.metadata` as a pickle, and a pickle can call anything. Here it may name the few classes that
a checkpoint of tensors needs, and nothing else; even those are not called: each object becomes a record of
what the file says of it, and DCP's own objects are made from the records. Tensors are read by torch.load with
weights_only=True; objects of other kinds, which DCP would unpickle, are in no checkpoint of ours.
"""

import pickle
from collections.abc import Container
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

METADATA = ".metadata"
_NAMED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    # of the folder that was written
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # Python 3.13's
    "builtins": {
        "getattr"
    },  # how Python 3.11.0 to 3.11.3 write a member of an enumeration; not called either
}


class _Record:
    """What the file says of one object: its state, and none of its code."""

    def __init__(self, *_):
        pass

    def __setstate__(self, state):
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if name in _NAMED.get(module, ()):
            return _Record
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def read_metadata(folder: Path, files: Container[str]) -> Metadata:
    """Shape, dtype and pieces of each saved tensor; `files` are those that pieces may lie in.

    Raises whatever a foreign or damaged file leads to; it never runs what stands there.
    """
    with open(folder / METADATA, "rb") as file:
        said = _Unpickler(file).load().state
    tensors = {str(name): _tensor(**tensor.state) for name, tensor in said["state_dict_metadata"].items()}
    places = {MetadataIndex(**at.state): _place(files, **p.state) for at, p in said["storage_data"].items()}
    return Metadata(tensors, storage_data=places)


def _tensor(properties: _Record, size: tuple, chunks: list[_Record]) -> TensorStorageMetadata:
    dtype, *_ = properties.state
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no dtype")
    pieces = [
        ChunkStorageMetadata(*(torch.Size(chunk.state[key]) for key in ("offsets", "sizes")))
        for chunk in chunks
    ]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), pieces)


def _place(files: Container[str], relative_path: str, offset: int, length: int, **_) -> _StorageInfo:
    if relative_path not in files:
        raise ValueError(f"it has a piece in {relative_path!r}, which is no file of the checkpoint")
    return _StorageInfo(relative_path, int(offset), int(length))


class SafeReader(dcp.FileSystemReader):
    """DCP's reader of a folder, with metadata that were read as above."""

    def __init__(self, folder: Path, metadata: Metadata):
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_, **__) -> Metadata:
        """For DCP."""
        return self._metadata
