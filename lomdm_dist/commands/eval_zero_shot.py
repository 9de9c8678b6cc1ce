"""`lomdm eval zero-shot`: perplexity on the field's sets, beside the paper's."""

import argparse

from lomdm_dist.commands.common import checkpoint_options, device, processes
from lomdm_dist.commands.eval_ppl import (
    EVALUATE,
    bound_of,
    bound_options,
    check_some,
    open_checkpoint,
    settings,
)
from lomdm_dist.errors import UserError
from lomdm_dist.evaluate.paper import ZERO_SHOT_SETS


def add_options(parser: argparse.ArgumentParser) -> None:
    checkpoint_options(parser)
    parser.add_argument(
        "--input",
        nargs="+",
        default=[],
        metavar="FILE",
        help="the sets' files, or folders (default: the hub)",
    )
    parser.add_argument(
        "--sets",
        nargs="+",
        choices=ZERO_SHOT_SETS,
        help="which (default: all; of --input, those that are there)",
    )
    bound_options(parser)
    parser.add_argument("--limit", type=int, help="evaluate the first sequences of each set only")
    parser.add_argument("overrides", nargs="*", metavar="evaluate.key=value", help=EVALUATE)
    parser.set_defaults(run=_zero_shot)


def _zero_shot(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.evaluate.conventions import describe
    from lomdm_dist.evaluate.report import zero_shot_table
    from lomdm_dist.evaluate.zero_shot import find_files

    with processes(options) as grid:
        checkpoint = open_checkpoint(options)
        files = find_files(options.sets or list(ZERO_SHOT_SETS), options.input)
        missing = [name for name in options.sets or ZERO_SHOT_SETS if name not in files]
        if not files or (missing and options.sets):
            raise UserError(f"no files of {', '.join(missing)} in {' '.join(options.input)}")
        tokenizer, first = checkpoint.tokenizer(), grid is None or grid.first
        found, texts = {}, {name: _read(name, files[name], options, checkpoint, tokenizer) for name in files}
        model = checkpoint.build_model(options.weights).to(device(grid))
        for name, (pieces, about) in texts.items():
            found[name] = bound_of(pieces, model, checkpoint, options, grid, name) | about
            if first:
                print(_say_set(name, found[name]), flush=True)
        if first:
            packing = checkpoint.state.data.packing
            convention = describe(options.preset, checkpoint.config, packing, zero_shot=True)
            result = {
                "sets": found,
                "missing": missing,
                "convention": convention | settings(options, checkpoint.config),
            }
            config = checkpoint.config.as_dict()
            print("", *zero_shot_table([result | {"config": config}]), sep="\n")
            machine.write_result(options.json, result, config)


def _read(name: str, files, options, checkpoint, tokenizer) -> tuple:
    """The sequences of a set, and what there is to say of them. UserError."""
    from lomdm_dist.evaluate.conventions import PRESETS, pieces_of_documents
    from lomdm_dist.evaluate.zero_shot import encoded_documents

    preset = PRESETS[options.preset]
    documents = list(encoded_documents(name, files, tokenizer))
    packing, length = checkpoint.state.data.packing, checkpoint.config.model.length
    pieces = pieces_of_documents(documents, preset, packing, length, tokenizer)
    check_some(pieces, options, name)
    return pieces, {
        "sequences_in_all": len(pieces),
        "documents": len(documents),
        "dropped_tokens": pieces.dropped_tokens,
        "files": files or "hub",
    }


def _say_set(name: str, result: dict) -> str:
    return (
        f"{name}: {result['nll_per_token']:.4f} +- {result['standard_error']:.4f} nats a token, "
        f"ppl {result['ppl']:.2f}; {result['tokens']:,} tokens, {result['sequences']:,} of "
        f"{result['sequences_in_all']:,} sequences; the set has {result['documents']:,} documents, its last "
        f"{result['dropped_tokens']:,} tokens fill no sequence"
    )
