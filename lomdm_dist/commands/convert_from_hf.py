"""`lomdm convert from-hf`: an export, or a public checkpoint of the family, as a training checkpoint."""

import argparse
from pathlib import Path

from lomdm_dist.commands.common import OVERRIDES

LAYOUTS = ("auto", "lomdm", "mdlm", "bd3lm", "duo", "ar")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, help="a folder as to-hf makes, or a public checkpoint's; or its file"
    )
    parser.add_argument("out", type=Path, help="the checkpoint folder to make")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=OVERRIDES)
    parser.add_argument("--layout", choices=LAYOUTS, default="auto", help="whose names its tensors have")
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="a folder or a hub name, where SOURCE brings none"
    )
    parser.add_argument(
        "--packing",
        choices=["packed", "wrapped", "padded"],
        help="of the data it was trained on; by default what the layout's own training has",
    )
    parser.set_defaults(run=_from_hf)


def _from_hf(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.config import load_config
    from lomdm_dist.convert.from_hf import from_hf

    result = from_hf(
        options.source,
        options.out,
        machine.versions(),
        options.layout,
        options.tokenizer,
        options.packing,
        options.overrides,
    )
    for note in result["notes"]:
        print(f"note: {note}")
    print(
        f"imported {options.source} (layout {result['layout']}) as {result['objective']} to {options.out}: "
        f"{result['parameters']:,} parameters, each as in the source, bit for bit; {result['packing']} data\n"
        f"start a run from it with train.start_from={options.out}"
    )
    machine.write_result(options.json, result, load_config(options.out / "config.yaml").as_dict())
