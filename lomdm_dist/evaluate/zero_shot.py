"""The field's zero-shot sets: texts that the model was not trained on, read by their recipes."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from lomdm_dist.data.documents import Meter, clean_unicode
from lomdm_dist.data.recipes import RECIPES, files_by_split, read
from lomdm_dist.data.shards import token_dtype
from lomdm_dist.data.tokenizer import encode
from lomdm_dist.errors import UserError

DOCUMENTS_AT_ONCE = 1024


SPLITS = {  # recipes of `lomdm prepare`, and their splits that the field evaluates on
    "ptb": "valid",
    "wikitext": "valid",  # -2 and -103 have it in common: the same 60 articles
    "lm1b": "valid",  # of the original the test split
    "lambada": "test",
    "ag_news": "test",
    "pubmed": "valid",
    "arxiv": "valid",
}


def find_files(names: list[str], inputs: list[str]) -> dict[str, list[str] | None]:
    """The files of each set among `inputs` (files and folders); None, the hub, for all where there are none.

    A folder is searched for names as the original distribution has them; so is a list of files, unless one
    set alone is asked for, whose files may have any name. Sets that nothing was found of are left out.
    Raises UserError where an input does not exist.
    """
    if not inputs:
        return dict.fromkeys(names)
    for path in map(Path, inputs):
        if not path.exists():
            raise UserError(f"no input file or folder {path}")
    found = {}
    for name in names:
        pattern = RECIPES[name].splits[SPLITS[name]].files
        mine = [
            i for i in inputs if Path(i).is_dir() or len(names) == 1 or re.fullmatch(pattern, Path(i).name)
        ]
        try:
            found[name] = files_by_split(name, [SPLITS[name]], mine)[SPLITS[name]]
        except UserError:
            if len(names) == 1:
                raise
    return found


def encoded_documents(name: str, files: list[str] | None, tokenizer) -> Iterator[np.ndarray]:
    """Token ids of each document of a set, cleaned as its recipe says, without EOS. UserError."""
    texts = (clean_unicode(text) for text in read(name, SPLITS[name], files, Meter()))
    dtype = token_dtype(len(tokenizer))
    kept = (text for text in texts if text and not text.isspace())
    while some := list(islice(kept, DOCUMENTS_AT_ONCE)):
        yield from (np.array(ids, dtype) for ids in encode(tokenizer, some))
