import dataclasses
import io
import json
import lzma
import re
import tarfile

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from lomdm_dist.data import recipes
from lomdm_dist.data.documents import Meter
from lomdm_dist.data.prepare import Request, prepare
from lomdm_dist.data.recipes import RECIPES, files_by_split, read
from lomdm_dist.errors import UserError

# Twenty documents of each kind, written for this test in the form of the original distribution.

LM1B = """\
The council voted on Tuesday to close two schools .
" We were not surprised , " said Ms. Adeyemi , who teaches there .
Shares of the airline fell 4.2 percent , to $ 31.07 .
Is anyone still listening ?
What a night !
The minister ( who resigned in May ) could not be reached .
It 's the third fire this year , and the city 's worst .
See http : / / www.example.org / news for the full list .
He paid £ 40 for the ticket .
The score was 3 : 2 ; nobody complained .
They call it ' the long mile ' in the village .
" Why ? " she asked .
Rain is expected in the north , west and east [ see map ] .
The 24 / 7 hotline opened in 2004 .
Mr. Ortiz said : " No comment . "
A total of 1,204 people voted .
The players ' union rejected the offer .
You can 't miss it .
Oil rose again .
Police found nothing , and left
"""
LM1B_WORDS = [9, 10, 10, 4, 3, 10, 10, 6, 6, 7, 9, 3, 12, 6, 5, 6, 7, 4, 3, 5]

PTB = """\
no one expected the index to fall N points
mr. <unk> said the bank 's profit rose N N to $ N million
it is n't clear who will buy the N shares
traders ' bids were $ N each
the company does n't comment on <unk>
a spokesman could n't be reached
sales fell N N in the third quarter
the new rate is N N N of the old
analysts say the market 's mood is grim
the plant employs N people in <unk> ohio
bonds due N were quoted at N \\/ N
they paid # N for the paintings
its net was $ N a share
we ca n't wait said the chairman
the board meets on oct. N
the unit makes <unk> and <unk>
london 's trading was thin
prices had risen N N to N N
gold was at $ N an ounce up N cents
nobody asked
"""
PTB_WORDS = [9, 12, 9, 5, 6, 5, 8, 10, 7, 8, 9, 6, 6, 6, 6, 6, 4, 8, 9, 2]


def wiki_article(title: str, number: int) -> list[str]:
    """Lines of one article as WikiText writes it: a title, a paragraph, a section, a paragraph."""
    return [
        " \n",
        f" = {title} = \n",
        " \n",
        f" {title} is a village of {number} people . It lies 2 @.@ 5 km ( 1 @.@ 6 mi ) from the coast . \n",
        " \n",
        " = = History = = \n",
        " \n",
        f' The village \'s church , " Old Tower " , was built in the 12th century by 1 @,@ {number} men . \n',
        " = = = Well @-@ known people = = = \n",
        " \n",
    ]


TITLES = [f"Nether Wallop {letter}" for letter in "ABCDEFGHIJKLMNOPQRST"]
WIKITEXT_WORDS = [5 + 18 + 3 + 14 + 4] * 20  # line by line

LAMBADA = [
    f"“Is it number {i}?” she asked. The clerk looked up, and said, “No.\n\nTry {i + 1}" for i in range(20)
]
LAMBADA_WORDS = [15] * 20

NEWS = [
    (3, "Fears for T N pension after talks", "Unions representing workers say they are disappointed."),
    (4, "The Race is On", 'A team in Toronto, ""undaunted"", wants to fly.'),
    (4, "Ky. Company Wins Grant", "A company founded by a chemist\\, near Louisville, won a grant."),
    *((1 + i % 4, f"Story number {i}", f"The story, told in {i} words; it ends here.") for i in range(17)),
]
NEWS_WORDS = [7 + 7, 4 + 8, 4 + 11, *[3 + 9] * 17]

PAPERS = [
    [
        f"we study {i} patients ( {i} men ) with anemia .",
        "the mean age was 41.2 years ; no patient died .",
        "is this enough ?",
    ]
    for i in range(20)
]
PAPER_WORDS = [9 + 10 + 3] * 20  # the full stop before a newline stays a word

PAGES = [f"Page {i}\n\n\n\nFirst line of page {i}.\nSecond line.\n\n\nEnd.\n\n" for i in range(20)]
PAGE_WORDS = [2 + 5 + 2 + 1] * 20


def write_tar(path, pages: list[bytes]) -> None:
    with tarfile.open(path, "w:xz") as tar:
        for number, page in enumerate(pages):
            member = tarfile.TarInfo(f"{number:07}-abc.txt")
            member.size = len(page)
            tar.addfile(member, io.BytesIO(page))


def csv_row(kind: int, title: str, description: str) -> str:
    return f'"{kind}","{title}","{description}"\n'


def wikitext() -> list[str]:
    return [line for number, title in enumerate(TITLES, 100) for line in wiki_article(title, number)]


WRITERS = {
    "lm1b": ("news.en.heldout-00000-of-00050", lambda path: path.write_text(LM1B)),
    "ptb": (
        "ptb.valid.txt",  # whose lines begin and end with a space
        lambda path: path.write_text("".join(f" {line} \n" for line in PTB.splitlines())),
    ),
    "wikitext": ("wiki.valid.raw", lambda path: path.write_text("".join(wikitext()))),
    "lambada": (
        "lambada_test.jsonl",
        lambda path: path.write_text("".join(json.dumps({"text": text + " "}) + "\n" for text in LAMBADA)),
    ),
    "ag_news": ("test.csv", lambda path: path.write_text("".join(csv_row(*row) for row in NEWS))),
    "pubmed": (
        "val.txt",
        lambda path: path.write_text(
            "".join(json.dumps({"article_id": "1", "article_text": p}) + "\n" for p in PAPERS)
        ),
    ),
    "owt": ("urlsf_subset00-1_data.xz", lambda path: write_tar(path, [page.encode() for page in PAGES])),
}


def made(name: str, folder) -> str:
    file, write = WRITERS[name]
    write(folder / file)
    return str(folder / file)


def split_of(name: str) -> str:
    return "valid" if "valid" in RECIPES[name].splits else "test"


def documents(name: str, files) -> list[str]:
    return list(read(name, split_of(name), files, Meter()))


WORDS = {
    "lm1b": LM1B_WORDS,
    "ptb": PTB_WORDS,
    "wikitext": WIKITEXT_WORDS,
    "lambada": LAMBADA_WORDS,
    "ag_news": NEWS_WORDS,
    "pubmed": PAPER_WORDS,
    "owt": PAGE_WORDS,
}

TEXTS = {
    "lm1b": {
        1: '"We were not surprised," said Ms. Adeyemi, who teaches there.',
        2: "Shares of the airline fell 4.2 percent, to $31.07 .",  # no word of letters before the stop
        5: "The minister (who resigned in May) could not be reached.",
        6: "It's the third fire this year, and the city's worst.",
        7: "See http://www.example.org/news for the full list.",
        8: "He paid £40 for the ticket.",
        9: "The score was 3: 2; nobody complained.",
        10: "They call it 'the long mile' in the village.",
        11: '"Why?" she asked.',
        13: "The 24/7 hotline opened in 2004.",
        17: "You can't miss it.",
    },
    "ptb": {
        1: "mr. ? said the bank's profit rose 1 1 to $1 million",
        2: "it isn't clear who will buy the 1 shares",
        3: "traders' bids were $1 each",
        7: "the new rate is 1 1 1 of the old",
        10: "bonds due 1 were quoted at 1 / N",  # the last word stays: no space follows it
        11: "they paid #1 for the paintings",
    },
    "wikitext": {
        3: " = Nether Wallop D =\n"
        " Nether Wallop D is a village of 103 people. It lies 2.5 km (1.6 mi) from the coast.\n"
        " == History ==\n"
        ' The village\'s church, "Old Tower", was built in the 12th century by 1,103 men.\n'
        " === Well-known people ===\n"
    },
    "lambada": {4: '"Is it number 4?" she asked. The clerk looked up, and said, "No.\n\nTry 5'},
    "ag_news": {
        1: 'The Race is On A team in Toronto, "undaunted", wants to fly.',
        2: "Ky. Company Wins Grant A company founded by a chemist\\, near Louisville, won a grant.",
    },
    "pubmed": {
        7: "we study 7 patients (7 men) with anemia .\n"
        "the mean age was 41.2 years; no patient died .\nis this enough?"
    },
    "owt": {5: "Page 5\n\nFirst line of page 5.\nSecond line.\n\nEnd."},
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_original_form_becomes_twenty_clean_documents(name, tmp_path):
    path, meter = made(name, tmp_path), Meter()
    texts = list(read(name, split_of(name), [path], meter))
    assert [len(text.split()) for text in texts] == WORDS[name] and len(texts) == 20
    assert {number: texts[number] for number in TEXTS[name]} == TEXTS[name]
    assert meter.bytes == (tmp_path / WRITERS[name][0]).stat().st_size


@pytest.mark.parametrize("name", WRITERS)
def test_token_counts_of_the_twenty_documents(name, tmp_path, monkeypatch):
    """With a tokenizer of whole words: the words, and EOS after each document."""
    path = made(name, tmp_path)
    words = {word for text in read(name, split_of(name), [path], Meter()) for word in text.split()}
    specials = {"eos_token": "<eos>", "mask_token": "<mask>", "pad_token": "<pad>"}
    vocabulary = {word: i for i, word in enumerate([*specials.values(), *sorted(words)])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=model, **specials).save_pretrained(tmp_path / "words")
    monkeypatch.setitem(RECIPES, "owt", dataclasses.replace(RECIPES["owt"], valid_from_the_end=10))
    splits = ("train", "valid") if name == "owt" else (split_of(name),)
    request = Request((path,), str(tmp_path / "words"), 64, recipe=name, splits=splits, packing="padded")
    totals, _ = prepare(request, tmp_path / "out", workers=1)
    assert (totals["documents"], totals["tokens"]) == (20, sum(WORDS[name]) + 20)


def hub_records(name: str) -> list[dict]:
    """The same twenty documents as the hub's records have them."""
    if name == "wikitext":
        return [{"text": line if line.strip() else ""} for line in wikitext()]
    texts = {
        "lm1b": LM1B.splitlines(),
        "ptb": PTB.splitlines(),
        "lambada": LAMBADA,
        "ag_news": [f"{title} {text}".replace('""', '"') for _, title, text in NEWS],
        "pubmed": ["\n".join(paper) for paper in PAPERS],
        "owt": PAGES,
    }
    return [{RECIPES[name].field: text, "label": 0} for text in texts[name]]


HUB = {
    "lm1b": ("billion-word-benchmark/lm1b", "plain_text", "test"),
    "owt": ("Skylion007/openwebtext", None, "train"),
    "ptb": ("ptb-text-only/ptb_text_only", "penn_treebank", "validation"),
    "wikitext": ("Salesforce/wikitext", "wikitext-103-raw-v1", "validation"),
    "lambada": ("EleutherAI/lambada_openai", "default", "test"),
    "ag_news": ("fancyzhx/ag_news", None, "test"),
    "pubmed": ("armanc/scientific_papers", "pubmed", "validation"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_hub_jsonl_and_parquet_give_the_same_documents(name, tmp_path, monkeypatch):
    import datasets

    records, asked = hub_records(name), []

    def load_dataset(path, config=None, *, split, streaming):
        asked.append((path, config, split))
        assert streaming
        return iter(records)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    expected = documents(name, [made(name, tmp_path)])
    assert documents(name, None) == expected
    assert asked == [HUB[name]]

    # in two files each: an article may lie across them
    files = {kind: [tmp_path / f"part-{i}.{kind}" for i in range(2)] for kind in ("jsonl", "parquet")}
    for i, part in enumerate((records[:33], records[33:])):
        files["jsonl"][i].write_text("".join(json.dumps(record) + "\n" for record in part))
        columns = {key: [record[key] for record in part] for key in records[0]}
        if not part:
            columns = {key: pyarrow.array([], pyarrow.string()) for key in columns}
        pyarrow.parquet.write_table(pyarrow.table(columns), files["parquet"][i])
    for paths in files.values():
        assert documents(name, list(map(str, paths))) == expected


def test_a_hub_data_set_that_is_a_script_is_read_from_its_parquet(monkeypatch):
    import datasets

    def load_dataset(path, config=None, *, split, streaming, **options):
        if not options:
            raise RuntimeError("Dataset scripts are no longer supported, but found scientific_papers.py")
        asked.append((path, config, split, options))
        return iter([{"article": "a ( b )"}])

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(read("arxiv", "valid", None, Meter())) == ["a (b)"]
    files = {"validation": "arxiv/validation/*.parquet"}
    options = {"data_files": files, "revision": "refs/convert/parquet"}
    assert asked == [("armanc/scientific_papers", None, "validation", options)]


def test_only_a_title_between_blank_lines_begins_an_article():
    lines = ["", " = One = \n", "", " inductance L \n", " = 1 henry and capacity C = \n", " 1 farad \n"]
    lines += ["", " = = Part = = \n", "", "", " = A = \n", "", " text \n"]
    assert list(recipes.articles(["", " before \n", *lines])) == [
        " before\n",
        " = One =\n inductance L\n = 1 henry and capacity C =\n 1 farad\n == Part ==\n",
        " = A =\n text\n",
    ]
    assert list(recipes.articles([])) == list(recipes.articles(["", " \n"])) == []


def alphanumeric(text: str) -> str:
    return "".join(filter(str.isalnum, text))


TOKENS = [
    "<unk>",
    "N",
    "n't",
    "'s",
    *"'\"()[]{}=.?!,:;/$£#°\n",
    "@-@",
    "@,@",
    "@.@",
    "http",
    "\\/",
    "42",
    "é",
    "Ärger",
]


@given(st.lists(st.sampled_from(TOKENS) | st.text(max_size=4)).map(" ".join) | st.text())
def test_detokenisers_lose_no_letter_and_no_digit(text):
    """But PTB's <unk> becomes a question mark, and N for a number becomes 1."""
    letters, ones = alphanumeric(text), alphanumeric(text).replace("N", "1")
    assert alphanumeric(recipes.detokenise_lm1b(text)) == letters
    assert alphanumeric(recipes.detokenise_wikitext(text)).replace("N", "1") == ones
    assert alphanumeric(recipes.detokenise_paper(text)).replace("N", "1") == ones
    known = text.replace("<unk>", "?")
    assert alphanumeric(recipes.detokenise_ptb(known)).replace("N", "1") == alphanumeric(known).replace(
        "N", "1"
    )


# Which file is of which split.


def touch(folder, *names: str) -> list[str]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("text\n")
    return [str(folder / name) for name in names]


def test_a_folder_is_searched_and_part_00000_of_lm1b_is_no_training_text(tmp_path):
    train, held = "training-monolingual.tokenized.shuffled/", "heldout-monolingual.tokenized.shuffled/"
    names = [f"{train}news.en-{i:05}-of-00100" for i in (1, 2, 99)]
    names += [f"{held}news.en.heldout-{i:05}-of-00050" for i in (0, 49)]
    paths = touch(tmp_path, *names, f"{held}news.en-00000-of-00100", "README")
    found = files_by_split("lm1b", ("train", "valid"), [str(tmp_path)])
    assert found == {"train": paths[:3], "valid": paths[3:5]}
    # the same folder and a file in it once more: nothing twice
    assert files_by_split("lm1b", ("valid",), [str(tmp_path), paths[3]]) == {"valid": paths[3:5]}


def test_both_splits_of_owt_are_the_same_files(tmp_path):
    paths = touch(tmp_path, "openwebtext/urlsf_subset00-10_data.xz", "openwebtext/urlsf_subset01-2_data.xz")
    assert files_by_split("owt", ("train", "valid"), [str(tmp_path)]) == {"train": paths, "valid": paths}
    (text,) = touch(tmp_path, "mine.jsonl")
    assert files_by_split("owt", ("train", "valid"), [text]) == {"train": [text], "valid": [text]}


def test_any_name_will_do_for_a_single_split(tmp_path):
    mine, valid = touch(tmp_path, "mine.txt", "ptb.valid.txt")
    assert files_by_split("ptb", ("test",), [mine]) == {"test": [mine]}
    with pytest.raises(UserError, match=r"mine.txt: its name does not tell.*ptb.valid.txt"):
        files_by_split("ptb", ("valid", "test"), [valid, mine])
    with pytest.raises(UserError, match=r"ptb.valid.txt is named as split valid of ptb, asked for is test"):
        files_by_split("ptb", ("test",), [valid])


@pytest.mark.parametrize("name", RECIPES)
def test_names_of_every_recipe(name, tmp_path):
    recipe = RECIPES[name]
    assert set(recipe.default) <= set(recipe.splits) and (not recipe.valid_from_the_end) == (name != "owt")
    for split, source in recipe.splits.items():
        hub_split = source.hub.partition(":")[2]
        for file in (
            source.example,
            f"{hub_split}-00000-of-00002-0123456789abcdef.parquet",
            hub_split + ".jsonl.gz",
        ):
            assert re.fullmatch(source.files, file)
            path = touch(tmp_path / split / file, file)
            assert files_by_split(name, (split,), [str(tmp_path / split / file)]) == {split: path}


@pytest.mark.parametrize(
    ("name", "split", "files"),
    [
        ("pubmed", "valid", ("arxiv-dataset/val.txt", "pubmed-dataset/val.txt")),
        ("wikitext", "valid", ("wiki.valid.raw", "wiki.valid.tokens")),
        ("lambada", "test", ("lambada_test.jsonl", "test-00000-of-00001.parquet")),
    ],
)
def test_a_folder_with_the_same_text_twice_is_refused(name, split, files, tmp_path):
    touch(tmp_path, *files)
    with pytest.raises(UserError, match=f"{files[0]} and .*{files[1]} would both be split {split}"):
        files_by_split(name, (split,), [str(tmp_path)])


def test_inputs_that_do_not_fit(tmp_path):
    touch(tmp_path, "ptb.valid.txt", "empty/readme.txt")
    for splits, given_, message in (
        (("valid",), "nowhere", "no input file or folder"),
        (("valid",), "empty", r"empty has no file of ptb; expected .*ptb.valid.txt, validation.jsonl or"),
        (("valid", "test"), ".", r"no input is a file of split test of ptb.*ptb.test.txt"),
        (("dev",), ".", "ptb has no split 'dev'; it has train, valid, test"),
    ):
        with pytest.raises(UserError, match=message):
            files_by_split("ptb", splits, [str(tmp_path / given_)])


# Damage.


def damaged(name: str, file: str, content: bytes, folder) -> str:
    (folder / file).write_bytes(content)
    with pytest.raises(UserError) as error:
        list(read(name, split_of(name), [str(folder / file)], Meter()))
    assert file in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def test_damaged_files_are_named_with_the_line(tmp_path):
    def message(name, file, content):
        return damaged(name, file, content, tmp_path)

    good = b'"3","a","b"\n'
    assert "line 2 is not class, title" in message("ag_news", "test.csv", good + b'"3","a b"\n')
    assert "line 2 is not class, title" in message("ag_news", "test.csv", good + b'"x","a","b"\n')
    assert "begins at line 2 is not CSV" in message("ag_news", "test.csv", good + b'"3","a" b,"c"\n')
    assert "begins at line 3 is not CSV" in message("ag_news", "test.csv", good * 2 + b'"3","a","b\n' + good)
    assert "not UTF-8" in message("ptb", "ptb.valid.txt", b"caf\xe9\n")
    assert "line 1 is not JSON" in message("lambada", "lambada_test.jsonl", b'{"text": "a\n')
    assert "line 2 has no field 'text'" in message(
        "lambada", "lambada_test.jsonl", b'{"text": "a"}\n{"txt": 1}\n'
    )
    assert "line 1 has no field 'article'" in message("pubmed", "val.txt", b'{"abstract": "a"}\n')
    assert "line 1: field 'article_text'" in message("pubmed", "val.txt", b'{"article_text": ["a", 1]}\n')
    assert "line 1 has no field 'article'" in message("pubmed", "val.txt", b"[]\n")


def test_a_first_row_of_column_names_is_no_story(tmp_path):
    (tmp_path / "test.csv").write_text('Class Index,Title,Description\n"3","a","b, c"\n\n"4", "d", "e\nf"\n')
    assert documents("ag_news", [str(tmp_path / "test.csv")]) == ["a b, c", "d e\nf"]


def test_damaged_archives_are_named(tmp_path):
    file = "urlsf_subset00-1_data.xz"
    noise = [bytes(range(32, 127)) * 50 + str(i).encode() * 2000 for i in range(50)]
    write_tar(tmp_path / file, noise)
    whole = (tmp_path / file).read_bytes()
    assert "cannot read archive" in damaged("owt", file, whole[: len(whole) // 2], tmp_path)
    middle = len(whole) // 2
    changed = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    assert "cannot read archive" in damaged("owt", file, changed, tmp_path)
    assert "cannot read archive" in damaged("owt", file, lzma.compress(b"no archive"), tmp_path)
    write_tar(tmp_path / file, [b"fine", b"caf\xe9"])
    assert "0000001-abc.txt is not UTF-8" in damaged("owt", file, (tmp_path / file).read_bytes(), tmp_path)
