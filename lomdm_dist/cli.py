"""The command line: `lomdm prepare | train | launch | eval | sample | checkpoint | convert | plan`.

Exit status: 0 done; 2 the user's mistake, said in one line; 75 stopped on request after saving;
1 anything else.
"""

import argparse
import contextlib
import os
import platform
import sys
import time
import traceback
from pathlib import Path

from lomdm_dist import __version__
from lomdm_dist.errors import FAILED, INTERRUPTED, MISTAKE, REQUEUE, RunFailed, StoppedOnRequest, UserError
from lomdm_dist.files import check_writable
from lomdm_dist.secrets import hide

SECONDS_AFTER_THE_FIRST = 5
PACKING = "packed (default): documents end to end; padded: each begins a sequence of its own"
TEXT_FORMS = "your texts: .txt, .jsonl, .parquet (also .gz, .zst, .bz2), .tar of texts, hf:NAME"
OVERRIDES = "change the config: optim.learning_rate=1e-4 train.run=runs/mine ..."
EVALUATE = "how the bound is estimated: evaluate.time=uniform evaluate.time_eps=1e-3 ..."
SAMPLER = "how text is drawn: sampler.top_p=0.9 ...; objective.c2=0: without the learned order"
PROMPT = "text that stays; a [MASK] in it, as the tokenizer spells it, is filled; more text follows"
PLAN = "change the config; what the planner chooses (train.micro_batch=8, ...) is then kept as you say"
A_CHECKPOINT = "a run folder (its latest) or a checkpoint"
WEIGHTS = "ema (default): the average over training; raw: of the last step"


def main(arguments: list[str] | None = None, default_command: str | None = None) -> None:
    """Run one command and exit with its status. `train.py` is `lomdm train`."""
    arguments = sys.argv[1:] if arguments is None else arguments
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
    except StoppedOnRequest:
        sys.exit(REQUEUE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _parse(parser: argparse.ArgumentParser, arguments: list[str]):
    """Parse, with overrides anywhere: argparse itself takes them before the options only."""
    options, more = parser.parse_known_args(arguments)
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
    "epilog": "Exit status: 0 done, 2 your mistake, 75 stopped on request after saving, 1 anything else.",
}


def _parser(default_command: str | None) -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--version", action="version", version=f"lomdm_dist {__version__}")
    common.add_argument("--json", metavar="FILE", help="write the result here too")
    common.add_argument("--debug", action="store_true", help="show the traceback of a mistake")
    if default_command == "train":
        parser = argparse.ArgumentParser(prog="train.py", parents=[common], **_ABOUT)
        _train_options(parser)
        return parser

    parser = argparse.ArgumentParser(prog="lomdm", parents=[common], **_ABOUT)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    _prepare_options(commands.add_parser("prepare", help="raw text -> token shards"), common)
    _train_options(commands.add_parser("train", parents=[common], help="train (the same as train.py)"))

    _launch_options(
        commands.add_parser("launch", parents=[common], help="start again what fails; or check hosts before")
    )

    evaluations = commands.add_parser("eval", help="evaluate a checkpoint").add_subparsers(
        required=True, metavar="WHAT"
    )
    _ppl_options(evaluations.add_parser("ppl", parents=[common], help="perplexity by the bound"))
    _sample_options(commands.add_parser("sample", parents=[common], help="generate text"))

    _checkpoint_commands(commands.add_parser("checkpoint", help="look into, check and rewrite one"), common)

    benches = commands.add_parser("bench", help="measure speed and memory").add_subparsers(
        required=True, metavar="WHAT"
    )
    _bench_step_options(benches.add_parser("step", parents=[common], help="a step, and each trick's gain"))

    conversions = commands.add_parser("convert", help="to Hugging Face").add_subparsers(
        required=True, metavar="DIRECTION"
    )
    _to_hf_options(conversions.add_parser("to-hf", parents=[common], help="export a checkpoint"))
    _plan_options(
        commands.add_parser("plan", parents=[common], help="how to train on so many GPUs, and what it takes")
    )
    return parser


def _prepare_options(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    from lomdm_dist.data.recipes import RECIPES

    recipes = parser.add_subparsers(required=True, metavar="RECIPE")
    text = recipes.add_parser("text", parents=[common], help=TEXT_FORMS)
    text.add_argument("--input", nargs="+", required=True, metavar="FILE", help="files, or hf:NAME[:SPLIT]")
    text.add_argument(
        "--tokenizer", required=True, help="bpe or wordpiece to train one; else a folder or hub name"
    )
    text.add_argument("--vocab-size", type=int, help="of a tokenizer trained here")
    text.add_argument("--length", type=int, required=True, help="tokens a sequence")
    text.add_argument(
        "--valid-fraction", type=float, default=0.05, help="share of documents held out (0.05); 0: none"
    )
    text.add_argument("--valid", nargs="+", default=[], metavar="FILE", help="validation files of your own")
    text.add_argument(
        "--sample-by",
        choices=["line", "paragraph", "document"],
        default="paragraph",
        help="what a document is in .txt (paragraph: blank lines stand between them)",
    )
    text.add_argument("--text-field", default="text", help="field of .jsonl, .parquet and hub records (text)")
    _work_options(text, "text")
    for name, recipe in RECIPES.items():
        _recipe_options(recipes.add_parser(name, parents=[common], help=recipe.about), name, recipe)

    verify = recipes.add_parser("verify", parents=[common], help="read what was made, and check all of it")
    inspect = recipes.add_parser("inspect", parents=[common], help="say what was made, and show some of it")
    reshard = recipes.add_parser("reshard", parents=[common], help="the same sequences in other shards")
    for command, run in ((verify, _verify), (inspect, _inspect), (reshard, _reshard)):
        command.add_argument("folder", type=_local, metavar="DIR", help="what prepare made, or a split of it")
        command.set_defaults(run=run)
    reshard.add_argument("--out", type=Path, required=True, help="the folder to make")
    reshard.add_argument("--shard-mib", type=float, required=True, help="size of a shard")


def _local(folder: str) -> Path:
    if "://" in folder or folder.startswith("pipe:"):
        raise argparse.ArgumentTypeError(hide(f"{folder}: a local folder is wanted"))
    return Path(folder)


def _recipe_options(parser: argparse.ArgumentParser, name: str, recipe) -> None:
    parser.add_argument(
        "--input", nargs="+", default=[], metavar="FILE", help="files or folders (default: from the hub)"
    )
    parser.add_argument(
        "--tokenizer", default=recipe.tokenizer, help=f"a folder or hub name ({recipe.tokenizer})"
    )
    parser.add_argument(
        "--length", type=int, default=recipe.length, help=f"tokens a sequence ({recipe.length})"
    )
    parser.add_argument(
        "--splits",
        nargs="+",
        choices=list(recipe.splits),
        default=list(recipe.default),
        help=f"which to make ({' '.join(recipe.default)})",
    )
    _work_options(parser, name)


def _work_options(parser: argparse.ArgumentParser, recipe: str) -> None:
    """What `lomdm prepare` has for every recipe."""
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    parser.add_argument("--packing", choices=["packed", "padded"], default="packed", help=PACKING)
    parser.add_argument("--shard-mib", type=float, default=64, help="size of a shard (64)")
    parser.add_argument("--workers", type=int, help="processes that encode (default: one a core)")
    parser.set_defaults(run=_prepare, recipe=recipe)


def _prepare(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.data.prepare import Request, prepare
    from lomdm_dist.data.recipes import RECIPES

    given = {name: value for name, value in vars(options).items() if name in Request.__dataclass_fields__}
    if options.recipe in RECIPES:
        given["splits"] = tuple(s for s in RECIPES[options.recipe].splits if s in options.splits)
    else:
        given["valid_inputs"] = tuple(options.valid)
        given["splits"] = ("train", "valid") if options.valid or options.valid_fraction else ("train",)
    request = Request(inputs=tuple(options.input), **given)
    try:
        totals, reused = prepare(request, options.out, options.workers)
    except KeyboardInterrupt as stopped:
        print(str(stopped) or "stopped", file=sys.stderr)
        raise
    print(
        f"{'reused' if reused else 'prepared'} {options.out}: {totals['sequences']:,} sequences, "
        f"{totals['tokens']:,} tokens, {totals['documents']:,} documents, {totals['shards']} shards"
    )
    for split, counts in totals["splits"].items():
        print(
            f"  {split}: "
            + ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in counts.items())
        )
    data = [f"data.{split}={options.out}/{split}" for split in ("train", "valid") if split in request.splits]
    print(
        f"for the config: model.vocab_size={totals['vocab_size']} model.mask_id={totals['mask_id']} "
        f"model.eos_id={totals['eos_id']} model.length={request.length} {' '.join(data)}".rstrip()
    )
    machine.write_result(options.json, totals | {"reused": reused}, vars(request))


def _verify(options) -> None:
    from lomdm_dist.data.inspect import verify

    _say_splits(options, "whole", verify(options.folder))


def _reshard(options) -> None:
    from lomdm_dist.data.inspect import reshard

    _say_splits(options, "made", reshard(options.folder, options.out, options.shard_mib))


def _say_splits(options, state: str, manifests: list) -> None:
    """A line a split."""
    from lomdm_dist import machine

    for m in manifests:
        print(
            f"{state}: {m.split}, {m.sequences:,} sequences, {m.tokens:,} tokens, {m.documents:,} documents, "
            f"{len(m.shards)} shards"
        )
    names = ("sequences", "tokens", "documents", "identity")
    splits = {m.split: {n: getattr(m, n) for n in names} | {"shards": len(m.shards)} for m in manifests}
    machine.write_result(options.json, {"splits": splits}, {"folder": options.folder})


def _inspect(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.data.inspect import inspect

    contents = inspect(options.folder)
    for split in contents:
        print("\n".join(split.lines()))
    splits = {split.manifest.split: split.as_dict() for split in contents}
    machine.write_result(options.json, {"splits": splits}, {"folder": options.folder})


def _train_options(parser: argparse.ArgumentParser) -> None:
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


def _launch_options(parser: argparse.ArgumentParser) -> None:
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
        raise UserError("lomdm launch --check needs --hostfile FILE and --config FILE")
    if late := [word for word in overrides if word.startswith("-")]:
        raise UserError(f"lomdm launch --check: {late[0]} stands after section.key=value; put it before")
    result = check(options.hostfile, options.config, overrides, options.port)
    config = result.pop("config")
    print("\n".join([*table(result["hosts"]), *result["problems"]]), flush=True)
    machine.write_result(options.json, result, config)
    if count := len(result["problems"]):
        raise UserError(f"{count} problem{'s' * (count > 1)} found; nothing was started")
    print("nothing found that would keep this job from running")


def _bench_step_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="a YAML file of a LoMDM, e.g. configs/owt.yaml")
    parser.add_argument("--sequences", type=int, default=8, help="masked sequences in a micro-batch (8)")
    parser.add_argument("--rounds", type=int, default=5, help="times that each row is measured (5)")
    parser.add_argument(
        "--rows", nargs="+", metavar="NAME", help="some of the rows, by their names in the table"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rows")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=OVERRIDES)
    parser.set_defaults(run=_bench_step)


def _bench_step(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.config import load_config
    from lomdm_dist.study import bench

    _positive(options, "sequences", "rounds")
    if options.plot:
        bench.check_plot(options.plot)
    config = load_config(options.config, options.overrides)
    result = bench.bench_step(config, options.sequences, options.rounds, _device(), options.rows)
    print(bench.as_markdown(result))
    if options.plot:
        bench.draw(result, options.plot)
        print(f"drawn: {options.plot}")
    machine.write_result(options.json, result, config.as_dict())


def _checkpoint_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, help=A_CHECKPOINT)
    parser.add_argument("--weights", choices=["ema", "raw"], default="ema", help=WEIGHTS)


def _ppl_options(parser: argparse.ArgumentParser) -> None:
    _checkpoint_options(parser)
    parser.add_argument("--data", required=True, help="token shards: a folder, a URL or pipe:COMMAND")
    parser.add_argument("--preset", choices=["bound"], default="bound", help="convention of the number")
    parser.add_argument("--draws", type=int, default=1, help="of (time, masks) a sequence (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    parser.add_argument("--batch", type=int, default=32, help="sequences at once (default 32)")
    parser.add_argument("--limit", type=int, help="evaluate the first sequences only")
    parser.add_argument("overrides", nargs="*", metavar="evaluate.key=value", help=EVALUATE)
    parser.set_defaults(run=_ppl)


def _ppl(options) -> None:
    import numpy as np

    from lomdm_dist import machine
    from lomdm_dist.data.reader import access_of
    from lomdm_dist.data.shards import ShardSet, check_model_fits
    from lomdm_dist.evaluate.perplexity import convention, estimate_bound
    from lomdm_dist.train.checkpoint import Checkpoint

    checkpoint = Checkpoint(options.checkpoint, _only(options.overrides, "evaluate."))
    shards = ShardSet(options.data, access_of(checkpoint.config.data))
    check_model_fits(shards, checkpoint.config.model)
    if shards.tokenizer != checkpoint.state.data.tokenizer:
        raise UserError(f"{options.data} was made with another tokenizer than checkpoint {checkpoint.folder}")
    if shards.manifest.packing != checkpoint.state.data.packing:
        raise UserError(
            f"{options.data} is {shards.manifest.packing}, checkpoint {checkpoint.folder} was trained on "
            f"{checkpoint.state.data.packing} sequences: their perplexities do not compare"
        )
    _positive(options, "draws", "batch", "limit")
    count = min(len(shards), options.limit or len(shards))
    result = estimate_bound(
        checkpoint.build_model(options.weights).to(_device()),
        shards,
        checkpoint.config,
        np.arange(count),
        options.draws,
        options.seed,
        options.batch,
        progress=True,
    )
    result["convention"] = convention(shards, checkpoint.config, options.draws, options.seed, options.weights)
    print(_say_bound(result, checkpoint.config, options))
    machine.write_result(options.json, result, checkpoint.config.as_dict())


def _say_bound(result: dict, config, options) -> str:
    value = f"{result['nll_per_token']:.4f} +- {result['standard_error']:.4f} nats a token"
    scope = f"{result['tokens']:,} tokens, {result['sequences']:,} sequences, {options.weights} weights"
    if config.objective.name == "ar":
        return f"exact {value}, ppl {result['ppl']:.2f}; {scope}"
    time, eps = config.evaluate.time, config.evaluate.time_eps
    asked, other = ("cut", "uncut") if time == "uniform" else ("uncut", "cut")
    below = f"{result['remainder']:.4f} +- {result['remainder_standard_error']:.4f} below t = {eps:g}"
    if not result["remainder"]:
        below = f"no draw fell below t = {eps:g}"
    jumps = f", {result['jumps']:.4f} in the jumps at its ends" if result["jumps"] else ""
    return (
        f"bound {value}, ppl {result['ppl']:.2f} ({asked}, time {time}; {other} "
        f"{result[f'nll_per_token_{other}']:.4f}: {below}{jumps}); {scope}, {options.draws} draws"
    )


def _sample_options(parser: argparse.ArgumentParser) -> None:
    _checkpoint_options(parser)
    parser.add_argument("--num", type=int, default=4, help="sequences (default 4)")
    parser.add_argument("--length", type=int, help="tokens; default and most: the model's")
    parser.add_argument("--steps", type=int, help="steps of time; default: the length")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    parser.add_argument("--batch", type=int, default=16, help="sequences at once (default 16)")
    parser.add_argument("--prompt", metavar="TEXT", help=PROMPT)
    parser.add_argument("overrides", nargs="*", metavar="sampler.key=value", help=SAMPLER)
    parser.set_defaults(run=_sample)


def _sample(options) -> None:
    import torch

    from lomdm_dist import machine
    from lomdm_dist.data.tokenizer import encode_prompt, not_text
    from lomdm_dist.sample import sample
    from lomdm_dist.train.checkpoint import Checkpoint

    _positive(options, "num", "length", "steps", "batch")
    overrides = _only(options.overrides, "sampler.", "objective.c1", "objective.c2")
    checkpoint = Checkpoint(options.checkpoint, _check_pace(options.checkpoint, overrides))
    config, tokenizer = checkpoint.config, checkpoint.tokenizer()
    length = options.length or config.model.length
    if length > config.model.length:
        raise UserError(f"--length {length}: the model was trained at {config.model.length}")
    given = None
    if options.prompt is not None:
        given = torch.full((length,), config.model.mask_id)
        prompt = encode_prompt(tokenizer, options.prompt)
        if len(prompt) > length:
            raise UserError(f"--prompt has {len(prompt)} tokens, --length is {length}")
        given[: len(prompt)] = torch.tensor(prompt, dtype=torch.long)
    samples = sample(
        checkpoint.build_model(options.weights).to(_device()),
        options.num,
        length,
        options.steps or length,
        options.seed,
        not_text(tokenizer, config.model.vocab_size),
        config.sampler,
        given,
        options.batch,
        progress=True,
    )
    steps = samples.network_calls
    texts = tokenizer.batch_decode(samples.token_ids)
    result = {
        "token_ids": samples.token_ids.tolist(),
        "texts": texts,
        "steps": steps,
        "network_calls": samples.network_calls,
        "entropy": samples.entropy(),
    }
    machine.write_result(options.json, result, checkpoint.config.as_dict())
    for i, text in enumerate(texts):
        print(f"--- sample {i}\n{text}")
    settings = [f"{k}={v}" for k, v in config.sampler.model_dump(exclude_defaults=True).items()]
    print(
        f"--- {options.num} samples of {config.objective.name}, {length} tokens, {steps} steps"
        f"{' (one a token)' if config.objective.name == 'ar' else ''}, entropy {samples.entropy():.3f} nats"
        f"{''.join(', ' + setting for setting in settings)}"
    )


def _only(overrides: list[str], *allowed: str) -> list[str]:
    """Overrides of a checkpoint's config: of what may differ from its training. UserError."""
    for override in overrides:
        if not any(override.partition("=")[0].startswith(name) for name in allowed):
            raise UserError(f"override {override!r}: a trained model takes {' and '.join(allowed)} only")
    return overrides


def _check_pace(path: str, overrides: list[str]) -> list[str]:
    """c1 and c2 are of the learned order's exponents. UserError."""
    from lomdm_dist.config import load_config
    from lomdm_dist.train.checkpoint import find_checkpoint

    objective = load_config(find_checkpoint(path) / "config.yaml").objective
    has_pace = objective.name == "lomdm" and objective.schedule == "power"
    if not has_pace and any(override.startswith("objective.") for override in overrides):
        kind = f"{objective.name} with a polynomial schedule" if objective.name == "lomdm" else objective.name
        raise UserError(f"{' '.join(overrides)}: {path} is {kind}; only lomdm's exponents have c1 and c2")
    return overrides


def _checkpoint_commands(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
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


def _to_hf_options(parser: argparse.ArgumentParser) -> None:
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


def _plan_options(parser: argparse.ArgumentParser) -> None:
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


def _positive(options, *names: str) -> None:
    if not 0 <= getattr(options, "seed", 0) < 2**63:
        raise UserError(f"--seed {options.seed}: give 0 to 2**63 - 1")
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: give 1 or more")


def _device():
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
