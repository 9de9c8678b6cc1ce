"""The lm-eval harness's view of a model, against enumeration, `lomdm eval` and plain loops."""

import itertools
import json
import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tokenizers
import torch
import yaml
from lm_eval.api.instance import Instance
from transformers import PreTrainedTokenizerFast

from lomdm_dist.cli import main
from lomdm_dist.commands import eval_tasks
from lomdm_dist.config import SamplerConfig, load_config
from lomdm_dist.data.tokenizer import encode, not_text
from lomdm_dist.errors import UserError
from lomdm_dist.evaluate import harness
from lomdm_dist.evaluate.harness import HarnessModel, generation_settings, is_greedy, noise_key
from lomdm_dist.evaluate.perplexity import estimate_bound, evaluation_noise, sequence_bounds
from lomdm_dist.sample import sample
from lomdm_dist.train.checkpoint import Checkpoint
from tests.model.test_bound import X, enumerated
from tests.model.test_model import randomised, tiny_config
from tests.table import FAMILY, L, Reference, V, table_model
from tests.tiny import randomize

TEXTS = ("The with statement wraps the execution of a block, and is longer than one piece.", "It is.", "")
QUESTIONS = [("The list", " is a", " of it"), ("In the", " end", " zoo")]


@pytest.fixture(scope="module")
def random_run(trained_run, tmp_path_factory):
    return randomize(trained_run.run, tmp_path_factory.mktemp("harness") / "run").folder


@pytest.fixture(scope="module")
def tokenizer(trained_run):
    return Checkpoint(trained_run.run).tokenizer()


def random_model(run, objective: str):
    """A model with random weights of the run's tokenizer and length, 16; and its config."""
    config = load_config(run / "config.yaml", [f"objective={{name: {objective}}}"])
    return randomised(config, torch.float32).eval(), config


def asked(kind: str, *arguments, document: int = 0) -> Instance:
    return Instance(kind, {}, arguments, 0, ("some task", document, 1))


def pair(context: str, continuation: str, document: int = 0) -> Instance:
    return asked("loglikelihood", context, continuation, document=document)


def word_model(objective: dict, **options) -> HarnessModel:
    """A table model whose tokens are the words a, b and c."""
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2, "[MASK]": 3}, unk_token="a")
    backend = tokenizers.Tokenizer(words)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]")
    sizes = {"vocab_size": V + 1, "mask_id": V, "length": L, "width": 2, "heads": 1}
    config = tiny_config(model=sizes, objective=objective)
    return HarnessModel(table_model(objective), tokenizer, config, **options)


@pytest.mark.parametrize("name", ["mdlm", "lomdm", "genmd4", "left to right"])
@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_likelihood_is_the_conditional_bound_by_enumeration(name, given):
    model, words = word_model(FAMILY[name], draws=8, batch=1000), ["a", " c", " b"]
    expected = enumerated(Reference(FAMILY[name], model.model, X), given=given)
    context, continuation = "".join(words[:given]), "".join(words[given:])
    found = model.loglikelihood([pair(context, continuation, document=i) for i in range(1000)])
    values = np.array([value for value, _ in found])
    assert abs(values.mean() + expected) < 4 * values.std() / 1000**0.5 + 1e-6


def test_ar_is_exact(trained_run, tokenizer):
    model, config = random_model(trained_run.run, "ar")
    adapter = HarnessModel(model, tokenizer, config)
    requests = [pair(context, end) for context, *ends in QUESTIONS for end in ends]
    for request, (value, _) in zip(requests, adapter.loglikelihood(requests), strict=True):
        x = torch.tensor(encode(tokenizer, ["".join(request.args)]))
        given = len(encode(tokenizer, [request.args[0]])[0])
        assert value == pytest.approx(-model.causal_ce(x)[0][0, given:].double().sum().item(), rel=1e-6)


@pytest.mark.parametrize("objective", ["mdlm", "lomdm", "ar", "left to right"])
def test_of_all_texts_one_is_greedy_the_one_that_a_plain_loop_fills(objective):
    if objective == "ar":
        config = tiny_config(model={"vocab_size": V + 1, "mask_id": V, "length": L}, objective={"name": "ar"})
        model = randomised(config, torch.float32).eval()
    else:
        model = table_model(FAMILY[objective])
    texts = torch.tensor(list(itertools.product(range(V), repeat=L)))
    for given in (0, 1):
        counted = (torch.arange(L) >= given).expand(texts.shape)
        found = is_greedy(model, texts, counted)
        for first in torch.tensor(list(itertools.product(range(V), repeat=given)), dtype=torch.long):
            z = torch.cat([first, torch.full((L - given,), V)])
            while (masked := z == V).any():
                with torch.no_grad():
                    if objective == "ar":
                        features, condition = model.predict_next(z[None, :-1])
                        place = int(masked.nonzero()[0])
                    else:
                        features, _, condition = model.see(z[None])
                    probs = model.backbone.output(features[0], condition)[:, :V].softmax(dim=1)
                if objective != "ar":
                    place = int(torch.where(masked, probs.amax(dim=1), -1).argmax())
                z[place] = probs[place].argmax()
            same = (texts[:, :given] == first).all(dim=1)
            assert torch.equal(texts[same & found], z[None])


class Texts:
    """Stands in for shards: the pieces of texts, padded to one length."""

    def __init__(self, pieces: list[list[int]], length: int):
        self.pieces, self.length = pieces, length

    def batch(self, indices, device):
        x = torch.zeros(len(indices), self.length, dtype=torch.long)
        valid = torch.zeros_like(x, dtype=torch.bool)
        for row, piece in enumerate(self.pieces[i] for i in indices):
            x[row, : len(piece)], valid[row, : len(piece)] = torch.tensor(piece), True
        return x, valid


def pieces_of(tokenizer, text: str) -> list[list[int]]:
    ids = encode(tokenizer, [text])[0]
    return [ids[k : k + 16] for k in range(0, len(ids), 16)]


@pytest.mark.parametrize("objective", ["lomdm", "mdlm", "ar"])
def test_rolling_is_the_sum_of_eval_ppl_over_the_pieces(trained_run, tokenizer, monkeypatch, objective):
    """With the noise of `eval ppl`, of a single sequence each: the last piece there is padded, here short."""
    monkeypatch.setattr(harness, "noise_key", lambda *_: 0)
    model, config = random_model(trained_run.run, objective)
    adapter = HarnessModel(model, tokenizer, config, draws=3, seed=5)
    found = adapter.loglikelihood_rolling([asked("", text) for text in TEXTS])
    for text, value in zip(TEXTS, found, strict=True):
        pieces = pieces_of(tokenizer, text)
        assert len(pieces) == {TEXTS[0]: 4, "": 0}.get(text, 1)
        one_by_one = [
            estimate_bound(model, Texts([piece], 16), config, np.zeros(1, dtype=int), draws=3, seed=5)
            for piece in pieces
        ]
        expected = sum(one["nll_per_token"] * one["tokens"] for one in one_by_one)
        assert value == pytest.approx(-expected, rel=1e-6)


def test_the_noise_of_documents_is_independent(trained_run, tokenizer):
    """Pieces scored under their own keys agree with `eval ppl`, whose noise is another."""
    model, config = random_model(trained_run.run, "lomdm")
    pieces = pieces_of(tokenizer, TEXTS[0] * 8)[:-1]
    adapter = HarnessModel(model, tokenizer, config, draws=8)
    found = adapter.loglikelihood_rolling([asked("", TEXTS[0] * 8)])[0]
    other = estimate_bound(model, Texts(pieces, 16), config, np.arange(len(pieces)), draws=64, seed=1)
    last = adapter.loglikelihood_rolling(
        [asked("", tokenizer.decode(pieces_of(tokenizer, TEXTS[0] * 8)[-1]))]
    )
    per_token = -(found - last[0]) / other["tokens"]
    assert (
        per_token == pytest.approx(other["nll_per_token"], rel=0.02) and per_token != other["nll_per_token"]
    )


class Threads:
    """Two ranks: threads that exchange their values."""

    data_size, barrier, box = 2, threading.Barrier(2), [None, None]

    def __init__(self, rank: int):
        self.data_rank = rank

    def gather(self, value) -> list:
        self.box[self.data_rank] = value
        self.barrier.wait(60)
        return list(self.box)


@pytest.mark.parametrize("objective", ["lomdm", "window"])
def test_numbers_depend_neither_on_batch_nor_on_order_nor_on_processes(trained_run, tokenizer, objective):
    model, config = random_model(trained_run.run, objective)
    requests = [
        pair(context, end, document=number)
        for number, (context, *ends) in enumerate(QUESTIONS * 3)
        for end in (*ends, ends[0])
    ]

    def found(requests, **options):
        return HarnessModel(model, tokenizer, config, draws=4, **options).loglikelihood(requests)

    first = found(requests, batch=5)
    values = [value for value, _ in first]
    for other in (found(requests, batch=1), found(requests[::-1], batch=7)[::-1]):
        assert [value for value, _ in other] == pytest.approx(values, rel=1e-5)
    with ThreadPoolExecutor(2) as pool:
        for shared in pool.map(lambda rank: found(requests, batch=5, grid=Threads(rank)), range(2)):
            assert shared == first
    assert values[0] == values[2] != values[6]  # one question has one noise; the next has another
    assert found(requests, batch=5, seed=1)[0] != first[0]


def test_context_and_continuation_part_at_the_right_token_and_the_left_is_cut(trained_run, tokenizer):
    model, config = random_model(trained_run.run, "mdlm")
    adapter = HarnessModel(model, tokenizer, config)
    for context, continuation in (("The val", "ue of"), ("The value ", "of"), ("", "The"), ("[MASK]", " is")):
        row = adapter._pair(pair(context, continuation))
        assert tokenizer.decode(row.ids) == context + continuation
        scored = tokenizer.decode(row.ids[row.given :])
        assert scored.endswith(continuation)
        assert tokenizer.mask_token_id not in row.ids
    assert adapter.contexts_cut == 0
    row = adapter._pair(pair(TEXTS[0], " It is"))
    ends = encode(tokenizer, [TEXTS[0], TEXTS[0] + " It is"])
    assert row.ids == ends[1][-16:] and 16 - row.given == len(ends[1]) - len(ends[0])
    assert adapter.contexts_cut == 1 == adapter.convention()["contexts_cut"]
    with pytest.raises(UserError, match=r"task some task, document 0: a continuation of .* the model has 16"):
        adapter.loglikelihood([pair("It", TEXTS[0])])


def test_a_continuation_without_tokens_is_certain(trained_run, tokenizer):
    model, config = random_model(trained_run.run, "ar")
    assert HarnessModel(model, tokenizer, config).loglikelihood([pair("", "")]) == [(0.0, True)]
    adapter = word_model(FAMILY["mdlm"])
    assert adapter.loglikelihood([pair("a b c", " "), pair("a", " b c")])[0] == (0.0, True)


def test_answers_are_the_samplers_cut_at_until_and_at_eos(trained_run, tokenizer, monkeypatch):
    model, config = random_model(trained_run.run, "lomdm")
    adapter = HarnessModel(model, tokenizer, config, seed=2)
    drawn = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 8}
    request = asked("", "The value", drawn)
    prompt = torch.tensor(encode(tokenizer, ["The value"])[0])
    given = torch.cat([prompt, torch.full((8,), config.model.mask_id)])
    never = not_text(tokenizer, config.model.vocab_size)
    texts = []
    for repeat in range(2):
        key = torch.tensor([noise_key(2, request, repeat)])
        ids = sample(model, key, len(given), 8, 2, never, SamplerConfig(temperature=2.0), given).token_ids
        texts.append(tokenizer.decode(ids[0, len(prompt) :]).split(tokenizer.eos_token)[0])
    assert adapter.generate_until([request, request]) == texts and texts[0] != texts[1]
    stop = texts[0][2:4]
    cut = asked("", "The value", drawn | {"until": ["no such", stop]})
    assert adapter.generate_until([cut])[0] == texts[0].split(stop)[0]

    with pytest.raises(UserError, match=r"max_gen_toks=256 .* the model has 16 positions"):
        adapter.generate_until([asked("", "The value", {})])

    class WithEos:
        token_ids = torch.tensor([[*prompt.tolist(), *prompt.tolist(), tokenizer.eos_token_id, 7]])

    monkeypatch.setattr(harness, "sample", lambda *_, **__: WithEos)
    assert adapter.generate_until([request]) == ["The value"]


def test_generation_settings_are_the_samplers_or_refused():
    def of(**given):
        until, tokens, settings = generation_settings(given, SamplerConfig(grid="even"), "task t")
        assert settings.grid == "even"
        return until, tokens, settings.temperature, settings.top_p

    assert of(until=".", max_new_tokens=3) == (["."], 3, 1e-6, 1.0)
    assert of(do_sample=True, top_p=0.9) == ([], 256, 1.0, 0.9)
    assert of(temperature=0.7, num_beams=1)[2] == 0.7
    assert of(do_sample=False, temperature=0.7)[2] == 1e-6
    for wrong in ({"top_k": 5}, {"num_beams": 4}, {"do_sample": True, "top_p": 0}, {"max_gen_toks": 0}):
        with pytest.raises(UserError, match=r"task t: generation settings .* the sampler takes until"):
            of(**wrong)


@pytest.fixture
def tasks(tmp_path, random_run, tokenizer):
    """A folder of three tasks: choices, rolling, answers; the first of two answers is expected rightly."""
    checkpoint = Checkpoint(random_run)
    adapter = HarnessModel(checkpoint.build_model(), tokenizer, checkpoint.config)
    how = {"until": ["\n"], "max_gen_toks": 6}
    prompts = [
        Instance("generate_until", {}, (context, how), 0, ("answers", number, 1))
        for number, (context, *_) in enumerate(QUESTIONS)
    ]
    answers = [adapter.generate_until(prompts)[0], "not this"]
    rows = {
        "choices": [{"text": c, "ends": e, "label": 0} for c, *e in QUESTIONS],
        "rolling": [{"text": text} for text in TEXTS[:2]],
        "answers": [{"text": c, "end": a} for (c, *_), a in zip(QUESTIONS, answers, strict=True)],
    }
    settings = {
        "choices": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "{{ends}}",
            "doc_to_target": "label",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        },
        "rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
        },
        "answers": {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{end}}",
            "generation_kwargs": how,
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, documents in rows.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        task = {"task": name, "dataset_path": "json", "test_split": "test"}
        task |= {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task | settings[name]))
    return folder


def test_the_command_and_its_numbers(tasks, random_run, tokenizer, tmp_path, capsys):
    checkpoint, out = Checkpoint(random_run), tmp_path / "tasks.json"
    model = checkpoint.build_model()
    where = ["eval", "tasks", "--checkpoint", str(random_run), "--include-path", str(tasks)]
    names = ["choices", "rolling", "answers"]
    main([*where, "--tasks", *names, "--draws", "4", "--json", str(out)])
    result, said = json.loads(out.read_text()), capsys.readouterr().out

    def bound(task: str, document: int, ids: list[int], given: int = 0, piece: int = 0) -> float:
        request = Instance("", {}, (), 0, (task, document, 1))
        keys = np.array([noise_key(0, request, piece)])
        noise = [evaluation_noise(0, draw, 4, keys, 1, len(ids)) for draw in range(4)]
        counted = torch.arange(len(ids))[None] >= given
        with torch.no_grad():
            parts = sequence_bounds(model, torch.tensor([ids]), None, counted, noise, 4, checkpoint.config)
        return parts.sum().item()

    right = []
    for number, (context, *ends) in enumerate(QUESTIONS):
        given = len(encode(tokenizer, [context])[0])
        bounds = [bound("choices", number, encode(tokenizer, [context + end])[0], given) for end in ends]
        right.append(bounds[0] < bounds[1])
    assert result["results"]["choices"]["acc,none"] == np.mean(right)
    nll = sum(
        bound("rolling", number, piece, piece=16 * k)
        for number, text in enumerate(TEXTS[:2])
        for k, piece in enumerate(pieces_of(tokenizer, text))
    )
    words, octets = sum(len(text.split()) for text in TEXTS), sum(len(text) for text in TEXTS)
    rolling = result["results"]["rolling"]
    assert rolling["word_perplexity,none"] == pytest.approx(math.exp(nll / words), rel=1e-6)
    assert rolling["byte_perplexity,none"] == pytest.approx(math.exp(nll / octets), rel=1e-6)
    assert result["results"]["answers"]["exact_match,none"] == 0.5

    assert {"command", "versions", "machine", "config", "documents", "groups"} <= result.keys()
    convention = {"draws": 4, "seed": 0, "weights": "ema", "lm_eval": eval_tasks.VERSION, "time": "pinned"}
    assert convention.items() <= result["convention"].items()
    assert "|word_perplexity|" in said and "4 draws, seed 0; ema weights; 0 contexts cut" in said
    main([*where, "--tasks", "rolling", "--limit", "1", "--json", str(out)])
    assert json.loads(out.read_text())["documents"]["rolling"]["effective"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "answers", "--gen-kwargs", "max_gen_toks=16"], "the model has 16 positions"),
        (["--tasks", "answers", "--gen-kwargs", "top_p"], "--gen-kwargs top_p: give KEY=VALUE"),
        (["--tasks", "choices", "--draws", "0"], "--draws 0: give 1 or more"),
        (["--tasks", "choices", "--include-path", "nowhere"], "--include-path nowhere: no such folder"),
        pytest.param(["--tasks", "nosuch"], "--tasks nosuch: ", marks=pytest.mark.slow),
    ],
)
def test_mistakes_are_said(tasks, random_run, capsys, options, message):
    where = ["--checkpoint", str(random_run), "--include-path", str(tasks)]
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "tasks", *where, *options])
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert stopped.value.code == 2 and said.startswith("error: ") and message in said


def test_without_the_harness_the_command_says_what_to_install(random_run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "tasks", "--checkpoint", str(random_run), "--tasks", "lambada"])
    assert stopped.value.code == 2
    assert f"pip install lm-eval=={eval_tasks.VERSION}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_harnesss_own_command_knows_the_model(tasks, random_run, monkeypatch, capsys):
    """It reads its 14,000 task files first."""
    words = (
        f"lm_eval --model lomdm --model_args checkpoint={random_run},draws=4 --tasks rolling --include_path"
    )
    monkeypatch.setattr(sys, "argv", [*words.split(), str(tasks)])
    eval_tasks._lm_eval()
    assert "|word_perplexity|" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*words.replace("draws", "drawz").split(), str(tasks)])
    with pytest.raises(SystemExit) as stopped:
        eval_tasks._lm_eval()
    assert stopped.value.code == 2 and "model_args drawz: there are checkpoint" in capsys.readouterr().err
