"""`lomdm eval ppl`: perplexity by the bound; for `ar` the exact one."""

import argparse

from lomdm_dist.commands.common import checkpoint_options, device, only, positive
from lomdm_dist.errors import UserError

EVALUATE = "how the bound is estimated: evaluate.time=uniform evaluate.time_eps=1e-3 ..."


def add_options(parser: argparse.ArgumentParser) -> None:
    checkpoint_options(parser)
    parser.add_argument("--data", required=True, help="token shards: a folder, a URL or pipe:COMMAND")
    parser.add_argument("--preset", choices=["bound"], default="bound", help="convention of the number")
    parser.add_argument("--draws", type=int, default=1, help="of (time, masks) a sequence (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    parser.add_argument("--batch", type=int, default=32, help="sequences at once (default 32)")
    parser.add_argument("--limit", type=int, help="evaluate the first sequences only")
    parser.add_argument("overrides", nargs="*", metavar="evaluate.key=value", help=EVALUATE)
    parser.set_defaults(run=_ppl)


def _ppl(options) -> None:
    import numpy as np

    from lomdm_dist import machine
    from lomdm_dist.data.reader import access_of
    from lomdm_dist.data.shards import ShardSet, check_model_fits
    from lomdm_dist.evaluate.perplexity import convention, estimate_bound
    from lomdm_dist.train.checkpoint import Checkpoint

    checkpoint = Checkpoint(options.checkpoint, only(options.overrides, "evaluate."))
    shards = ShardSet(options.data, access_of(checkpoint.config.data))
    check_model_fits(shards, checkpoint.config.model)
    if shards.tokenizer != checkpoint.state.data.tokenizer:
        raise UserError(f"{options.data} was made with another tokenizer than checkpoint {checkpoint.folder}")
    if shards.manifest.packing != checkpoint.state.data.packing:
        raise UserError(
            f"{options.data} is {shards.manifest.packing}, checkpoint {checkpoint.folder} was trained on "
            f"{checkpoint.state.data.packing} sequences: their perplexities do not compare"
        )
    positive(options, "draws", "batch", "limit")
    count = min(len(shards), options.limit or len(shards))
    result = estimate_bound(
        checkpoint.build_model(options.weights).to(device()),
        shards,
        checkpoint.config,
        np.arange(count),
        options.draws,
        options.seed,
        options.batch,
        progress=True,
    )
    result["convention"] = convention(shards, checkpoint.config, options.draws, options.seed, options.weights)
    print(_say_bound(result, checkpoint.config, options))
    machine.write_result(options.json, result, checkpoint.config.as_dict())


def _say_bound(result: dict, config, options) -> str:
    value = f"{result['nll_per_token']:.4f} +- {result['standard_error']:.4f} nats a token"
    scope = f"{result['tokens']:,} tokens, {result['sequences']:,} sequences, {options.weights} weights"
    if config.objective.name == "ar":
        return f"exact {value}, ppl {result['ppl']:.2f}; {scope}"
    time, eps = config.evaluate.time, config.evaluate.time_eps
    asked, other = ("cut", "uncut") if time == "uniform" else ("uncut", "cut")
    below = f"{result['remainder']:.4f} +- {result['remainder_standard_error']:.4f} below t = {eps:g}"
    if not result["remainder"]:
        below = f"no draw fell below t = {eps:g}"
    jumps = f", {result['jumps']:.4f} in the jumps at its ends" if result["jumps"] else ""
    return (
        f"bound {value}, ppl {result['ppl']:.2f} ({asked}, time {time}; {other} "
        f"{result[f'nll_per_token_{other}']:.4f}: {below}{jumps}); {scope}, {options.draws} draws"
    )
