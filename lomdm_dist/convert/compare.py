"""What a checkpoint computes, and what its export does: the same, or there is no export."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from lomdm_dist.config import EvaluateConfig
from lomdm_dist.evaluate.perplexity import evaluation_noise, sequence_bounds
from lomdm_dist.model import LoMDM
from lomdm_dist.train.checkpoint import Checkpoint

TOLERANCE = 1e-4  # of float32 arithmetic; a wrong weight or formula is off by far more
SEQUENCES, MOST_TOKENS = 2, 128  # enough to see a difference, and no logits of a whole text in memory
TIMES = (0.1, 0.5, 0.9)


def outputs_of_checkpoint(checkpoint: Checkpoint, weights: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The logits of one random batch, both exponents and the bound, by name, in float32 arithmetic.

    With the weights as rounded to dtype; how far that moves the logits is "rounding".
    """
    model, batch = checkpoint.build_model(weights), _random_batch(checkpoint)
    outputs = _outputs(model, checkpoint, *batch)
    if dtype != torch.float32:
        exact = outputs["logits"]
        for parameter in model.parameters():
            parameter.data = parameter.to(dtype).float()
        outputs = _outputs(model, checkpoint, *batch)
        outputs["rounding"] = torch.tensor(_difference(exact, outputs["logits"]))
    return outputs


@torch.no_grad()
def compare(expected: dict[str, Tensor], checkpoint: Checkpoint, folder: Path) -> dict[str, float | None]:
    """Load the export as a stranger does; the largest differences of all that it computes.

    Exponents: of both heads; where a schedule has none, of its probabilities. None for `ar`. Raises
    RuntimeError where one is larger than float32 explains.
    """
    kind = AutoModelForCausalLM if checkpoint.config.objective.name == "ar" else AutoModelForMaskedLM
    exported = kind.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    found = _outputs_of_export(exported, *_random_batch(checkpoint))
    largest = {name: _difference(expected[name], value) for name, value in found.items()}
    for name, difference in largest.items():
        finite = expected[name][expected[name].isfinite()].abs()
        allowed = TOLERANCE * max(1.0, finite.max().item())
        if not difference <= allowed:  # so that nan fails too
            raise RuntimeError(
                f"the export in {folder} differs from checkpoint {checkpoint.folder}: {name} by up to "
                f"{difference:.3g}, more than {allowed:.1g}"
            )
    orders = [largest[name] for name in ("exponents seen (psi)", "exponents (phi)") if name in largest]
    return {
        "max_logit_difference": largest["logits"],
        "max_exponent_difference": max(orders, default=None),
        "max_bound_difference": largest["bound"],
    } | ({"rounding": expected["rounding"].item()} if "rounding" in expected else {})


@torch.no_grad()
def _outputs(model: LoMDM, checkpoint: Checkpoint, x: Tensor, z: Tensor, valid: Tensor) -> dict[str, Tensor]:
    config = checkpoint.config.model_copy(update={"evaluate": EvaluateConfig()})
    noise = [evaluation_noise(0, 0, 1, torch.arange(SEQUENCES).numpy(), SEQUENCES, x.shape[1])]
    bound = sequence_bounds(model, x, valid, None, noise, 1, config).sum(dim=0) / x.shape[1]
    if config.objective.name == "ar":
        features, condition = model.predict_next(x, _next_documents(model, x))
        return {"logits": model.backbone.output(features[:, 1:], condition)[valid], "bound": bound}
    features, reverse, condition = model.see(z, valid)
    logits, masked = model.backbone.output(features, condition), (z == model.mask_id) & valid
    if model.token_exponents is not None:
        means = logits[masked].softmax(dim=1).double() @ model.token_exponents().double()
        seen = torch.ones(z.shape, dtype=torch.float64).masked_scatter(masked, means)
    else:
        seen = _order(reverse, z)
    return {
        "logits": logits[valid],
        "exponents seen (psi)": seen[..., valid],
        "exponents (phi)": _order(model.order(x, valid), x)[..., valid],
        "bound": bound,
    }


def _next_documents(model: LoMDM, x: Tensor) -> Tensor | None:
    if model.eos_id is None:
        return None
    ends = (x == model.eos_id).long().cumsum(dim=1)
    return torch.cat([torch.zeros_like(x[:, :1]), ends], dim=1)


def _outputs_of_export(model: PreTrainedModel, x: Tensor, z: Tensor, valid: Tensor) -> dict[str, Tensor]:
    bound = model.nelbo(x, valid, draws=1, seed=0) / x.shape[1]
    if model.config.objective == "ar":
        return {"logits": model(x, valid).logits[valid], "bound": bound}
    output = model(z, valid)
    seen = output.exponents if output.exponents is not None else _order(model._see(z, valid)[1], z)
    return {
        "logits": output.logits[valid],
        "exponents seen (psi)": seen[..., valid],
        "exponents (phi)": _order(model.order(x, valid), x)[..., valid],
        "bound": bound,
    }


def _order(schedule, x: Tensor) -> Tensor:
    """The exponents of x [B, L]; of a schedule without any its mask probabilities at some times."""
    if hasattr(schedule, "exponent"):
        return schedule.exponent.expand(x.shape)
    times = [torch.full((len(x),), t, dtype=torch.float64) for t in TIMES]
    return torch.stack([schedule.mask_prob(t).expand(x.shape) for t in times])


def _random_batch(checkpoint: Checkpoint) -> tuple[Tensor, Tensor, Tensor]:
    """Clean x, z with about half of it masked, and valid, all [B, L]; the last row has padding."""
    config, generator = checkpoint.config.model, torch.Generator().manual_seed(0)
    shape = (SEQUENCES, min(config.length, MOST_TOKENS))
    x = torch.randint(config.vocab_size - 1, shape, generator=generator)
    x = x + (x >= config.mask_id)  # clean text never holds the mask token
    x[:, shape[1] // 4] = checkpoint.state.data.tokenizer.eos_id  # and ends a document
    z = torch.where(torch.rand(shape, generator=generator) < 0.5, config.mask_id, x)
    valid = torch.ones(shape, dtype=torch.bool)
    valid[-1, (shape[1] + 1) // 2 :] = False
    return x, z, valid


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference; 0 where both are -inf, nan where either is."""
    return torch.where(ours == theirs, 0.0, (ours - theirs).abs()).max().item()
