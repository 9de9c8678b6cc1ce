"""How texts are cut and what is counted under each preset, against counts made by hand."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lomdm_dist.cli import main
from lomdm_dist.config import load_config
from lomdm_dist.data.inspect import inspect
from lomdm_dist.data.recipes import detokenise_wikitext, plain_quotes
from lomdm_dist.data.shards import ShardSet
from lomdm_dist.errors import UserError
from lomdm_dist.evaluate.conventions import PRESETS, pieces_of_documents, pieces_of_shards
from lomdm_dist.evaluate.perplexity import estimate_bound
from lomdm_dist.model import LoMDM
from lomdm_dist.model.lomdm import Denoised
from lomdm_dist.process import PowerSchedule
from lomdm_dist.train.checkpoint import Checkpoint
from tests.model.test_model import tiny_config
from tests.tiny import LENGTH, prepare_tiny, randomize

WIKITEXT = """ = Harbour =

 The harbour of the town was built in 1871 , and it is still used .
 It has two basins .

 = Lighthouse =

 = = History = =

 The light was first lit on 4 May 1902 .
"""
LAMBADA = [f"she said it {n} times , and then once more" for n in range(30)]


@pytest.fixture(scope="module")
def run(trained_run, tmp_path_factory):
    return randomize(trained_run.run, tmp_path_factory.mktemp("random") / "run").folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "wiki.valid.raw").write_text(WIKITEXT)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in LAMBADA)
    (folder / "lambada_test.jsonl").write_text(lines)
    return folder


def tokens_by_hand(preset: str, lengths: list[int], length: int) -> tuple[int, int]:
    """Sequences and counted tokens of documents of so many tokens: what each convention says, once more."""
    text, documents = sum(lengths), len(lengths)
    if preset in ("mdlm", "duo"):  # no EOS between, BOS and EOS around L - 2 tokens, all counted
        pieces = text // (length - 2)
        return pieces, pieces * length
    if preset == "bd3lm":  # no EOS between; the first token of a piece is given
        return text // length, text // length * (length - 1)
    if preset == "md4":
        return text // length, text // length * length
    pieces = (text + documents) // length  # bound: as trained, EOS after each document
    return pieces, pieces * length


def zero_shot(run, inputs: Path, preset: str, out: Path, *more: str) -> dict:
    options = ["--checkpoint", str(run), "--input", str(inputs), "--preset", preset, "--json", str(out)]
    main(["eval", "zero-shot", *options, *more])
    return json.loads(out.read_text())


@pytest.mark.parametrize("preset", list(PRESETS))
def test_zero_shot_counts_tokens_as_its_convention_says(run, texts, tmp_path, preset, capsys):
    result = zero_shot(run, texts, preset, tmp_path / "zero.json")
    said = capsys.readouterr().out
    assert "| LoMDM (paper) | 80.40 | 27.82 |" in said and "do not compare across tokenizers" in said
    assert result["missing"] == ["ptb", "lm1b", "ag_news", "pubmed", "arxiv"]
    tokenizer = Checkpoint(run).tokenizer()
    lines = [line for line in WIKITEXT.splitlines(keepends=True) if line.strip()]
    articles = ["".join(map(detokenise_wikitext, part)) for part in (lines[:3], lines[3:])]
    by_hand = {"wikitext": articles, "lambada": [plain_quotes(text) for text in LAMBADA]}
    for name, documents in by_hand.items():
        lengths = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in documents]
        found = result["sets"][name]
        assert (found["sequences"], found["tokens"]) == tokens_by_hand(preset, lengths, LENGTH), name
        assert found["documents"] == len(documents)
    assert result["convention"]["preset"] == preset


@pytest.mark.slow
@pytest.mark.skipif(
    "LOMDM_CORPORA" not in os.environ, reason="LOMDM_CORPORA does not name a folder of corpora"
)
@pytest.mark.parametrize("preset", list(PRESETS))
def test_the_public_files_have_the_tokens_that_were_counted_by_hand(run, tmp_path, preset):
    folder = Path(os.environ["LOMDM_CORPORA"]) / "eval"
    tokenizer = Checkpoint(run).tokenizer()
    lines = (folder / "wiki.valid.raw").read_text().splitlines(keepends=True)
    passages = [json.loads(line)["text"] for line in (folder / "lambada_test.jsonl").open()]
    stream = "".join(detokenise_wikitext(line) for line in lines if line.strip())
    lengths = {"lambada": [len(ids) for ids in tokenizer([plain_quotes(p) for p in passages]).input_ids]}
    # by lines and not by articles, of which there are 60
    lengths["wikitext"] = [len(tokenizer(stream).input_ids), *[0] * 59]
    result = zero_shot(run, folder, preset, tmp_path / "zero.json")
    for name, of_documents in lengths.items():
        found, by_hand = result["sets"][name], tokens_by_hand(preset, of_documents, LENGTH)
        assert (found["sequences"], found["tokens"]) == by_hand


def test_pieces_by_hand(run):
    """Three documents of 5, 0 and 6 tokens, pieces of 4."""
    tokenizer = Checkpoint(run).tokenizer()
    eos = tokenizer.eos_token_id  # and BOS: this tokenizer has none of its own
    documents = [[11, 12, 13, 14, 15], [], [21, 22, 23, 24, 25, 26]]

    def rows(preset, packing):
        pieces = pieces_of_documents(documents, PRESETS[preset], packing, 4, tokenizer)
        return pieces.rows.tolist(), pieces.dropped_tokens

    assert rows("bound", "packed") == (
        [[11, 12, 13, 14], [15, eos, eos, 21], [22, 23, 24, 25]],
        2,
    )
    assert rows("bd3lm", "packed") == ([[11, 12, 13, 14], [15, 21, 22, 23]], 3)
    wrapped = [[11, 12], [13, 14], [15, 21], [22, 23], [24, 25]]
    assert rows("mdlm", "packed") == ([[eos, *pair, eos] for pair in wrapped], 1)
    pad = tokenizer.pad_token_id
    assert rows("mdlm", "padded") == (
        [[eos, 11, 12, eos], [eos, eos, pad, pad], [eos, 21, 22, eos]],
        7,
    )
    assert rows("bound", "padded")[0] == [
        [11, 12, 13, 14],
        [15, eos, pad, pad],
        [eos, pad, pad, pad],
        [21, 22, 23, 24],
        [25, 26, eos, pad],
    ]


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_shards_cut_anew_hold_the_same_text(run, tmp_path, packing):
    """Wrapped pieces of prepared data, made of the shards or by `prepare` itself."""
    data = prepare_tiny(tmp_path / "data", packing=packing)
    tokenizer, shards = Checkpoint(run).tokenizer(), ShardSet(data / "valid")
    pieces = pieces_of_shards(shards, PRESETS["mdlm"], tokenizer, None)
    if packing == "padded":
        text = pieces.rows[pieces.rows != tokenizer.pad_token_id]
        assert len(pieces) == shards.manifest.documents
        assert (pieces.rows[:, 0] == tokenizer.eos_token_id).all()
        assert (text == tokenizer.eos_token_id).sum() == 2 * len(pieces)
        return
    again = [prepare_tiny(tmp_path / "wrapped", packing="wrapped") for _ in range(2)]  # reused, verified
    counts = [sum(split.lengths) for split in inspect(again[1])]
    manifests = [split.manifest for split in inspect(again[1])]
    assert counts == [m.documents - m.dropped_documents for m in manifests]
    wrapped = ShardSet(again[0] / "valid")
    made = wrapped.rows(np.arange(len(wrapped)))
    assert len(pieces) in (len(made), len(made) - 1)  # the end that packing dropped may hold one more
    assert (pieces.rows == made[: len(pieces)]).all()
    few = pieces_of_shards(shards, PRESETS["mdlm"], tokenizer, 3)
    assert (few.rows[:3] == made[:3]).all()
    assert pieces_of_shards(wrapped, PRESETS["mdlm"], tokenizer, None) is wrapped


class SomeText:
    """Stands in for shards: 4,096 sequences of 64 tokens."""

    length = 64

    def batch(self, indices, device):
        return torch.ones(len(indices), self.length, dtype=torch.long), None


@pytest.mark.parametrize("preset", ["mdlm", "bd3lm", "md4", "bound"])
def test_a_constant_ce_under_each_preset(preset, exponent=0.375):
    """The cut presets lose 1e-3 ** e of it; md4 puts ln(V - 1) in its place; what is given counts nowhere."""
    objective = {"name": "lomdm", "c1": exponent, "c2": 0.0}
    config = tiny_config(model={"length": 64}, objective=objective)
    evaluate = load_overrides(config, PRESETS[preset].evaluate)
    model, ce = LoMDM(evaluate.model, evaluate.objective).eval(), 3.0
    reverse, seen = PowerSchedule(torch.tensor([[exponent]])), []

    def denoise(z, x, masked, *_):
        seen.append(masked[:, 0].any())
        return Denoised(masked * ce, reverse, torch.zeros(()), masked * -ce)

    model.denoise = denoise
    given = PRESETS[preset].given
    result = estimate_bound(model, SomeText(), evaluate, np.arange(4096), batch=1024, given=given)
    lost, guess = 1e-3**exponent, math.log(evaluate.model.vocab_size - 1)
    expected = {"bound": ce, "md4": (1 - lost) * ce + lost * guess}.get(preset, (1 - lost) * ce)
    assert abs(result["nll_per_token"] - expected) < 3 * result["standard_error"] + 1e-6
    assert result["tokens"] == 4096 * (64 - given)
    assert any(seen) == (not given)


def load_overrides(config, overrides):
    settings = dict(override.removeprefix("evaluate.").split("=") for override in overrides)
    evaluate = type(config.evaluate).model_validate(
        {key: float(value) if key == "time_eps" else value for key, value in settings.items()}
    )
    return config.model_copy(update={"evaluate": evaluate})


def test_only_what_is_counted_is_masked_and_the_rest_is_seen(run, trained_run):
    """`given` tokens are attended to: the bound of the others depends on them."""
    model, shards = Checkpoint(run).build_model(), ShardSet(trained_run.data / "valid")
    config = load_config(run / "config.yaml")

    class Altered:
        length = shards.length

        def batch(self, indices, device):
            x, valid = shards.batch(indices, device)
            x[:, 0] = 5
            return x, valid

    first = estimate_bound(model, shards, config, np.arange(21), given=1)
    other = estimate_bound(model, Altered(), config, np.arange(21), given=1)
    assert first["tokens"] == 21 * 15
    assert first["nll_per_token"] != other["nll_per_token"]


@pytest.mark.parametrize("rule", ["pinned", "mixture", "uniform"])
def test_a_sequence_with_nothing_to_count_counts_nothing(run, trained_run, rule):
    """A document of k L + 1 tokens ends in a piece of one, which `given` leaves out."""
    model, shards = Checkpoint(run).build_model(), ShardSet(trained_run.data / "valid")
    config = load_config(run / "config.yaml", [f"evaluate.time={rule}"])

    class Short:
        length = shards.length

        def batch(self, indices, device):
            x, _ = shards.batch(indices, device)
            valid = torch.ones_like(x, dtype=torch.bool)
            valid[1:, 1:] = False
            return x, valid

    found = estimate_bound(model, Short(), config, np.arange(3), given=1)
    assert found["tokens"] == 15 and math.isfinite(found["nll_per_token"])


def test_data_of_another_packing_needs_force(run, tmp_path, capsys):
    padded = prepare_tiny(tmp_path / "padded", packing="padded")
    where = ["--checkpoint", str(run), "--data", str(padded / "valid")]
    with pytest.raises(SystemExit):
        main(["eval", "ppl", *where])
    assert "--force computes it all the same" in capsys.readouterr().err
    main(["eval", "ppl", *where, "--force", "--json", str(tmp_path / "ppl.json")])
    convention = json.loads((tmp_path / "ppl.json").read_text())["convention"]
    assert (convention["packing"], convention["trained_on"]) == ("padded", "packed")


def test_files_that_are_not_there(run, texts, tmp_path, capsys):
    for options, message in (
        (["--input", str(tmp_path / "nothing")], "no input file or folder"),
        (["--input", str(tmp_path)], "no files of ptb, wikitext,"),
        (["--input", str(texts), "--sets", "ptb"], "has no file of ptb; expected are names like"),
        (["--input", str(texts), "--sets", "ptb", "wikitext"], "no files of ptb in"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["eval", "zero-shot", "--checkpoint", str(run), *options])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


def test_nothing_is_evaluated_before_all_was_read(run, texts, tmp_path, capsys):
    """A later set that cannot be read, or has no text, ends it before the first takes its time."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "wiki.valid.raw").write_text(WIKITEXT)
    for content, message in (("{bad", "line 1 is not JSON"), ("", "lambada makes no whole sequence")):
        (folder / "lambada_test.jsonl").write_text(content)
        with pytest.raises(SystemExit) as stopped:
            main(["eval", "zero-shot", "--checkpoint", str(run), "--input", str(folder)])
        said = capsys.readouterr()
        assert stopped.value.code == 2 and message in said.err and "wikitext" not in said.out


def test_pieces_too_short_for_bos_and_eos(run):
    tokenizer = Checkpoint(run).tokenizer()
    with pytest.raises(UserError, match="leave no room in 2 tokens"):
        pieces_of_documents([[5, 6]], PRESETS["mdlm"], "packed", 2, tokenizer)
    for packing in ("packed", "padded"):
        assert len(pieces_of_documents([], PRESETS["mdlm"], packing, 4, tokenizer)) == 0
