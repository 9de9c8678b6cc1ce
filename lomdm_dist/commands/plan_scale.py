"""`lomdm plan scale`: how fast a training will be on machines that one does not have yet."""

import argparse
from pathlib import Path

from lomdm_dist.commands.plan import PLAN, choices, device_options, gpu_of
from lomdm_dist.errors import UserError
from lomdm_dist.secrets import say


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="a YAML file")
    parser.add_argument(
        "--gpus", default="1..4096", metavar="N", help="1..4096 (default): powers of two; or 8,24,64"
    )
    device_options(parser)
    parser.add_argument("--price", type=float, metavar="MONEY", help="of a GPU for an hour, for the cost")
    parser.add_argument(
        "--tokens", type=float, help="of the training (default: steps x global batch x length)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the scaling curves")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=PLAN)
    parser.set_defaults(run=_plan_scale)


def _plan_scale(options) -> None:
    say(f"plan scale: {options.config} on {options.gpus} x {options.gpu}")
    from lomdm_dist import machine
    from lomdm_dist.config import load_config
    from lomdm_dist.files import check_figure
    from lomdm_dist.study import scale

    numbers = scale.counts(options.gpus)
    for name in ("price", "tokens"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} {value:g}: give more than 0")
    if options.plot:
        check_figure(options.plot)
    config, device = load_config(options.config, options.overrides), gpu_of(options)
    calibration, said = (
        scale.from_bench(options.calibrate) if options.calibrate else (None, "nothing measured")
    )
    points = scale.scale(config, numbers, device, calibration, choices(config, options.overrides))
    batch, grown = config.train.global_batch, points[scale.WEAK]
    origin = next(point.gpus for point in grown if point.batch == batch)
    tokens = options.tokens or config.train.steps * config.train.global_batch * config.model.length
    result = {
        "title": f"{Path(options.config).stem} on {device.name}, {tokens:.3g} tokens",
        **{kind: scale.rows(found, tokens, options.price) for kind, found in points.items()},
        "device": vars(device),
        "tokens": tokens,
        "convention": {
            "numbers": "predicted by the model of time and memory, not measured",
            "calibrated by": said,
            "mfu": "operations a step needs, those computed again not among them, over the peak in bf16",
            "efficiency": "tokens/s a GPU over those of the first row",
            "limit": "compute, where it is half of a step, or the largest of what else takes time; "
            "memory, where a plan that does not fit is a tenth faster; the batch, where it is too small",
            "strong": f"global_batch of the config, {batch:,}",
            "weak": f"{batch / origin:g} sequences a GPU, the config's {batch:,} on {origin:,} GPUs: of "
            f"--gpus the first from a node of {device.a_node} on that has a plan, or else the last",
            "price": options.price,
            "cost": "gpu_hours times price",
            "left out": scale.left_out(),
        },
    }
    print("\n".join(_lines(result, options.price)))
    if options.plot:
        scale.draw(result, options.plot)
        print(f"\ndrawn: {options.plot}")
    machine.write_result(options.json, result, config.as_dict())


def _lines(result: dict, price: float | None) -> list[str]:
    from lomdm_dist.study import scale

    lines = [
        f"{result['title']}: predicted, not measured; calibrated by {result['convention']['calibrated by']}"
    ]
    for kind in (scale.STRONG, scale.WEAK):
        lines += ["", f"{kind} scaling ({result['convention'][kind]}):", ""]
        lines += scale.as_table(result[kind], price)
    refused = scale.without_plan(result)
    lines += ["", "efficiency: " + result["convention"]["efficiency"], *["", *refused] * bool(refused)]
    return [*lines, "", "left out: " + "; ".join(result["convention"]["left out"])]
