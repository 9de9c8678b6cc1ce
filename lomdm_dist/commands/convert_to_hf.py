"""`lomdm convert to-hf`: export a checkpoint."""

import argparse
from pathlib import Path

from lomdm_dist.commands.common import A_CHECKPOINT, WEIGHTS
from lomdm_dist.errors import UserError

DTYPE = "of the weights saved; what is computed with them follows it when they are loaded (default float32)"
SHARD = "most of a file of weights, in 10^9 bytes, and about what this takes of memory (default 5)"
CHECK = (
    "parameters: every one is read back; logits (default, where the memory is free): also logits, exponents "
    "and bound of a batch, for which the model must fit into memory once"
)
DATA = (
    "token shards to measure the bound of the model card on (default: take what `eval ppl` left in the run)"
)
AS_EVAL_PPL = {"preset": "bound", "limit": None, "force": False, "draws": 1, "seed": 0, "batch": 32}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help=A_CHECKPOINT)
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--weights", choices=["ema", "raw"], default="ema", help=WEIGHTS)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help=DTYPE)
    parser.add_argument("--max-shard-gb", type=float, default=5.0, metavar="N", help=SHARD)
    parser.add_argument("--check", choices=["logits", "parameters"], help=CHECK)
    parser.add_argument("--data", help=DATA)
    parser.set_defaults(run=_to_hf, **AS_EVAL_PPL)


def _to_hf(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.convert.to_hf import to_hf
    from lomdm_dist.files import check_new
    from lomdm_dist.train.checkpoint import Checkpoint

    if not 1e-3 <= options.max_shard_gb < 1e6:
        raise UserError(f"--max-shard-gb {options.max_shard_gb:g}: give a size of 0.001 or more")
    check_new(options.out)
    checkpoint = Checkpoint(options.checkpoint)
    how = options.weights, options.dtype, options.max_shard_gb, options.check
    result = to_hf(checkpoint, options.out, *how, _bound(options, checkpoint))
    print(f"exported {checkpoint.folder} to {options.out}: {_say(result)}")
    for missing in result["card_lacks"]:
        print(f"note: the model card has no {missing}")
    machine.write_result(options.json, result, checkpoint.config.as_dict())


def _bound(options, checkpoint) -> dict | None:
    """As `lomdm eval ppl --data` measures it, with one draw."""
    from lomdm_dist.commands.eval_ppl import measure, open_shards

    if options.data is None:
        return None
    return measure(options, checkpoint, open_shards(options, checkpoint), None)


def _say(result: dict) -> str:
    text = (
        f"{result['parameters']:,} parameters, {result['dtype']}, "
        f"{result['files']} file{'s' * (result['files'] > 1)} of weights; every parameter compared"
    )
    if result["checked"] == "parameters":
        return f"{text}, nothing computed with them (--check logits does, and holds the model in memory)"
    orders = result["max_exponent_difference"]
    text += f"; largest differences: logits {result['max_logit_difference']:.1e}"
    text += "" if orders is None else f", exponents {orders:.1e}"
    text += (
        f", {'likelihood' if orders is None else 'bound'} {result['max_bound_difference']:.1e} nats a token"
    )
    if "rounding" in result:
        text += f"; rounding to {result['dtype']} moves the logits by {result['rounding']:.1e}"
    return text
