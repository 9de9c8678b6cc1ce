"""`lomdm eval ppl`: perplexity by the bound; for `ar` the exact one."""

import argparse

from lomdm_dist.commands.common import check_pace, checkpoint_options, device, only, positive, processes
from lomdm_dist.errors import UserError

EVALUATE = (
    "how the bound is estimated: evaluate.time=uniform evaluate.time_eps=1e-3 ...; objective.c2=0: without "
    "the learned order"
)
PRESET = (
    "convention of the number: bound (default; uncut, as trained), or that of public trainers: mdlm, duo, "
    "bd3lm, md4 (docs/evaluation.md)"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    checkpoint_options(parser)
    parser.add_argument("--data", required=True, help="token shards: a folder, a URL or pipe:COMMAND")
    bound_options(parser)
    parser.add_argument("--limit", type=int, help="evaluate the first sequences only")
    parser.add_argument(
        "--force", action="store_true", help="also on data that is packed in another way than the model's"
    )
    parser.add_argument("overrides", nargs="*", metavar="evaluate.key=value", help=EVALUATE)
    parser.set_defaults(run=_ppl)


def bound_options(parser: argparse.ArgumentParser) -> None:
    """How a bound is estimated, and under which convention."""
    presets = ("bound", "mdlm", "duo", "bd3lm", "md4")
    parser.add_argument("--preset", choices=presets, default="bound", help=PRESET)
    parser.add_argument("--draws", type=int, default=1, help="of (time, masks) a sequence (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    parser.add_argument("--batch", type=int, default=32, help="sequences at once (default 32)")


def open_checkpoint(options):
    """The checkpoint, its config with the preset's settings and the command line's. UserError."""
    from lomdm_dist.evaluate.conventions import PRESETS
    from lomdm_dist.train.checkpoint import Checkpoint

    positive(options, "draws", "batch", "limit")
    overrides = only(options.overrides, "evaluate.", "objective.c1", "objective.c2")
    check_pace(options.checkpoint, overrides)
    return Checkpoint(options.checkpoint, [*PRESETS[options.preset].evaluate, *overrides])


def _ppl(options) -> None:
    with processes(options) as grid:
        checkpoint = open_checkpoint(options)
        shards = open_shards(options, checkpoint)
        result = measure(options, checkpoint, shards, grid)
        if grid is None or grid.first:
            from lomdm_dist import machine

            print(say_bound(result, checkpoint.config, options))
            machine.write_result(options.json, result, checkpoint.config.as_dict())


def open_shards(options, checkpoint):
    """The data, if its perplexity under this model means something. UserError."""
    from lomdm_dist.data.reader import access_of
    from lomdm_dist.data.shards import ShardSet, check_model_fits

    shards = ShardSet(options.data, access_of(checkpoint.config.data))
    check_model_fits(shards, checkpoint.config.model)
    if shards.tokenizer != checkpoint.state.data.tokenizer:
        raise UserError(f"{options.data} was made with another tokenizer than checkpoint {checkpoint.folder}")
    packing, trained = shards.manifest.packing, checkpoint.state.data.packing
    if packing != trained and not options.force:
        raise UserError(
            f"{options.data} is {packing}, checkpoint {checkpoint.folder} was trained on {trained} "
            "sequences: their perplexities do not compare (--force computes it all the same)"
        )
    return shards


def check_some(pieces, options, name: str) -> None:
    if not len(pieces):
        raise UserError(f"{name} makes no whole sequence under --preset {options.preset}")


def bound_of(pieces, model, checkpoint, options, grid, name: str) -> dict:
    """The bound of the first sequences, or of all."""
    import numpy as np

    from lomdm_dist.evaluate.conventions import PRESETS
    from lomdm_dist.evaluate.perplexity import estimate_bound

    count = min(len(pieces), options.limit or len(pieces))
    given, first = PRESETS[options.preset].given, grid is None or grid.first
    how = options.draws, options.seed, options.batch, given, grid, name if first else None
    return estimate_bound(model, pieces, checkpoint.config, np.arange(count), *how)


def measure(options, checkpoint, shards, grid) -> dict:
    """The bound of the data under `--preset`, with its convention beside it."""
    from lomdm_dist.evaluate.conventions import PRESETS, describe, pieces_of_shards

    config, preset = checkpoint.config, PRESETS[options.preset]
    pieces = pieces_of_shards(shards, preset, checkpoint.tokenizer(), options.limit)
    check_some(pieces, options, options.data)
    model = checkpoint.build_model(options.weights).to(device(grid))
    result = bound_of(pieces, model, checkpoint, options, grid, options.data)
    result["convention"] = {
        **describe(options.preset, config, checkpoint.state.data.packing),
        **data_of(shards),
        **settings(options, config),
        "step": checkpoint.state.step,
    }
    return result


def data_of(shards) -> dict:
    """Which data a number is of."""
    manifest = shards.manifest
    return {
        "data": str(shards),
        "packing": manifest.packing,
        "split": manifest.split,
        "source": f"{manifest.recipe}: {manifest.official_split}",
        "identity": manifest.identity,
    }


def settings(options, config) -> dict:
    """What of the command and the model a number needs beside it, besides the preset."""
    return {
        "objective": config.objective.model_dump(mode="json"),
        "draws": options.draws,
        "seed": options.seed,
        "weights": options.weights,
        "dtype": "float32",
    }


def say_bound(result: dict, config, options) -> str:
    """A bound in one line."""
    value = f"{result['nll_per_token']:.4f} +- {result['standard_error']:.4f} nats a token"
    scope = (
        f"{result['tokens']:,} tokens, {result['sequences']:,} sequences, {options.weights} weights, "
        f"preset {options.preset}"
    )
    scope = ", ".join([scope, *(word for word in options.overrides if word.startswith("objective."))])
    if config.objective.name == "ar":
        return f"exact {value}, ppl {result['ppl']:.2f}; {scope}"
    time, eps = config.evaluate.time, config.evaluate.time_eps
    draws = f"{options.draws} draw{'s' * (options.draws > 1)}"
    if config.evaluate.below == "guessed":
        below = f"{result['remainder']:.4f} of it guessed below t = {eps:g}"
        return f"bound {value}, ppl {result['ppl']:.2f} (time {time}; {below}); {scope}, {draws}"
    asked, other = ("cut", "uncut") if time == "uniform" else ("uncut", "cut")
    below = f"{result['remainder']:.4f} +- {result['remainder_standard_error']:.4f} below t = {eps:g}"
    if not result["remainder"]:
        below = f"no draw fell below t = {eps:g}"
    jumps = f", {result['jumps']:.4f} in the jumps at its ends" if result["jumps"] else ""
    return (
        f"bound {value}, ppl {result['ppl']:.2f} ({asked}, time {time}; {other} "
        f"{result[f'nll_per_token_{other}']:.4f}: {below}{jumps}); {scope}, {draws}"
    )
