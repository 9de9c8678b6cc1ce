"""`lomdm sample`: generate text."""

import argparse

from lomdm_dist.commands.common import checkpoint_options, device, only, positive
from lomdm_dist.errors import UserError

SAMPLER = "how text is drawn: sampler.top_p=0.9 ...; objective.c2=0: without the learned order"
PROMPT = (
    "text that stays; a [MASK] in it, as the tokenizer spells it, is filled; more text follows; may be "
    "repeated, --num sequences for each"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    checkpoint_options(parser)
    parser.add_argument("--num", type=int, default=4, help="sequences (default 4)")
    parser.add_argument("--length", type=int, help="tokens; default and most: the model's")
    parser.add_argument("--steps", type=int, help="steps; default: the length")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    parser.add_argument("--batch", type=int, default=16, help="sequences at once (default 16)")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help=PROMPT)
    parser.add_argument("overrides", nargs="*", metavar="sampler.key=value", help=SAMPLER)
    parser.set_defaults(run=_sample)


def _sample(options) -> None:
    import torch

    from lomdm_dist import machine
    from lomdm_dist.data.tokenizer import encode_prompt, not_text
    from lomdm_dist.sample import sample
    from lomdm_dist.train.checkpoint import Checkpoint

    positive(options, "num", "length", "steps", "batch")
    overrides = only(options.overrides, "sampler.", "objective.c1", "objective.c2")
    checkpoint = Checkpoint(options.checkpoint, _check_pace(options.checkpoint, overrides))
    config, tokenizer = checkpoint.config, checkpoint.tokenizer()
    length = options.length or config.model.length
    if length > config.model.length:
        raise UserError(f"--length {length}: the model was trained at {config.model.length}")
    given = None
    if options.prompt:
        starts = [_start(encode_prompt(tokenizer, p), length, config.model.mask_id) for p in options.prompt]
        given = torch.stack(starts).repeat_interleave(options.num, dim=0)
    samples = sample(
        checkpoint.build_model(options.weights).to(device()),
        options.num if given is None else len(given),
        length,
        options.steps or length,
        options.seed,
        not_text(tokenizer, config.model.vocab_size),
        config.sampler,
        given,
        options.batch,
        progress=True,
    )
    texts = tokenizer.batch_decode(samples.token_ids)
    result = {
        "token_ids": samples.token_ids.tolist(),
        "texts": texts,
        "steps": samples.steps,
        "network_calls": samples.network_calls,
        "saved_calls": samples.saved_calls,
        "seconds": samples.seconds,
        "tokens_per_second": samples.tokens_per_second(),
        "entropy": samples.entropy(),
    }
    machine.write_result(options.json, result, checkpoint.config.as_dict())
    for i, text in enumerate(texts):
        print(f"--- sample {i}\n{text}")
    settings = [f"{k}={v}" for k, v in config.sampler.model_dump(exclude_defaults=True).items()]
    print(
        f"--- {len(texts)} samples of {config.objective.name}, {length} tokens, {samples.steps} steps"
        f"{' (one a token)' if config.objective.name == 'ar' else ''}, entropy {samples.entropy():.3f} nats"
        f"{''.join(', ' + setting for setting in settings)}\n"
        f"--- {samples.network_calls:.1f} network calls a sequence ({samples.saved_calls:.0%} of the steps "
        f"needed none), {samples.tokens_per_second():,.0f} tokens/s"
    )


def _start(prompt: list[int], length: int, mask_id: int):
    """A prompt's ids and then masks, [length]. UserError."""
    import torch

    if len(prompt) > length:
        raise UserError(f"--prompt has {len(prompt)} tokens, --length is {length}")
    start = torch.full((length,), mask_id)
    start[: len(prompt)] = torch.tensor(prompt, dtype=torch.long)
    return start


def _check_pace(path: str, overrides: list[str]) -> list[str]:
    """c1 and c2 are of the learned order's exponents. UserError."""
    from lomdm_dist.config import load_config
    from lomdm_dist.train.checkpoint import find_checkpoint

    objective = load_config(find_checkpoint(path) / "config.yaml").objective
    has_pace = objective.name == "lomdm" and objective.schedule == "power"
    if not has_pace and any(override.startswith("objective.") for override in overrides):
        kind = f"{objective.name} with a polynomial schedule" if objective.name == "lomdm" else objective.name
        raise UserError(f"{' '.join(overrides)}: {path} is {kind}; only lomdm's exponents have c1 and c2")
    return overrides
