"""Tokenizers: trained here with `tokenizers`, or any that `transformers` loads.

Whatever its source, a tokenizer leaves this module with distinct EOS, mask and pad ids, and with
special tokens in raw text read as plain text: a document that contains "[MASK]" must not corrupt
itself.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lomdm_dist.data.encode import read_plainly
from lomdm_dist.data.shards import TokenizerFacts
from lomdm_dist.errors import UserError, first_line
from lomdm_dist.files import first_link

TRAINED = ("bpe", "wordpiece")
ADVICE = "give bpe or wordpiece to train one, a folder, or a hub name"
EOS, MASK, PAD, UNKNOWN = "<|endoftext|>", "[MASK]", "[PAD]", "[UNK]"


def train_tokenizer(kind: str, documents: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level `bpe` or a lower-casing `wordpiece` tokenizer of exactly `vocab_size` ids."""
    if kind == "bpe":
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        specials = {"eos_token": EOS, "mask_token": MASK, "pad_token": PAD}
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(specials.values()),
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    else:
        model = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token=UNKNOWN))
        model.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
        model.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        model.decoder = tokenizers.decoders.WordPiece()
        specials = {"eos_token": EOS, "mask_token": MASK, "pad_token": PAD, "unk_token": UNKNOWN}
        trainer = tokenizers.trainers.WordPieceTrainer(
            vocab_size=vocab_size, special_tokens=list(specials.values()), show_progress=False
        )
    model.train_from_iterator(documents, trainer)
    if model.get_vocab_size() != vocab_size:
        least = f"; {kind} needs at least {256 + len(specials)}" if kind == "bpe" else ""
        raise UserError(
            f"--vocab-size {vocab_size}: this text makes {model.get_vocab_size()} {kind} tokens{least}"
        )
    return PreTrainedTokenizerFast(tokenizer_object=model, **specials)


def load_tokenizer(name: str | Path, advice: str = ADVICE) -> PreTrainedTokenizerFast:
    """Load from a folder or the hub, and give it the EOS and mask tokens it lacks. UserError, with advice.

    Code that it brings is never run, and neither that nor a chat template, a program too, is saved with it.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name), use_fast=True, trust_remote_code=False)
    except Exception as error:  # the library raises many kinds; each means: not a tokenizer we can load
        raise UserError(f"cannot load tokenizer {name}: {first_line(error)}; {advice}") from None
    if not tokenizer.is_fast:
        raise UserError(f"tokenizer {name} has no fast form; save it once with tokenizer.json")
    tokenizer.chat_template = None
    tokenizer.init_kwargs.pop("auto_map", None)
    if tokenizer.eos_token_id is None:
        # BERT's end of a piece is [SEP]
        tokenizer.add_special_tokens({"eos_token": tokenizer.sep_token or EOS})
    if tokenizer.mask_token_id is None:
        tokenizer.add_special_tokens({"mask_token": MASK})
    if tokenizer.mask_token_id == tokenizer.eos_token_id:
        raise UserError(f"tokenizer {name} uses one id for its EOS and its mask token; they must differ")
    return tokenizer


def bos_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """What begins a piece where one does: BOS, else BERT's [CLS], else EOS, which is GPT-2's BOS too."""
    ids = (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id)
    return next(found for found in ids if found is not None)


def ensure_pad(tokenizer: PreTrainedTokenizerFast) -> None:
    """Padded sequences need a pad id that is neither EOS nor mask: padding is not text."""
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id, tokenizer.mask_token_id):
        tokenizer.add_special_tokens({"pad_token": PAD})


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> list[list[int]]:
    """Token ids of each document, no special token added, none recognised in the text."""
    backend = read_plainly(tokenizer.backend_tokenizer)
    return [e.ids for e in backend.encode_batch_fast(documents, add_special_tokens=False)]


def encode_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids of a text in which the mask token stands for a token to fill; other special tokens are text.

    One space before a mask belongs to the token that fills it, as in the tokens of running text.
    Raises UserError where the text is none.
    """
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UserError("the prompt is not UTF-8 text")
    *before, last = text.split(tokenizer.mask_token)
    ids = []
    for piece in encode(tokenizer, [piece.removesuffix(" ") for piece in before]):
        ids += [*piece, tokenizer.mask_token_id]
    return ids + encode(tokenizer, [last])[0]


def not_text(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> tuple[int, ...]:
    """Ids that never are text: padding, and those below vocab_size that no token has."""
    pad = {tokenizer.pad_token_id} - {None, tokenizer.eos_token_id}
    return tuple(sorted(pad | (set(range(vocab_size)) - set(tokenizer.get_vocab().values()))))


def open_tokenizer(folder: Path, expected: TokenizerFacts) -> PreTrainedTokenizerFast:
    """Load a tokenizer that shards or a checkpoint were made with, and no other. Raises UserError."""
    if link := first_link(folder):
        raise UserError(f"the tokenizer file {link} is a link: put the file itself there")
    again = "put the right one back, or prepare the data again"
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder / 'tokenizer.json'} is missing: {again}")
    tokenizer = load_tokenizer(folder, again)
    if describe(tokenizer) != expected:
        raise UserError(f"the tokenizer in {folder} is not the one that was recorded there: {again}")
    return tokenizer


def describe(tokenizer: PreTrainedTokenizerFast) -> TokenizerFacts:
    """What a manifest and a checkpoint record. The vocabulary counts ids that no token has, too."""
    definition = tokenizer.backend_tokenizer.to_str().encode()
    return TokenizerFacts(
        sha256=hashlib.sha256(definition).hexdigest(),
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        eos_id=tokenizer.eos_token_id,
        mask_id=tokenizer.mask_token_id,
        pad_id=tokenizer.pad_token_id,
    )
