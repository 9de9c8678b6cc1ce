"""`lomdm prepare`: raw text -> token shards."""

import argparse
import sys
from pathlib import Path

from lomdm_dist.secrets import hide

PACKING = (
    "packed (default): documents end to end; wrapped: the same, with BOS and EOS around each sequence, as "
    "MDLM trains; padded: each document begins a sequence of its own"
)
TEXT_FORMS = "your texts: .txt, .jsonl (also .gz, .zst, .bz2), .parquet, .tar of texts, hf:NAME"


def add_options(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--packing", choices=["packed", "wrapped", "padded"], default="packed", help=PACKING)
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
