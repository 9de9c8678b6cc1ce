"""Classes of tokens: as those of the words they are parts of, whatever the tokenizer."""

from itertools import pairwise

import pytest

from lomdm_dist.data.tokenizer import encode, train_tokenizer
from lomdm_dist.errors import UserError
from lomdm_dist.evaluate import speech
from lomdm_dist.evaluate.speech import CLASSES, WORD, find_tagger, speech_class, tag_tokens, token_spans

TEXT = "The quick fox doesn't sleep. It's in a house of “Zürich” 日本, and must see the 3.5 dogs!"
KINDS = ("bpe", "wordpiece")


@pytest.fixture(scope="module")
def tokenizers():
    return {"bpe": train_tokenizer("bpe", iter([TEXT]), 262), "wordpiece": wordpiece()}


def wordpiece():
    return train_tokenizer("wordpiece", iter([TEXT.lower()] * 3), 60)


@pytest.fixture
def by_length(monkeypatch):
    """A tagger that any word can be checked against: long words are nouns, those of two letters IN."""

    def tag(words):
        return ["NN" if len(word) > 4 else "IN" if len(word) == 2 else "VB" for word in words]

    monkeypatch.setattr(speech, "find_tagger", lambda name: speech.Tagger("by length", tag))
    return tag


@pytest.mark.parametrize("kind", KINDS)
def test_spans_cut_the_text_into_its_tokens(kind, tokenizers):
    tokenizer = tokenizers[kind]
    ids = encode(tokenizer, [TEXT])[0]
    text, spans = token_spans(tokenizer, ids)
    assert text == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(text[start:end] for start, end in spans) == text
    assert all(a[1] == b[0] for a, b in pairwise(spans))


def test_bytes_that_make_no_letter_break_nothing(tokenizers, by_length):
    tokenizer = tokenizers["bpe"]
    ids = [k % 259 + 3 for k in range(0, 2000, 7)]
    assert len(tag_tokens(tokenizer, ids)) == len(ids)
    assert tag_tokens(tokenizer, []) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_class_of_its_word(kind, tokenizers, by_length):
    tokenizer = tokenizers[kind]
    ids = encode(tokenizer, [TEXT])[0]
    text, spans = token_spans(tokenizer, ids)
    class_of = ["other"] * len(text)
    for word in WORD.finditer(text):
        found = speech_class(word[0], by_length([word[0]])[0])
        class_of[word.start() : word.end()] = [found] * len(word[0])
    for (start, end), found in zip(spans, tag_tokens(tokenizer, ids), strict=True):
        end = max(end, start + 1)  # of a letter's bytes the last token has it, the others stand before it
        inside = {class_of[k] for k in range(start, end) if not text[k].isspace()}
        assert found in (inside or {"other"}), text[start:end]


def test_a_special_token_is_other_and_ends_a_sentence(tokenizers, monkeypatch):
    tokenizer, sentences = tokenizers["bpe"], []

    def tag(words):
        sentences.append(words)
        return ["NN"] * len(words)

    monkeypatch.setattr(speech, "find_tagger", lambda name: speech.Tagger("nouns", tag))
    ids = [*encode(tokenizer, ["a fox"])[0], tokenizer.eos_token_id, *encode(tokenizer, ["the dogs"])[0]]
    classes = tag_tokens(tokenizer, ids)
    assert sentences == [["a", "fox", "."], ["the", "dogs"]]
    assert classes[ids.index(tokenizer.eos_token_id)] == "other" and classes[0] == "noun"


def test_words_are_those_of_the_penn_treebank():
    words = [word[0] for word in WORD.finditer("Doesn't it's we'll well-known 1,000.5 can't end.")]
    expected = "Does n't it 's we 'll well-known 1,000.5 ca n't end ."
    assert words == expected.split()


def test_the_rule():
    rows = {
        "noun": [("dogs", "NNS"), ("Rome", "NNP")],
        "verb": [("ran", "VBD"), ("must", "MD")],
        "article": [("The", "DT"), ("an", "DT")],
        "preposition": [("of", "IN"), ("to", "TO")],
        "other": [("this", "DT"), ("red", "JJ"), ("|", "NN"), ("he", "PRP")],
    }
    assert tuple(rows) == CLASSES
    for expected, words in rows.items():
        assert {speech_class(*word) for word in words} == {expected}


@pytest.mark.parametrize("name", ["spacy", "nltk", "textblob"])
def test_the_taggers_know_a_plain_sentence(name, tokenizers):
    try:
        find_tagger(name)
    except UserError as missing:
        pytest.skip(str(missing))
    tokenizer = tokenizers["bpe"]
    words = ["The", " dogs", " saw", " a", " house", " in", " Rome", "."]
    pieces = [encode(tokenizer, [word])[0] for word in words]
    classes = iter(tag_tokens(tokenizer, [k for piece in pieces for k in piece], name))
    of_words = [[next(classes) for _ in piece][-1] for piece in pieces]
    expected = ["article", "noun", "verb", "article", "noun", "preposition", "noun", "other"]
    assert of_words == expected


def test_without_a_tagger_the_ways_to_get_one_are_said(monkeypatch):
    def absent():
        raise ImportError

    ways = {name: (absent, how) for name, (_, how) in speech.TAGGERS.items()}
    monkeypatch.setattr(speech, "TAGGERS", ways)
    with pytest.raises(UserError, match=r"no tagger is installed: pip install spacy .*; or .*textblob"):
        find_tagger.__wrapped__()
    with pytest.raises(UserError, match="tagger nltk is not installed: pip install nltk"):
        find_tagger.__wrapped__("nltk")
