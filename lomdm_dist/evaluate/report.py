"""One page of a run: what it learned, what its evaluations found, the paper's numbers, what was not run.

Reads a run's metrics and the files that its commands wrote with `--json`, in RUN and RUN/eval.
"""

import base64
import html
import json
import math
import shlex
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from lomdm_dist.config import Config, load_config
from lomdm_dist.errors import UserError
from lomdm_dist.evaluate import paper
from lomdm_dist.files import check_matplotlib, check_writable, write_atomically, write_figure
from lomdm_dist.tables import markdown

EVALUATIONS = {  # what a report has, and what makes it: the command for a run, and the file
    "ppl": ("lomdm eval ppl --checkpoint {run} --data {valid} --draws 8", "ppl"),
    "rule": ("lomdm eval rule --checkpoint {run} --data {valid} --rule confidence", "rule"),
    "zero-shot": ("lomdm eval zero-shot --checkpoint {run} --preset mdlm", "zero_shot"),
    "gen-ppl": ("lomdm eval gen-ppl --checkpoint {run} --judge gpt2-large --paper", "gen_ppl"),
    "order": ("lomdm eval order --checkpoint {run} --data {valid}", "order"),
    "tasks": ("lomdm eval tasks --checkpoint {run} --tasks lambada_openai", "tasks"),
    "sample": ("lomdm sample --checkpoint {run} --trajectory {run}/eval/trajectory.html", "samples"),
}
SMOOTHED = 10  # logged steps
SHOWN_SAMPLES = 4


def report(run: Path, out: Path) -> list[str]:
    """Write OUT/report.md, its pictures, and report.html, which has them inside. Returns what was not run.

    Raises UserError where `run` is no run, and without matplotlib and markdown-it-py.
    """
    run = run.resolve()
    config, metrics, results, unread = _open(run)
    check_writable(out / "report.md")
    pictures = draw_curves(metrics, out)
    missing = [name for name in EVALUATIONS if name not in results and not _senseless(name, config)]
    lines = _lines(run, config, metrics, results, unread, pictures, missing)
    text = "\n".join(lines) + "\n"
    write_atomically(out / "report.md", text)
    write_atomically(out / "report.html", _page(text, run.name, out))
    return missing


def _open(run: Path) -> tuple[Config, list[dict], dict[str, list[dict]], list[str]]:
    """The config, the logged steps, results of evaluations by name, and files not understood. UserError."""
    if not (run / "metrics.jsonl").is_file() or not (run / "config.yaml").is_file():
        raise UserError(f"{run} is no run: it has no config.yaml and metrics.jsonl")
    with (run / "metrics.jsonl").open(errors="replace") as lines:
        metrics = [row for line in lines if (row := _numbers(_parse(line))).get("step") is not None]
    return load_config(run / "config.yaml"), metrics, *results_of(run)


def results_of(run: Path) -> tuple[dict[str, list[dict]], list[str]]:
    """What evaluations wrote with `--json` into RUN and RUN/eval, by name; and files not understood."""
    results, unread = {}, []
    for path in sorted([*run.glob("*.json"), *(run / "eval").glob("*.json")]):
        result = _parse(path.read_text(errors="replace"))
        if result is not None and (name := _made_by(result)):
            result["file"] = path.name
            if _is_read_by(SECTIONS[name][1], result):
                results.setdefault(name, []).append(result)
            else:
                unread.append(path.name)
    return results, unread


def _parse(text: str) -> dict | None:
    """None where it is not whole: the last line of a run that is going on."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _numbers(row: dict | None) -> dict:
    """What a logged step has of numbers."""
    return {key: value for key, value in (row or {}).items() if type(value) in (int, float)}


def _made_by(result: dict) -> str | None:
    """The evaluation that a file is the result of: its command says so."""
    words = result.get("command")
    words = [word for word in words[1:] if isinstance(word, str)] if isinstance(words, list) else []
    for word, following in pairwise([*words, ""]):
        if word in ("eval", "sample"):
            name = following if word == "eval" else word
            return name if name in EVALUATIONS else None
    return None


def _senseless(name: str, config: Config) -> bool:
    return config.objective.name == "ar" and name in ("rule", "order")


def _lines(run: Path, config: Config, metrics, results, unread, pictures, missing) -> Iterator[str]:
    """The report in Markdown."""
    yield from (f"# {run.name}", "", *_about(config, metrics), "")
    yield "## Learning"
    for picture, caption in pictures:
        yield from ("", f"![{caption}]({picture})", "", caption)
    for name, (title, section) in SECTIONS.items():
        if name in results:
            yield from ("", f"## {title}", "", *section(results[name]))
    if unread:
        yield from ("", "## Not read", "", "Results that this version did not write, or not whole:", "")
        yield from (f"- {name}" for name in unread)
    if missing:
        yield from ("", "## Not run", "", "This report has what these commands make, once they were run:", "")
        valid = config.data.valid
        commands = (
            f"{EVALUATIONS[name][0]} --json {{run}}/eval/{EVALUATIONS[name][1]}.json" for name in missing
        )
        places = {"run": shlex.quote(str(run)), "valid": shlex.quote(valid)}
        yield from ("```", *(command.format(**places) for command in commands), "```")
    yield from (
        "",
        '"paper" marks the numbers of the LoMDM paper; docs/evaluation.md says under which convention.',
    )


def _is_read_by(section: Callable, result: dict) -> bool:
    """Whether a result has what its section shows: another version's, or an edited one, may not."""
    try:
        list(section([result]))
    except (LookupError, TypeError, ValueError, AttributeError):
        return False
    return True


def _about(config: Config, metrics: list[dict]) -> Iterator[str]:
    steps = [row for row in metrics if "loss" in row]
    last = steps[-1] if steps else {}
    model = config.model
    yield f"{config.objective.in_words()}; {model.width} wide, {model.blocks} blocks, {model.heads} heads,"
    yield f"length {model.length},"
    yield f"vocabulary {model.vocab_size:,}; {last.get('step', 0):,} of {config.train.steps:,} steps,"
    yield f"{last.get('tokens', 0):,} tokens."


# Sections: each takes the results of one evaluation, of one or more files, and yields Markdown.


def _ppl(results: list[dict]) -> Iterator[str]:
    rows = []
    for result in results:
        about = result["convention"]
        cut, uncut = (_number(result.get(f"ppl_{kind}"), 2) for kind in ("cut", "uncut"))
        rows.append(
            [about["preset"], about.get("split"), _nats(result), _number(result["ppl"], 2), cut, uncut]
        )
        rows[-1] += [
            f"{result['tokens']:,}",
            about["draws"],
            about["weights"],
            _objective(about["objective"]),
        ]
        rows[-1].append(result["file"])
    names = ("preset", "split", "nats a token", "ppl", "cut", "uncut", "tokens", "draws", "weights")
    names += ("objective", "file")
    yield from markdown(names, rows)
    yield from ("", "Test perplexity in the paper:", "")
    yield from markdown(
        ("paper", *paper.TEST_SETS),
        [[name, *(_number(v, 1) for v in row)] for name, row in paper.TEST.items()],
    )


def _rule(results: list[dict]) -> Iterator[str]:
    yield "The exact likelihood of a sampler that unmasks by a rule; not to be mixed with the bound above."
    yield ""
    rows = []
    for result in results:
        about = result["convention"]
        rows.append([about["rule"], about["steps"], _nats(result), _number(result["ppl"], 2)])
        rows[-1].append(f"{result['tokens']:,}")
    yield from markdown(("rule", "steps", "nats a token", "ppl", "tokens"), rows)


def zero_shot_table(results: list[dict]) -> Iterator[str]:
    """Perplexities, a row a result of `eval zero-shot`, and the paper's; and what cannot be compared."""
    names = paper.ZERO_SHOT_SETS
    rows, unlike = [], {}
    for result in results:
        model, preset = result["config"]["model"], result["convention"]["preset"]
        title = f"this {_objective(result['convention']['objective'])}, preset {preset}"
        some = [found["sequences"] < found["sequences_in_all"] for found in result["sets"].values()]
        title += ", the beginning of some sets" * any(some)
        rows.append([title, *(_number(result["sets"].get(name, {}).get("ppl"), 2) for name in names)])
        unlike[f"vocabulary {model['vocab_size']:,}, length {model['length']}"] = None
    rows += [[f"{model} (paper)", *(_number(v, 2) for v in row)] for model, row in paper.ZERO_SHOT.items()]
    yield from markdown(("", *names), rows)
    yield ""
    yield "The paper's models: 170M parameters, OpenWebText, GPT-2's vocabulary of 50,258, length 1024."
    for kind in unlike.keys() - {"vocabulary 50,258, length 1024"}:
        yield f"Here: {kind}. Perplexities a token do not compare across tokenizers."


def _generative(results: list[dict]) -> Iterator[str]:
    for result in results:
        rows = []
        for row in result["rows"]:
            value = f"{_number(row['gen_ppl'], 2)} ± {_number(row['gen_ppl_standard_error'], 2)}"
            distinct = " ".join(_number(row[f"distinct_{n}"], 3) for n in (1, 2, 3))
            rows.append([paper.in_words(row), row["steps"], value, _number(row["entropy"], 3), distinct])
            rows[-1].append(_number(row["network_calls"], 1))
        names = ("", "steps", "gen ppl", "entropy", "distinct 1 2 3", "network calls")
        yield from (
            f"Judge {Path(str(result['convention']['judge'])).name}, {result['file']}.",
            "",
            *markdown(names, rows),
            "",
        )
    theirs = paper.GENERATIVE
    rows = [
        [f"{paper.in_words(row)} (paper)", *(_number(value, 2) for value in row["gen_ppl"])]
        for row in theirs["rows"]
    ]
    yield f"Paper, judge {theirs['judge']}, {theirs['samples']} samples of {theirs['length']:,} tokens:"
    yield from ("", *markdown(("steps", *theirs["steps"]), rows))


def _objective(chosen: dict) -> str:
    """With what may differ from the training: a learned order's c1 and c2."""
    has_pace = chosen["name"] == "lomdm" and chosen["schedule"] == "power"
    pace = {key: chosen[key] if has_pace else None for key in ("c1", "c2")}
    return paper.in_words({"objective": chosen["name"], **pace})


def _order(results: list[dict]) -> Iterator[str]:
    for result in results:
        rows = [
            [time, *(_mean(pairs[pair]) for pair in pairs)] for time, pairs in result["correlations"].items()
        ]
        yield from ("Correlations over the masked positions of a text (mean over texts):", "")
        yield from (*markdown(("times", *next(iter(result["correlations"].values()))), rows), "")
        along = result["left_to_right"]
        yield f"Left to right (Spearman, 1: from left to right): samples {_mean(along.get('samples'))}, "
        yield f"exponents {_mean(along.get('exponents'))}."
        if result.get("speech"):
            yield from (
                "",
                f"Parts of speech among the tokens revealed early and late ({result['tagger']}):",
                "",
            )
            yield from markdown(("", *CLASSES), list(_speech_rows(result)))
        for name, reason in result["missing"].items():
            yield from ("", f"No {name}: {reason}.")


CLASSES = ("noun", "verb", "article", "preposition")


def _speech_rows(result: dict) -> Iterator[list]:
    for part in result["speech"].values():
        yield ["steps {}-{}".format(*part["steps"]), *(_mean(part["shares"].get(c)) for c in CLASSES)]
    for model, parts in paper.SPEECH.items():
        for part, steps in (("early", "1-16"), ("late", "112-128")):
            yield [f"{model} {steps} (paper)", *(_number(parts[part].get(c), 2) for c in CLASSES)]


def _tasks(results: list[dict]) -> Iterator[str]:
    rows = [
        [task, name, _number(value, 4)]
        for result in results
        for task, found in result["results"].items()
        for name, value in found.items()
        if isinstance(value, float)
    ]
    yield from markdown(("task", "metric", "value"), rows)


def _samples(results: list[dict]) -> Iterator[str]:
    for result in results:
        yield f"{result['steps']} steps, entropy {_number(result['entropy'], 3)} nats, {result['file']}:"
        for text in result["texts"][:SHOWN_SAMPLES]:
            fence = "```" if "```" not in text else "~~~~~~~~"
            yield from ("", fence, text, fence)
        yield ""


SECTIONS = {
    "ppl": ("Perplexity", _ppl),
    "rule": ("Likelihood of unmasking rules", _rule),
    "zero-shot": ("Zero-shot perplexity", zero_shot_table),
    "gen-ppl": ("Generative perplexity", _generative),
    "order": ("Order of generation", _order),
    "tasks": ("Tasks", _tasks),
    "sample": ("Samples", _samples),
}


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _nats(result: dict) -> str:
    return f"{_number(result['nll_per_token'], 4)} ± {_number(result['standard_error'], 4)}"


def _mean(found: dict | None) -> str:
    if not found or not found["sequences"]:
        return "-"
    return f"{_number(found['mean'], 3)} ± {_number(found['standard_error'], 3)}"


def draw_curves(metrics: list[dict], out: Path) -> list[tuple[str, str]]:
    """Pictures of the learning, drawn in OUT: name and caption of each. UserError without matplotlib."""
    check_matplotlib("eval report")
    from matplotlib.figure import Figure

    found = []
    for name, caption, curves in _figures(metrics):
        figure = Figure(figsize=(7, 3.2), layout="constrained")
        axes = figure.subplots()
        for label, rows, style in curves:
            axes.plot(*zip(*rows, strict=True), label=label, **style)
        axes.set(xlabel="step")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        write_figure(figure, out / name, dpi=120)
        found.append((name, caption))
    return found


def _figures(metrics: list[dict]) -> Iterator[tuple[str, str, list]]:
    def curve(key: str) -> list[tuple[int, float]]:
        return [(row["step"], row[key]) for row in metrics if row.get(key) is not None]

    loss, valid = curve("loss"), curve("valid_nll_per_token")
    curves = [(f"training, mean of {SMOOTHED} logged steps", _smooth(loss), {"color": "tab:blue"})]
    curves += [("validation", valid, {"color": "tab:orange", "marker": "o", "markersize": 3})]
    if any(rows for _, rows, _ in curves):
        yield "curve.png", "The bound, nats a token.", [c for c in curves if c[1]]
    for key, caption in (
        ("exponent_std", "Spread of the learned order in a text: standard deviation of its exponents."),
        ("velocity", "What predicting the order costs of the bound, nats a token (velocity term)."),
    ):
        rows = _smooth(curve(key))
        if any(value for _, value in rows):
            yield f"{key}.png", caption, [(key, rows, {"color": "tab:blue"})]
    dots = {"marker": "o", "markersize": 3}
    pairs = [(name, curve(f"order_{name.replace(', ', '_')}"), dots) for name in PAIRS]
    if any(rows for _, rows, _ in pairs):
        yield "correlations.png", CORRELATIONS, [c for c in pairs if c[1]]


CORRELATIONS = (
    "Correlations of A, hatA and the confidence within a text, mean over the first validation sequences. "
    "As long as the spread of the order is nearly nothing they are of nearly nothing."
)
PAIRS = ("A, hatA", "A, confidence", "hatA, confidence")


def _smooth(rows: list[tuple[int, float]]) -> list[tuple[int, float]]:
    means = []
    for k, (step, _) in enumerate(rows):
        some = [value for _, value in rows[max(0, k + 1 - SMOOTHED) : k + 1]]
        means.append((step, sum(some) / len(some)))
    return means


def _page(text: str, title: str, folder: Path) -> str:
    """The Markdown as one HTML page, its pictures inside. UserError without markdown-it-py."""
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        raise UserError("eval report needs markdown-it-py: pip install markdown-it-py") from None
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    for picture in folder.glob("*.png"):
        data = base64.b64encode(picture.read_bytes()).decode()
        body = body.replace(f'src="{picture.name}"', f'src="data:image/png;base64,{data}"')
    return PAGE.format(title=html.escape(title), body=body)


PAGE = """\
<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; }}
body {{ font: 16px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: left; }}
th, td {{ white-space: nowrap; }}
pre {{ padding: .8rem; border: 1px solid var(--line); border-radius: 6px; white-space: pre-wrap; }}
img {{ max-width: 100%; background: #fff; border-radius: 6px; }}
h2 {{ margin-top: 2.2rem; border-bottom: 1px solid var(--line); }}
</style>
{body}
</html>
"""
