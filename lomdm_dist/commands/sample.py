"""`lomdm sample`: generate text, and see how it came about."""

import argparse
import contextlib
from pathlib import Path
from typing import NamedTuple

from lomdm_dist.commands.common import check_pace, checkpoint_options, device, length_of, only, positive
from lomdm_dist.errors import UserError
from lomdm_dist.files import check_matplotlib, check_writable, write_atomically

SAMPLER = "how text is drawn: sampler.top_p=0.9 ...; objective.c2=0: without the learned order"
PROMPT = (
    "text that stays; a [MASK] in it, as the tokenizer spells it, is filled; more text follows; may be "
    "repeated, --num sequences for each"
)
BESIDE = "another checkpoint, sampled with the same seed and steps, with changes of its own; may be repeated"
TRAJECTORY = "show how the texts came about: FILE.html, a page, or FILE.png; may be repeated"


def add_options(parser: argparse.ArgumentParser) -> None:
    checkpoint_options(parser)
    parser.add_argument("--num", type=int, default=4, help="sequences (default 4)")
    parser.add_argument("--length", type=int, help="tokens; default and most: the model's")
    parser.add_argument("--steps", type=int, help="steps; default: the length")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    parser.add_argument("--batch", type=int, default=16, help="sequences at once (default 16)")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help=PROMPT)
    parser.add_argument(
        "--trajectory", type=Path, action="append", default=[], metavar="FILE", help=TRAJECTORY
    )
    parser.add_argument(
        "--beside",
        nargs="+",
        action="append",
        default=[],
        metavar=("CHECKPOINT", "objective.key=value"),
        help=BESIDE,
    )
    parser.add_argument(
        "--watch", action="store_true", help="show the first text in the terminal as it grows"
    )
    parser.add_argument("overrides", nargs="*", metavar="sampler.key=value", help=SAMPLER)
    parser.set_defaults(run=_sample)


class _Model(NamedTuple):
    """A checkpoint as the command line names it, opened."""

    path: str
    overrides: list[str]
    checkpoint: "Checkpoint"  # noqa: F821
    tokenizer: "PreTrainedTokenizerFast"  # noqa: F821

    @property
    def config(self):
        return self.checkpoint.config


def _sample(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.parallel.grid import world_size

    if world_size() > 1:
        raise UserError("`lomdm sample` draws in one process: start it without a launcher")

    positive(options, "num", "length", "steps", "batch")
    _check_views(options)
    of_all = [override for override in options.overrides if override.startswith("sampler.")]
    models = [_open(options.checkpoint, options.overrides)]
    models += [_open(path, [*of_all, *overrides]) for path, *overrides in options.beside]
    length = length_of(options, min(model.config.model.length for model in models))
    given = [_starts(model, options, length) for model in models]
    drawn = [_draw(model, length, rows, options) for model, rows in zip(models, given, strict=True)]
    results = [_result(model, samples) for model, samples in zip(models, drawn, strict=True)]
    beside = {"beside": results[1:]} if options.beside else {}
    machine.write_result(options.json, results[0] | beside, models[0].config.as_dict())
    for model, samples, result in zip(models, drawn, results, strict=True):
        _say(model.config, samples, result["texts"])
    if options.trajectory:
        _show(models, drawn, options)


def _check_views(options) -> None:
    """Before the work: can what is asked for be shown? UserError."""
    from lomdm_dist.sample.terminal import check_terminal

    for path in options.trajectory:
        if path.suffix not in (".html", ".png"):
            raise UserError(f"--trajectory {path}: the name must end in .html or .png")
        if path.suffix == ".png":
            check_matplotlib("a PNG")
        check_writable(path)
    if options.watch:
        check_terminal()


def _open(path: str, overrides: list[str]) -> _Model:
    from lomdm_dist.train.checkpoint import Checkpoint

    only(overrides, "sampler.", "objective.c1", "objective.c2")
    checkpoint = Checkpoint(path, check_pace(path, overrides))
    return _Model(path, overrides, checkpoint, checkpoint.tokenizer())


def _starts(model: _Model, options, length: int):
    """The ids of each prompt and then masks, [N, length]; None without a prompt. UserError."""
    import torch

    from lomdm_dist.data.tokenizer import encode_prompt

    if not options.prompt:
        return None
    starts = torch.full((len(options.prompt), length), model.config.model.mask_id)
    for start, prompt in zip(starts, options.prompt, strict=True):
        ids = encode_prompt(model.tokenizer, prompt)
        if len(ids) > length:
            raise UserError(f"--prompt has {len(ids)} tokens, --length is {length}")
        start[: len(ids)] = torch.tensor(ids, dtype=torch.long)
    return starts.repeat_interleave(options.num, dim=0)


def _draw(model: _Model, length: int, given, options):
    from lomdm_dist.data.tokenizer import not_text
    from lomdm_dist.sample import sample
    from lomdm_dist.sample.terminal import LiveView

    config = model.config
    live = LiveView(model.tokenizer, config.model.mask_id, config.objective.name) if options.watch else None
    with live or contextlib.nullcontext():
        return sample(
            model.checkpoint.build_model(options.weights).to(device()),
            options.num if given is None else len(given),
            length,
            options.steps or length,
            options.seed,
            not_text(model.tokenizer, config.model.vocab_size),
            config.sampler,
            given,
            options.batch,
            progress=live is None,
            on_step=live,
        )


def _result(model: _Model, samples) -> dict:
    return {
        "checkpoint": str(model.checkpoint.folder),
        "objective": model.config.objective.model_dump(mode="json"),
        "token_ids": samples.token_ids.tolist(),
        "texts": model.tokenizer.batch_decode(samples.token_ids),
        "steps": samples.steps,
        "network_calls": samples.network_calls,
        "saved_calls": samples.saved_calls,
        "seconds": samples.seconds,
        "tokens_per_second": samples.tokens_per_second(),
        "entropy": samples.entropy(),
    }


def _say(config, samples, texts: list[str]) -> None:
    for i, text in enumerate(texts):
        print(f"--- sample {i}\n{text}")
    print(
        f"--- {len(texts)} sample{'s' * (len(texts) > 1)} of {config.objective.name}, "
        f"{samples.token_ids.shape[1]} tokens, "
        f"{samples.steps} steps{' (one a token)' if config.objective.name == 'ar' else ''}, "
        f"entropy {samples.entropy():.3f} nats{_settings(config)}\n"
        f"--- {samples.network_calls:.1f} network calls a sequence ({samples.saved_calls:.0%} of the steps "
        f"needed none), {samples.tokens_per_second():,.0f} tokens/s"
    )


def _settings(config) -> str:
    """The sampler's settings that are not the usual ones."""
    return "".join(f", {k}={v}" for k, v in config.sampler.model_dump(exclude_defaults=True).items())


def _show(models: list[_Model], drawn: list, options) -> None:
    """Write the page or the picture of how the texts came about."""
    from lomdm_dist.sample.picture import draw
    from lomdm_dist.sample.trajectory import page, trajectory

    shown = []
    for (path, overrides, checkpoint, tokenizer), samples in zip(models, drawn, strict=True):
        config = checkpoint.config
        pace = [override.partition(".")[2] for override in overrides if override.startswith("objective.")]
        label = ", ".join([config.objective.name, *pace])
        about = f"{path}, step {checkpoint.state.step:,}, {options.weights} weights{_settings(config)}"
        shown.append(trajectory(samples, tokenizer, label, about, *_speech(tokenizer, samples)))
    count, length = drawn[0].token_ids.shape
    title = (
        f"{count} sample{'s' * (count > 1)} of {length} tokens, {drawn[0].steps} steps, seed {options.seed}"
    )
    for path in options.trajectory:
        if path.suffix == ".html":
            write_atomically(path, page(shown, title))
        else:
            draw(shown, title, path)
        print(f"trajectory: {path}")


def _speech(tokenizer, samples) -> tuple[list[list[str]] | None, str]:
    """The part of speech of each token of each text; or None, and why."""
    from lomdm_dist.evaluate.speech import tag_tokens

    try:
        return [tag_tokens(tokenizer, ids) for ids in samples.token_ids.tolist()], ""
    except UserError as missing:
        return None, str(missing)
