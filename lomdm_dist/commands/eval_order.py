"""`lomdm eval order`: in what order a model generates."""

import argparse
from pathlib import Path

from lomdm_dist.commands.common import checkpoint_options, device, length_of, only, positive, processes
from lomdm_dist.commands.eval_ppl import data_of, open_shards, settings
from lomdm_dist.errors import UserError

LIMIT, NUM, LENGTH = 1000, 256, 128  # the last two are the paper's
TAGGER = "of parts of speech: spacy, nltk or textblob (default: the first that is installed)"
SAMPLER = "how the samples are drawn: sampler.grid=even ..."


def add_options(parser: argparse.ArgumentParser) -> None:
    checkpoint_options(parser)
    parser.add_argument("--data", required=True, help="token shards: a folder, a URL or pipe:COMMAND")
    parser.add_argument("--limit", type=int, default=LIMIT, help=f"sequences of them (default {LIMIT})")
    parser.add_argument("--draws", type=int, default=1, help="of (time, masks) a sequence (default 1)")
    parser.add_argument("--num", type=int, default=NUM, help=f"samples (default {NUM})")
    parser.add_argument("--length", type=int, help=f"of a sample (default {LENGTH}, at most the model's)")
    parser.add_argument("--steps", type=int, help="of a sample; default: its length")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    parser.add_argument("--batch", type=int, default=32, help="sequences at once (default 32)")
    parser.add_argument("--tagger", choices=["spacy", "nltk", "textblob"], help=TAGGER)
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw a figure: FILE.png, .pdf or .svg")
    parser.add_argument("overrides", nargs="*", metavar="sampler.key=value", help=SAMPLER)
    parser.set_defaults(run=_order, force=True)  # the order on data packed in another way means something


def _order(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.train.checkpoint import Checkpoint

    positive(options, "limit", "draws", "num", "length", "steps", "batch")
    checkpoint = Checkpoint(options.checkpoint, only(options.overrides, "sampler."))
    length, steps = _check(options, checkpoint.config)
    shards, tokenizer = open_shards(options, checkpoint), checkpoint.tokenizer()
    with processes(options) as grid:
        model = checkpoint.build_model(options.weights).to(device(grid))
        result = _of_data(model, shards, tokenizer, options, grid)
        samples = _samples(model, checkpoint.config, tokenizer, length, steps, options, grid)
    if grid is not None and not grid.first:
        return
    _add_samples(result, *samples, steps, tokenizer, options)
    result["convention"] = _convention(shards, checkpoint.config, length, steps, result, options)
    print("\n\n".join(_tables(result, options)))
    machine.write_result(options.json, result, checkpoint.config.as_dict())
    if options.plot:
        from lomdm_dist.evaluate.order_figure import draw

        draw(result, options.plot)
        print(f"\nfigure: {options.plot}")


def _check(options, config) -> tuple[int, int]:
    """Length and steps of the samples. UserError before the work."""
    if config.objective.name == "ar":
        raise UserError(f"{options.checkpoint} is ar: it generates from left to right, one token a step")
    length = length_of(options, config.model.length, LENGTH)
    if options.tagger:
        from lomdm_dist.evaluate.speech import find_tagger

        find_tagger(options.tagger)
    if options.plot:
        from lomdm_dist.files import check_figure

        check_figure(options.plot)
    return length, options.steps or length


def _of_data(model, shards, tokenizer, options, grid) -> dict:
    """What the schedules say of given texts."""
    import numpy as np
    import torch

    from lomdm_dist.evaluate import order

    indices = np.arange(min(len(shards), options.limit))
    bar = grid is None or grid.first
    found = order.correlations(
        *(model, shards, indices, options.draws, options.seed, options.batch, grid),
        "correlations" if bar else None,
    )
    result = {"missing": {}, "correlations": _plain(found), "left_to_right": {"exponents": None}}
    result |= {"exponent_by_frequency": None, "earliest": None, "latest": None}
    if not found["all"]["A_hatA"].sequences:
        result["missing"]["correlations"] = "A or hatA is the same at all masked positions of a text"
    exponent = order.exponents(model, shards, indices, options.batch, grid, "exponents" if bar else None)
    if exponent is None:
        result["missing"]["exponents"] = "this kind of schedule has none"
        return result
    ids, where = shards.batch(indices, "cpu")
    where = torch.ones_like(ids, dtype=torch.bool) if where is None else where
    along = order.left_to_right(-exponent, where)
    if not along.sequences:
        result["missing"]["exponents"] = "all positions of a text have the same"
        return result
    result["left_to_right"]["exponents"] = along._asdict()
    result["exponent_by_frequency"] = order.exponent_by_frequency(exponent, ids, where)
    result |= order.extreme_tokens(exponent, ids, where)
    for token in result["earliest"] + result["latest"]:
        token["text"] = tokenizer.decode([token["id"]])
    return result


def _plain(found) -> dict:
    return {time: {pair: value._asdict() for pair, value in pairs.items()} for time, pairs in found.items()}


def _samples(model, config, tokenizer, length: int, steps: int, options, grid) -> tuple:
    """Ids and steps of revelation of all samples, each [N, L]; shared out over the ranks."""
    import torch

    from lomdm_dist.data.tokenizer import not_text
    from lomdm_dist.sample import sample

    never = not_text(tokenizer, config.model.vocab_size)
    rank, size = (grid.data_rank, grid.data_size) if grid else (0, 1)
    mine = torch.arange(options.num)[rank::size]
    drawn = [torch.empty(2, 0, length, dtype=torch.int64)]
    if len(mine):
        samples = sample(
            *(model, mine, length, steps, options.seed, never, config.sampler),
            batch=options.batch,
            progress=rank == 0,
        )
        drawn = [torch.stack([samples.token_ids, samples.revealed_at.long()])]
    order = torch.cat([torch.arange(options.num)[k::size] for k in range(size)]).argsort()
    return torch.cat(grid.gather(drawn[0]) if grid else drawn, dim=1)[:, order].unbind()


def _add_samples(result: dict, ids, revealed_at, steps: int, tokenizer, options) -> None:
    from lomdm_dist.evaluate.order import left_to_right, speech_shares
    from lomdm_dist.evaluate.paper import SPEECH
    from lomdm_dist.evaluate.speech import find_tagger, tag_tokens

    result["left_to_right"]["samples"] = left_to_right(revealed_at)._asdict()
    try:
        result["tagger"] = find_tagger(options.tagger).name
        classes = [tag_tokens(tokenizer, row, options.tagger) for row in ids.tolist()]
        result["speech"] = speech_shares(classes, revealed_at, steps)
    except UserError as error:
        result["tagger"] = result["speech"] = None
        result["missing"]["speech"] = str(error)
    result["paper"] = {"speech": SPEECH}


def _convention(shards, config, length: int, steps: int, result: dict, options) -> dict:
    from lomdm_dist.evaluate.order import FEWEST, LEAST
    from lomdm_dist.evaluate.speech import RULE

    return {
        "correlations": (
            "Pearson, over the masked positions of a text, then the mean over texts and its standard error; "
            f"a text needs {FEWEST} masked positions whose values differ; of several draws of a text the mean"
        ),
        "A, hatA": "velocities of the forward and the reverse schedule; within a text both have its 1 / t",
        "confidence": "probability of the most probable token",
        "times": "of the mixture (density of the mean mask probability), stratified; masks are plain draws",
        "thirds": "early t > 2/3, middle, late t <= 1/3: of generation, which begins at t = 1",
        "left_to_right": "Spearman with the position, +1 from left to right; ties share their mean rank",
        "exponent": f"of the forward schedule: large is early; tokens listed occur {LEAST} times or more",
        "speech": RULE,
        "speech_of_tokens": "each token of a word has its class; shares are of all tokens revealed",
        "tagger": result["tagger"],
        "samples": {"num": options.num, "length": length, "steps": steps},
        "sampler": config.sampler.model_dump(mode="json"),
        "sequences": min(len(shards), options.limit),
        **data_of(shards),
        **settings(options, config),
    }


def _tables(result: dict, options) -> list[str]:
    """What is printed, a table an item."""
    missing = result["missing"]
    tables = [] if "correlations" in missing else [_correlation_table(result, options)]
    tables.append(_direction(result))
    if result["speech"]:
        tables.append(_speech_table(result))
    if result["exponent_by_frequency"]:
        tables.append(_frequency_table(result))
    return tables + [f"no {name}: {reason}" for name, reason in missing.items()]


def _value(found: dict | None) -> str:
    if found is None or not found["sequences"]:
        return "-"
    return f"{found['mean']:.3f} +- {found['standard_error']:.3f}"


def _rows(rows: list[list], first: int = 18, rest: int = 18) -> str:
    return "\n".join(f"  {row[0]:<{first}}" + "".join(f"{cell:>{rest}}" for cell in row[1:]) for row in rows)


def _correlation_table(result: dict, options) -> str:
    names = {"all": "all times", "early": "early, t > 2/3", "middle": "middle", "late": "late, t <= 1/3"}
    rows = [["", "A, hatA", "A, confidence", "hatA, confidence", "texts"]]
    for time, pairs in result["correlations"].items():
        texts = max(pair["sequences"] for pair in pairs.values())
        rows.append([names[time], *map(_value, pairs.values()), f"{texts:,}"])
    return (
        "Correlations over the masked positions of a text, mean over texts: does psi (hatA) see from the\n"
        "masked text the order that phi (A) chose, and are the positions generated first those that the\n"
        f"network is sure of? {options.draws} draw{'s' * (options.draws > 1)} a text, "
        f"{options.weights} weights\n{_rows(rows)}"
    )


def _direction(result: dict) -> str:
    rows = [["samples", _value(result["left_to_right"]["samples"])]]
    rows.append(["exponents", _value(result["left_to_right"]["exponents"])])
    return "Left to right: 1, no direction: 0, right to left: -1 (Spearman, position and order)\n" + _rows(
        rows
    )


def _speech_table(result: dict) -> str:
    from lomdm_dist.evaluate.speech import CLASSES

    about = result["convention"]["samples"]
    rows = [["", *CLASSES]]
    for part in result["speech"].values():
        shares = (part["shares"].get(name) for name in CLASSES)
        rows.append(["steps {}-{}".format(*part["steps"]), *map(_value, shares)])
    for name, parts in result["paper"]["speech"].items():
        for part, steps in (("early", "1-16"), ("late", "112-128")):
            shares = parts[part]
            cells = (f"{shares[c]:.2f}" if c in shares else "" for c in CLASSES)
            rows.append([f"paper {name} {steps}", *cells])
    return (
        f"Parts of speech among the tokens revealed early and late, of {about['num']} samples of "
        f"{about['length']} tokens\nin {about['steps']} steps (paper: 256 of 128 in 128); "
        f"{result['tagger']}\n{_rows(rows, 21, 16)}"
    )


def _frequency_table(result: dict) -> str:
    rows = [["occurrences", "different tokens", "positions", "exponent"]]
    for row in result["exponent_by_frequency"]:
        if row["types"]:
            value = f"{row['exponent']:.4f} +- {row['standard_error']:.4f}"
            rows.append([f"{row['least']:,}-{row['most']:,}", row["types"], f"{row['tokens']:,}", value])

    def some(tokens: list[dict]) -> str:
        return "  ".join(f"{token['text']!r} {token['exponent']:.3f}" for token in tokens)

    return (
        "Exponent by how often a token occurs in the data: the larger, the earlier it is generated\n"
        f"{_rows(rows)}\n  earliest: {some(result['earliest'])}\n  latest:   {some(result['latest'])}"
    )
