"""`lomdm launch`: start again what fails; check hosts before a job starts."""

import argparse
import sys

from lomdm_dist.errors import UserError


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--restarts", type=int, default=10, help="in any 24 hours (10); 0: none")
    parser.add_argument(
        "--check", action="store_true", help="start nothing: ask the hosts of --hostfile by ssh"
    )
    parser.add_argument("--hostfile", metavar="FILE", help="for --check: lines of [user@]host slots=N")
    parser.add_argument("--config", help="for --check: the YAML file that is to be trained")
    parser.add_argument(
        "--port", type=int, default=29500, help="for --check: where the processes meet (29500)"
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND ...",
        help="run it until it has ended for good; after --check, section.key=value ...",
    )
    parser.set_defaults(run=_launch)


def _launch(options) -> None:
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not 0 < options.port < 2**16:
        raise UserError(f"--port {options.port}: give 1 to {2**16 - 1}")
    if options.check:
        _check_hosts(options, words)
        return
    from lomdm_dist.launch.supervise import supervise

    if options.hostfile or options.config:
        raise UserError(
            "--hostfile and --config stand before the command: they are for --check, or belong to it"
        )
    if options.restarts < 0:
        raise UserError(f"--restarts {options.restarts}: give 0 or more")
    if not words:
        raise UserError("lomdm launch: give a command to run, such as torchrun train.py ..., or --check")
    status = supervise(words, options.restarts)
    if options.json is not None:
        from lomdm_dist import machine

        machine.write_result(options.json, {"status": status}, {})
    sys.exit(status)


def _check_hosts(options, overrides: list[str]) -> None:
    """A row a host and a line a problem; a UserError at the end where there is one."""
    from lomdm_dist import machine
    from lomdm_dist.launch.check import check, table

    if options.hostfile is None or options.config is None:
        raise UserError("lomdm launch --check needs both --hostfile FILE and --config FILE")
    if late := [word for word in overrides if word.startswith("-")]:
        raise UserError(f"lomdm launch --check: {late[0]} stands after section.key=value; put it before")
    result = check(options.hostfile, options.config, overrides, options.port)
    config = result.pop("config")
    print("\n".join([*table(result["hosts"]), *result["problems"]]), flush=True)
    machine.write_result(options.json, result, config)
    if count := len(result["problems"]):
        raise UserError(f"{count} problem{'s' * (count > 1)} found; nothing was started")
    print("nothing found that would keep this job from running")
