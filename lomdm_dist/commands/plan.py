"""`lomdm plan`: how to train on so many GPUs, and what it takes."""

import argparse

from lomdm_dist.errors import UserError
from lomdm_dist.secrets import hide

PLAN = "change the config; what the planner chooses (train.micro_batch=8, ...) is then kept as you say"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="a YAML file")
    parser.add_argument("--gpus", type=int, required=True, help="in all")
    parser.add_argument("--gpu", default="h100-80gb", help="h100-80gb (default), h200-141gb, a100-80gb, ...")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=PLAN)
    parser.set_defaults(run=_plan)


def _plan(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.config import keys_of, load_config
    from lomdm_dist.study.plan import CHOSEN, plan
    from lomdm_dist.train.fit import wanted

    config = load_config(options.config, options.overrides)

    if options.gpu not in machine.GPUS:
        raise UserError(f"--gpu {options.gpu}: known are {', '.join(machine.GPUS)}")
    if options.gpus < 1:
        raise UserError(f"--gpus {options.gpus}: give 1 or more")
    said = {key for override in options.overrides for key in keys_of(override)}
    fixed = tuple(key for key in CHOSEN if key in said - set(wanted(config)))
    chosen = plan(config, options.gpus, machine.GPUS[options.gpu], fixed=fixed)
    kept = [override for override in options.overrides if not keys_of(override) <= set(CHOSEN)]
    print(hide("\n".join(chosen.lines(kept))))
    machine.write_result(options.json, chosen.as_dict(), chosen.config.as_dict())
