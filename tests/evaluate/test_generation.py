import json
import math
import os
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    PreTrainedTokenizerFast,
)

from lomdm_dist.cli import main
from lomdm_dist.evaluate.generation import describe, distinct, generate, judge_texts, open_judge, texts_of
from lomdm_dist.evaluate.paper import GENERATIVE
from lomdm_dist.train.checkpoint import Checkpoint
from tests.ranks import Ranks
from tests.tiny import randomize

CONTEXT, VOCABULARY = 32, 280
TEXT = "A statement is made of words; the words of letters, and a class statement of both."
TEXTS = [TEXT, "", "x", "word</s>of</s>letters</s></s> and more", 6 * TEXT, "</s>", "of", TEXT[:40]]


def save_tokenizer(folder: Path, vocabulary: int = VOCABULARY) -> None:
    """Byte-level BPE with `</s>`, and no padding token."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT * 3], trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)


def gpt2(kind=GPT2LMHeadModel, **settings):
    torch.manual_seed(0)
    known = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": CONTEXT, "vocab_size": VOCABULARY}
    return kind(GPT2Config(**known, bos_token_id=0, eos_token_id=0, initializer_range=0.3, **settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A causal model of random weights, absolute positions and 32 of them, with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("judge")
    gpt2().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def judge(folder):
    return open_judge(str(folder))


@pytest.fixture(scope="module")
def random_run(trained_run, tmp_path_factory):
    return randomize(trained_run.run, tmp_path_factory.mktemp("random") / "step-8").folder


@pytest.fixture(scope="module")
def checkpoint(random_run):
    return Checkpoint(random_run)


@torch.no_grad()
def plain_loop(folder: Path, texts: list[str], eos: str = "all") -> tuple[list[float], list[int]]:
    """The judge on one block of one text after another: no batch, no padding, no code of ours."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sums, counts = [], []
    for text in texts:
        ids, nll, count = tokenizer.encode(text), 0.0, 0
        for start in range(0, len(ids), CONTEXT):
            block = ids[start : start + CONTEXT]
            log_probs = model(torch.tensor([block])).logits[0].double().log_softmax(dim=1)
            for k in range(1, len(block)):
                if eos == "first" and block[k] == 0 and 0 in block[:k]:
                    continue
                nll, count = nll - float(log_probs[k - 1, block[k]]), count + 1
        sums.append(nll)
        counts.append(count)
    return sums, counts


@pytest.mark.parametrize("batch", [1, 3, 32])
@pytest.mark.parametrize("eos", ["all", "first"])
def test_the_judge_equals_a_plain_loop(judge, folder, batch, eos):
    """Texts of 0, 1 and many tokens, of many blocks, with EOS; whatever lies beside them in a batch."""
    nll, tokens = judge_texts(judge, TEXTS, eos, batch)
    expected, counts = plain_loop(folder, TEXTS, eos)
    assert tokens.tolist() == counts and counts[1] == counts[2] == counts[5] == 0 and counts[4] > 3 * CONTEXT
    assert nll.tolist() == pytest.approx(expected, rel=1e-5)
    assert counts[3] == plain_loop(folder, TEXTS)[1][3] - (3 if eos == "first" else 0)


def test_a_judge_that_knows_nothing_gives_the_size_of_its_vocabulary(judge, folder, checkpoint):
    ignorant = open_judge(str(folder))
    for parameter in ignorant.model.parameters():
        parameter.data.zero_()
    found = generate(checkpoint.build_model(), checkpoint.tokenizer(), ignorant, checkpoint.config, 3, 16, 4)
    numbers = describe(found)
    assert numbers["gen_ppl"] == pytest.approx(VOCABULARY) == numbers["mean_ppl"]
    assert numbers["standard_error"] < 1e-6


@pytest.fixture(scope="module")
def ten(checkpoint, judge):
    """Ten samples: drawn 4 at once, judged 3 at once."""

    def draw(**options):
        options = {"seed": 5, "batch": 4, "judge_batch": 3} | options
        known = checkpoint.build_model(), checkpoint.tokenizer(), judge, checkpoint.config
        return generate(*known, 10, 16, 6, **options)

    return draw


def test_ten_samples_at_batch_four_count_ten(ten, folder):
    found = ten()
    numbers = describe(found)
    sums, counts = plain_loop(folder, found.texts)
    assert numbers["samples"] == 10 == len(set(found.texts)) and numbers["rejected"] == numbers["empty"] == 0
    assert numbers["judge_tokens"] == sum(counts)
    assert numbers["gen_ppl"] == pytest.approx(math.exp(sum(sums) / sum(counts)), rel=1e-5)
    own = [math.exp(nll / count) for nll, count in zip(sums, counts, strict=True)]
    assert numbers["mean_ppl"] == pytest.approx(sum(own) / 10, rel=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_neither_ranks_nor_batches_change_the_result(ten, size):
    alone, collected = ten(batch=10, judge_batch=1), []
    for rank in range(size):
        shared = ten(grid=Ranks(rank, size, collected))
    assert torch.equal(shared.token_ids, alone.token_ids) and shared.texts == alone.texts
    one, many = describe(alone), describe(shared)
    for key in one.keys() - {"seconds", "tokens_per_second"}:
        assert many[key] == pytest.approx(one[key], rel=1e-6), key


def test_more_ranks_than_samples(checkpoint, judge):
    known = checkpoint.build_model(), checkpoint.tokenizer(), judge, checkpoint.config
    collected = []
    for rank in range(3):
        found = generate(*known, 2, 16, 3, grid=Ranks(rank, 3, collected))
    assert found.indices.tolist() == [0, 1] and len(found.texts) == 2


def test_standard_error_is_that_of_the_samples(judge):
    """Against the jackknife over samples, whose token counts differ."""
    texts = [TEXT[k : k + 10 + 3 * k] for k in range(20)]
    nll, tokens = judge_texts(judge, texts)
    without = (nll.sum() - nll) / (tokens.sum() - tokens)
    jackknife = float(((without - without.mean()) ** 2).sum() * 19 / 20) ** 0.5
    found = describe(generation_of(nll, tokens))
    assert found["standard_error"] == pytest.approx(jackknife, rel=0.1)
    assert found["gen_ppl_standard_error"] == pytest.approx(found["gen_ppl"] * found["standard_error"])


def generation_of(nll, tokens):
    from lomdm_dist.evaluate.generation import Generation

    n = len(nll)
    ids = torch.zeros(n, 4, dtype=torch.long)
    return Generation(torch.arange(n), ids, [""] * n, nll, tokens, 0.0, 1.0, 1.0)


def test_samples_without_a_token_to_judge_are_counted_and_nothing_else():
    some = describe(generation_of(torch.tensor([6.0, 0.0, 2.0]).double(), torch.tensor([3.0, 0.0, 1.0])))
    assert (some["empty"], some["samples"], some["judge_tokens"]) == (1, 3, 4)
    assert some["gen_ppl"] == pytest.approx(math.exp(2)) == some["mean_ppl"]
    none = describe(generation_of(torch.zeros(2, dtype=torch.float64), torch.zeros(2)))
    assert none["empty"] == 2 and math.isnan(none["gen_ppl"]) and math.isnan(none["mean_ppl"])


def test_distinct_counts_ngrams_within_samples():
    ids = torch.tensor([[1, 2, 1, 2, 1], [1, 2, 3, 3, 3]])
    for n in (1, 2, 3):
        grams = [tuple(row[k : k + n]) for row in ids.tolist() for k in range(6 - n)]
        assert distinct(ids, n) == len(set(grams)) / len(grams)
    assert math.isnan(distinct(ids[:, :2], 3))


def test_the_models_eos_becomes_the_judges(checkpoint):
    tokenizer = checkpoint.tokenizer()
    word, eos = tokenizer.encode(" the")[0], tokenizer.eos_token_id
    ids = torch.tensor([[word, eos, word, eos], [eos, eos, word, word]])
    spelled = tokenizer.decode([word])
    assert texts_of(tokenizer, ids, "</s>") == [f"{spelled}</s>{spelled}</s>", f"</s></s>{spelled * 2}"]
    assert texts_of(tokenizer, ids, tokenizer.eos_token) == tokenizer.batch_decode(ids)


def run(random_run, folder, tmp_path, *options) -> dict:
    out = tmp_path / "gen.json"
    known = ["--checkpoint", str(random_run), "--judge", str(folder), "--num", "8", "--steps", "6", "12"]
    main(["eval", "gen-ppl", *known, "--json", str(out), *options])
    return json.loads(out.read_text())


def test_the_command_makes_the_papers_table(random_run, folder, tmp_path, capsys):
    texts = tmp_path / "texts.jsonl"
    result = run(random_run, folder, tmp_path, "--paper", "--save-samples", str(texts))
    orders = [(row["c1"], row["c2"], row["steps"]) for row in result["rows"]]
    assert orders == [(*pace, steps) for pace in ((0.7, 0.65), (0.7, 0), (1, 0)) for steps in (6, 12)]
    found = [row["gen_ppl"] for row in result["rows"]]
    assert len({tuple(found[k : k + 2]) for k in (0, 2, 4)}) == 3  # each pace is really another
    said = capsys.readouterr().out
    for ppl in (ppl for row in GENERATIVE["rows"] for ppl in row["gen_ppl"]):
        assert any(line.startswith("paper ") and f"{ppl:.2f}" in line for line in said.splitlines())
    assert {"command", "versions", "machine", "config", "paper"} <= result.keys()
    assert result["convention"]["context"] == CONTEXT and "MDLM" in result["convention"]["eos"]
    lines = [json.loads(line) for line in texts.read_text().splitlines()]
    assert len(lines) == 6 * 8
    first = [line for line in lines if (line["c2"], line["steps"]) == (0.65, 6)]
    nll, tokens = sum(line["nll"] for line in first), sum(line["tokens"] for line in first)
    assert result["rows"][0]["gen_ppl"] == pytest.approx(math.exp(nll / tokens))

    off = run(random_run, folder, tmp_path, "objective.c2=0", "--eos", "first")
    assert [row["gen_ppl"] for row in off["rows"]] == found[2:4]
    assert "paper" not in off


def test_a_model_without_a_pace_has_one_row_a_number_of_steps(trained_mdlm_run, folder, tmp_path):
    result = run(trained_mdlm_run.run, folder, tmp_path, "--paper", "--eos", "all")
    assert [(row["objective"], row["c1"], row["steps"]) for row in result["rows"]] == [
        ("mdlm", None, 6),
        ("mdlm", None, 12),
    ]


def make(kind: str, folder: Path, out: Path) -> None:
    if kind == "no tokenizer":
        gpt2().save_pretrained(out)
    elif kind == "fills masks":
        small = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
        BertLMHeadModel(BertConfig(**small, vocab_size=VOCABULARY, initializer_range=1.0)).save_pretrained(
            out
        )
        save_tokenizer(out)
    elif kind == "no head":
        gpt2(GPT2Model, tie_word_embeddings=False).save_pretrained(out)
        save_tokenizer(out)
    elif kind == "another's tokenizer":
        gpt2().save_pretrained(out)
        save_tokenizer(out, VOCABULARY + 10)
    elif kind == "another task":
        out.mkdir()
        (out / "config.json").write_text('{"model_type": "t5"}')
        save_tokenizer(out)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("absent", "there is no such folder"),
        ("another task", "Unrecognized configuration class"),
        ("no tokenizer", "has no tokenizer: save its tokenizer beside it"),
        ("another's tokenizer", "has 280 tokens, its tokenizer ids up to 289"),
        ("no head", "lacks weights (lm_head.weight)"),
        ("fills masks", "sees the tokens that it is to predict"),
    ],
)
def test_what_is_no_judge_is_refused(kind, message, random_run, folder, tmp_path, capsys):
    make(kind, folder, tmp_path / "judge")
    with pytest.raises(SystemExit) as stopped:
        run(random_run, tmp_path / "judge", tmp_path)
    said = capsys.readouterr()
    assert stopped.value.code == 2 and not said.out
    last = said.err.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--paper", "objective.c2=0"], "--paper sets c1 and c2 itself"),
        (["--steps", "8", "0"], "--steps 0: give 1 to 100,000"),
        (["--judge-batch", "0"], "--judge-batch 0: give 1 or more"),
        (["--length", "17"], "the model was trained at 16"),
        (["objective.c2=0.8"], "c1 > c2 >= 0 keeps every exponent positive"),
        (["--save-samples", "/dev/null/x"], "cannot write the result to"),
    ],
)
def test_mistakes_are_one_line(options, message, random_run, folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(random_run, folder, tmp_path, *options)
    said = capsys.readouterr()
    assert stopped.value.code == 2 and not said.out
    assert message in said.err.strip().splitlines()[-1]


def test_a_real_judge_prefers_a_story():
    """TinyStories' 260K model, whose tokenizer adds a BOS: a story, and the same words in another order."""
    corpora = os.environ.get("LOMDM_CORPORA")
    if not corpora:
        pytest.skip("LOMDM_CORPORA does not name the folder of corpora")
    judge = open_judge(f"{corpora}/judge_stories260k")
    story = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    words = story.split()
    nll, tokens = judge_texts(judge, [story, " ".join(sorted(words))])
    assert int(tokens[0]) == len(judge.tokenizer(story, add_special_tokens=False)["input_ids"])
    story_ppl, shuffled_ppl = (nll / tokens).exp().tolist()
    assert story_ppl < 4 and shuffled_ppl > 5 * story_ppl
