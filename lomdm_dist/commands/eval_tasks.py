"""`lomdm eval tasks`: tasks of the lm-eval harness.

`python -m lomdm_dist.commands.eval_tasks --model lomdm --model_args checkpoint=RUN,draws=16 --tasks ...` is
the harness's own command, which knows our models by that name.
"""

import argparse
import functools
import sys
from pathlib import Path

from lomdm_dist.commands import common
from lomdm_dist.commands.common import checkpoint_options, positive, processes
from lomdm_dist.errors import MISTAKE, UserError, first_line

VERSION = "0.4.13"  # of lm-eval, as tested
MODEL_ARGS = "checkpoint, weights, draws, seed, steps, batch_size, device"
TASKS = "names of tasks, groups or tags of the harness, or YAML files"
GENERATION = "change the tasks' generation_kwargs: max_gen_toks=32 temperature=0.8 ..."


def add_options(parser: argparse.ArgumentParser) -> None:
    checkpoint_options(parser)
    parser.add_argument("--tasks", nargs="+", required=True, metavar="TASK", help=TASKS)
    parser.add_argument("--include-path", metavar="DIR", help="more tasks, as YAML files")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="examples in the context")
    parser.add_argument("--limit", type=int, help="the first documents of each task only")
    parser.add_argument("--draws", type=int, default=16, help="of (time, masks) a bound (default 16)")
    parser.add_argument("--steps", type=int, help="of time a generated answer; default: one a token")
    parser.add_argument("--gen-kwargs", nargs="+", default=[], metavar="KEY=VALUE", help=GENERATION)
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    parser.add_argument("--batch", type=int, default=32, help="sequences at once (default 32)")
    parser.set_defaults(run=_tasks)


def _tasks(options) -> None:
    from lomdm_dist import machine

    positive(options, "draws", "steps", "batch", "limit")
    if options.num_fewshot is not None and options.num_fewshot < 0:
        raise UserError(f"--num-fewshot {options.num_fewshot}: give 0 or more")
    for setting in options.gen_kwargs:
        if "=" not in setting:
            raise UserError(f"--gen-kwargs {setting}: give KEY=VALUE")
    lm_eval = _harness()
    tasks = _load_tasks(options.tasks, options.include_path)
    with processes(options) as grid:
        model = harness_model()(
            options.checkpoint,
            options.weights,
            options.draws,
            options.seed,
            options.steps,
            options.batch,
            grid=grid,
        )
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=options.tasks,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            gen_kwargs=",".join(options.gen_kwargs) or None,
            task_manager=tasks,
            log_samples=False,
        )
        if found is not None and (grid is None or grid.first):
            result = {
                "results": found["results"],
                "groups": found.get("groups", {}),
                "documents": found["n-samples"],
                "convention": model.convention()
                | {
                    "weights": options.weights,
                    "lm_eval": lm_eval.__version__,
                    "task_versions": found["versions"],
                    "num_fewshot": found["n-shot"],
                    "gen_kwargs": options.gen_kwargs,
                    "limit": options.limit,
                },
            }
            print(_say(lm_eval, found, model, options))
            machine.write_result(options.json, result, model.config.as_dict())


def _say(lm_eval, found: dict, model, options) -> str:
    tables = [lm_eval.utils.make_table(found)]
    if found.get("groups"):
        tables.append(lm_eval.utils.make_table(found, "groups"))
    said = model.convention()
    draws = "" if said["draws"] is None else f", {said['draws']} draws, seed {said['seed']}"
    return "\n".join(
        [
            *tables,
            f"loglikelihood: {said['loglikelihood']}{draws}; {options.weights} weights; "
            f"{said['contexts_cut']} contexts cut to {said['length']} tokens",
        ]
    )


def _harness():
    """The package, where it is installed. UserError."""
    try:
        import lm_eval
        import lm_eval.utils
    except ImportError:
        raise UserError(f"lm-eval is not installed: pip install lm-eval=={VERSION}") from None
    return lm_eval


def _load_tasks(names: list[str], include_path: str | None):
    """The harness's task manager, with these tasks and their data loaded. UserError."""
    from lm_eval.tasks import TaskManager

    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"--include-path {include_path}: no such folder")
    manager = TaskManager(include_path=include_path, include_defaults=False)
    if set(names) - set(manager.all_subtasks):  # tasks of that folder need none of the 14,000 files of others
        manager = TaskManager(include_path=include_path)
    try:
        loaded = manager.load(names)
    except Exception as error:  # of many kinds: no such name, a bad YAML, a data set out of reach
        hint = "; the harness reads its sets from the hub, or what was read before from its cache (HF_HOME)"
        raise UserError(f"--tasks {' '.join(names)}: {first_line(error)}{hint}") from None
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise UserError(f"--tasks {name}: it runs code that a model wrote, or shows it images: not here")
    manager.load = lambda _: loaded  # the harness asks again
    return manager


@functools.cache
def harness_model() -> type:
    """The class that the harness knows as "lomdm", made and registered once. UserError without lm-eval."""
    _harness()
    import torch
    from lm_eval.api.registry import register_model

    from lomdm_dist.evaluate.harness import HarnessModel
    from lomdm_dist.train.checkpoint import WEIGHTS, Checkpoint

    @register_model("lomdm")
    class HarnessCheckpoint(HarnessModel):
        """A HarnessModel of a checkpoint; the arguments are those of `--model_args`. UserError."""

        def __init__(
            self,
            checkpoint: str,
            weights: str = "ema",
            draws: int = 16,
            seed: int = 0,
            steps: int | None = None,
            batch_size: int | str = 32,
            device: str | None = None,
            grid=None,
            **others,
        ):
            if others:
                raise UserError(f"model_args {', '.join(others)}: there are {MODEL_ARGS}")
            if weights not in WEIGHTS:
                raise UserError(f"weights={weights}: give {' or '.join(WEIGHTS)}")
            for name, value in {"draws": draws, "steps": steps, "batch_size": batch_size}.items():
                if value is not None and not (str(value).isdecimal() and int(value) > 0):
                    raise UserError(f"{name}={value}: give a whole number, 1 or more")
            found = Checkpoint(checkpoint)
            if not torch.cuda.is_available():
                device = None  # the harness says cuda:0 where nobody says anything
            model = found.build_model(weights).to(device or common.device(grid))
            super().__init__(
                model, found.tokenizer(), found.config, draws, seed, steps, int(batch_size), grid
            )

    return HarnessCheckpoint


def _lm_eval() -> None:
    """The harness's own command."""
    try:
        harness_model()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(MISTAKE)


if __name__ == "__main__":
    _lm_eval()
