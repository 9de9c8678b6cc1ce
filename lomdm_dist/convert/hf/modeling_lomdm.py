"""The learnable-order masked diffusion language model (LoMDM), and MDLM, in one readable file.

    from transformers import AutoModelForMaskedLM
    model = AutoModelForMaskedLM.from_pretrained(FOLDER, trust_remote_code=True)
    model(input_ids)               logits of the clean tokens, and the exponents seen from the masked text
    model.order_exponents(ids)     the order that the model has learned for a clean text
    model.nelbo(ids)               the bound on -log p(x), in nats a sequence
    model.sample(num=4)            ids of text from nothing

Position i is masked at time t, in (0, 1], with probability t ** e_i. A position with a large exponent
is masked late, hence generated early. MDLM is e = 1. Shape letters: B sequences, L positions, D width,
V vocabulary, N masked positions of a batch.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .configuration_lomdm import LomdmConfig

MLP_RATIO = 4
FREQUENCIES = 256  # width of the time embedding that the condition starts from
ROTARY_BASE = 10_000.0
EVALUATE, SAMPLE, STRATA = 1, 2, 4  # purposes of noise: they keep the streams of one seed apart
SMALLEST_TIME = 1e-300  # u ** (1 / e) may fall below float64's range


# --- the network ---------------------------------------------------------------------------------


class LayerNorm(nn.Module):
    """Weight and no bias; computed in float32 whatever the input's dtype."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return (F.layer_norm(x.float(), x.shape[-1:]) * self.weight.float()).to(x.dtype)


class Condition(nn.Module):
    """The adaLN condition [1, condition_width]: the network does not depend on time, it is that of time 0."""

    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self) -> Tensor:
        embedding = self.mlp[0].weight.new_zeros(1, FREQUENCIES)
        embedding[:, : FREQUENCIES // 2] = 1  # cos(0), and sin(0) in the second half
        return F.silu(self.mlp(embedding))


def rotary_table(length: int, head_width: int, device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each [L, head_width / 2], float32."""
    exponents = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, ROTARY_BASE**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (i, i + d/2) of each head by the angle of their position; x [B, heads, L, d]."""
    cos, sin = rotary
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def zero_linear(width_in: int, width_out: int) -> nn.Linear:
    """A linear layer that starts at zero."""
    linear = nn.Linear(width_in, width_out)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


class Block(nn.Module):
    """Pre-norm transformer block with adaLN modulation and bidirectional attention."""

    def __init__(self, config: LomdmConfig):
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.norm1 = LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.norm2 = LayerNorm(width)
        self.mlp_in = nn.Linear(width, MLP_RATIO * width)
        self.mlp_out = nn.Linear(MLP_RATIO * width, width)
        self.modulation = zero_linear(config.condition_width, 6 * width)

    def attention(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Tensor | None) -> Tensor:
        B, L, D = x.shape
        q, k, v = self.qkv(x).view(B, L, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v, attn_mask=attend)
        return self.attention_out(mixed.transpose(1, 2).reshape(B, L, D))

    def mlp(self, x: Tensor) -> Tensor:
        return self.mlp_out(F.gelu(self.mlp_in(x), approximate="tanh"))

    def forward(self, x: Tensor, condition: Tensor, rotary, attend: Tensor | None) -> Tensor:
        """x [B, L, D] -> [B, L, D]; attend [B, 1, 1, L] bool is False at padding."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        x = x + gate1 * self.attention(modulate(self.norm1(x), shift1, scale1), rotary, attend)
        return x + gate2 * self.mlp(modulate(self.norm2(x), shift2, scale2))


class Output(nn.Module):
    """Final norm and projection onto the vocabulary: [..., D] -> logits [..., V], float32.

    The mask token is not text: its logit is -inf.
    """

    def __init__(self, config: LomdmConfig):
        super().__init__()
        self.mask_token_id = config.mask_token_id
        self.norm = LayerNorm(config.hidden_size)
        self.modulation = zero_linear(config.condition_width, 2 * config.hidden_size)
        self.weight = nn.Parameter(torch.zeros(config.vocab_size, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, features: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition).chunk(2, dim=-1)
        logits = F.linear(modulate(self.norm(features), shift, scale), self.weight, self.bias).float()
        never = torch.arange(logits.shape[-1], device=logits.device) == self.mask_token_id
        return logits.masked_fill(never, -torch.inf)


class Backbone(nn.Module):
    """Token ids -> features [B, L, D] of the last block; `output` turns them into logits."""

    def __init__(self, config: LomdmConfig):
        super().__init__()
        self.head_width = config.hidden_size // config.num_attention_heads
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.condition = Condition(config.condition_width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.output = Output(config)

    def context(self, valid: Tensor | None, length: int, documents: Tensor | None = None) -> tuple:
        """What all blocks of a forward pass share: condition, rotary table, attention mask."""
        condition = self.condition()
        rotary = rotary_table(length, self.head_width, condition.device)
        attend = None if valid is None else valid[:, None, None, :]
        if documents is not None:
            same = (documents[:, :, None] == documents[:, None, :])[:, None]
            itself = torch.eye(length, dtype=torch.bool, device=same.device)  # or padding would see nothing
            attend = same if attend is None else (same & attend) | itself
        return condition, rotary, attend

    def forward(self, tokens: Tensor, context: tuple) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, *context)
        return x


class SchedulerHead(nn.Module):
    """One more block, then a scalar a position: features [B, L, D] -> [B, L], float32."""

    def __init__(self, config: LomdmConfig):
        super().__init__()
        self.block = Block(config)
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, features: Tensor, context: tuple) -> Tensor:
        hidden = self.block(features, *context).float()
        return F.linear(hidden, self.weight.float(), self.bias.float())[..., 0]


# --- the model -----------------------------------------------------------------------------------


@dataclass
class LomdmOutput(ModelOutput):
    """loss       mean cross-entropy of the masked positions that have a label; None without labels
    logits     [B, L, V] float32, -inf at the mask token. They say something of masked positions only:
               by definition an unmasked position keeps its token
    exponents  [B, L] float64, of the reverse process, seen from the masked text: a masked position is
               revealed between the times t and s < t with probability 1 - (s / t) ** exponent
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    exponents: Tensor | None = None


class LomdmForMaskedLM(PreTrainedModel):
    """theta (`backbone`), phi (order of the clean text), psi (the order, seen from the masked text).

    Where an `attention_mask` is taken, it is 1 at text and 0 at padding; without one, all is text. With
    the config's `attend` "document", a clean text is taken apart at EOS; a masked one is one document.
    """

    config_class = LomdmConfig
    _supports_sdpa = True

    def __init__(self, config: LomdmConfig):
        super().__init__(config)
        self.backbone = Backbone(config)
        learned = config.objective == "lomdm"
        self.phi = SchedulerHead(config) if learned else None
        self.psi = SchedulerHead(config) if learned else None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: a new model's modules have set themselves."""

    def get_input_embeddings(self) -> nn.Embedding:
        return self.backbone.embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> LomdmOutput | tuple:
        """The masked text [B, L] -> LomdmOutput; labels [B, L], -100 where there is none."""
        features, exponents, condition = self._see(input_ids, _valid(attention_mask))
        logits, loss = self.backbone.output(features, condition), None
        if labels is not None:
            chosen = (input_ids == self.config.mask_token_id) & (labels != -100)
            loss = F.cross_entropy(logits[chosen], labels[chosen])
        output = LomdmOutput(loss=loss, logits=logits, exponents=exponents)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def order_exponents(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The clean text [B, L] -> its exponents [B, L], float64: larger is generated earlier."""
        valid = _valid(attention_mask)
        if self.phi is None:
            return self._fixed_exponents(input_ids)
        with torch.no_grad():
            context = self.backbone.context(valid, input_ids.shape[1], self._documents(input_ids))
            features = self.backbone(input_ids, context)
        return self._exponents(self.phi(features, context), valid)

    @torch.no_grad()
    def nelbo(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        draws: int = 1,
        seed: int = 0,
        first_index: int = 0,
        total: int | None = None,
    ) -> Tensor:
        """The bound on -log p(x) of each clean text: [B, L] -> [B], nats, float64. No time is cut off.

        An estimate, the mean of `draws` draws of a time and a mask pattern. For a set of `total` texts in
        batches, give the index of the batch's first: then the noise is that of `lomdm eval ppl`, and the sum
        over the set, divided by its tokens (all but padding), is its nll_per_token. exp of that is an upper
        bound on the perplexity.
        """
        valid, (count, length) = _valid(attention_mask), input_ids.shape
        numbers = torch.arange(first_index, first_index + count)
        total = first_index + count if total is None else total
        exponents = self.order_exponents(input_ids, attention_mask)
        everything = torch.ones_like(input_ids, dtype=torch.bool) if valid is None else valid
        bound = torch.zeros(count, dtype=torch.float64, device=input_ids.device)
        for draw in range(draws):
            uniforms = keyed_uniforms(seed, EVALUATE, draw, numbers, 2 + length)
            turn = int(keyed_uniforms(seed, STRATA, 0, [0], 1) * total * draws)
            uniforms[:, 0] = stratify(uniforms[:, 0], numbers * draws + draw + turn, total * draws)
            time, masks = uniforms.to(input_ids.device).split([2, length], dim=1)
            t, pinned = pinned_time(exponents, time, everything)
            masked = (masks < t[:, None] ** exponents) & everything | pinned
            rate = torch.where(masked, exponents / t[:, None], 0.0).sum(dim=1)
            weight = everything.sum(dim=1) / rate  # 1 / density of the time and the masks
            bound += weight * self._integrand(input_ids, valid, masked, exponents, t) / draws
        return bound

    def _integrand(
        self, x: Tensor, valid: Tensor | None, masked: Tensor, exponents: Tensor, t: Tensor
    ) -> Tensor:
        """sum over masked i of A_i CE_i + A_i log(A_i / hatA_i) - (A_i - hatA_i), with A = e / t: [B]."""
        z = torch.where(masked, self.config.mask_token_id, x)
        features, hat_exponents, condition = self._see(z, valid, self._documents(x))
        ce = F.cross_entropy(self.backbone.output(features[masked], condition), x[masked], reduction="none")
        velocity, hat_velocity = exponents / t[:, None], hat_exponents / t[:, None]
        terms = velocity * (velocity.log() - hat_velocity.log()) - (velocity - hat_velocity)
        terms += velocity * torch.zeros_like(velocity).masked_scatter(masked, ce.double())
        return torch.where(masked, terms, 0.0).sum(dim=1)

    @torch.no_grad()
    def sample(
        self, num: int = 1, length: int | None = None, steps: int | None = None, seed: int = 0
    ) -> Tensor:
        """Draw `num` texts from the model: ids [num, length]. Text i depends on (seed, i) alone.

        From all masks at time 1 to all text at time 0, in `steps` equal steps (default: the length).
        """
        length = self.config.max_position_embeddings if length is None else length
        steps = length if steps is None else steps
        z = torch.full((num, length), self.config.mask_token_id, device=self.device)
        for k in range(steps):
            t, s = 1 - k / steps, 1 - (k + 1) / steps
            uniforms = keyed_uniforms(seed, SAMPLE, k, range(num), 2 * length)
            to_reveal, for_token = uniforms.to(self.device).chunk(2, dim=1)
            features, exponents, condition = self._see(z, None)
            reveal_prob = 1 - (s / t) ** exponents
            reveal = (z == self.config.mask_token_id) & (to_reveal < reveal_prob)
            logits = self.backbone.output(features[reveal], condition)
            if self.config.pad_token_id not in (None, self.config.eos_token_id):
                logits[:, self.config.pad_token_id] = -torch.inf  # padding is not text
            z = z.masked_scatter(reveal, draw_tokens(logits, for_token[reveal]))
        return z

    def _documents(self, x: Tensor) -> Tensor | None:
        """The number of each token's document, [B, L], where a token sees its own document only."""
        if self.config.attend == "sequence":
            return None
        ends = (x == self.config.eos_token_id).long()
        return ends.cumsum(dim=1) - ends

    def _see(self, z: Tensor, valid: Tensor | None, documents: Tensor | None = None) -> tuple:
        """The masked text -> features [B, L, D], exponents [B, L], and the condition of the output."""
        context = self.backbone.context(valid, z.shape[1], documents)
        features = self.backbone(z, context)
        if self.psi is None:
            return features, self._fixed_exponents(z), context[0]
        logits = self.psi(features.detach(), (context[0].detach(), *context[1:]))
        return features, self._exponents(logits, valid), context[0]

    def _exponents(self, logits: Tensor, valid: Tensor | None) -> Tensor:
        """c1 + c2 (sigmoid(g_i) - mean over the text of sigmoid(g)): [B, L], float64; c1 at padding."""
        gate = torch.sigmoid(logits.double())
        valid = torch.ones_like(gate) if valid is None else valid
        mean = (gate * valid).sum(dim=1, keepdim=True) / valid.sum(dim=1, keepdim=True).clamp(min=1)
        return self.config.c1 + self.config.c2 * (gate - mean) * valid

    def _fixed_exponents(self, tokens: Tensor) -> Tensor:
        return torch.full(tokens.shape, self.config.c1, dtype=torch.float64, device=tokens.device)


def _valid(attention_mask: Tensor | None) -> Tensor | None:
    return None if attention_mask is None else attention_mask.bool()


# --- noise, times, draws -------------------------------------------------------------------------


def keyed_uniforms(seed: int, purpose: int, step: int, indices: Iterable[int], count: int) -> Tensor:
    """Uniforms in [0, 1) that depend on these numbers alone: [len(indices), count], float64, on the CPU."""
    rows = []
    for index in indices:
        bits = np.random.Philox(key=[seed, purpose], counter=[0, step, int(index), 0])
        rows.append(np.random.Generator(bits).random(count))
    return torch.from_numpy(np.stack(rows))


def stratify(uniforms: Tensor, indices: Tensor, batch: int) -> Tensor:
    """One uniform in each of `batch` equal strata of [0, 1), spread by a golden-ratio lattice: [n] -> [n]."""
    generator = max(1, round(batch * (math.sqrt(5) - 1) / 2))
    while math.gcd(generator, batch) != 1:
        generator += 1
    return (indices * generator % batch + uniforms) / batch


def pinned_time(exponents: Tensor, uniforms: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Pick a position of the text and draw the time at which it is masked: t [B], and that position [B, L].

    uniforms [B, 2]: the first for the time, the second for the position.
    """
    counts = valid.double().cumsum(dim=1)
    position = torch.searchsorted(counts, (uniforms[:, 1] * counts[:, -1])[:, None], right=True)
    position = position.clamp(max=valid.shape[1] - 1)
    chosen = exponents.gather(1, position)[:, 0]
    t = (uniforms[:, 0].log() / chosen).exp().clamp(min=SMALLEST_TIME, max=1.0)
    return t, torch.zeros_like(valid).scatter(1, position, True)


def draw_tokens(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Exact draws: logits [N, V], uniforms [N] -> ids [N], by the inverse of the distribution in float64."""
    cumulative = logits.double().softmax(dim=1).cumsum(dim=1)
    cumulative = cumulative / cumulative[:, -1:]  # ends at 1, so a uniform below 1 always lands
    return torch.searchsorted(cumulative, uniforms[:, None], right=True)[:, 0]
