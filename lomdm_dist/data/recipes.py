"""The field's data sets by name, for `lomdm prepare NAME`: which files, which split, how they become text.

A recipe reads the original distribution, the same records as JSON lines or Parquet, or the hub, and
gives the same documents for all three. The detokenisers are those that the published perplexities of
SEDD, MDLM and their successors stand on; odd rules are kept, since other text has another perplexity.
"""

import csv
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lomdm_dist.data.documents import (
    COMPRESSED,
    Meter,
    field_of,
    lines,
    read_hub,
    read_jsonl,
    read_parquet,
    read_tar,
)
from lomdm_dist.errors import UserError


@dataclass(frozen=True)
class Split:
    files: str  # a regular expression for the whole name of a file
    hub: str  # NAME:SPLIT
    official: str  # what the field calls it
    hub_config: str | None = None
    example: str = ""  # a name that `files` matches, for messages


@dataclass(frozen=True)
class Recipe:
    """`original` reads the records of a file of the original distribution, `documents` cleans records."""

    about: str
    tokenizer: str
    length: int
    splits: dict[str, Split]  # by the name of the folder that will be made
    default: tuple[str, ...]
    original: Callable[[Path, Meter], Iterable[str]]
    documents: Callable[[Iterable[str]], Iterator[str]]
    field: str = "text"  # of records in JSON lines, in Parquet and on the hub
    # the last so many documents of `train` are `valid`; the two then name the same files, and the caller cuts
    valid_from_the_end: int = 0


# Detokenisers. Each is a list of (find, replacement), applied in order; find is plain text or a pattern.


def _apply(rules, text: str) -> str:
    for find, replacement in rules:
        text = text.replace(find, replacement) if isinstance(find, str) else find.sub(replacement, text)
    return text


_LM1B = [
    ("http : / / ", "http://"),
    ("https : / / ", "https://"),
    (re.compile(r" '(\w+)"), r"'\1"),
    (re.compile(r" (\w+) \. "), r" \1. "),
    (re.compile(r" (\w+) \.$"), r" \1."),
    (" ? ", "? "),
    (re.compile(r" \?$"), "?"),
    (" ! ", "! "),
    (re.compile(r" !$"), "!"),
    *[(f" {mark} ", f"{mark} ") for mark in ",:;"],
    (" / ", "/"),
    (re.compile('" ([^"]+) "'), r'"\1"'),
    (re.compile("' ([^']+) '"), r"'\1'"),
    (re.compile(r"\( ([^()]+) \)"), r"(\1)"),
    (re.compile(r"\[ ([^][]+) \]"), r"[\1]"),
    ("$ ", "$"),
    ("£ ", "£"),
]

# One rule of the field's is left out: it looks for a slash, an apostrophe, a digit and a slash in a row,
# which no text has, and would put its own pattern in the digit's place.
_WIKITEXT = [
    ("s '", "s'"),
    *[(f" @{mark}@ ", mark) for mark in "-,."],
    *[(f" {mark} ", f"{mark} ") for mark in ":;.!?,"],
    *[
        (re.compile(rf"(\{opening})([^\{closing}]*+)(\{closing})"), lambda m: m[1] + m[2].strip() + m[3])
        for opening, closing in ("()", "[]", "{}", '""', "''")
    ],
    *[(" ".join("=" * n), "=" * n) for n in (4, 3, 2)],
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]

_PTB = [
    (" 's", "'s"),
    ("s ' ", "s' "),
    (" n't", "n't"),
    ("\\/", "/"),
    (re.compile(" N(?= )"), " 1"),
    ("$ 1", "$1"),
    ("# 1", "#1"),
    ("<unk>", "?"),
]


def detokenise_lm1b(sentence: str) -> str:
    return _apply(_LM1B, sentence)


def detokenise_wikitext(text: str) -> str:
    return _apply(_WIKITEXT, text)


def detokenise_ptb(sentence: str) -> str:
    """The corpus has N for every number and <unk> for every rare word: they become 1 and ?."""
    return _apply(_PTB, sentence)


def detokenise_paper(text: str) -> str:
    return detokenise_lm1b(detokenise_wikitext(text))


def plain_quotes(passage: str) -> str:
    return passage.replace("“", '"').replace("”", '"').strip()


def plain_page(page: str) -> str:
    """A page of OpenWebText as the hub has it: no more than one blank line in a row."""
    return re.sub("\n{3,}", "\n\n", page).strip()


_TITLE = re.compile(r"= [^=\s](.*[^=\s])? =")  # of an article; sections have more of the signs


def articles(records: Iterable[str]) -> Iterator[str]:
    """WikiText's lines as articles, one for each title; what stands before the first title is one too.

    A title stands between blank lines: formulas broken over lines can look like one (with this rule
    WikiText-2 has its official 600, 60 and 60 articles, without it 629, 60 and 62). Every line is
    detokenised by itself and blank ones go, as in the field's evaluation, so that the articles in a
    row are its text, character for character; and a stray quote spoils one line, no more.
    """
    article, before = [], ""
    for record, after in itertools.pairwise(itertools.chain(records, [""])):
        line = record.strip()
        if article and _TITLE.fullmatch(line) and not before and not after.strip():
            yield "".join(article)
            article = []
        if line:
            article.append(detokenise_wikitext(record))
        before = line
    if article:
        yield "".join(article)


# Readers: the records of one file.


def _sentences(path: Path, meter: Meter) -> Iterator[str]:
    return (line.strip() for line in lines(path, meter))


def _json_records(path: Path, meter: Meter, field: str) -> Iterator[str]:
    return (_text_of(record, field, where) for record, where in read_jsonl(path, meter))


def _text_of(record, field: str, where: str) -> str:
    """A record's text. The original of the scientific papers has a list of sentences in its place."""
    if field != "article" or not isinstance(record, dict) or "article_text" not in record:
        return field_of(record, field, where)
    sentences = record["article_text"]
    if not isinstance(sentences, list) or not all(isinstance(s, str) for s in sentences):
        raise UserError(f"{where}: field 'article_text' is not a list of sentences")
    return "\n".join(sentences)


def _news_rows(path: Path, meter: Meter) -> Iterator[str]:
    """AG News: rows of class, title and description, all quoted; a row may go over several lines."""
    rows = csv.reader(lines(path, meter), skipinitialspace=True, strict=True)
    start = 1
    try:
        for row in rows:
            header = start == 1 and len(row) == 3 and not row[0].isdigit()  # which some copies have
            if row and not header:
                yield _story(row, f"{path} line {start}")
            start = rows.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}: the row that begins at line {start} is not CSV: {error}") from None


def _story(row: list[str], where: str) -> str:
    if len(row) != 3 or not row[0].isdigit():
        raise UserError(
            f"{where} is not class, title and description but {len(row)} columns that begin with "
            f"{row[0][:20]!r}; give the original train.csv or test.csv of AG News"
        )
    return f"{row[1]} {row[2]}"


def _records(recipe: Recipe, path: Path, meter: Meter) -> Iterable[str]:
    kind = next((s for s in reversed(path.suffixes) if s.lower() not in COMPRESSED), "").lower()
    if kind == ".parquet":
        return read_parquet(path, meter, recipe.field)
    if kind in (".jsonl", ".json"):
        return _json_records(path, meter, recipe.field)
    return recipe.original(path, meter)


# The recipes.


def _split(original: str, example: str, hub: str, config: str | None = None, official: str = "") -> Split:
    """A split whose files are named as in the original, or as on the hub: SPLIT-anything.parquet."""
    hub_split = hub.partition(":")[2]
    names = rf"({original}|{hub_split}([-_.].*)?\.(parquet|jsonl?))(\.gz|\.zst|\.bz2)?"
    return Split(names, hub, official or hub_split, config, example)


def _three(hub: str, config: str, *names: str, valid: str = "valid") -> dict[str, Split]:
    """Train, valid and test; `names` of their files in the original have {} for train, `valid` or test."""
    splits = {}
    for split, file, there in (
        ("train", "train", "train"),
        ("valid", valid, "validation"),
        ("test", "test", "test"),
    ):
        files = [name.format(file) for name in names]
        splits[split] = _split("|".join(map(re.escape, files)), files[0], f"{hub}:{there}", config)
    return splits


def _zero_shot(about: str, splits: dict[str, Split], original, documents, field: str = "text") -> Recipe:
    """Evaluated by models of OpenWebText, hence with their tokenizer and length."""
    default = ("valid",) if "valid" in splits else ("test",)
    return Recipe(
        f"{about}, for zero-shot evaluation", "gpt2", 1024, splits, default, original, documents, field
    )


def _papers(name: str) -> Recipe:
    return _zero_shot(
        f"scientific papers, {name}: an article a document",
        _three("armanc/scientific_papers", name, "{}.txt", valid="val"),
        partial(_json_records, field="article"),
        partial(map, detokenise_paper),
        field="article",
    )


_LM1B_HUB, _OWT_HUB = "billion-word-benchmark/lm1b", "Skylion007/openwebtext"

RECIPES = {
    "lm1b": Recipe(
        "One Billion Word benchmark: news, a sentence a document",
        tokenizer="bert-base-uncased",
        length=128,
        splits={
            # Part 00000 of the hundred is no training text: it is the held-out text in one piece.
            "train": _split(
                r"news\.en-(?!00000)\d{5}-of-00100",
                "news.en-00001-of-00100",
                f"{_LM1B_HUB}:train",
                "plain_text",
            ),
            "valid": _split(
                r"news\.en\.heldout-\d{5}-of-00050",
                "news.en.heldout-00000-of-00050",
                f"{_LM1B_HUB}:test",
                "plain_text",
            ),
        },
        default=("train", "valid"),
        original=_sentences,
        documents=partial(map, detokenise_lm1b),
    ),
    "owt": Recipe(
        "OpenWebText: web pages; the last 100,000 are the validation split",
        tokenizer="gpt2",
        length=1024,
        splits={
            split: _split(
                r"urlsf_subset.*_data\.xz",
                "urlsf_subset00-1_data.xz",
                f"{_OWT_HUB}:train",
                official=official,
            )
            for split, official in (("train", "train[:-100000]"), ("valid", "train[-100000:]"))
        },
        default=("train", "valid"),
        original=read_tar,
        documents=partial(map, plain_page),
        valid_from_the_end=100_000,
    ),
    "ptb": _zero_shot(
        "Penn Treebank in Mikolov's form: a sentence a document",
        _three("ptb-text-only/ptb_text_only", "penn_treebank", "ptb.{}.txt"),
        _sentences,
        partial(map, detokenise_ptb),
        field="sentence",
    ),
    "wikitext": _zero_shot(
        "WikiText-103 (or -2): an article a document",
        _three("Salesforce/wikitext", "wikitext-103-raw-v1", "wiki.{}.raw", "wiki.{}.tokens"),
        lines,
        articles,
    ),
    "lambada": _zero_shot(
        "LAMBADA in OpenAI's form: a passage a document",
        {
            "test": _split(
                r"lambada_test\.jsonl", "lambada_test.jsonl", "EleutherAI/lambada_openai:test", "default"
            )
        },
        partial(_json_records, field="text"),
        partial(map, plain_quotes),
    ),
    "ag_news": _zero_shot(
        "AG News: title and description of a story a document",
        {
            split: _split(rf"{split}\.csv", f"{split}.csv", f"fancyzhx/ag_news:{split}")
            for split in ("train", "test")
        },
        _news_rows,
        iter,
    ),
    "pubmed": _papers("pubmed"),
    "arxiv": _papers("arxiv"),
}


def read(name: str, split: str, files: list[str] | None, meter: Meter) -> Iterator[str]:
    """Documents of a split, cleaned, from its files in their order, or from the hub where `files` is None.

    Where the recipe has `valid_from_the_end`, either split gives all documents, for the caller to cut.
    Some may be empty. UserError.
    """
    recipe = RECIPES[name]
    if files is None:
        source = recipe.splits[split]
        return recipe.documents(read_hub(source.hub, recipe.field, source.hub_config))
    # one stream: an article of WikiText may go on in the next file
    return recipe.documents(
        itertools.chain.from_iterable(_records(recipe, Path(file), meter) for file in files)
    )


def files_by_split(name: str, splits: Iterable[str], inputs: Iterable[str]) -> dict[str, list[str]]:
    """The files of each asked-for split, none twice, in the order of `inputs`, a folder's by path. UserError.

    A file belongs to the split whose pattern its name matches. A folder is searched recursively; what
    matches no pattern there, or belongs to a split not asked for, is passed over. A file that is
    named itself must be used: any name will do where one split is asked for, unless it is another's.
    """
    recipe, found = RECIPES[name], {split: {} for split in splits}
    for split in found:
        if split not in recipe.splits:
            raise UserError(f"{name} has no split {split!r}; it has {', '.join(recipe.splits)}")
    for given in map(Path, inputs):
        if given.is_dir():
            there = _in_folder(name, found, given)
        elif given.is_file():
            there = {split: [given] for split in _splits_of_named(name, found, given)}
        else:
            raise UserError(f"no input file or folder {given}")
        for split, paths in there.items():
            found[split] |= {os.path.realpath(path): str(path) for path in paths}
    for split, paths in found.items():
        if not paths:
            raise UserError(f"no input is a file of split {split} of {name}; {_names(name, [split])}")
    return {split: list(paths.values()) for split, paths in found.items()}


def _matching(name: str, file: Path) -> list[str]:
    return [s for s, split in RECIPES[name].splits.items() if re.fullmatch(split.files, file.name)]


def _splits_of_named(name: str, asked: Iterable[str], file: Path) -> list[str]:
    """The asked-for splits that a file which the user named belongs to."""
    asked, matching = list(asked), _matching(name, file)
    belongs = [split for split in asked if split in matching]
    if belongs:
        return belongs
    if matching:
        raise UserError(
            f"{file} is named as split {matching[0]} of {name}, asked for is {', '.join(asked)}; "
            f"ask for {matching[0]}, or leave the file out"
        )
    if len({RECIPES[name].splits[split].files for split in asked}) > 1:
        raise UserError(f"{file}: its name does not tell the split of {name}; {_names(name, asked)}")
    return asked


def _in_folder(name: str, asked: Iterable[str], folder: Path) -> dict[str, list[Path]]:
    """The files of each asked-for split below a folder, sorted by path."""
    found = {split: [] for split in asked}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        for split in _matching(name, file):
            if split in found:
                found[split].append(file)
    if not any(found.values()):
        raise UserError(f"{folder} has no file of {name}; {_names(name, found)}")
    for split, files in found.items():
        _check_shards(name, split, files)
    return found


def _check_shards(name: str, split: str, files: list[Path]) -> None:
    """Several files of a split must be parts of one whole, or the same text would be read twice.

    Parts have names that differ, in their numbers only. Two copies, two formats, WikiText-2 beside
    WikiText-103, or PubMed's val.txt beside arXiv's, do not.
    """
    by_name = {}
    for file in files:
        twin = by_name.setdefault(file.name, file)
        stranger = file if _without_numbers(file.name) == _without_numbers(files[0].name) else files[0]
        for other in (twin, stranger):
            if other is not file:
                raise UserError(
                    f"{other} and {file} would both be split {split} of {name}; name the one you mean"
                )


def _without_numbers(name: str) -> str:
    return re.sub(r"-[0-9a-f]{16}|\d+", "#", name)  # hub files may end in a hash


def _names(name: str, splits: Iterable[str]) -> str:
    """How the files of splits are named, in words."""
    parts = []
    for split in splits:
        source = RECIPES[name].splits[split]
        hub = source.hub.partition(":")[2]
        parts.append(f"{split}: {source.example}, {hub}.jsonl or {hub}.parquet")
    return f"expected are names like {'; '.join(parts)}"
