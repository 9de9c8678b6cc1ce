"""Generative perplexity: what a model generates, as likely as another language model, the judge, finds it.

A text that repeats itself is likely too. So the entropy of the samples and their distinct n-grams stand
beside the number.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from lomdm_dist.config import Config
from lomdm_dist.data.tokenizer import not_text
from lomdm_dist.errors import UserError, first_line
from lomdm_dist.evaluate.statistics import exp, ratio
from lomdm_dist.sample import sample

PROBE = "Once upon a time there was"


@dataclass(frozen=True)
class Judge:
    """A causal language model of `transformers` in float32, and its own tokenizer.

    context  the most tokens that it sees at once; None where its config has no limit
    eos      its EOS as text, empty where it has none
    """

    name: str
    model: torch.nn.Module
    tokenizer: object
    context: int | None

    @property
    def eos(self) -> str:
        return self.tokenizer.eos_token or ""


def open_judge(name: str) -> Judge:
    """Load from a folder, or by its name on the hub; no code that it brings is run. UserError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if name.startswith(("/", "./", "../", "~")) and not Path(name).is_dir():
        raise UserError(f"no judge in {name}: there is no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model, loading = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # the library raises many kinds; each means: no judge
        raise UserError(
            f"cannot load judge {name}: {first_line(error).rstrip('.')}; give a folder with a causal "
            "language model of transformers and its tokenizer, or a hub name where there is network (and "
            "HF_HUB_OFFLINE is not set)"
        ) from None
    if loading["missing_keys"]:
        some = ", ".join(sorted(loading["missing_keys"])[:3])
        raise UserError(f"judge {name} lacks weights ({some}): they would be random; give one that is whole")
    _check_tokenizer(name, model, tokenizer)
    model.eval()
    _check_causal(name, model)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Judge(name, model, tokenizer, context)


def _check_tokenizer(name: str, model, tokenizer) -> None:
    """Where its files are missing, the library makes an empty tokenizer and says nothing. UserError."""
    ids = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    if not set(ids) - {tokenizer.unk_token_id}:
        raise UserError(f"judge {name} has no tokenizer: save its tokenizer beside it")
    rows = model.get_input_embeddings().num_embeddings
    # a pad token, say, that was added late and has no row, does no harm
    unused = set(tokenizer.all_special_ids) - {tokenizer.eos_token_id}
    last = max(set(tokenizer.get_vocab().values()) - unused)
    if last >= rows:
        raise UserError(f"judge {name} has {rows} tokens, its tokenizer ids up to {last}: it is another's")


@torch.no_grad()
def _check_causal(name: str, model) -> None:
    """Models made to fill masks load as causal ones too. UserError."""
    first, _ = model(torch.tensor([[0, 1], [0, 2]], device=model.device)).logits.unbind(dim=1)
    if not torch.allclose(first[0], first[1], atol=1e-4):
        raise UserError(f"judge {name} sees the tokens that it is to predict: it is no causal language model")


def texts_of(tokenizer, token_ids: Tensor, eos: str) -> list[str]:
    """Texts of samples [N, L], special tokens spelled out, `eos` (the judge's) where the model's stood."""
    texts = []
    for row in token_ids.tolist():
        pieces = [[]]
        for token in row:
            pieces.append([]) if token == tokenizer.eos_token_id else pieces[-1].append(token)
        texts.append(eos.join(tokenizer.batch_decode(pieces)))
    return texts


@torch.no_grad()
def judge_texts(
    judge: Judge, texts: list[str], eos: str = "all", batch: int = 8, progress: bool = False
) -> tuple[Tensor, Tensor]:
    """The negative log-likelihood of each text in nats, and its number of counted tokens: [N], [N], float64.

    A text is cut into blocks of the judge's context, without overlap; the first token of a block has
    nothing before it and is not counted. eos: "all", or with "first" of the EOS tokens of a block only the
    first is counted, as MDLM's evaluation does. A text without counted tokens has 0 and 0.
    """
    encoded = judge.tokenizer(texts, verbose=False)["input_ids"] if texts else []
    blocks = []
    for i, ids in enumerate(encoded):
        context = judge.context or max(len(ids), 1)
        blocks += [(i, torch.tensor(ids[k : k + context])) for k in range(0, len(ids) - 1, context)]
    blocks.sort(key=lambda block: -len(block[1]))  # little padding, and the most memory at once
    sums = torch.zeros(2, len(texts), dtype=torch.float64)
    for k in tqdm(range(0, len(blocks), batch), desc="judge", disable=None if progress else True):
        of_text, ids = zip(*blocks[k : k + batch], strict=True)
        nll, counted = _score(judge, ids, eos)
        terms = torch.stack([nll.where(counted, 0.0).sum(dim=1), counted.sum(dim=1).double()])
        sums.index_add_(1, torch.tensor(of_text), terms.cpu())
    return sums[0], sums[1]


def _score(judge: Judge, blocks: tuple[Tensor, ...], eos: str) -> tuple[Tensor, Tensor]:
    """-log p of the tokens 1, 2, ... of each block, and which of them count: [B, T - 1], float64 and bool.

    Padding is on the right, where a causal model does not see it and positions stay as they are.
    """
    device = judge.model.device
    ids = pad_sequence(blocks, batch_first=True).to(device)
    is_text = pad_sequence([torch.ones_like(block) for block in blocks], batch_first=True).to(device)
    logits = judge.model(input_ids=ids, attention_mask=is_text, use_cache=False).logits
    # row by row: the log-softmax of all would be as large as the logits once more
    rows = zip(logits, ids, strict=True)
    nll = [F.cross_entropy(row[:-1].float(), x[1:], reduction="none") for row, x in rows]
    counted = is_text.bool()
    if eos == "first" and judge.eos:
        is_eos = ids == judge.tokenizer.eos_token_id
        counted &= ~is_eos | (is_eos.cumsum(dim=1) == 1)
    return torch.stack(nll).double(), counted[:, 1:]


class Generation(NamedTuple):
    """Samples and what the judge says of them, in the order of their indices.

    indices [N]; token_ids [N, L]; texts; nll [N] nats and tokens [N] (of the judge), float64; entropy and
    network_calls of each, in the mean; seconds that sampling took.
    """

    indices: Tensor
    token_ids: Tensor
    texts: list[str]
    nll: Tensor
    tokens: Tensor
    entropy: float
    network_calls: float
    seconds: float


def generate(
    model,
    tokenizer,
    judge: Judge,
    config: Config,
    count: int,
    length: int,
    steps: int,
    seed: int = 0,
    eos: str = "all",
    batch: int = 16,
    judge_batch: int = 8,
    grid=None,
    progress: bool = False,
) -> Generation:
    """Draw `count` texts of `length` tokens and have them judged.

    With a `grid` its ranks share them out, and every rank gets all. No sample is drawn again or left out.
    """
    rank, size = (grid.data_rank, grid.data_size) if grid else (0, 1)
    mine, parts = torch.arange(rank, count, size), []
    if len(mine):
        never = not_text(tokenizer, config.model.vocab_size)
        start = time.perf_counter()
        samples = sample(
            model, mine, length, steps, seed, never, config.sampler, batch=batch, progress=progress
        )
        seconds = time.perf_counter() - start
        texts = texts_of(tokenizer, samples.token_ids, judge.eos)
        nll, tokens = judge_texts(judge, texts, eos, judge_batch, progress)
        about = samples.entropy(), samples.network_calls, seconds
        parts = [Generation(mine, samples.token_ids, texts, nll, tokens, *about)]
    if grid:
        parts = [part for of_rank in grid.gather(parts) for part in of_rank]
    return _joined(parts)


def _joined(parts: list[Generation]) -> Generation:
    """What the ranks drew, as one process would have drawn it."""
    indices = torch.cat([part.indices for part in parts])
    order = indices.argsort()
    share = [len(part.indices) / len(indices) for part in parts]
    texts = [text for part in parts for text in part.texts]

    def all_of(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])[order]

    def mean_of(name: str) -> float:
        return math.fsum(w * getattr(part, name) for w, part in zip(share, parts, strict=True))

    return Generation(
        indices[order],
        all_of("token_ids"),
        [texts[i] for i in order],
        all_of("nll"),
        all_of("tokens"),
        mean_of("entropy"),
        mean_of("network_calls"),
        max(part.seconds for part in parts),
    )


def describe(found: Generation) -> dict:
    """The numbers of a generation, as `lomdm eval gen-ppl` reports them.

    gen_ppl is exp of nats a token over all samples, standard_error that of nll_per_token over the
    samples, and gen_ppl_standard_error what it means for gen_ppl; mean_ppl the mean over the samples of
    their own perplexities. `empty` samples have no token to judge, and no part in these.
    """
    nll, error = ratio(found.nll, found.tokens)
    judged = found.tokens > 0
    own = (found.nll / found.tokens)[judged].exp()
    return {
        "gen_ppl": exp(nll),
        "gen_ppl_standard_error": exp(nll) * error,
        "nll_per_token": nll,
        "standard_error": error,
        "mean_ppl": float(own.mean()),
        "entropy": found.entropy,
        **{f"distinct_{n}": distinct(found.token_ids, n) for n in (1, 2, 3)},
        "network_calls": found.network_calls,
        "tokens_per_second": found.token_ids.numel() / found.seconds,
        "seconds": found.seconds,
        "samples": len(found.texts),
        "rejected": 0,
        "empty": int((~judged).sum()),
        "judge_tokens": int(found.tokens.sum()),
    }


def distinct(token_ids: Tensor, n: int) -> float:
    """Different n-grams of samples [N, L] as a share of all their n-grams; nan where there are none."""
    if token_ids.shape[1] < n:
        return math.nan
    grams = token_ids.unfold(1, n, 1).flatten(0, 1)
    return len(torch.unique(grams, dim=0)) / len(grams)


def convention(judge: Judge, config: Config, length: int, seed: int, eos: str, weights: str) -> dict:
    """Everything that a number needs beside it to be compared with another."""
    counted = {
        "all": "every EOS is counted",
        "first": "of the EOS tokens of a block the first is counted, the others are not (MDLM's evaluation)",
    }
    spelled = (
        f"the model's becomes the judge's, {judge.eos!r}" if judge.eos else "the judge has none: left out"
    )
    return {
        "objective": config.objective.model_dump(mode="json"),
        "sampler": config.sampler.model_dump(mode="json"),
        "length": length,
        "judge": judge.name,
        "judge_tokenizer": f"its own, {type(judge.tokenizer).__name__}, special tokens as it adds them",
        "judge_parameters": sum(p.numel() for p in judge.model.parameters()),
        "judge_dtype": "float32",
        "text": "decoded by the model's tokenizer, special tokens kept; encoded by the judge's",
        "eos": f"{spelled}; {counted[eos]}",
        "context": judge.context,
        "blocks": "of the judge's context, without overlap; the last, shorter one too: nothing is cut off",
        "first_token": "of a block is not counted",
        "padding": "on the right, masked, never counted",
        "gen_ppl": "exp(sum of nats / sum of counted tokens) over all samples",
        "mean_ppl": "mean over samples of exp(nats / counted tokens) of each",
        "entropy": "nats, of the token frequencies within a sample, by the model's tokens, mean over samples",
        "distinct": "different n-grams / all n-grams over all samples, by the model's tokens",
        "tokens_per_second": "the model's tokens, sampling alone",
        "rejected": "none: every sample is judged",
        "seed": seed,
        "weights": weights,
        "dtype": "float32",
    }
