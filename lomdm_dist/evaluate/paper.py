"""The paper's numbers, to stand beside ours, where they are marked "paper"."""

# Zero-shot perplexity of models trained on OpenWebText (GPT-2's tokenizer, length 1024); but for AR bounds.
ZERO_SHOT_SETS = ("ptb", "wikitext", "lm1b", "lambada", "ag_news", "pubmed", "arxiv")
ZERO_SHOT = {
    "AR": (82.05, 25.75, 51.25, 51.28, 52.09, 49.01, 41.73),
    "MDLM": (95.26, 32.83, 67.01, 47.52, 61.15, 41.89, 37.37),
    "BD3LM-4": (96.81, 31.31, 60.88, 50.03, 61.67, 42.52, 39.20),
    "LoMDM": (80.40, 27.82, 61.19, 36.32, 53.53, 37.73, 32.88),
}

# Test perplexity; LM1B a sentence a sequence, LM1B packed, OpenWebText. None: not reported.
TEST_SETS = ("LM1B", "LM1B packed", "OWT")
TEST = {
    "AR": (22.3, 22.8, 17.5),
    "SEDD absorb": (32.7, None, 24.1),
    "UDLM": (31.3, 36.7, 27.4),
    "Duo": (29.9, 33.7, 25.2),
    "MDLM": (27.0, 31.8, 23.2),
    "GenMD4": (26.9, 30.0, 21.8),
    "BD3LM-16": (None, 30.6, 22.3),
    "BD3LM-8": (None, 29.8, 21.7),
    "BD3LM-4": (None, 28.2, 20.7),
    "LoMDM": (25.4, 27.2, 20.4),
}

# Generative perplexity, trained on OpenWebText; by number of steps.
GENERATIVE = {
    "judge": "gpt2-large",
    "samples": 256,
    "length": 1024,
    "steps": (128, 256, 512, 1024),
    "rows": (
        {"objective": "mdlm", "c1": None, "c2": None, "gen_ppl": (116.71, 79.43, 55.50, 42.56)},
        {"objective": "lomdm", "c1": 0.7, "c2": 0.65, "gen_ppl": (92.78, 73.98, 48.29, 38.87)},
        {"objective": "lomdm", "c1": 0.7, "c2": 0.0, "gen_ppl": (107.95, 78.05, 59.34, 44.42)},
        {"objective": "lomdm", "c1": 1.0, "c2": 0.0, "gen_ppl": (122.48, 83.68, 59.88, 48.30)},
    ),
}

# Share of a part of speech among newly revealed tokens: 256 samples of length 128 over 128 steps,
# early in steps 1 to 16, late in steps 112 to 128
SPEECH = {
    "MDLM": {
        "early": {"noun": 0.30, "verb": 0.18, "article": 0.10, "preposition": 0.15},
        "late": {"noun": 0.29, "verb": 0.18, "article": 0.09, "preposition": 0.14},
    },
    "LoMDM": {
        "early": {"noun": 0.25, "verb": 0.15, "article": 0.14, "preposition": 0.19},
        "late": {"noun": 0.37, "verb": 0.20, "article": 0.07, "preposition": 0.10},
    },
}


def in_words(row: dict) -> str:
    """The objective of a row of the paper's or of ours, with c1 and c2 where it has them."""
    return row["objective"] + ("" if row["c1"] is None else f" c1={row['c1']:g} c2={row['c2']:g}")
