"""The causal backbone of `ar` a few tokens at a time: keys and values of those before them are kept."""

from torch import Tensor

from lomdm_dist.model.lomdm import LoMDM
from lomdm_dist.ops.attention import Memory
from lomdm_dist.ops.rotary import rotary_table


class Decoder:
    """Reads `count` sequences of up to `length` tokens; the first of each is the mask token: nothing yet.

    Holds 2 B L width numbers a block. For a model that is not split.
    """

    def __init__(self, model: LoMDM, count: int, length: int):
        backbone = self.backbone = model.backbone
        self.read, self.condition = 0, backbone.condition()
        like, width = backbone.embedding.weight, backbone.head_width
        self.rotary = rotary_table(length, width, like.device)
        shape = len(backbone.blocks), 2, count, like.shape[1] // width, length, width
        self.past = like.new_empty(shape)

    def __call__(self, tokens: Tensor) -> Tensor:
        """The next tokens [B, n] -> features of the last of them, [B, D]: those that predict what follows."""
        first, self.read = self.read, self.read + tokens.shape[1]
        rotary = tuple(angles[first : self.read] for angles in self.rotary)
        x = self.backbone.embedding(tokens.flatten())
        for block, past in zip(self.backbone.blocks, self.past, strict=True):
            x = block(x, self.condition, rotary, Memory(past, first), None)
        return x.unflatten(0, tokens.shape)[:, -1]
