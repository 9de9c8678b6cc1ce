"""The README.md of an export, filled from the run: what it is, of which data, how good, how to use it."""

from pathlib import Path

from lomdm_dist.config import Config
from lomdm_dist.data.reader import open_reader
from lomdm_dist.data.shards import Manifest
from lomdm_dist.errors import UserError
from lomdm_dist.evaluate.report import results_of
from lomdm_dist.train.checkpoint import Checkpoint

PACKING = {
    "packed": "documents end to end, EOS after each",
    "wrapped": "documents end to end, EOS after each, and BOS and EOS around each sequence",
    "padded": "one document a sequence, EOS at its end, then padding; give `attention_mask`",
}
WEIGHTS = {"ema": "average over the steps (ema)", "raw": "of the last step (raw)"}

IMPORTED = "imported"  # how the identity of data begins that are not known (from_hf.py)


def model_card(
    checkpoint: Checkpoint, weights: str, name: str, checks: dict, bound: dict | None
) -> tuple[str, list[str]]:
    """Markdown with YAML in front; and what it lacks, with the way to it.

    bound: a result of `lomdm eval ppl`, by default one of this step and these weights that lies with the run;
    without any the card says that it was not measured.
    """
    config, state = checkpoint.config, checkpoint.state
    causal = config.objective.name == "ar"
    bound = bound or _measured(checkpoint, weights)
    rows = {
        "objective": _objective(config),
        "size": f"{checks['parameters']:,} parameters, {config.model.blocks} blocks of width "
        f"{config.model.width}, {config.model.heads} heads; vocabulary {config.model.vocab_size:,}",
        "weights": f"{WEIGHTS[weights]}, saved as {checks['dtype']}",
        "sequences": f"{config.model.length} tokens; {PACKING[state.data.packing]}",
        "data": _data(checkpoint),
        "data identity": f"`{state.data.identity}` (sha256 of the sequences in their order)",
        "trained": _trained(checkpoint),
        "recipe": _recipe(config),
        "versions": ", ".join(f"{package} {version}" for package, version in state.versions.items()),
        "checked": _checks(checks),
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    task, kind = ("text-generation", "autoregressive") if causal else ("fill-mask", "masked-diffusion")
    front = FRONT.format(task=task, kind=kind, objective=config.objective.name)
    what = "An autoregressive language model" if causal else "A masked diffusion language model"
    use = (USE_CAUSAL if causal else USE).replace("NAME", name)
    lacks = [] if bound else [LACKS_BOUND.format(weights=weights)]
    lacks += [] if _manifests(checkpoint) else [LACKS_DATA]
    table = f"| | |\n|---|---|\n{table}"
    return f"{front}\n# {what}\n\n{table}\n\n## {_bound(bound, causal)}\n\n{use}{LIMITS}", lacks


LACKS_BOUND = (
    "bound: give --data SHARDS, or write `lomdm eval ppl` of this step's {weights} weights into RUN/ppl.json"
)
LACKS_DATA = "facts of the data: they are not where the run's config says, seen from this folder"


def _trained(checkpoint: Checkpoint) -> str:
    state, start = checkpoint.state, checkpoint.config.train.start_from
    if state.data.identity.startswith(IMPORTED):
        return "weights that were imported: what they were trained on, and how, is not known here"
    text = f"{state.step:,} steps, {state.sequences:,} sequences, {state.tokens:,} tokens seen"
    if start is not None:
        text += (
            f", begun with the weights of `{Path(start).name}`, whose own training is not in these numbers"
        )
    return text


def _objective(config: Config) -> str:
    objective = config.objective
    chosen = objective.model_dump(exclude={"name", "time", "time_eps", "permutation"}, exclude_defaults=True)
    words = {
        "lomdm": "the order in which text is generated is learned",
        "genmd4": "an exponent of its own for each token",
        "mdlm": "random order, every exponent 1",
        "window": f"fixed order {getattr(objective, 'order', '')}",
        "ar": "from left to right, causal attention",
    }[objective.name]
    if objective.pace:
        rule = {"norm_sig": "NormSig", "softmax": "softmax"}[objective.normalize]
        words += f", exponents c1 + c2 {rule} with c1 = {objective.c1:g}, c2 = {objective.c2:g}"
    settings = ", ".join(f"{key} = {value}" for key, value in chosen.items() if key not in ("c1", "c2"))
    return f"{objective.name}: {words}" + (f" ({settings})" if settings else "")


def _data(checkpoint: Checkpoint) -> str:
    """What the sources of the training data say of themselves, if they are at hand; not where they lie."""
    config, told = checkpoint.config, []
    manifests = _manifests(checkpoint)
    for k, source in enumerate(config.data.train):
        text = "`a pipe`" if source.path.startswith("pipe:") else f"`{Path(source.path).name}`"
        if len(config.data.train) > 1:
            text += f" (weight {source.weight:g})"
        if manifests:
            text += (
                f": recipe {manifests[k].recipe}, official split {manifests[k].official_split}, "
                f"{manifests[k].documents:,} documents, {manifests[k].sequences:,} sequences"
            )
        told.append(text)
    return "; ".join(told) + ("" if manifests else "; not at hand when this card was written")


def _manifests(checkpoint: Checkpoint) -> list[Manifest]:
    """The manifests of the very data of the training; none where they are gone, or others now."""
    config = checkpoint.config
    if not all(Path(source.path).is_dir() for source in config.data.train):
        return []
    try:
        reader = open_reader(config.data, config.train.seed)
    except UserError:
        return []
    same = reader.identity() == checkpoint.state.data.identity
    return [source.manifest for source in reader.sources] if same else []


def _recipe(config: Config) -> str:
    optim, train = config.optim, config.train
    rates = f"learning rate {optim.learning_rate:g} after {optim.warmup_steps:,} steps of warm-up"
    clip = f"gradient norm at most {optim.clip:g}"
    if config.objective.name == "lomdm":
        rates += f" (heads {optim.heads_learning_rate:g} after {optim.heads_warmup:,})"
        clip += ", that of the heads by itself"
    return (
        f"AdamW, {rates}, betas {optim.beta1:g} and {optim.beta2:g}, weight decay {optim.weight_decay:g}, "
        f"{clip}; "
        f"{train.global_batch:,} sequences a step, dropout {config.model.dropout:g}, {train.precision}, "
        f"average of the weights with decay {optim.ema_decay:g}, seed {train.seed}"
    )


def _checks(checks: dict) -> str:
    text = "every parameter, bit for bit, against the checkpoint"
    if checks["checked"] == "logits":
        text += (
            f"; logits of a batch differ by at most {checks['max_logit_difference']:.1e}, "
            f"the {'likelihood' if checks['max_exponent_difference'] is None else 'bound'} by "
            f"{checks['max_bound_difference']:.1e} nats a token"
        )
    if "rounding" in checks:
        text += f"; rounding to {checks['dtype']} moved those logits by at most {checks['rounding']:.1e}"
    return text


def _measured(checkpoint: Checkpoint, weights: str) -> dict | None:
    """What `lomdm eval ppl --json` left in the run's folder of this step and these weights."""
    found = [
        result
        for result in results_of(checkpoint.folder.parent.parent)[0].get("ppl", [])
        if [result["convention"].get(key) for key in ("step", "weights", "objective")]
        == [checkpoint.state.step, weights, checkpoint.config.objective.model_dump(mode="json")]
    ]
    return next((r for r in reversed(found) if r["convention"]["preset"] == "bound"), (found or [None])[-1])


def _bound(bound: dict | None, causal: bool) -> str:
    title = "Likelihood" if causal else "Bound"
    if bound is None:
        return f"{title}\n\nNot measured for this export."
    told = dict(bound["convention"])
    told["bound"] = (
        told["bound"].partition(";")[0].partition(", which")[0]
    )  # the rest is of the result's keys
    data = f"split {told['split']} (recipe and official split {told['source']}; `{told['identity'][:16]}`)"
    shown = ("preset", "bound", "time", "denominator", "pieces", "document_eos", "draws", "seed", "weights")
    convention = "; ".join(f"{key} {told[key]}" for key in shown if told.get(key) is not None)
    kind = "exact" if causal else "an upper bound: compare it with other bounds only"
    return (
        f"{title}\n\n**{bound['nll_per_token']:.4f} ± {bound['standard_error']:.4f} nats a token** (standard "
        f"error over sequences), perplexity {bound['ppl']:.2f}, {kind}. Over {bound['tokens']:,} tokens in "
        f"{bound['sequences']:,} sequences of {data}.\n\nConvention: {convention}."
    )


FRONT = """\
---
library_name: transformers
pipeline_tag: {task}
tags:
- {kind}
- {objective}
---
"""

USE = """\
## Use

`torch` and `transformers` are all it needs; the code is in this folder, so read it and trust it:

```python
from transformers import AutoModelForMaskedLM, AutoTokenizer
model = AutoModelForMaskedLM.from_pretrained("NAME", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("NAME", trust_remote_code=True)
print(tokenizer.batch_decode(model.generate(num=2, seed=0)))
```

A prompt stays, and the mask tokens in it are filled; `length` says how long the text becomes:

```python
prompt = tokenizer("One[MASK][MASK] three", add_special_tokens=False)["input_ids"]
print(tokenizer.decode(model.generate([prompt], length=len(prompt), top_p=0.9)[0]))
```

- `model(input_ids)`: `logits` for the masked positions (-inf at the mask token), and the `exponents` seen
  from there. `subs=True` gives log-probabilities in which an unmasked position copies its input.
- `model.order_exponents(input_ids)`: those of a clean text; larger is generated earlier.
- `model.nelbo(input_ids, attention_mask, draws=8)`: the bound on -log p(x), in nats a sequence. exp(sum of
  the bounds / number of tokens) is an upper bound on the perplexity; compare it with other bounds only.
- `model.generate(prompt, steps, top_p, temperature, seed)`: text i depends on the seed (0 unless given) and i
  alone.
- `pipeline("fill-mask", ...)` and `Trainer` work as with other masked models; the loss counts masked
  positions only.

Texts were encoded without special tokens but EOS: `tokenizer(text, add_special_tokens=False)`.
"""

USE_CAUSAL = """\
## Use

`torch` and `transformers` are all it needs; the code is in this folder, so read it and trust it:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("NAME", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("NAME", trust_remote_code=True)
print(tokenizer.batch_decode(model.sample(num=2, seed=0)))
```

`model(input_ids, labels=input_ids)` is that of other causal models, but the first token counts, too: it is
predicted from the mask token, which the model itself puts in front. `generate` is that of `transformers`,
needs a prompt and keeps no cache; `sample` takes one too, `model.sample(num=2, prompt=ids, top_p=0.9)`.
`model.nelbo(input_ids)` is -log p(x), exact, in nats a sequence.

Texts were encoded without special tokens but EOS: `tokenizer(text, add_special_tokens=False)`.
"""

LIMITS = """
## Limits

It was trained to predict text of the data above, and on nothing else: it follows no instructions, may say
what is false or harmful, and repeats the biases of its data. Longer texts than those of training it has
never seen. Not filled in by the export, and for whoever shares it to say: the language of the data, where
they come from, what they may be used for, and a licence.
"""
