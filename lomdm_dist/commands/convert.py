"""`lomdm convert to-hf`: export a checkpoint."""

import argparse
from pathlib import Path

from lomdm_dist.commands.common import A_CHECKPOINT, WEIGHTS


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help=A_CHECKPOINT)
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--weights", choices=["ema", "raw"], default="ema", help=WEIGHTS)
    parser.set_defaults(run=_to_hf)


def _to_hf(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.convert.to_hf import to_hf
    from lomdm_dist.train.checkpoint import Checkpoint

    checkpoint = Checkpoint(options.checkpoint)
    result = to_hf(checkpoint, options.out, options.weights)
    print(
        f"exported {checkpoint.folder} to {options.out}: {result['parameters']:,} parameters, "
        f"largest logit difference {result['max_logit_difference']:.1e}"
    )
    machine.write_result(options.json, result, checkpoint.config.as_dict())
