"""`lomdm plan`: how to train on so many GPUs, and what it takes."""

import argparse
from pathlib import Path

from lomdm_dist.commands.common import check_names
from lomdm_dist.errors import UserError
from lomdm_dist.secrets import hide

PLAN = "change the config; what the planner chooses (train.micro_batch=8, ...) is then kept as you say"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="a YAML file")
    parser.add_argument("--gpus", type=int, required=True, help="in all")
    device_options(parser)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=PLAN)
    parser.set_defaults(run=_plan)


def device_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", default="h100-80gb", help="h100-80gb (default), h200-141gb, a100-80gb, ...")
    parser.add_argument(
        "--hardware", type=Path, metavar="FILE", help="more devices, as lomdm_dist/hardware.yaml"
    )
    parser.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="a result of `lomdm bench throughput --json`"
    )


def gpu_of(options):
    """The device that is asked for. UserError where it is in no table."""
    from lomdm_dist import machine

    known = machine.GPUS | (machine.read_hardware(options.hardware) if options.hardware else {})
    check_names("--gpu", [options.gpu], known)
    return known[options.gpu]


def choices(config, overrides: list[str]) -> tuple[str, ...]:
    """Keys of what the planner chooses that the user chose, in words other than `auto`."""
    from lomdm_dist.config import keys_of
    from lomdm_dist.study.plan import CHOSEN, wanted

    said = {key for override in overrides for key in keys_of(override)}
    return tuple(key for key in CHOSEN if key in said - set(wanted(config)))


def _plan(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.config import keys_of, load_config
    from lomdm_dist.study.plan import CHOSEN, plan
    from lomdm_dist.study.scale import from_bench, left_out

    config, device = load_config(options.config, options.overrides), gpu_of(options)
    if options.gpus < 1:
        raise UserError(f"--gpus {options.gpus}: give 1 or more")
    calibration, said = from_bench(options.calibrate) if options.calibrate else (None, None)
    chosen = plan(config, options.gpus, device, calibration, choices(config, options.overrides))
    kept = [override for override in options.overrides if not keys_of(override) <= set(CHOSEN)]
    print(hide("\n".join(chosen.lines(kept))))
    print("\n".join(["", *([f"calibrated by {said}"] if said else []), f"left out: {'; '.join(left_out())}"]))
    result = chosen.as_dict() | {"calibrated_by": said, "left_out": left_out()}
    machine.write_result(options.json, result, chosen.config.as_dict())
