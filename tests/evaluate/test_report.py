"""`lomdm eval report`: what was run stands there with its numbers, what was not is said."""

import json
import re
import shlex
import shutil
import sys
from html.parser import HTMLParser

import pytest

from lomdm_dist import cli


@pytest.fixture
def run(trained_run, tmp_path):
    """A run of its own: the report is written into it."""
    return shutil.copytree(trained_run.run, tmp_path / "run")


class Reader(HTMLParser):
    """What a browser would have to fetch, and the text."""

    def __init__(self, page: str):
        super().__init__()
        self.sources, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.sources += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_a_report_says_what_was_run_and_what_was_not(run, trained_run, capsys, monkeypatch):
    def main(words):  # results name the command that made them
        monkeypatch.setattr(sys, "argv", ["lomdm", *words])
        cli.main(words)

    valid = str(trained_run.data / "valid")
    for preset in ("bound", "mdlm"):
        out = run / "eval" / f"{preset}.json"
        out.parent.mkdir(exist_ok=True)
        main(
            ["eval", "ppl", "--checkpoint", str(run), "--data", valid, "--preset", preset, "--json", str(out)]
        )
    ppl = json.loads(out.read_text())
    samples = run / "samples.json"
    main(["sample", "--checkpoint", str(run), "--num", "2", "--steps", "4", "--json", str(samples)])
    (run / "eval" / "of something else.json").write_text('{"command": ["x", "eval"]}')
    (run / "eval" / "broken.json").write_text('{"command": ')
    (run / "eval" / "older.json").write_text(
        '{"command": ["lomdm", "eval", "zero-shot"], "sets": {"ptb": 3}}'
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 9, "valid_nll_per_token": 5.25, "order_A_hatA": 0.5, "order_A_confidence": null}\n{"st'
        )
    main(["eval", "report", str(run), "--json", str(run / "report.json")])
    assert "not run, and said there: rule, zero-shot, gen-ppl, order, tasks" in capsys.readouterr().out
    found = json.loads((run / "report.json").read_text())
    assert found["found"] == ["ppl", "sample"]

    text = (run / "report" / "report.md").read_text()
    assert "## Not read" in text and "- older.json" in text
    row = f"| mdlm | valid | {ppl['nll_per_token']:.4f} ± {ppl['standard_error']:.4f} | {ppl['ppl']:.2f} |"
    assert row in text and "| LoMDM | 25.4 | 27.2 | 20.4 |" in text
    assert f"lomdm eval gen-ppl --checkpoint {run} --judge gpt2-large --paper" in text
    for picture in re.findall(r"!\[.*\]\((.*)\)", text):
        assert (run / "report" / picture).stat().st_size > 1000
    assert "correlations.png" in text
    page = Reader((run / "report" / "report.html").read_text())
    assert page.sources and all(source.startswith("data:image/png;base64,") for source in page.sources)
    for sample in json.loads(samples.read_text())["texts"]:
        assert sample.strip()[:20] in text and sample.strip()[:10] in page.text


def test_a_sample_cannot_write_html(run):
    text = "```\n</pre><script>alert(1)</script> | <img src=x>"
    result = {"command": ["lomdm", "sample"], "texts": [text], "steps": 4, "entropy": None}
    (run / "samples.json").write_text(json.dumps(result))
    cli.main(["eval", "report", str(run), "--out", str(run / "elsewhere")])
    page = (run / "elsewhere" / "report.html").read_text()
    assert "<script>" not in page and "<img src=x>" not in page and "&lt;script&gt;" in page


def test_what_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["eval", "report", str(tmp_path)])
    assert stopped.value.code == 2 and "is no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        '{"command": 5}',
        '{"command": ["x", "eval", "ppl"]}',
        '{"command": ["x", "eval", "order"], "correlations": 3}',
        '{"command": ["x", "sample"], "token_ids": []}',
        '{"command": ["x", "eval", "ppl"], "convention": {"preset": 1}, "nll_per_token": "3"}',
        "[" * 100_000,
        "\x00\xff",
    ],
)
def test_no_result_spoils_the_others(run, text):
    (run / "eval").mkdir()
    (run / "eval" / "a.json").write_text(text)
    cli.main(["eval", "report", str(run)])


def test_no_logged_line_spoils_the_others(run):
    lines = ['{"loss": 1}', '{"step": 1, "loss": "a"}', '{"step": null, "loss": 2}', '{"step": "1"}', "[1]"]
    lines += ['{"step": 2, "tokens": null, "loss": [1]}', '{"step": 3, "loss": NaN, "velocity": Infinity}']
    (run / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    cli.main(["eval", "report", str(run)])


def test_names_of_runs_are_quoted(trained_run, tmp_path, monkeypatch):
    run = shutil.copytree(trained_run.run, tmp_path / "my 'q\"run $a <b>")
    monkeypatch.chdir(run)
    cli.main(["eval", "report", "."])
    text = (run / "report" / "report.md").read_text()
    assert text.startswith("# my 'q") and f"--checkpoint {shlex.quote(str(run))} --data" in text
