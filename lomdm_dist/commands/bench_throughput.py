"""`lomdm bench throughput`: tokens a second, and where the time goes, over grids, micro-batches and ranks."""

import argparse
import os
from pathlib import Path

from lomdm_dist.commands.common import OVERRIDES, positive
from lomdm_dist.errors import RunFailed, UserError
from lomdm_dist.files import check_figure
from lomdm_dist.secrets import say

DATA = "config: the config's shards; synthetic: random tokens. By default config where the shards are there"
GRID = 'each in quotes: --grid "parallel.zero_stage=3" "parallel.engine=fsdp2 parallel.tensor_parallel=2"'


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="a YAML file")
    parser.add_argument(
        "--micro-batch", type=int, nargs="+", metavar="N", help="the config's if none is given"
    )
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="processes of this machine (1)")
    parser.add_argument("--grid", nargs="+", metavar="OVERRIDES", default=[], help=GRID)
    parser.add_argument(
        "--scaling",
        choices=["weak", "strong"],
        default="weak",
        help="weak (default): the config's global batch is that of the fewest ranks, and grows with them; "
        "strong: that of all",
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="that are measured, plainly and by phase (10 each)"
    )
    parser.add_argument("--warmup", type=int, default=3, help="steps of both kinds before them (3)")
    parser.add_argument("--data", choices=["config", "synthetic"], help=DATA)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rows")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=OVERRIDES)
    parser.set_defaults(run=_bench_throughput)


def _bench_throughput(options) -> None:
    """Plainly: every point in processes of its own. Under a launcher: this job is the one point."""
    from lomdm_dist.config import load_config

    positive(options, "steps")
    if options.warmup < 0:
        raise UserError(f"--warmup {options.warmup}: give 0 or more")
    if bad := [n for n in (*(options.micro_batch or ()), *(options.ranks or ())) if n < 1]:
        raise UserError(f"--micro-batch and --ranks count from 1, not {bad[0]}")
    config = load_config(options.config, options.overrides)
    _say_first(
        f"bench throughput: {options.warmup} + {options.steps} steps, plainly and by phase, of each point"
    )
    if "WORLD_SIZE" in os.environ:
        _measure_this_job(options, config)
    else:
        _measure_points(options, config)


def _say_first(text: str) -> None:
    """Say it once: under a launcher the first process does."""
    if os.environ.get("RANK", "0") == "0":
        say(text)


def _measure_points(options, config) -> None:
    from lomdm_dist import machine
    from lomdm_dist.study import throughput_points as points

    if options.plot:
        check_figure(options.plot)
    ranks = sorted(set(options.ranks or [1]))
    todo = points.make_points(
        options.config, options.overrides, options.grid, options.micro_batch, ranks, options.scaling
    )
    data = options.data or _data_at_hand(config)
    rows = points.measure_points(todo, options.config, data, options.steps, options.warmup)
    measured = not all(row["error"] for row in rows)
    print(points.as_markdown(rows))
    if options.plot and measured:
        points.draw(rows, options.plot)
        print(f"drawn: {options.plot}")
    result = {"rows": rows, "scaling": options.scaling, "convention": points.CONVENTION}
    machine.write_result(options.json, result, config.as_dict())
    if not measured:
        raise RunFailed("no point could be measured: the table says why")


def _measure_this_job(options, config) -> None:
    from lomdm_dist import machine
    from lomdm_dist.parallel.grid import join, process_grid, world_size
    from lomdm_dist.study import throughput_points as points
    from lomdm_dist.study.throughput import measure, pin

    if options.micro_batch or options.ranks or options.grid or options.plot:
        raise UserError(
            "under a launcher the one point that is measured is this job: change the config by overrides, "
            "without --micro-batch, --ranks, --grid and --plot"
        )
    points.check_settled(config)
    config.accumulation(config.data_parallel(world_size()))
    data = options.data or _data_at_hand(config)
    reader = _open_data(config) if data == "config" else None
    pinned, counts = pin(), {"--steps": options.steps, "--warmup": options.warmup}
    alike = {"the command": "bench throughput"} | counts | config.alike()
    with process_grid(config.parallel.tensor_parallel, join(alike)) as grid:
        row = measure(config, grid, reader, options.steps, options.warmup) | {"pinned": pinned}
        if grid.first:
            point = points.Point("", config.train.micro_batch, row["ranks"], tuple(options.overrides))
            row |= {
                "name": point.name,
                "series": point.series,
                "overrides": options.overrides,
                "efficiency": 1.0,
            }
            row["lost"] = {}
            print(points.as_markdown([row]))
            result = {"rows": [row], "convention": points.CONVENTION}
            machine.write_result(options.json, result, config.as_dict())


def _open_data(config):
    """The config's shards. UserError where they cannot be read, or are not the model's."""
    from lomdm_dist.data.reader import open_reader
    from lomdm_dist.data.shards import check_model_fits

    reader = open_reader(config.data, config.train.seed)
    for shards in reader.sources:
        check_model_fits(shards, config.model)
    return reader


def _data_at_hand(config) -> str:
    """The config's shards, if they are there and fit; else it is said why not."""
    try:
        _open_data(config)
    except UserError as error:
        _say_first(f"synthetic tokens are taken: {error}")
        return "synthetic"
    return "config"
