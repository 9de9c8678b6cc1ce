"""Masked diffusion language models with an order, learned (LoMDM, GenMD4) or fixed (MDLM, windows), and the
causal baseline, in one readable file.

    from transformers import AutoModelForMaskedLM
    model = AutoModelForMaskedLM.from_pretrained(FOLDER, trust_remote_code=True)
    model(input_ids)               logits of the clean tokens, and the exponents seen from the masked text
    model.order_exponents(ids)     the order that the model has learned for a clean text
    model.nelbo(ids)               the bound on -log p(x), in nats a sequence
    model.generate(prompt)         ids of text: from nothing, after a prompt, or in its gaps

The schedule says with which probability position i is masked at time t, in (0, 1]; in most, t ** e_i. A
position with a large exponent is masked late, hence generated early. MDLM is e = 1. Shape letters:
B sequences, L positions, D width, V vocabulary, N masked positions of a batch.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from .configuration_lomdm import LomdmConfig

MLP_RATIO = 4
FREQUENCIES = 256  # width of the time embedding that the condition starts from
ROTARY_BASE = 10_000.0
GAMMA_MIN, GAMMA_MAX = -13.3, 5.0  # MuLAN's ends
EVALUATE, SAMPLE, STRATA = 1, 2, 4  # purposes of noise: they keep the streams of one seed apart
SMALLEST_TIME = 1e-300  # u ** (1 / e) may fall below float64's range
BISECTIONS = 50  # of [0, 1]: a time to 1e-15


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


def rotary_table(positions: Tensor, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles at positions [..., L], each [..., L, head_width / 2], float32."""
    exponents = torch.arange(0, head_width, 2, device=positions.device, dtype=torch.float32) / head_width
    angles = positions[..., None].float() * ROTARY_BASE**-exponents
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
    """Pre-norm transformer block with adaLN modulation."""

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
        """x [B, L, D] -> [B, L, D]; attend [B or 1, 1, L or 1, L] bool: who sees whom."""
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
        self.causal = config.objective == "ar"
        self.gradient_checkpointing = False  # set by `gradient_checkpointing_enable`
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.condition = Condition(config.condition_width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.output = Output(config)

    def context(self, valid: Tensor | None, length: int, documents: Tensor | None = None) -> tuple:
        """What all blocks of a forward pass share: condition, rotary table, attention mask."""
        condition = self.condition()
        places = torch.arange(length, device=condition.device)
        attend = None if valid is None else valid[:, None, None, :]
        if documents is not None:
            attend = _both((documents[:, :, None] == documents[:, None, :])[:, None], attend)
        if self.causal:
            attend = _both((places <= places[:, None])[None, None], attend)
            if valid is not None:  # a text may begin behind padding
                places = (valid.cumsum(dim=1) - 1).clamp(min=0)[:, None]
        if attend is not None and attend.shape[2] > 1:  # or padding might see nothing, which is no number
            attend = attend | torch.eye(length, dtype=torch.bool, device=attend.device)
        return condition, rotary_table(places, self.head_width), attend

    def forward(self, tokens: Tensor, context: tuple) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                x = self._gradient_checkpointing_func(block.__call__, x, *context)
            else:
                x = block(x, *context)
        return x


def _both(first: Tensor, second: Tensor | None) -> Tensor:
    return first if second is None else first & second


class SchedulerHead(nn.Module):
    """One more block, or none, and a linear layer: features [B, L, D] -> [B, L, 1 or 3], float32.

    A power schedule has one output a position, the logit of its exponent; a polynomial one has three.
    """

    def __init__(self, config: LomdmConfig):
        super().__init__()
        self.block = Block(config) if config.head == "transformer" else None
        outputs = 1 if config.schedule == "power" else 3
        self.weight = nn.Parameter(torch.zeros(outputs, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, features: Tensor, context: tuple) -> Tensor:
        hidden = features if self.block is None else self.block(features, *context)
        return F.linear(hidden.float(), self.weight.float(), self.bias.float())


class TokenExponents(nn.Module):
    """GenMD4's exponents, one a vocabulary entry: w [V], float64."""

    def __init__(self, config: LomdmConfig):
        super().__init__()
        self.theta = nn.Parameter(torch.full((config.vocab_size,), math.log(math.e - 1)))

    def forward(self) -> Tensor:
        return F.softplus(self.theta.float()).double()


# --- schedules: mask_prob(t) = 1 - alpha_i(t), and velocity(t) = A_i(t) = -alpha_i' / (1 - alpha_i) --------
# t [B] -> [B, L], float64.


class PowerSchedule:
    """1 - alpha_i(t) = t ** e_i; exponent [B, L] or [1, 1]."""

    def __init__(self, exponent: Tensor):
        self.exponent = exponent

    def mask_prob(self, t: Tensor) -> Tensor:
        return (self.exponent * t.log()[:, None]).exp()

    def velocity(self, t: Tensor) -> Tensor:
        return self.exponent / t[:, None]


class WindowSchedule:
    """1 - alpha_i(t) = eps t + (1 - eps) S((t - start_i) / width), S(u) = 3 u**2 - 2 u**3 on [0, 1].

    Of `count` windows the position that is generated first has the last: window [L] holds 0 .. count - 1.
    """

    def __init__(self, window: Tensor, count: int, eps: float):
        self.start, self.width, self.eps = 1 - (window.double() + 1) / count, 1 / count, eps

    def mask_prob(self, t: Tensor) -> Tensor:
        u = ((t[:, None] - self.start) / self.width).clamp(0, 1)
        return self.eps * t[:, None] + (1 - self.eps) * u**2 * (3 - 2 * u)

    def velocity(self, t: Tensor) -> Tensor:
        u = ((t[:, None] - self.start) / self.width).clamp(0, 1)
        return (self.eps + (1 - self.eps) * 6 * u * (1 - u) / self.width) / self.mask_prob(t)


class PolynomialSchedule:
    """1 - alpha_i(t) = sigmoid(gamma_i(t)), gamma_i(t) = GAMMA_MIN + (GAMMA_MAX - GAMMA_MIN) f_i(t) / f_i(1).

    f_i'(t) = (a_i t**2 + b_i t + c_i)**2; a, b, c [B, L]. It stops short of its ends: a little is masked at
    t = 0 already, and a little is clean at t = 1 still.
    """

    def __init__(self, a: Tensor, b: Tensor, c: Tensor):
        self.a, self.b, self.c = a.double(), b.double(), c.double()

    def quintic(self, t: Tensor) -> Tensor:
        a, b, c = self.a, self.b, self.c
        return t * (c**2 + t * (b * c + t * ((b**2 + 2 * a * c) / 3 + t * (a * b / 2 + t * a**2 / 5))))

    def gamma(self, t: Tensor) -> Tensor:
        share = self.quintic(t[:, None]) / self.quintic(torch.ones_like(t[:, None]))
        return GAMMA_MIN + (GAMMA_MAX - GAMMA_MIN) * share

    def mask_prob(self, t: Tensor) -> Tensor:
        return torch.sigmoid(self.gamma(t))

    def velocity(self, t: Tensor) -> Tensor:
        slope = (self.a * t[:, None] ** 2 + self.b * t[:, None] + self.c) ** 2
        whole = self.quintic(torch.ones_like(t[:, None]))
        return (GAMMA_MAX - GAMMA_MIN) * slope / whole * torch.sigmoid(-self.gamma(t))


def learned_schedule(config: LomdmConfig, outputs: Tensor, valid: Tensor | None):
    """A head's outputs [B, L, 1 or 3] -> schedule; where `valid` is False, padding, the exponent is c1.

    NormSig(g)_i = sigmoid(g_i) - mean over the text of sigmoid(g_j).
    """
    if config.schedule == "polynomial":
        a, b, c = outputs.unbind(dim=-1)
        return PolynomialSchedule(a, b, 1 + c)
    logits = outputs[..., 0].double()
    text = torch.ones_like(logits, dtype=torch.bool) if valid is None else valid
    if config.normalize == "softmax":
        weights = logits.masked_fill(~text, torch.finfo(torch.float64).min).softmax(dim=1)
    else:
        gate = torch.sigmoid(logits) * text
        weights = gate - gate.sum(dim=1, keepdim=True) / text.sum(dim=1, keepdim=True).clamp(min=1)
    return PowerSchedule(config.c1 + config.c2 * weights * text)


def fixed_schedule(config: LomdmConfig, length: int, device):
    """That of `mdlm` and `window`, the same for every text of this length."""
    if config.objective == "mdlm":
        return PowerSchedule(torch.ones(1, 1, dtype=torch.float64, device=device))
    places = torch.arange(length, device=device)
    if config.order == "blocks":
        return WindowSchedule(places // config.block, -(-length // config.block), config.window_eps)
    if config.order == "permutation":  # of a shorter text, the positions in it
        generated = torch.tensor(config.permutation, device=device)
        places = torch.argsort(generated[generated < length])
    return WindowSchedule(places, length, config.window_eps)


# --- the models ------------------------------------------------------------------------------------


@dataclass
class LomdmOutput(ModelOutput):
    """loss       mean cross-entropy of the masked positions that have a label (of a causal model: of all
               labels); None without labels
    logits     [B, L, V] float32, -inf at the mask token. They say something of masked positions only:
               by definition an unmasked position keeps its token (`subs` shows that)
    exponents  [B, L] float64, of the reverse process, seen from the masked text: a masked position is
               revealed between the times t and s < t with probability 1 - (s / t) ** exponent. GenMD4's are
               means over the tokens, 1 where nothing is masked. None where the schedule has none
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    exponents: Tensor | None = None


class LomdmPreTrainedModel(PreTrainedModel):
    """What the two models share.

    Where an `attention_mask` is taken, it is 1 at text and 0 at padding; without one, all is text. With the
    config's `attend` "document", a clean text is taken apart at EOS; a masked one is one document.
    """

    config_class = LomdmConfig
    _supports_sdpa = True
    supports_gradient_checkpointing = True

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: a new model's modules have set themselves."""

    def get_input_embeddings(self) -> nn.Embedding:
        return self.backbone.embedding

    def _outcome(self, output: LomdmOutput, return_dict: bool | None) -> LomdmOutput | tuple:
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def _start(self, prompt: Tensor | None, num: int, length: int | None) -> Tensor:
        """`num` texts for each prompt, [n] or [P, n]: it, then masks up to the length. [P num, length]."""
        length = self.config.max_position_embeddings if length is None else length
        given = torch.empty(1, 0) if prompt is None else torch.atleast_2d(torch.as_tensor(prompt))
        if given.shape[1] > length or min(length, num) < 1:
            raise ValueError(f"{num} texts of {length} tokens after {given.shape[1]} given ones cannot be")
        if length > self.config.max_position_embeddings:
            raise ValueError(
                f"{length} tokens: the model was trained at {self.config.max_position_embeddings}"
            )
        if given.numel() and (
            given.is_floating_point() or not 0 <= given.min() <= given.max() < self.config.vocab_size
        ):
            raise ValueError(f"a prompt holds ids from 0 to {self.config.vocab_size - 1}")
        z = torch.full((len(given), length), self.config.mask_token_id, device=self.device)
        z[:, : given.shape[1]] = given.to(self.device)
        return z.repeat_interleave(num, dim=0)


class LomdmForMaskedLM(LomdmPreTrainedModel, GenerationMixin):
    """theta (`backbone`); a learned order has phi (of the clean text) and psi (seen from the masked text), or
    an exponent a token. `generate` is this model's own; GenerationMixin brings `generation_config`."""

    def __init__(self, config: LomdmConfig):
        super().__init__(config)
        self.backbone = Backbone(config)
        learned = config.objective == "lomdm"
        self.phi = SchedulerHead(config) if learned else None
        self.psi = SchedulerHead(config) if learned else None
        self.token_exponents = TokenExponents(config) if config.objective == "genmd4" else None
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        subs: bool | None = None,
        return_dict: bool | None = None,
    ) -> LomdmOutput | tuple:
        """The masked text [B, L] -> LomdmOutput; labels [B, L], -100 where there is none.

        subs (by default the config's, which is False): `logits` are log-probabilities, and an unmasked
        position copies its input: 0 at its own token, -inf elsewhere. Not the default, because a loss that
        touches an unmasked position would be infinite; at masked positions the two are one distribution.
        """
        valid = _valid(attention_mask)
        features, reverse, condition = self._see(input_ids, valid)
        logits, loss = self.backbone.output(features, condition), None
        masked = input_ids == self.config.mask_token_id
        masked = masked if valid is None else masked & valid
        if labels is not None:
            loss = mean_cross_entropy(logits, labels, masked & (labels != -100))
        if self.token_exponents is not None:
            reverse = PowerSchedule(self._mean_exponents(logits[masked], masked))
        exponents = reverse.exponent.expand(input_ids.shape) if isinstance(reverse, PowerSchedule) else None
        if self.config.subs if subs is None else subs:
            copies = torch.full_like(logits, -torch.inf).scatter(2, input_ids[..., None], 0.0)
            logits = torch.where(masked[..., None], logits.log_softmax(dim=-1), copies)
        return self._outcome(LomdmOutput(loss=loss, logits=logits, exponents=exponents), return_dict)

    def order(self, input_ids: Tensor, attention_mask: Tensor | None = None):
        """The schedule by which the clean text [B, L] is masked: its `mask_prob(t)` and `velocity(t)`."""
        valid = _valid(attention_mask)
        if self.token_exponents is not None:
            return PowerSchedule(self.token_exponents()[input_ids])
        if self.phi is None:
            return fixed_schedule(self.config, input_ids.shape[1], input_ids.device)
        with torch.no_grad():
            context = self.backbone.context(valid, input_ids.shape[1], _documents(self.config, input_ids))
            features = self.backbone(input_ids, context)
        return learned_schedule(self.config, self.phi(features, context), valid)

    def order_exponents(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The clean text [B, L] -> its exponents [B, L], float64: larger is generated earlier.

        Raises ValueError where the schedule has none: `order` has its probabilities.
        """
        schedule = self.order(input_ids, attention_mask)
        if not isinstance(schedule, PowerSchedule):
            raise ValueError("window and polynomial schedules have no exponents: see `order`")
        return schedule.exponent.expand(input_ids.shape)

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
        if draws < 1:
            raise ValueError(f"draws {draws}: give 1 or more")
        x, valid, (count, length) = input_ids, _valid(attention_mask), input_ids.shape
        numbers, total = torch.arange(first_index, first_index + count), total or first_index + count
        schedule = self.order(x, attention_mask)
        text = torch.ones_like(x, dtype=torch.bool) if valid is None else valid
        bound = torch.zeros(count, dtype=torch.float64, device=x.device)
        for draw in range(draws):
            uniforms = evaluation_noise(seed, draw, draws, numbers, total, length)
            time, masks = uniforms.to(x.device).split([2, length], dim=1)
            t, position, mass = pinned_time(schedule, time, text)
            pinned = torch.zeros_like(text).scatter(1, position, True)
            masked = (masks < schedule.mask_prob(t)) & text | pinned
            density = torch.where(masked, schedule.velocity(t), 0.0).sum(dim=1) / mass  # of t and the masks
            bound += self._integrand(x, valid, masked, schedule, t) / density
            if isinstance(schedule, PolynomialSchedule):
                bound += self._jumps(x, valid, text, schedule, masks)
        return bound / draws

    def _integrand(self, x: Tensor, valid: Tensor | None, masked: Tensor, schedule, t: Tensor) -> Tensor:
        """sum over masked i of A_i CE_i + A_i log(A_i / hatA_i) - (A_i - hatA_i): [B].

        GenMD4: hatA is the mean of the tokens' A, the CE is that of p w / <w, p>; it all comes to the sum of
        A_i CE_i - A_i + hatA_i with the CE of p.
        """
        ce, reverse, logits = self._cross_entropy(x, valid, masked)
        velocity = schedule.velocity(t).expand(x.shape)
        if self.token_exponents is not None:
            terms = velocity * ce - velocity + self._mean_exponents(logits, masked) / t[:, None]
        else:
            hat = reverse.velocity(t)
            terms = velocity * ce + velocity * (velocity.log() - hat.log()) - (velocity - hat)
        return torch.where(masked, terms, 0.0).sum(dim=1)

    def _mean_exponents(self, logits: Tensor, masked: Tensor) -> Tensor:
        """GenMD4: by the logits [N, V] of the masked positions; 1 elsewhere: [B, L], float64."""
        means = logits.softmax(dim=1).double() @ self.token_exponents()
        return means.new_ones(masked.shape).masked_scatter(masked, means)

    def _jumps(self, x: Tensor, valid: Tensor | None, text: Tensor, schedule, uniforms: Tensor) -> Tensor:
        """The bound of what lies beyond the ends of a polynomial: [B].

        At time 1 a little is clean already, paid for from all masks; at time 0 what is still masked is drawn.
        """
        start = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        clean = 1 - schedule.mask_prob(start + 1)
        left = (uniforms < schedule.mask_prob(start)) & text
        first, last = (self._cross_entropy(x, valid, masked)[0] for masked in (text, left))
        return (clean * first + last).sum(dim=1)

    def _cross_entropy(self, x: Tensor, valid: Tensor | None, masked: Tensor) -> tuple:
        """x, some of it masked -> CE [B, L], float64, 0 elsewhere; reverse schedule; logits [N, V]."""
        z = torch.where(masked, self.config.mask_token_id, x)
        features, reverse, condition = self._see(z, valid, _documents(self.config, x))
        logits = self.backbone.output(features[masked], condition)
        ce = F.cross_entropy(logits, x[masked], reduction="none").double()
        return ce.new_zeros(x.shape).masked_scatter(masked, ce), reverse, logits

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor | None = None,
        steps: int | None = None,
        top_p: float | None = None,
        temperature: float | None = None,
        seed: int = 0,
        num: int = 1,
        length: int | None = None,
    ) -> Tensor:
        """Draw `num` texts for each of P prompts: ids [P num, length]. Text i depends on (seed, i) alone.

        prompt       ids [n] or [P, n]: what is there stays, a mask id in it is filled, masks follow up to the
                     length (default: that of training; give n to fill gaps only). Without one, all is drawn
        steps        from all masks at time 1 to all text at time 0 (default: the length)
        top_p        tokens are drawn from the smallest set that holds this share of the probability
        temperature  logits are divided by it

        steps, top_p and temperature that are not given are taken from `generation_config`. Raises ValueError.
        """
        z = self._start(prompt, num, length)
        steps = self._chosen("steps", steps, z.shape[1])
        top_p, temperature = self._chosen("top_p", top_p, 1.0), self._chosen("temperature", temperature, 1.0)
        whole = isinstance(steps, int) and steps >= 1
        if not whole or not 0 < top_p <= 1 or not 0 < temperature < math.inf:
            raise ValueError(f"steps {steps}, top_p {top_p} or temperature {temperature} is out of range")
        seen = None  # holds until something is revealed: the network does not see the time
        for k in range(steps):
            masked = z == self.config.mask_token_id
            if not masked.any():
                break
            seen = self._see(z, None) if seen is None else seen
            uniforms = keyed_uniforms(seed, SAMPLE, k, range(len(z)), 2 * z.shape[1])
            to_reveal, for_token = uniforms.to(z.device).chunk(2, dim=1)
            reveal, logits = self._step(seen, masked, k, steps, to_reveal, top_p, temperature)
            if reveal.any():
                z, seen = z.masked_scatter(reveal, draw_tokens(logits, for_token[reveal])), None
        return z

    def _chosen(self, name: str, given, usual):
        """A setting: given, or that of `generation_config`, which older and newer versions may leave out."""
        settings = [given, getattr(self.generation_config, name, None), usual]
        return next(setting for setting in settings if setting is not None)

    def sample(
        self, num: int = 1, length: int | None = None, steps: int | None = None, seed: int = 0
    ) -> Tensor:
        """Draw `num` texts from the model as it is: `generate` without a prompt, top_p and temperature 1."""
        length = self.config.max_position_embeddings if length is None else length
        return self.generate(None, length if steps is None else steps, 1.0, 1.0, seed, num, length)

    def _step(
        self, seen: tuple, masked: Tensor, k: int, steps: int, uniforms: Tensor, top_p: float, heat: float
    ) -> tuple[Tensor, Tensor]:
        """Step k, from time t to s: what it reveals, [B, L] bool, and the logits [n, V] of its tokens.

        The first step is from all masks, where a schedule may only come near; the last reveals all that is
        left. GenMD4 has a probability for each token: v comes out with p_v (1 - (s / t) ** w_v).
        """
        features, reverse, condition = seen
        s = torch.tensor([(steps - k - 1) / steps], dtype=torch.float64, device=masked.device)
        t = torch.tensor([(steps - k) / steps], dtype=torch.float64, device=masked.device)

        def logits_of(positions: Tensor) -> Tensor:
            logits = self.backbone.output(features[positions], condition)
            return restrict(logits, top_p, heat, self.config.never_token_ids)

        if self.token_exponents is None:
            prob = 1 - reverse.mask_prob(s) / (1 if k == 0 else reverse.mask_prob(t))
            reveal = masked & ((uniforms < prob) | (k == steps - 1))
            return reveal, logits_of(reveal)
        by_token, logits = -torch.expm1(self.token_exponents() * (s / t).log()), logits_of(masked)
        prob = torch.zeros_like(uniforms).masked_scatter(masked, logits.softmax(dim=1) @ by_token)
        reveal = masked & ((uniforms < prob) | (k == steps - 1))
        return reveal, logits[reveal[masked]] + by_token.log()

    def _see(self, z: Tensor, valid: Tensor | None, documents: Tensor | None = None) -> tuple:
        """The masked text -> features [B, L, D], reverse schedule, and the condition of the output.

        GenMD4's schedule is None: it is that of the tokens to come.
        """
        context = self.backbone.context(valid, z.shape[1], documents)
        features = self.backbone(z, context)
        if self.token_exponents is not None:
            return features, None, context[0]
        if self.psi is None:
            return features, fixed_schedule(self.config, z.shape[1], z.device), context[0]
        outputs = self.psi(features.detach(), (context[0].detach(), *context[1:]))
        return features, learned_schedule(self.config, outputs, valid), context[0]


class LomdmForCausalLM(LomdmPreTrainedModel, GenerationMixin):
    """The autoregressive baseline: position i is predicted from those before it, the first from the mask
    token, which stands for "nothing yet" and is put in front here. `generate` is that of `transformers`."""

    def __init__(self, config: LomdmConfig):
        super().__init__(config)
        self.backbone = Backbone(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> LomdmOutput | tuple:
        """The text [B, L] -> logits [B, L, V] of what follows each token, as causal models of `transformers`.

        labels [B, L], -100 where there is none, are the text itself, not shifted: the loss is the mean
        cross-entropy of all of them. The first counts, too: it is predicted from the mask token.
        """
        logits, loss = self._next(input_ids, _valid(attention_mask)), None
        if labels is not None:
            loss = mean_cross_entropy(logits[:, :-1], labels, labels != -100)
        return self._outcome(LomdmOutput(loss=loss, logits=logits[:, 1:]), return_dict)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_
    ) -> dict:
        """For `generate`: the whole text again for each token; nothing is cached."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    @torch.no_grad()
    def nelbo(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_) -> Tensor:
        """-log p(x) of each text, exact: [B, L] -> [B], nats, float64. A bound's draws are ignored."""
        valid = _valid(attention_mask)
        logits = self._next(input_ids, valid)[:, :-1]
        ce = F.cross_entropy(logits.transpose(1, 2), input_ids, reduction="none").double()
        return (ce if valid is None else ce * valid).sum(dim=1)

    @torch.no_grad()
    def sample(
        self,
        num: int = 1,
        length: int | None = None,
        *,
        seed: int = 0,
        prompt: Tensor | None = None,
        top_p: float = 1.0,
        temperature: float = 1.0,
    ) -> Tensor:
        """Draw `num` texts after each prompt, [n] or [P, n]: ids [P num, length]; text i by (seed, i)."""
        z = self._start(prompt, num, length)
        given = 0 if prompt is None else torch.as_tensor(prompt).shape[-1]
        for position in range(given, z.shape[1]):
            uniforms = keyed_uniforms(seed, SAMPLE, position - given, range(len(z)), 2 * z.shape[1])
            logits = restrict(
                self._next(z[:, :position], None)[:, -1], top_p, temperature, self.config.never_token_ids
            )
            z[:, position] = draw_tokens(logits, uniforms[:, z.shape[1] + position].to(z.device))
        return z

    def _next(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Logits [B, L + 1, V] of the tokens at positions 0 .. L, each seen from those before it."""
        tokens = torch.cat([x.new_full((len(x), 1), self.config.mask_token_id), x], dim=1)
        documents = _documents(self.config, x)
        if documents is not None:  # of the tokens to predict: a new one is seen from the EOS before it
            ends = (x == self.config.eos_token_id).long().cumsum(dim=1)
            documents = torch.cat([torch.zeros_like(tokens[:, :1]), ends], dim=1)
        valid = None if valid is None else torch.cat([torch.ones_like(valid[:, :1]), valid], dim=1)
        context = self.backbone.context(valid, tokens.shape[1], documents)
        return self.backbone.output(self.backbone(tokens, context), context[0])


def mean_cross_entropy(logits: Tensor, labels: Tensor, chosen: Tensor) -> Tensor:
    """Over the chosen positions [B, L]; 0 where there is none, which a batch of short texts may have."""
    total = F.cross_entropy(logits[chosen], labels[chosen], reduction="sum")
    return total / chosen.sum().clamp(min=1)


def _valid(attention_mask: Tensor | None) -> Tensor | None:
    return None if attention_mask is None else attention_mask.bool()


def _documents(config: LomdmConfig, x: Tensor) -> Tensor | None:
    """The number of each token's document, [B, L], where a token sees its own document only."""
    if config.attend == "sequence":
        return None
    ends = (x == config.eos_token_id).long()
    return ends.cumsum(dim=1) - ends  # EOS belongs to the document that it ends


# --- noise, times, draws -----------------------------------------------------------------------------


def keyed_uniforms(seed: int, purpose: int, step: int, indices: Iterable[int], count: int) -> Tensor:
    """Uniforms in [0, 1) that depend on these numbers alone: [len(indices), count], float64, on the CPU."""
    key = np.array([seed, purpose], dtype=np.uint64)  # of a list, numpy would make float64
    rows = []
    for index in indices:
        bits = np.random.Philox(key=key, counter=[0, step, int(index), 0])
        rows.append(np.random.Generator(bits).random(count))
    return torch.from_numpy(np.stack(rows))


def evaluation_noise(seed: int, draw: int, draws: int, numbers: Tensor, total: int, length: int) -> Tensor:
    """Uniforms [B, 2 + length] of one draw for texts `numbers` [B] of `total`: time, position, masks.

    The times of all draws of all texts are stratified together, turned by the seed.
    """
    uniforms = keyed_uniforms(seed, EVALUATE, draw, numbers, 2 + length)
    turn = int(keyed_uniforms(seed, STRATA, 0, [0], 1) * total * draws)
    uniforms[:, 0] = stratify(uniforms[:, 0], numbers * draws + draw + turn, total * draws)
    return uniforms


def stratify(uniforms: Tensor, indices: Tensor, batch: int) -> Tensor:
    """One uniform in each of `batch` equal strata of [0, 1), spread by a golden-ratio lattice: [n] -> [n]."""
    generator = max(1, round(batch * (math.sqrt(5) - 1) / 2))
    while math.gcd(generator, batch) != 1:
        generator += 1
    return (indices * generator % batch + uniforms) / batch


def pinned_time(schedule, uniforms: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pick a position of the text and draw the time at which it is masked: t [B]; that position [B, 1], which
    is then masked for certain; and the mass [B] of what the schedule masks.

    uniforms [B, 2]: the first for the time, the second for the position. A power schedule picks the position
    and inverts its probability; others invert the sum over positions, and pick after.
    """
    start, end = torch.zeros_like(uniforms[:, 0]), torch.ones_like(uniforms[:, 0])
    if isinstance(schedule, PowerSchedule):
        position = pick(text.double(), uniforms[:, 1])
        chosen = schedule.exponent.expand(text.shape).gather(1, position)[:, 0]
        t = (uniforms[:, 0].log() / chosen).exp()
        return t.clamp(min=SMALLEST_TIME, max=1.0), position, text.sum(dim=1).double()
    before = (schedule.mask_prob(start) * text).sum(dim=1)
    mass = (schedule.mask_prob(end) * text).sum(dim=1) - before
    wanted = before + uniforms[:, 0] * mass
    for _ in range(BISECTIONS):
        middle = (start + end) / 2
        above = (schedule.mask_prob(middle) * text).sum(dim=1) > wanted
        start, end = torch.where(above, start, middle), torch.where(above, middle, end)
    t = end.clamp(min=SMALLEST_TIME)
    return t, pick(schedule.velocity(t) * schedule.mask_prob(t) * text, uniforms[:, 1]), mass


def pick(shares: Tensor, uniforms: Tensor) -> Tensor:
    """A position with probability proportional to shares [B, L]: [B, 1]."""
    sums = shares.cumsum(dim=1)
    position = torch.searchsorted(sums, (uniforms * sums[:, -1])[:, None], right=True)
    return position.clamp(max=sums.shape[1] - 1)


def restrict(logits: Tensor, top_p: float, temperature: float, never: list[int]) -> Tensor:
    """Logits [N, V] -> [N, V], float64, -inf where a token is not to be drawn; the likeliest always stays."""
    logits = logits.double()
    logits[:, never] = -torch.inf
    if temperature != 1:
        logits = (logits - logits.amax(dim=1, keepdim=True)) / temperature
    if top_p < 1:
        ordered, order = logits.sort(dim=1, descending=True)
        probs = ordered.softmax(dim=1)
        outside = probs.cumsum(dim=1) - probs >= top_p
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf)
    return logits


def draw_tokens(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Exact draws: logits [N, V], uniforms [N] -> ids [N], by the inverse of the distribution in float64."""
    cumulative = logits.double().softmax(dim=1).cumsum(dim=1)
    cumulative = cumulative / cumulative[:, -1:]  # ends at 1, so a uniform below 1 always lands
    return torch.searchsorted(cumulative, uniforms[:, None].contiguous(), right=True)[:, 0]
