"""Tensor parallelism: a model is split from outside, by replacing its linear layers with Megatron's.

    qkv, mlp_in            column-parallel: a rank has some heads, some of the MLP's channels
    attention_out, mlp_out row-parallel
    adaLN modulation       column-parallel, and gathered: one row a pass, but 6 D x condition_width weights
    embedding, output      by vocabulary, padded to divide; padding is never looked up and never predicted
    norms, the rest        everyone has all of it

With sequence parallelism the ranks also share out the tokens between the layers of a block: norms,
modulation, dropout and residuals, and what is kept of them for the backward pass. Features leave a stack
of blocks whole. The parameters that all have then see some of the tokens each, so their gradients are
summed over the ranks (`Shared`): without that they are silently wrong.

A split model computes what the whole one does, on every rank the same.
"""

import dataclasses
import warnings

import torch
from torch import Tensor, nn

from lomdm_dist.model import LoMDM
from lomdm_dist.model.backbone import Block, ModulatedNorm, Output
from lomdm_dist.ops.collective import same_on
from lomdm_dist.parallel.grid import Grid
from lomdm_dist.parallel.layout import Layout, whole_layouts

warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")  # see `train`
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says at import that Transformer Engine is absent
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        gather_from_sequence_parallel_region,
        scatter_to_sequence_parallel_region,
    )


def split(model: LoMDM, grid: Grid, sequence_parallel: bool) -> dict[str, Layout]:
    """Split a model on the meta device over the tensor-parallel ranks; returns the layouts of this one."""
    if grid.device.type == "cpu":
        # Megatron asks for the current GPU wherever it makes a tensor
        torch.cuda.current_device = lambda: torch.device("cpu")
    splitter = _Splitter(whole_layouts(model), grid, sequence_parallel)
    for name, module in list(model.named_modules()):
        if isinstance(module, Block):
            splitter.block(name, module)
        elif isinstance(module, Output):
            splitter.output(name, module)
    splitter.embedding("backbone.embedding", model.backbone)
    if sequence_parallel:
        splitter.share_tokens(model)
    return splitter.layouts


class _Splitter:
    def __init__(self, layouts: dict[str, Layout], grid: Grid, sequence_parallel: bool):
        self.layouts = layouts
        self.rank, self.size, self.group = grid.tensor_rank, grid.tensor_size, grid.tensor_group
        self.sequence_parallel = sequence_parallel
        self.plain = ModelParallelConfig(
            tensor_model_parallel_size=self.size, use_cpu_initialization=True, perform_initialization=False
        )
        self.within_blocks = dataclasses.replace(self.plain, sequence_parallel=sequence_parallel)

    def block(self, name: str, block: Block) -> None:
        self._column(name, block, "qkv")
        self._row(name, block, "attention_out")
        self._column(name, block, "mlp_in")
        self._row(name, block, "mlp_out")
        self._modulation(name, block, of_tokens=True)
        if self.sequence_parallel:
            block.norm1 = _SharedNorm(block.norm1, self.group)
            block.norm2 = _SharedNorm(block.norm2, self.group)

    def output(self, name: str, output: Output) -> None:
        self._modulation(name, output, of_tokens=False)
        output.vocabulary = self.group
        rows = self._padded(output.vocab_size)
        for kind in ("weight", "bias"):
            whole = getattr(output, kind)
            part = whole.new_empty(rows, *whole.shape[1:])
            setattr(output, kind, nn.Parameter(part))
            self._note(f"{name}.{kind}", 0, rows)

    def embedding(self, name: str, backbone: nn.Module) -> None:
        whole = backbone.embedding.weight
        rows = self._padded(whole.shape[0])
        with torch.device("meta"):
            backbone.embedding = _Embedding(
                rows * self.size,
                whole.shape[1],
                init_method=None,
                reduce_scatter_embeddings=self.sequence_parallel,
                config=self.plain,
                tp_group=self.group,
            )
        self._note(f"{name}.weight", 0, rows)

    def share_tokens(self, model: LoMDM) -> None:
        """Spread the tokens over the ranks where they enter a stack of blocks, gather them where they leave.

        The embedding spreads the backbone's already.
        """
        model.backbone.multiple = self.size
        heads = [head.block for head in (model.phi, model.psi) if head is not None and head.block is not None]
        for block in heads:
            block.register_forward_pre_hook(self._spread_tokens)
        for block in [model.backbone.blocks[-1], *heads]:
            block.register_forward_hook(self._gather_tokens)
        for block in model.modules():
            if isinstance(block, Block):
                block.register_forward_pre_hook(self._spread_rows)

    def _spread_tokens(self, block: Block, arguments: tuple) -> tuple:
        return (scatter_to_sequence_parallel_region(arguments[0], group=self.group), *arguments[1:])

    def _gather_tokens(self, block: Block, arguments: tuple, x: Tensor) -> Tensor:
        # what follows is the same on all ranks, and so is its gradient: each takes back its own tokens'
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=self.group)

    def _spread_rows(self, block: Block, arguments: tuple) -> tuple:
        *rest, rows = arguments
        return (*rest, None if rows is None else rows.chunk(self.size)[self.rank])

    def _padded(self, vocab_size: int) -> int:
        """Rows of the vocabulary a rank has."""
        return -(-vocab_size // self.size)

    def _note(self, name: str, dim: int, part: int) -> None:
        self.layouts[name] = Layout(self.layouts[name].shape, dim, part, self.rank * part)

    def _note_columns(self, name: str) -> None:
        """q, k and v lie one below the other, and each is split, by heads."""
        for kind in ("weight", "bias"):
            if whole := self.layouts.get(f"{name}.{kind}"):
                dim = len(whole.shape) - (2 if kind == "weight" else 1)
                self._note(f"{name}.{kind}", dim, whole.shape[dim] // self.size)

    def _column(self, name: str, owner: nn.Module, kind: str) -> None:
        linear = getattr(owner, kind)
        self._note_columns(f"{name}.{kind}")
        with torch.device("meta"):
            column = _Column(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                init_method=None,
                config=self.within_blocks,
                tp_group=self.group,
            )
        setattr(owner, kind, column)

    def _row(self, name: str, owner: nn.Module, kind: str) -> None:
        linear = getattr(owner, kind)
        self._note(f"{name}.{kind}.weight", 1, linear.in_features // self.size)
        with torch.device("meta"):
            row = _Row(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                input_is_parallel=True,
                skip_bias_add=True,
                init_method=None,
                config=self.within_blocks,
                tp_group=self.group,
            )
        setattr(owner, kind, row)

    def _modulation(self, name: str, owner: nn.Module, of_tokens: bool) -> None:
        linear = owner.modulation
        self._note_columns(f"{name}.modulation")
        with torch.device("meta"):
            owner.modulation = _Modulation(
                linear.in_features,
                linear.out_features,
                bias=True,
                gather_output=True,
                init_method=None,
                config=self.plain,
                tp_group=self.group,
            )
        owner.modulation.shared = of_tokens and self.sequence_parallel


class _Column(ColumnParallelLinear):
    """Megatron's returns its bias too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class _Modulation(ColumnParallelLinear):
    """The condition [1, C] -> [1, n D], whole on all ranks; `shared` where each uses it on its own tokens."""

    def forward(self, condition: Tensor) -> Tensor:
        out = super().forward(condition)[0]
        return same_on(out, self.tp_group) if self.shared else out


class _Row(RowParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        out, bias = super().forward(x)
        if bias is None:
            return out
        return out + (same_on(bias, self.tp_group) if self.sequence_parallel else bias)


class _SharedNorm(ModulatedNorm):
    """A norm of which each rank sees some of the tokens: the gradient of its weight is summed."""

    def __init__(self, norm: ModulatedNorm, group):
        nn.Module.__init__(self)
        self.weight, self.group = norm.weight, group

    def scale(self) -> Tensor:
        return same_on(self.weight, self.group)


class _Embedding(VocabParallelEmbedding):
    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [N] -> [N, D]; with sequence parallelism this rank's share of them."""
        if self.reduce_scatter_embeddings:
            return super().forward(tokens[None])[:, 0]
        return super().forward(tokens)
