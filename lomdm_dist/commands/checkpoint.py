"""`lomdm checkpoint`: look into one, check it, rewrite it."""

import argparse
from pathlib import Path

from lomdm_dist.commands.common import A_CHECKPOINT
from lomdm_dist.errors import UserError


def add_options(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    inspect = actions.add_parser("inspect", parents=[common], help="say what it holds; reads no weights")
    verify = actions.add_parser("verify", parents=[common], help="read all of it, and check it")
    convert = actions.add_parser("convert", parents=[common], help="the same, in today's form and one file")
    for command, run in (
        (inspect, _inspect_checkpoint),
        (verify, _verify_checkpoints),
        (convert, _convert_checkpoint),
    ):
        command.add_argument("path", type=Path, metavar="PATH", help=A_CHECKPOINT)
        command.set_defaults(run=run)
    verify.add_argument("--all", action="store_true", help="every checkpoint of a run folder")
    convert.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    convert.add_argument(
        "--weights-only", action="store_true", help="without AdamW's moments: smaller, cannot be resumed"
    )


def _inspect_checkpoint(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.convert.checkpoint import inspect

    contents = inspect(options.path)
    print("\n".join(contents.lines()))
    machine.write_result(options.json, contents.as_dict(), contents.checkpoint.config.as_dict())


def _verify_checkpoints(options) -> None:
    """A line each; a UserError at the end where one is not whole."""
    from lomdm_dist import machine
    from lomdm_dist.convert.checkpoint import checkpoints_of, verify

    results, problems = [], []
    for folder in checkpoints_of(options.path) if options.all else [options.path]:
        try:
            contents = verify(folder)
            results.append(contents.totals() | {"whole": True})
            print(f"whole: {contents.line()}", flush=True)
        except UserError as error:
            results.append({"folder": str(folder), "whole": False, "problem": str(error)})
            problems.append(str(error))
            if options.all:
                print(f"not whole: {error}", flush=True)
    settings = {"path": options.path, "all": options.all}
    machine.write_result(options.json, {"checkpoints": results}, settings)
    if problems:
        of_all = f"{len(problems)} of {len(results)} checkpoints of {options.path} are not whole"
        raise UserError(of_all if options.all else problems[0])


def _convert_checkpoint(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.convert.checkpoint import convert

    contents = convert(options.path, options.out, options.weights_only)
    print(f"made: {contents.line()}")
    machine.write_result(options.json, contents.totals(), contents.checkpoint.config.as_dict())
