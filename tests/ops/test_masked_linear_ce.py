"""The fused projection and cross-entropy against the plain one: values and all gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lomdm_dist.ops.masked_linear_ce import masked_linear_ce, plain_masked_linear_ce
from tests.distributed.grids import on_processes

WIDTH, MASK = 6, 2
INPUTS = ("hidden", "weight", "bias", "weights", "values")


def problem(rows: int, vocab_size: int, dtype=torch.float64, seed: int = 0) -> dict[str, torch.Tensor]:
    """Targets at both ends of the vocabulary are among the first; the first row's weight is zero."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, of=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(of)

    targets = torch.randint(3, vocab_size, (rows,), generator=generator)
    targets[:3] = torch.tensor([0, vocab_size - 1, 0])[:rows]
    weights = normal(rows, of=torch.float64).abs()
    weights[:1] = 0
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "hidden": normal(rows, WIDTH),
        "weight": normal(vocab_size, WIDTH),
        "bias": normal(vocab_size),
        "targets": targets,
        "weights": weights,
        "values": normal(vocab_size, of=wide).abs(),
        "value_weights": normal(rows, of=torch.float64),
    }


def outcome(function, given: dict, vocab_size: int, with_values: bool, upstream: float = 1.7, **more):
    """Values, and gradients of `upstream` times the sum."""
    given = {
        n: t.clone().requires_grad_() if n in INPUTS else t
        for n, t in given.items()
        if with_values or "value" not in n
    }
    total, *rest = function(**given, mask_id=MASK, vocab_size=vocab_size, **more)
    (upstream * total).backward()
    return total.detach(), rest, {n: given[n].grad for n in INPUTS if n in given}


def compare(ours, theirs, tolerance: float) -> None:
    """To `tolerance` of the largest element of each."""
    values = zip([ours[0], *ours[1]], [theirs[0], *theirs[1]], strict=True)
    for mine, plain in [*values, *((ours[2][n], theirs[2][n]) for n in theirs[2])]:
        assert mine.shape == plain.shape and not mine.isnan().any()
        scale = max(1.0, float(plain.abs().max())) if plain.numel() else 1.0
        assert float((mine.double() - plain.double()).abs().sum()) <= tolerance * scale * max(1, mine.numel())


@settings(max_examples=60, deadline=None)
@given(
    rows=st.sampled_from([0, 1, 2, 7, 16, 33]),
    vocab_size=st.sampled_from([4, 5, 29]),
    chunk=st.sampled_from([1, 4, 16, 100]),
    with_values=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_in_float64(rows, vocab_size, chunk, with_values, seed):
    given = problem(rows, vocab_size, seed=seed)
    ours = outcome(masked_linear_ce, given, vocab_size, with_values, chunk=chunk)
    compare(ours, outcome(plain_masked_linear_ce, given, vocab_size, with_values), 1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-3)])
def test_values_and_gradients_in_lower_precision(dtype, tolerance):
    """Against float64 arithmetic on the same numbers."""
    given = problem(300, 40, dtype)
    ours = outcome(masked_linear_ce, given, 40, True, chunk=64)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in given.items()}
    plain = outcome(plain_masked_linear_ce, wide, 40, True)
    peak, plain_peak = ours[1].pop(1), plain[1].pop(1)  # near 0, with the error of logits that are not
    assert float((peak.double() - plain_peak).abs().mean()) < 5 * tolerance
    compare(ours, plain, tolerance)
    assert ours[1][0].dtype == torch.float32, "CE is float32 even of a bf16 network"
    assert ours[2]["weight"].dtype == dtype


def test_each_rows_weight_is_its_own():
    """The trap of a public kernel: the first row's weight, here zero, was taken for all."""
    given = problem(5, 9)
    given["weights"] = torch.tensor([0.0, 1, 0, 0, 0], dtype=torch.float64)
    _, _, gradients = outcome(masked_linear_ce, given, 9, False)
    assert (gradients["hidden"].abs().sum(dim=1) > 0).tolist() == [False, True, False, False, False]


def test_without_gradient_only_values_are_computed():
    given = problem(7, 9)
    with torch.no_grad():
        ours = masked_linear_ce(**given, mask_id=MASK, vocab_size=9)
    plain = plain_masked_linear_ce(**given, mask_id=MASK, vocab_size=9)
    assert all(torch.allclose(mine, other) for mine, other in zip(ours, plain, strict=True))


def test_a_second_backward_pass_is_refused():
    given = problem(3, 9)
    given["hidden"].requires_grad_()
    given["values"] = given["value_weights"] = None
    total, *_ = masked_linear_ce(**given, mask_id=MASK, vocab_size=9)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def split_over(size: int, vocab_size: int, with_values: bool):
    from lomdm_dist.parallel.grid import process_grid

    with process_grid(size) as grid:
        given = problem(9, vocab_size)
        part = -(-vocab_size // size)
        mine = slice(grid.tensor_rank * part, (grid.tensor_rank + 1) * part)
        for name in ("weight", "bias"):  # padding is not zero: it must not be read
            whole = given[name]
            padded = torch.full((part * size, *whole.shape[1:]), 3.0, dtype=whole.dtype)
            padded[:vocab_size] = whole
            given[name] = padded[mine].clone()
        group = grid.tensor_group if size > 1 else None
        return outcome(masked_linear_ce, given, vocab_size, with_values, group=group, chunk=4)


# on four ranks: even, padded, and one that is all padding
@pytest.mark.parametrize(("size", "vocab_size"), [(2, 8), (4, 8), (4, 7), (4, 5)])
@pytest.mark.parametrize("with_values", [False, True])
def test_a_vocabulary_split_over_processes(size, vocab_size, with_values):
    plain = outcome(plain_masked_linear_ce, problem(9, vocab_size), vocab_size, with_values)
    of_ranks = on_processes(size, split_over, size, vocab_size, with_values)
    for name in ("weight", "bias"):
        together = torch.cat([of_rank[2][name] for of_rank in of_ranks])
        assert (together[vocab_size:] == 0).all(), "padding has no gradient"
        for of_rank in of_ranks:
            of_rank[2][name] = together[:vocab_size]
    for of_rank in of_ranks:
        compare(of_rank, plain, 1e-9)
