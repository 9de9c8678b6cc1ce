"""Part of speech of each token of a text, by a tagger that is installed: spaCy's, NLTK's or TextBlob's.

Taggers speak of words, models of tokens: a token has the class of the word that it is a part of.
"""

import functools
import re
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import NamedTuple

from lomdm_dist.errors import UserError
from lomdm_dist.sample.trajectory import pieces

CLASSES = ("noun", "verb", "article", "preposition", "other")
RULE = "noun NN*; verb VB*, MD; article DT of a, an, the; preposition IN, TO; other all else, and signs"
ARTICLES = {"a", "an", "the"}
# Words as the Penn treebank has them: "does" "n't", "it" "'s"; else a sign is a word
WORD = re.compile(r"\w+(?=n't\b)|n't\b|'(?:s|re|ve|ll|d|m)\b|\d+(?:[.,]\d+)+|\w+(?:-\w+)*|[^\w\s]", re.I)
SENTENCE_ENDS = {".", "!", "?"}


def speech_class(word: str, tag: str) -> str:
    """The rule from a Penn tag to a class, all of it; `RULE` in short.

    noun         NN, NNS, NNP, NNPS
    verb         VB, VBD, VBG, VBN, VBP, VBZ; MD ("must")
    article      DT where the word is a, an or the; "this" and "every" are other
    preposition  IN, with the conjunctions it holds ("because", "that"); TO, the infinitive's too
    other        all else; and what has no letter or digit, whatever its tag
    """
    if not any(map(str.isalnum, word)):  # a tagger may take an unknown sign for a noun
        return "other"
    if tag.startswith("NN"):
        return "noun"
    if tag.startswith("VB") or tag == "MD":
        return "verb"
    if tag == "DT" and word.lower() in ARTICLES:
        return "article"
    return "preposition" if tag in ("IN", "TO") else "other"


class Tagger(NamedTuple):
    """`tag` gives the Penn tags of the words of a sentence."""

    name: str
    tag: Callable[[list[str]], list[str]]


def _spacy() -> Tagger:
    import spacy
    from spacy.tokens import Doc

    nlp = spacy.load("en_core_web_sm", exclude=["parser", "ner", "attribute_ruler", "lemmatizer"])
    name = f"spacy {spacy.__version__}, en_core_web_sm {nlp.meta['version']}"
    return Tagger(name, lambda words: [word.tag_ for word in nlp(Doc(nlp.vocab, words=words))])


def _nltk() -> Tagger:
    import nltk

    tagger = nltk.PerceptronTagger()
    return Tagger(
        f"nltk {nltk.__version__}, averaged perceptron", lambda words: [tag for _, tag in tagger.tag(words)]
    )


def _textblob() -> Tagger:
    from importlib.metadata import version

    from textblob.en import parser  # of its PatternTagger, whose lexicon comes with the package

    return Tagger(
        f"textblob {version('textblob')}, PatternTagger",
        lambda words: [tag for _, tag in parser.find_tags(words)],
    )


TAGGERS = {  # the best first: how to load it, how to get it
    "spacy": (_spacy, "pip install spacy && python -m spacy download en_core_web_sm"),
    "nltk": (_nltk, "pip install nltk && python -m nltk.downloader averaged_perceptron_tagger_eng"),
    "textblob": (_textblob, "pip install textblob"),
}


@functools.cache
def find_tagger(name: str | None = None) -> Tagger:
    """The tagger of this name, or the first of `TAGGERS` that is installed with its data. UserError."""
    for load, _ in [TAGGERS[name]] if name else TAGGERS.values():
        try:
            return load()
        except (ImportError, OSError, LookupError):  # no package; no data of it (spaCy's, NLTK's error)
            continue
    if name:
        raise UserError(f"tagger {name} is not installed: {TAGGERS[name][1]}")
    raise UserError(f"no tagger is installed: {'; or '.join(how for _, how in TAGGERS.values())}")


def tag_tokens(tokenizer, ids: list[int], tagger: str | None = None) -> list[str]:
    """The class of each of a text's tokens, one of `CLASSES`; special tokens are other.

    tokenizer: a fast one of `transformers`; tagger: a name in `TAGGERS`, by default the first that is
    installed. Raises UserError where none is.
    """
    text, spans = token_spans(tokenizer, ids)
    special = set(tokenizer.all_special_ids)
    for token, (start, end) in zip(ids, spans, strict=True):
        if token in special:  # it ends a sentence
            text = text[:start] + "."[: end - start].ljust(end - start) + text[end:]
    words = tag_words(text, find_tagger(tagger))
    classes, k = [], 0
    for start, end in spans:
        while k < len(words) and words[k][1] <= start:
            k += 1
        inside = k < len(words) and words[k][0] < max(end, start + 1)
        classes.append(words[k][2] if inside else "other")
    return classes


def token_spans(tokenizer, ids: list[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text of ids, and where in it each token's part begins and ends."""
    parts = pieces(tokenizer, ids)
    ends = [0, *accumulate(map(len, parts))]
    return "".join(parts), list(pairwise(ends))


def tag_words(text: str, tagger: Tagger) -> list[tuple[int, int, str]]:
    """Begin, end and class of each word, in their order. Sentences end at . ! and ?."""
    words, sentence = [], []

    def finish() -> None:
        for word, tag in zip(sentence, tagger.tag([word[0] for word in sentence]), strict=True):
            words.append((word.start(), word.end(), speech_class(word[0], tag)))
        sentence.clear()

    for word in WORD.finditer(text):
        sentence.append(word)
        if word[0] in SENTENCE_ENDS:
            finish()
    if sentence:
        finish()
    return words
