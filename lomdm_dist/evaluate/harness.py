"""A model as the lm-eval harness sees it: log-likelihoods by the bound, answers by the sampler.

https://github.com/EleutherAI/lm-evaluation-harness, whose `LM` says what each request means. Noise is
keyed by the seed and the question, so a number depends neither on the batch nor on the order of the
requests, nor on the number of processes; the candidates of one question meet the same times and masks
(common random numbers), which spares their comparison most of the noise.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from torch import Tensor
from tqdm import tqdm

from lomdm_dist.config import Config, EvaluateConfig, SamplerConfig
from lomdm_dist.data.tokenizer import encode, not_text
from lomdm_dist.errors import UserError
from lomdm_dist.evaluate.perplexity import evaluation_noise, sequence_bounds
from lomdm_dist.sample import sample

GREEDY = 1e-6  # temperature: the least the sampler takes, at which the most probable token is drawn
ROWS_AT_ONCE = 1024  # of logits


class Scored(NamedTuple):
    """Token ids of which those from `given` on are scored, with the noise of `key`."""

    ids: list[int]
    given: int
    key: int


class Asked(NamedTuple):
    """A prompt to continue: its ids, how, and the key of its noise."""

    ids: list[int]
    tokens: int
    until: list[str]
    settings: SamplerConfig
    key: int


class HarnessModel(LM):
    """The requests of lm-eval, answered by a LoMDM in evaluation mode.

    Texts are encoded as in training, special tokens being plain text, and nothing is put around them:
    no BOS, no EOS. A text shorter than the model's length is run at its own length. `draws` of (time,
    masks) a bound; `steps` of time a generated answer, by default one a token. With a `grid` the work
    is shared out over its ranks, and every rank has all the answers.
    """

    def __init__(
        self,
        model,
        tokenizer,
        config: Config,
        draws: int = 16,
        seed: int = 0,
        steps: int | None = None,
        batch: int = 32,
        grid=None,
    ):
        super().__init__()
        self.model, self.tokenizer, self.grid = model, tokenizer, grid
        self.config = config.model_copy(update={"evaluate": EvaluateConfig()})
        self.draws, self.seed, self.steps, self.batch = draws, seed, steps, batch
        self.length = config.model.length
        self.never = not_text(tokenizer, config.model.vocab_size)
        self.contexts_cut = 0
        self._device = next(model.parameters()).device

    def loglikelihood(self, requests) -> list[tuple[float, bool]]:
        """(context, continuation) -> minus the bound on -log p(continuation | context), in nats, and
        whether the continuation is what greedy filling gives (`is_greedy` below).

        The context is attended to, never masked. The texts are encoded together; the continuation
        starts at the first token that the context alone would not have. Where both exceed the model's
        length, the left of the context is cut, and counted. UserError where the continuation alone does.
        """
        return self._run([self._pair(request) for request in requests], self._likelihoods, "score")

    def loglikelihood_rolling(self, requests) -> list[float]:
        """(text,) -> minus the bound on -log p(text), in nats: the sum over pieces of the model's length.

        Pieces do not overlap, and none sees another; the last is shorter. Every token counts.
        """
        pieces, owners = [], []
        for number, request in enumerate(requests):
            ids = encode(self.tokenizer, [request.args[0]])[0]
            for start in range(0, len(ids), self.length):
                piece = ids[start : start + self.length]
                pieces.append(Scored(piece, 0, noise_key(self.seed, request, start)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, value in zip(owners, self._run(pieces, self._bounds, "score"), strict=True):
            sums[owner] += value
        return sums

    def generate_until(self, requests) -> list[str]:
        """(prompt, settings) -> text drawn after the prompt, up to the first `until` or EOS.

        `max_gen_toks` masks follow the prompt, and all are filled. Where both exceed the model's length, the
        left of the prompt is cut, and counted. Without do_sample each token is the most probable one, at a
        position drawn by the reverse process. UserError where a setting is none of the sampler's.
        """
        seen, asked = Counter(), []
        for request in requests:
            question = request.task_name, request.doc_id
            asked.append(self._asked(request, seen[question]))
            seen[question] += 1
        return self._run(asked, self._generate, "generate")

    def convention(self) -> dict:
        """What the numbers need beside them."""
        exact = self.config.objective.name == "ar"
        return {
            "objective": self.config.objective.model_dump(mode="json"),
            "loglikelihood": "exact, left to right" if exact else "minus the bound, uncut, context given",
            "time": None if exact else self.config.evaluate.time,
            "draws": None if exact else self.draws,
            "seed": self.seed,
            "noise": "keyed by seed, task and document: the same for the candidates of one question",
            "is_greedy": "left to right" if exact else "most confident position first, one at a time",
            "text": "encoded whole, special tokens as plain text; no BOS, no EOS; run at its own length",
            "rolling": f"pieces of {self.length} tokens, not overlapping, each by itself; all tokens count",
            "length": self.length,
            "contexts_cut": self.contexts_cut,
            "steps": None if exact else self.steps or "one a token",
            "sampler": self.config.sampler.model_dump(mode="json"),
            "greedy_answers": f"temperature {GREEDY:g}, positions drawn by the reverse process",
            "dtype": "float32",
        }

    def _pair(self, request) -> Scored:
        context, continuation = request.args
        whole, alone = encode(self.tokenizer, [context + continuation, context.rstrip()])
        same = [a == b for a, b in zip(whole, alone, strict=False)]
        given = same.index(False) if False in same else len(same)
        if len(whole) - given > self.length:
            raise UserError(
                f"{_of(request)}: a continuation of {len(whole) - given} tokens, the model has {self.length}"
            )
        cut = max(0, len(whole) - self.length)
        self.contexts_cut += cut > 0
        return Scored(whole[cut:], given - cut, noise_key(self.seed, request))

    def _asked(self, request, repeat: int) -> Asked:
        prompt, given = request.args
        until, tokens, settings = generation_settings(given, self.config.sampler, _of(request))
        if tokens >= self.length:
            raise UserError(
                f"{_of(request)}: max_gen_toks={tokens} (256 where a task says nothing), and the model has "
                f"{self.length} positions for prompt and answer: ask for fewer, --gen-kwargs max_gen_toks=N"
            )
        ids = encode(self.tokenizer, [prompt])[0]
        cut = max(0, len(ids) + tokens - self.length)
        self.contexts_cut += cut > 0
        return Asked(ids[cut:], tokens, until, settings, noise_key(self.seed, request, repeat))

    def _run(self, work: list, function: Callable[[list], list], name: str) -> list:
        """The answers to `work`, in its order; batches of one length are shared out over the ranks."""
        rank, size = (self.grid.data_rank, self.grid.data_size) if self.grid else (0, 1)
        mine = list(_batches(work, self.batch))[rank::size]
        answers = {}
        for numbers in tqdm(mine, desc=name, disable=None if rank == 0 else True):
            answers |= zip(numbers, function([work[i] for i in numbers]), strict=True)
        for others in self.grid.gather(answers) if self.grid else ():
            answers |= others
        return [answers[i] for i in range(len(work))]

    def _likelihoods(self, rows: list[Scored]) -> list[tuple[float, bool]]:
        x, counted = self._tensors(rows)
        return list(zip(self._bounds(rows), is_greedy(self.model, x, counted).tolist(), strict=True))

    @torch.no_grad()
    def _bounds(self, rows: list[Scored]) -> list[float]:
        """Minus the bound of what is scored of rows of one length; a row of which nothing is has 0."""
        some = [row for row in rows if row.given < len(row.ids)]
        if not some:
            return [0.0] * len(rows)
        x, counted = self._tensors(some)
        keys = np.array([row.key for row in some])
        noise = (
            evaluation_noise(self.seed, draw, self.draws, keys, 1, x.shape[1]).to(self.device)
            for draw in range(self.draws)
        )
        parts = sequence_bounds(self.model, x, None, counted, noise, self.draws, self.config)
        bounds = iter((-parts.sum(dim=0)).tolist())
        return [next(bounds) if row.given < len(row.ids) else 0.0 for row in rows]

    def _tensors(self, rows: list[Scored]) -> tuple[Tensor, Tensor]:
        """Token ids and which are scored, both [B, L]."""
        x = torch.tensor([row.ids for row in rows], dtype=torch.long, device=self.device)
        given = torch.tensor([row.given for row in rows], device=self.device)
        return x, torch.arange(x.shape[1], device=self.device) >= given[:, None]

    def _generate(self, asked: list[Asked]) -> list[str]:
        """Answers to prompts of one length; those asked for alike are drawn together."""
        answers = {}
        for how in {(one.tokens, one.settings) for one in asked}:
            alike = [i for i, one in enumerate(asked) if (one.tokens, one.settings) == how]
            answers |= zip(alike, self._draw([asked[i] for i in alike], *how), strict=True)
        return [answers[i] for i in range(len(asked))]

    def _draw(self, asked: list[Asked], tokens: int, settings: SamplerConfig) -> list[str]:
        prompts = torch.tensor([one.ids for one in asked], dtype=torch.long)
        given = F.pad(prompts, (0, tokens), value=self.config.model.mask_id)
        keys = torch.tensor([one.key for one in asked])
        how = given.shape[1], self.steps or tokens, self.seed, self.never, settings, given, len(asked)
        samples = sample(self.model, keys, *how)
        drawn = samples.token_ids[:, prompts.shape[1] :].tolist()
        return [self._text(ids, one.until) for ids, one in zip(drawn, asked, strict=True)]

    def _text(self, ids: list[int], until: list[str]) -> str:
        eos = self.tokenizer.eos_token_id
        text = self.tokenizer.decode(ids[: ids.index(eos)] if eos in ids else ids)
        return postprocess_generated_text(text, until, None)


def _batches(work: list, batch: int) -> Iterator[list[int]]:
    """Longest first. No padding: a window schedule depends on the length, so it would change a number."""

    def length(i: int) -> int:
        return len(work[i].ids)

    for _, same in groupby(sorted(range(len(work)), key=length, reverse=True), key=length):
        same = list(same)
        yield from (same[k : k + batch] for k in range(0, len(same), batch))


def generation_settings(
    given: dict, settings: SamplerConfig, of: str
) -> tuple[list[str], int, SamplerConfig]:
    """A task's generation_kwargs -> where to stop, how many tokens at most, how they are drawn. UserError."""
    try:
        asked = normalize_gen_kwargs(given)
        until, tokens, drawn = asked.pop("until"), asked.pop("max_gen_toks"), asked.pop("do_sample", False)
        temperature = asked.pop("temperature", settings.temperature) if drawn else 0
        changes = {"temperature": max(temperature, GREEDY), "top_p": asked.pop("top_p", settings.top_p)}
        if tokens < 1 or set(asked) - {"temperature", "num_beams"} or asked.get("num_beams", 1) != 1:
            raise ValueError
        return until, tokens, SamplerConfig.model_validate(settings.model_dump() | changes)
    except (ValueError, TypeError):
        raise UserError(
            f"{of}: generation settings {given}: the sampler takes until, do_sample, temperature, "
            "top_p in (0, 1] and max_gen_toks from 1"
        ) from None


@torch.no_grad()
def is_greedy(model, x: Tensor, counted: Tensor) -> Tensor:
    """Whether greedy filling of the counted positions of x [B, L], all masked at first, gives x: [B], bool.

    One position at a time, the one whose most probable token is most probable, gets that token; `ar`
    goes from left to right. So the text is told how many tokens to fill, and nothing else.
    """
    if not counted.any():
        return torch.ones(len(x), dtype=torch.bool)
    if model.objective.name == "ar":
        features, condition = model.predict_next(x[:, :-1])
        _, token = _most_probable(model, features[counted], condition)
        right = torch.ones_like(counted)
        right[counted] = token == x[counted]
        return right.all(dim=1)
    greedy = torch.ones(len(x), dtype=torch.bool, device=x.device)
    masked = counted.clone()
    while len(rows := (greedy & masked.any(dim=1)).nonzero()[:, 0]):
        hidden = masked[rows]
        features, _, condition = model.see(torch.where(hidden, model.mask_id, x[rows]))
        found, tokens = _most_probable(model, features[hidden], condition)
        confidence = torch.full(hidden.shape, -1.0, device=x.device).masked_scatter(hidden, found)
        token = x[rows].masked_scatter(hidden, tokens)
        position = confidence.argmax(dim=1)
        greedy[rows] = (token == x[rows]).gather(1, position[:, None])[:, 0]
        masked[rows, position] = False
    return greedy


def _most_probable(model, features: Tensor, condition) -> tuple[Tensor, Tensor]:
    """features [N, D] -> the largest probability [N], float32, and its token [N]."""
    probs = [
        model.backbone.output(part, condition).float().softmax(dim=1).max(dim=1)
        for part in features.split(ROWS_AT_ONCE)
    ]
    return torch.cat([p.values for p in probs]), torch.cat([p.indices for p in probs])


def noise_key(seed: int, request, number: int = 0) -> int:
    """The key of a request's noise: one for all candidates of a document of a task. 40 bits."""
    text = f"{seed}\0{request.task_name}\0{request.doc_id}\0{number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:5], "big")


def _of(request) -> str:
    return f"task {request.task_name}, document {request.doc_id}"
