"""How a text came about, as data for a page and a picture; and the page: one file, no network.

A model's trajectory is a plain dict, which the page gets as JSON:

    label, about   what is sampled, and from where
    steps          of it; given tokens are of step 0
    samples        one dict a text: `pieces` [L] of its tokens, `revealed_at` [L], `exponents` [L] and
                   `classes` [L] or None, `bytes`: of the tokens that are no whole characters
    reasons        why `exponents` or `classes` are None
"""

import json
import math
import re
from importlib.resources import files
from itertools import accumulate, pairwise

from transformers.convert_slow_tokenizer import bytes_to_unicode

from lomdm_dist.sample.ancestral import Samples

SHORT = 32  # tokens; of longer texts each half is cut by itself, or the time would grow with the square
LONGEST_CHARACTER = 4  # bytes of UTF-8, hence tokens
BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}
NO_EXPONENTS = "the schedule has no exponents"


def trajectory(
    samples: Samples,
    tokenizer,
    label: str,
    about: str = "",
    classes: list[list[str]] | None = None,
    no_classes: str = "not asked for",
) -> dict:
    """The trajectory of one model. classes: part of speech of each token of each text, [N][L]."""
    texts = []
    for i, ids in enumerate(samples.token_ids.tolist()):
        parts = pieces(tokenizer, ids)
        exponents = None if samples.exponents is None else samples.exponents[i].tolist()
        texts.append(
            {
                "pieces": parts,
                "revealed_at": samples.revealed_at[i].tolist(),
                "exponents": exponents and [None if math.isnan(e) else round(e, 4) for e in exponents],
                "classes": classes and classes[i],
                "bytes": {
                    n: spell(tokenizer.convert_ids_to_tokens(ids[n]))
                    for n, part in enumerate(parts)
                    if not part.strip("\N{REPLACEMENT CHARACTER}")
                },
            }
        )
    reasons = {"exponents": NO_EXPONENTS, "classes": no_classes}
    return {"label": label, "about": about, "steps": samples.steps, "samples": texts, "reasons": reasons}


def pieces(tokenizer, ids: list[int]) -> list[str]:
    """What each token adds to the text: joined, they are tokenizer.decode(ids), letter for letter.

    A character whose bytes are spread over tokens belongs to the last of them; the others are empty.
    """
    if not ids:
        return []
    whole = tokenizer.decode(ids)
    if len(ids) > SHORT:
        for cut in range(len(ids) // 2, len(ids) // 2 + LONGEST_CHARACTER):
            left, right = ids[:cut], ids[cut:]
            if tokenizer.decode(left) + tokenizer.decode(right) == whole:
                return pieces(tokenizer, left) + pieces(tokenizer, right)
    known = (_agree(whole, tokenizer.decode(ids[:n])) for n in range(1, len(ids)))
    ends = [0, *accumulate(known, max), len(whole)]
    return [whole[start:end] for start, end in pairwise(ends)]


def _agree(one: str, other: str) -> int:
    """Letters that two texts have in common from their beginning on."""
    differ = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def spell(token: str) -> str:
    """Bytes of a token of a byte-level vocabulary, in hexadecimal; another token's own name."""
    if fallback := re.fullmatch("<0x([0-9A-F]{2})>", token):  # of SentencePiece
        return fallback[1]
    if all(letter in BYTE_OF for letter in token):
        return " ".join(f"{BYTE_OF[letter]:02X}" for letter in token)
    return token


def page(models: list[dict], title: str) -> str:
    """The HTML page that shows trajectories side by side. Texts may hold anything, `</script>` too."""
    data = json.dumps({"title": title, "models": models}, allow_nan=False).replace("<", "\\u003c")
    template = files("lomdm_dist.sample").joinpath("trajectory.html").read_text(encoding="utf-8")
    return template.replace("{{data}}", data)
