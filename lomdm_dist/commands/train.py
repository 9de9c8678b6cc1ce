"""`lomdm train`, and train.py."""

import argparse

from lomdm_dist.commands.common import OVERRIDES
from lomdm_dist.errors import UserError
from lomdm_dist.secrets import say


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="a YAML file, e.g. configs/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=OVERRIDES)
    parser.add_argument(
        "--resume", metavar="auto|CHECKPOINT", help="auto: from the run's latest, if there is one"
    )
    parser.add_argument(
        "--stop-after", type=int, metavar="STEP", help="save and end after this step, as RUN/stop does"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="one step of one rank, counted: memory, collectives; trains nothing",
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="for --dry-run: of so many ranks (1)")
    parser.add_argument("--rank", type=int, metavar="R", help="for --dry-run: which of them (0)")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    parser.set_defaults(run=_train)


def _train(options) -> None:
    from lomdm_dist.config import load_config

    config = load_config(options.config, options.overrides)
    from lomdm_dist import machine

    if options.dry_run:
        _dry_run(options, config)
        return
    if options.world_size is not None or options.rank is not None:
        raise UserError("--world-size and --rank are for --dry-run; a launcher says them of a real run")
    from lomdm_dist.parallel.grid import rank
    from lomdm_dist.train.loop import train

    summary = train(config, options.resume, options.stop_after)
    if rank() == 0:
        machine.write_result(options.json, summary, config.as_dict())


def _dry_run(options, config) -> None:
    if options.resume is not None or options.stop_after is not None:
        raise UserError("--dry-run takes one step of a new model: leave out --resume and --stop-after")
    world_size, rank = 1 if options.world_size is None else options.world_size, options.rank or 0
    say(f"dry run: {options.config} as rank {rank} of {world_size}")
    from lomdm_dist import machine
    from lomdm_dist.study.dry_run import dry_run, lines

    result = dry_run(config, world_size, rank)
    print("\n".join(lines(result)))
    machine.write_result(options.json, result, config.as_dict())
