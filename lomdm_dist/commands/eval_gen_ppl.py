"""`lomdm eval gen-ppl`: what another language model thinks of the texts that a checkpoint generates."""

import argparse
import json
from pathlib import Path

from lomdm_dist.commands.common import (
    check_pace,
    checkpoint_options,
    device,
    length_of,
    only,
    positive,
    processes,
)
from lomdm_dist.errors import UserError
from lomdm_dist.evaluate.paper import GENERATIVE, in_words

STEPS = (128, 256, 512, 1024)  # the paper's
PAPER = "the paper's table: the order as trained, c2 = 0, c1 = 1 and c2 = 0; the paper's numbers beside"
EOS = "count every EOS, or of a block the first only, as MDLM's evaluation (default all; with --paper first)"
SAMPLER = "how text is drawn: sampler.top_p=0.9 ...; objective.c2=0: without the learned order"
COLUMNS = "{:<26} {:>5} {:>17} {:>9} {:>8} {:>19} {:>7} {:>9}"
HEADER = ("steps", "gen ppl", "mean ppl", "entropy", "distinct 1, 2, 3", "calls", "tokens/s")


def add_options(parser: argparse.ArgumentParser) -> None:
    checkpoint_options(parser)
    parser.add_argument("--judge", required=True, help="a causal language model: a folder or a hub name")
    parser.add_argument("--num", type=int, default=256, help="samples (default 256)")
    parser.add_argument("--length", type=int, help="tokens; default and most: the model's")
    parser.add_argument(
        "--steps", type=int, nargs="+", default=STEPS, help="of time (default 128 256 512 1024)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    parser.add_argument("--batch", type=int, default=16, help="samples drawn at once (default 16)")
    parser.add_argument("--judge-batch", type=int, default=8, help="blocks judged at once (default 8)")
    parser.add_argument("--eos", choices=["all", "first"], help=EOS)
    parser.add_argument("--paper", action="store_true", help=PAPER)
    parser.add_argument(
        "--save-samples", metavar="FILE", type=Path, help="JSON lines: text, nll, tokens of each"
    )
    parser.add_argument("overrides", nargs="*", metavar="sampler.key=value", help=SAMPLER)
    parser.set_defaults(run=_gen_ppl)


def _gen_ppl(options) -> None:
    from transformers.utils import logging

    from lomdm_dist import machine
    from lomdm_dist.evaluate.generation import convention, open_judge
    from lomdm_dist.files import check_writable, write_atomically
    from lomdm_dist.train.checkpoint import Checkpoint

    _check(options)
    checkpoint = Checkpoint(options.checkpoint, check_pace(options.checkpoint, options.overrides))
    length = length_of(options, checkpoint.config.model.length)
    eos = options.eos or ("first" if options.paper else "all")
    if options.save_samples:
        check_writable(options.save_samples)
    logging.set_verbosity_error()  # what matters of what the library warns of is an error here
    logging.disable_progress_bar()
    judge = open_judge(options.judge)
    with processes(options) as grid:
        rows, samples = _rows(checkpoint, judge, length, eos, options, grid)
        if grid and not grid.first:
            return
    about = convention(judge, checkpoint.config, length, options.seed, eos, options.weights)
    result = {"rows": rows, "convention": about}
    print(f"judge {judge.name}, {options.num} samples of {length} tokens, EOS: {about['eos']}")
    if empty := sum(row["empty"] for row in rows):
        print(f"{empty} samples have nothing to judge (fewer than 2 tokens) and no part in the numbers")
    if options.paper:
        result["paper"] = GENERATIVE
        print("\n".join(_paper_rows()))
    if options.save_samples:
        write_atomically(options.save_samples, "".join(json.dumps(line) + "\n" for line in samples))
    machine.write_result(options.json, result, checkpoint.config.as_dict())


def _check(options) -> None:
    """UserError."""
    positive(options, "num", "length", "steps", "batch", "judge_batch")
    only(options.overrides, "sampler.", "objective.c1", "objective.c2")
    if options.paper and any(override.startswith("objective.") for override in options.overrides):
        raise UserError("--paper sets c1 and c2 itself: give one or the other")


def _rows(checkpoint, judge, length: int, eos: str, options, grid) -> tuple[list[dict], list[dict]]:
    """A row for each objective and number of steps, printed as it is found; and all samples, judged."""
    from lomdm_dist.evaluate.generation import describe, generate

    first = grid is None or grid.first
    config, tokenizer = checkpoint.config, checkpoint.tokenizer()
    model = checkpoint.build_model(options.weights).to(device(grid))
    judge.model.to(device(grid))
    rows, samples = [], []
    if first:
        print(COLUMNS.format("", *HEADER))
    for objective in _objectives(checkpoint, options):
        model.objective = objective  # c1 and c2 are no weights
        for steps in [length] if objective.name == "ar" else options.steps:
            numbers = options.num, length, steps, options.seed, eos, options.batch, options.judge_batch
            found = generate(model, tokenizer, judge, config, *numbers, grid, progress=first)
            order = {"objective": objective.name, "c1": None, "c2": None, **objective.pace, "steps": steps}
            rows.append(order | describe(found))
            samples += [order | text for text in _texts(found)]
            if first:
                print(_say(rows[-1]), flush=True)
    return rows, samples


def _texts(found) -> list[dict]:
    """What --save-samples writes of each sample."""
    values = found.indices.tolist(), found.texts, found.nll.tolist(), found.tokens.tolist()
    return [
        dict(zip(("sample", "text", "nll", "tokens"), of, strict=True)) for of in zip(*values, strict=True)
    ]


def _objectives(checkpoint, options) -> list:
    """The checkpoint's; with --paper its order switched off as well, at its own pace and at MDLM's."""
    from lomdm_dist.config import load_config

    paces = [[]]
    if options.paper and checkpoint.config.objective.pace:
        paces += [["objective.c2=0"], ["objective.c1=1", "objective.c2=0"]]
    path = checkpoint.folder / "config.yaml"
    found = [load_config(path, [*options.overrides, *pace]).objective for pace in paces]
    return [objective for i, objective in enumerate(found) if objective not in found[:i]]


def _say(row: dict) -> str:
    return COLUMNS.format(
        in_words(row),
        row["steps"],
        f"{row['gen_ppl']:.2f} +- {row['gen_ppl_standard_error']:.2f}",
        f"{row['mean_ppl']:.2f}",
        f"{row['entropy']:.3f}",
        " ".join(f"{row[f'distinct_{n}']:.3f}" for n in (1, 2, 3)),
        f"{row['network_calls']:.1f}",
        f"{row['tokens_per_second']:,.0f}",
    )


def _paper_rows() -> list[str]:
    paper = GENERATIVE
    about = f"judge {paper['judge']}, {paper['samples']} samples of {paper['length']:,} tokens"
    return [f"paper (compares with the same judge, number and length only): {about}"] + [
        COLUMNS.format(f"paper {in_words(row)}", steps, f"{ppl:.2f}", *[""] * 5).rstrip()
        for row in paper["rows"]
        for steps, ppl in zip(paper["steps"], row["gen_ppl"], strict=True)
    ]
