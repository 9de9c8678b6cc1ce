"""The command line: `lomdm prepare`, `train`, `eval`, `sample`, `convert`, `bench`, `sweep`, `plan`, ....

What a command takes and does stands in a file of its own, in `commands`.

Exit status: 0 done; 2 the user's mistake, said in one line; 75 stopped on request after saving;
130 Ctrl-C; 1 anything else.
"""

import argparse
import contextlib
import itertools
import os
import platform
import re
import sys
import time
import traceback
from pathlib import Path

from lomdm_dist import __version__
from lomdm_dist.commands import (
    bench_compare,
    bench_profile,
    bench_step,
    bench_throughput,
    checkpoint,
    convert_diff,
    convert_from_hf,
    convert_to_hf,
    eval_gen_ppl,
    eval_order,
    eval_ppl,
    eval_report,
    eval_rule,
    eval_tasks,
    eval_zero_shot,
    fit,
    launch,
    plan,
    plan_scale,
    prepare,
    sample,
    sweep,
    train,
)
from lomdm_dist.errors import FAILED, INTERRUPTED, MISTAKE, RunFailed, StoppedOnRequest, UserError
from lomdm_dist.files import check_writable
from lomdm_dist.secrets import hide

# before torch is loaded: it prints frames of C++ where another process leaves the store first, as one must
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
SECONDS_AFTER_THE_FIRST = 5
SECTIONS = (  # of the config; not imported from there, which takes a while
    *("model", "objective", "data", "optim", "train", "evaluate"),
    *("sampler", "parallel", "kernels", "faults", "wandb"),
)
OVERRIDE = re.compile(rf"({'|'.join(SECTIONS)})(\.\w+)*=")


def main(arguments: list[str] | None = None, default_command: str | None = None) -> None:
    """Run one command and exit with its status. `train.py` is `lomdm train`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # was closed, and must not become the number of a file of ours
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    sys.excepthook = _say_traceback
    options = _parse(_parser(default_command), arguments)
    with contextlib.suppress(AttributeError):  # whatever stands in for a terminal
        sys.stdout.reconfigure(errors="replace")
    try:
        if options.json is not None:
            check_writable(Path(options.json))
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UserError, OSError) as error:
        if options.debug:
            raise
        mistake = isinstance(error, UserError)
        _say(f"error: {error}" if mistake else f"error: {error} (--debug shows where)")
        sys.exit(MISTAKE if mistake else FAILED)
    except RunFailed as error:
        if str(error):
            _say(f"error: {error}")
        sys.exit(error.status)
    except StoppedOnRequest as stopped:
        sys.exit(stopped.status)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _parse(parser: argparse.ArgumentParser, arguments: list[str]):
    """Parse, with overrides anywhere: argparse itself takes them before the options only.

    After an option that takes a list, `--steps 8 16 sampler.top_p=0.9`, it would take them for part of that.
    `--beside` and `--grid` have overrides of their own, and so has the command that `launch` runs.
    """
    if arguments[:2] == ["plan", "scale"]:  # `plan` is a command, too, which argparse has for no group
        arguments = ["plan scale", *arguments[2:]]
    words, taken, option = [], [], None
    for word in arguments:
        ours = OVERRIDE.match(word) and option not in ("--beside", "--grid") and arguments[0] != "launch"
        ours = ours and words[-1:] != ["--prompt"]  # a text, whatever it says
        (taken if ours else words).append(word)
        option = word.partition("=")[0] if word.startswith("--") else option
    for before, word in itertools.pairwise(words):
        empty = not word and before.startswith("--") and before not in ("--prompt", "--grid")
        if (empty or re.fullmatch(r"--(?!prompt)[\w-]+=", word)) and arguments[0] != "launch":
            parser.error(f"what follows {word or before} is empty: is a variable not set?")
    options, more = parser.parse_known_args(words)
    more = [*more, *taken]
    if more and (not hasattr(options, "overrides") or any(word.startswith("-") for word in more)):
        parser.error(hide(f"unrecognized arguments: {' '.join(more)}"))
    if more:
        options.overrides = [*options.overrides, *more]
    return options


def _say(line: str) -> None:
    """An error, once for a job of many processes.

    A launcher ends the others when the first process has failed; only if that one goes on has
    another rank a trouble of its own, and says so.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(SECONDS_AFTER_THE_FIRST)
        line = f"rank {rank} on {platform.node()}: {line}"
    print(hide(line), file=sys.stderr, flush=True)


def _say_traceback(*error) -> None:
    print(hide("".join(traceback.format_exception(*error))), end="", file=sys.stderr, flush=True)


_ABOUT = {
    "description": "Train, evaluate, sample and export learnable-order masked diffusion language models.",
    "epilog": "Exit status: 0 done, 2 your mistake, 75 stopped on request after saving, 130 Ctrl-C, "
    "1 anything else.",
}


def _parser(default_command: str | None) -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--version", action="version", version=f"lomdm_dist {__version__}")
    common.add_argument("--json", metavar="FILE", help="write the result here too")
    common.add_argument("--debug", action="store_true", help="show the traceback of a mistake")
    if default_command == "train":
        parser = argparse.ArgumentParser(prog="train.py", parents=[common], **_ABOUT)
        train.add_options(parser)
        return parser

    parser = argparse.ArgumentParser(prog="lomdm", parents=[common], **_ABOUT)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command, about: str, among=commands) -> None:
        # no shortened options: what `--besid` means must not depend on who reads it
        command.add_options(among.add_parser(name, parents=[common], help=about, allow_abbrev=False))

    def group(name: str, about: str, of: str):
        return commands.add_parser(name, help=about).add_subparsers(required=True, metavar=of)

    prepare.add_options(commands.add_parser("prepare", help="raw text -> token shards"), common)
    add("train", train, "train (the same as train.py)")
    add("launch", launch, "start again what fails; or check hosts before")
    evaluations = group("eval", "evaluate a checkpoint", "WHAT")
    add("ppl", eval_ppl, "perplexity by the bound", evaluations)
    add("gen-ppl", eval_gen_ppl, "what another language model thinks of its texts", evaluations)
    add("order", eval_order, "in what order it generates", evaluations)
    add("report", eval_report, "one page of a run and its evaluations", evaluations)
    add("zero-shot", eval_zero_shot, "perplexity on other data sets, beside the paper's", evaluations)
    add("tasks", eval_tasks, "tasks of the lm-eval harness", evaluations)
    add("rule", eval_rule, "exact likelihood of a deterministic order's sampler", evaluations)
    add("sample", sample, "generate text")
    checkpoint.add_options(commands.add_parser("checkpoint", help="look into, check and rewrite one"), common)
    benches = group("bench", "measure speed and memory", "WHAT")
    add("step", bench_step, "a step, and each trick's gain", benches)
    add("throughput", bench_throughput, "training steps on grids of this machine, or in this job", benches)
    add("compare", bench_compare, "two results side by side", benches)
    add("profile", bench_profile, "where the time of a run's traced steps went", benches)
    conversions = group("convert", "to and from Hugging Face", "WHAT")
    add("to-hf", convert_to_hf, "export a checkpoint", conversions)
    add("from-hf", convert_from_hf, "import an export, or a public checkpoint", conversions)
    add("diff", convert_diff, "what differs between two checkpoints or exports", conversions)
    add("sweep", sweep, "train many points, and compare them")
    add("plan", plan, "how to train on so many GPUs, and what it takes")
    add("plan scale", plan_scale, "the same for 1 to thousands of GPUs: curves, days, cost, limits")
    add("fit", fit, "scaling laws of a sweep, and what one objective gains over another")
    return parser


if __name__ == "__main__":
    main()
