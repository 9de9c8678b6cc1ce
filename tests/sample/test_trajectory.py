import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from lomdm_dist.cli import main
from lomdm_dist.data.tokenizer import encode, load_tokenizer, train_tokenizer
from lomdm_dist.errors import UserError
from lomdm_dist.sample import Samples
from lomdm_dist.sample import terminal as terminal_module
from lomdm_dist.sample.picture import draw, oklch
from lomdm_dist.sample.terminal import HIDE_CURSOR, HOLE, SHOW_CURSOR, LiveView, wrap
from lomdm_dist.sample.trajectory import page, pieces, spell, trajectory
from tests.tiny import REPOSITORY

EVIL = "</script><script>alert(1)</script><!--"


@pytest.fixture(scope="module")
def tokenizer(tiny_data):
    return load_tokenizer(tiny_data / "tokenizer")


def random_ids(tokenizer, length: int, seed: int = 0) -> list[int]:
    """Any tokens: among them many bytes that are no character."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(tokenizer), (length,), generator=generator).tolist()


@pytest.mark.parametrize("length", [1, 20, 200])
def test_pieces_joined_are_the_text(tokenizer, length):
    for seed in range(5):
        ids = random_ids(tokenizer, length, seed)
        assert (
            "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) and len(pieces(tokenizer, ids)) == length
        )


def test_pieces_of_words_are_the_text_too():
    text = "it isn't so: a tokenizer of words puts the spaces between them. "
    words = train_tokenizer("wordpiece", iter([text]), 60)
    ids = encode(words, [text * 8])[0]
    parts = pieces(words, ids)
    assert "".join(parts) == words.decode(ids) and all(parts) and len(parts) == len(ids) > 64


def test_a_split_character_belongs_to_its_last_token(tokenizer):
    text = "a “é” 文\n" * 9
    ids = encode(tokenizer, [text])[0]
    parts = pieces(tokenizer, ids)
    assert "".join(parts) == text and "�" not in "".join(parts)
    for at, part in enumerate(parts):
        if part in ("“", "é", "文"):
            left = ids[at - len(part.encode()) + 1 : at + 1]
            assert bytes.fromhex("".join(map(spell, tokenizer.convert_ids_to_tokens(left)))).decode() == part
    assert {"“", "é", "文", ""} <= set(parts)
    assert spell("<0xE2>") == "E2" and spell("â") == "E2" and spell("文") == "文"


def made(tokenizer, texts: list[str], steps: int = 6, length: int = 48) -> Samples:
    """Samples of these texts, the first three tokens given, the others revealed at random."""
    rows = [(encode(tokenizer, [text])[0] * length)[:length] for text in texts]
    generator = torch.Generator().manual_seed(1)
    revealed_at = torch.randint(1, steps + 1, (len(rows), length), generator=generator, dtype=torch.int32)
    revealed_at[:, :3] = 0
    exponents = 0.2 + torch.rand(revealed_at.shape, generator=generator)
    return Samples(
        torch.tensor(rows), revealed_at, exponents.masked_fill(revealed_at == 0, torch.nan), steps, steps
    )


def data_of(html: str) -> dict:
    return json.loads(html.split('<script id="data" type="application/json">')[1].split("</script>")[0])


def test_the_page_holds_the_trajectory_whatever_the_text(tokenizer):
    samples = made(tokenizer, [EVIL, "two\n\nlines & <b>"])
    html = page([trajectory(samples, tokenizer, EVIL, "a & b")], EVIL)
    assert html.count("<script") == html.count("</script>") == 2
    data = data_of(html)
    assert data["title"] == EVIL == data["models"][0]["label"]
    for row, text in zip(samples.token_ids, data["models"][0]["samples"], strict=True):
        assert "".join(text["pieces"]) == tokenizer.decode(row) and text["classes"] is None
    assert [text["revealed_at"] for text in data["models"][0]["samples"]] == samples.revealed_at.tolist()
    found = torch.tensor(
        [[float("nan") if e is None else e for e in t["exponents"]] for t in data["models"][0]["samples"]]
    )
    assert torch.allclose(found, samples.exponents, atol=1e-4, equal_nan=True)


def test_the_picture_takes_any_text(tokenizer, tmp_path):
    models = [
        trajectory(made(tokenizer, [text]), tokenizer, "$x^", "a_b") for text in (EVIL, "two\n\nlines 文 $y$")
    ]
    for count in (1, 2):
        draw(models[:count], "$", tmp_path / "a.png")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    # white, black, and sRGB's red as OKLCH has it
    assert oklch(1, 0, 0) == pytest.approx((1, 1, 1), abs=1e-3) and oklch(0, 0, 0) == (0, 0, 0)
    assert oklch(0.62796, 0.25768, 29.234) == pytest.approx((1, 0, 0), abs=2e-3)


def test_the_command_writes_both_and_samples_models_alike(trained_run, trained_mdlm_run, tmp_path, capsys):
    out = [tmp_path / "a.html", tmp_path / "a.png", tmp_path / "a.json"]
    common = ["--num", "2", "--steps", "5", "--seed", "7", "--length", "12"]
    beside = ["--beside", str(trained_mdlm_run.run), "--beside", str(trained_run.run), "objective.c2=0"]
    views = ["--trajectory", str(out[0]), "--trajectory", str(out[1]), "--json", str(out[2])]
    main(["sample", "--checkpoint", str(trained_run.run), *common, "sampler.top_p=0.9", *views, *beside])
    said = capsys.readouterr().out
    main(
        [
            "sample",
            "--checkpoint",
            str(trained_mdlm_run.run),
            *common,
            "sampler.top_p=0.9",
            "--json",
            str(out[2]) + "b",
        ]
    )
    alone, result = json.loads((tmp_path / "a.jsonb").read_text()), json.loads(out[2].read_text())
    assert result["beside"][0]["token_ids"] == alone["token_ids"] and len(result["beside"]) == 2
    assert out[1].read_bytes().startswith(b"\x89PNG") and f"trajectory: {out[0]}" in said
    models = data_of(out[0].read_text())["models"]
    assert [model["label"] for model in models] == ["lomdm", "mdlm", "lomdm, c2=0"]
    for model, texts in zip(models, [result["texts"], *(r["texts"] for r in result["beside"])], strict=True):
        assert ["".join(text["pieces"]) for text in model["samples"]] == texts
        assert {at for text in model["samples"] for at in text["revealed_at"]} <= set(range(1, 6))


def test_parts_of_speech_come_from_the_tagger_or_the_reason_why_not(trained_run, tmp_path, monkeypatch):
    def no_tagger(tokenizer, ids):
        raise UserError("no tagger is installed")

    options = ["--num", "1", "--steps", "3", "--trajectory", str(tmp_path / "a.html")]
    for tag in (lambda tokenizer, ids: ["noun"] * len(ids), no_tagger):
        monkeypatch.setitem(sys.modules, "lomdm_dist.evaluate.speech", SimpleNamespace(tag_tokens=tag))
        main(["sample", "--checkpoint", str(trained_run.run), *options])
        model = data_of((tmp_path / "a.html").read_text())["models"][0]
        reason = "no tagger is installed" if tag is no_tagger else ""
        assert model["samples"][0]["classes"] == (None if reason else ["noun"] * 16)
        assert model["reasons"]["classes"] == reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trajectory", "a.txt"], "must end in .html or .png"),
        (["--trajectory", "/proc/no/a.html"], "cannot write"),
        (["--watch"], "draws in a terminal"),
        (["--beside", "nowhere"], "nowhere"),
        (["--beside", "RUN", "model.width=3"], "takes sampler."),
    ],
)
def test_mistakes_are_said_before_the_work(trained_run, capsys, options, message):
    options = [str(trained_run.run) if option == "RUN" else option for option in options]
    with pytest.raises(SystemExit) as stopped:
        main(["sample", "--checkpoint", str(trained_run.run), *options])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_the_page_is_part_of_the_package(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    assert (tmp_path / "lomdm_dist/sample/trajectory.html").is_file()


class Screen:
    """Stands in for a terminal of 40 columns; `frames` is what was written, cut at each frame."""

    def __init__(self):
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "12")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(terminal_module, "FRAME", 0)
    return Screen()


def test_the_terminal_shows_the_first_text_as_it_grows(tokenizer, screen):
    ids = torch.tensor(encode(tokenizer, ["A text\nof two lines, and “signs” \x1b[2J"])[0])
    mask, length = tokenizer.mask_token_id, len(ids)
    with LiveView(tokenizer, mask, "lomdm", screen) as view:
        for known in (0, length // 2, length):
            z = torch.where(torch.arange(length) < known, ids, mask)
            view(torch.tensor([1, 0]), torch.stack([ids, z]))
            view(torch.tensor([5]), ids[None])  # another batch: not shown
    assert screen.text.startswith(HIDE_CURSOR) and screen.text.endswith(SHOW_CURSOR)
    frames = screen.text.removesuffix(SHOW_CURSOR).split("\x1b[J")[1:]
    assert (
        frames[0].count(HOLE) == length
        and f"lomdm: {length} of {length} tokens" in frames[2]
        and HOLE not in frames[2]
    )
    assert frames[2].startswith(
        "A text\nof two lines, and “signs”  [2J\n"
    )  # no code of the text gets through
    for frame, before in zip(frames[1:], frames[:-1], strict=True):  # drawn over all that was there
        assert f"\x1b[{before.count(chr(10))}F" in before and max(map(len, frame.split("\n"))) < 40


def test_the_terminal_is_put_right_after_ctrl_c(tokenizer, screen):
    with pytest.raises(KeyboardInterrupt), LiveView(tokenizer, 1, "lomdm", screen):
        raise KeyboardInterrupt
    assert screen.text.endswith(SHOW_CURSOR)


def test_lines_fit_and_a_text_too_long_for_the_screen_is_cut(tokenizer, screen):
    assert wrap([("ab", ""), (" cd", ""), ("文文文", ""), ("xyzuvw", "")], 5, False) == [
        "ab cd",
        "文文",
        "文",
        "xyzuv",
        "w",
    ]
    assert wrap([("a", "\x1b[2m")], 5, True) == ["\x1b[2ma\x1b[0m"]
    view = LiveView(tokenizer, tokenizer.mask_token_id, "lomdm", screen)
    view.draw([5] * 1000)
    assert screen.text.count("\n") < 12 and "lines more" in screen.text
