"""`lomdm eval rule`: the exact likelihood of a deterministic order's sampler."""

import argparse

from lomdm_dist.commands.common import checkpoint_options, device, only, positive, processes
from lomdm_dist.commands.eval_ppl import data_of, open_shards

RULE = "which positions a step reveals: the surest, those of the largest exponents, or the first"
STEPS = "they share out the positions evenly; default: the length, one token a step"
SAMPLER = "how tokens are drawn: sampler.temperature=0.8 sampler.top_p=0.9"
OTHER = "the bound of `eval ppl` speaks of the random process, this likelihood of the sampler with this rule"


def add_options(parser: argparse.ArgumentParser) -> None:
    checkpoint_options(parser)
    parser.add_argument("--data", required=True, help="token shards: a folder, a URL or pipe:COMMAND")
    parser.add_argument(
        "--rule", choices=["confidence", "exponent", "left_to_right"], required=True, help=RULE
    )
    parser.add_argument("--steps", type=int, help=STEPS)
    parser.add_argument("--batch", type=int, default=32, help="sequences at once (default 32)")
    parser.add_argument("--limit", type=int, help="evaluate the first sequences only")
    parser.add_argument(
        "--force", action="store_true", help="also on data that is packed in another way than the model's"
    )
    parser.add_argument("overrides", nargs="*", metavar="sampler.key=value", help=SAMPLER)
    parser.set_defaults(run=_rule)


def _rule(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.evaluate.rule import check_exact
    from lomdm_dist.train.checkpoint import Checkpoint

    positive(options, "steps", "batch", "limit")
    kinds = ("temperature", "top_p", "final", "grid", "dtype")
    overrides = only(options.overrides, *(f"sampler.{kind}" for kind in kinds))
    checkpoint = Checkpoint(options.checkpoint, [*overrides, f"sampler.rule={options.rule}"])
    check_exact(checkpoint.config.sampler, checkpoint.config.objective)
    shards = open_shards(options, checkpoint)
    with processes(options) as grid:
        result = _estimate(options, checkpoint, shards, grid)
        if grid is None or grid.first:
            print(_say(result))
            machine.write_result(options.json, result, checkpoint.config.as_dict())


def _estimate(options, checkpoint, shards, grid) -> dict:
    import numpy as np

    from lomdm_dist.data.tokenizer import not_text
    from lomdm_dist.evaluate.rule import estimate_rule

    config, steps = checkpoint.config, options.steps or shards.length
    result = estimate_rule(
        checkpoint.build_model(options.weights).to(device(grid)),
        shards,
        np.arange(min(len(shards), options.limit or len(shards))),
        steps,
        config.sampler,
        not_text(checkpoint.tokenizer(), config.model.vocab_size),
        options.batch,
        grid,
        progress=grid is None or grid.first,
    )
    result["convention"] = {
        "likelihood": "exact likelihood of the deterministic rule's sampler, not the bound",
        "rule": options.rule,
        "steps": steps,
        "tokens_a_step": f"{shards.length / steps:g} of {shards.length}, shared out as evenly as can be",
        "ties": "equal to 6 decimals: to the left",
        "temperature": config.sampler.temperature,
        "top_p": config.sampler.top_p,
        "denominator": "all tokens but padding",
        "attend": "sequence",
        **data_of(shards),
        "trained_on": checkpoint.state.data.packing,
        "objective": config.objective.model_dump(mode="json"),
        "weights": options.weights,
        "dtype": "float32",
    }
    return result


def _say(result: dict) -> str:
    said = result["convention"]
    value = f"{result['nll_per_token']:.4f} +- {result['standard_error']:.4f} nats a token"
    settings = f"top_p {said['top_p']:g}, temperature {said['temperature']:g}"
    impossible = result["impossible_tokens"]
    lines = [
        f"rule {said['rule']}: exact {value}, ppl {result['ppl']:.2f}; {said['steps']} steps, {settings}; "
        f"{result['tokens']:,} tokens, {result['sequences']:,} sequences, {said['weights']} weights, "
        f"{result['network_calls']:.1f} network calls a sequence, {result['seconds']:.1f} s",
        OTHER,
    ]
    if impossible:
        lines.insert(1, f"{impossible:,} of the tokens are never drawn under {settings}")
    return "\n".join(lines)
