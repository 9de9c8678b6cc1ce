"""`lomdm train`, and train.py."""

import argparse

from lomdm_dist.commands.common import OVERRIDES


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="a YAML file, e.g. configs/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=OVERRIDES)
    parser.add_argument(
        "--resume", metavar="auto|CHECKPOINT", help="auto: from the run's latest, if there is one"
    )
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="save and exit 75 after this step")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    parser.set_defaults(run=_train)


def _train(options) -> None:
    from lomdm_dist.config import load_config

    config = load_config(options.config, options.overrides)
    from lomdm_dist import machine
    from lomdm_dist.parallel.grid import rank
    from lomdm_dist.train.loop import train

    summary = train(config, options.resume, options.stop_after)
    if rank() == 0:
        machine.write_result(options.json, summary, config.as_dict())
