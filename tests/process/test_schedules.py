import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lomdm_dist.process import (
    PolynomialSchedule,
    PowerSchedule,
    WindowSchedule,
    corrupt,
    log_q,
    norm_sig,
)

times = st.floats(1e-9, 1 - 1e-9)
exponents = st.floats(0.05, 3.0)


@given(times, exponents)
@settings(max_examples=50, deadline=None)
def test_power_schedule_is_a_power(t, e):
    schedule = PowerSchedule(torch.tensor([[e]], dtype=torch.float64))
    time = torch.tensor([t], dtype=torch.float64)
    assert schedule.log_mask_prob(time).exp().item() == pytest.approx(t**e, rel=1e-12)
    assert schedule.velocity(time).item() == pytest.approx(e / t, rel=1e-12)


ORDER = torch.tensor([2, 0, 3, 1])
POLYNOMIAL = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.3, -0.7], [0.2, 1.1, 0.4], [3.0, -2.0, 1.0]]).T
SCHEDULES = {
    "power": PowerSchedule(torch.tensor([[0.05, 0.7, 1.0, 2.5]])),
    "left to right": WindowSchedule.left_to_right(4, 1e-3),
    "permutation": WindowSchedule.permutation(ORDER, 1e-3),
    "blocks": WindowSchedule.blocks(4, 3, 1e-3),
    "polynomial": PolynomialSchedule(*POLYNOMIAL[:, None], -13.3, 5.0),
}
each_schedule = pytest.mark.parametrize("name", SCHEDULES)


def at(t: float) -> torch.Tensor:
    return torch.tensor([t], dtype=torch.float64)


@each_schedule
@given(t=times)
@settings(max_examples=30, deadline=None)
def test_a_position_is_masked_or_kept(name, t):
    schedule = SCHEDULES[name]
    total = schedule.log_mask_prob(at(t)).exp() + schedule.log_keep_prob(at(t)).exp()
    assert torch.allclose(total, torch.ones(1, 4, dtype=torch.float64), atol=1e-12)
    assert (schedule.velocity(at(t)) >= 0).all()


@each_schedule
@given(t=times)
@settings(max_examples=30, deadline=None)
def test_velocity_is_the_derivative(name, t):
    """d/dt log(1 - alpha) = -alpha' / (1 - alpha), by autograd."""
    time = at(t).requires_grad_()
    slopes = [
        torch.autograd.grad(log_prob, time, retain_graph=True)[0]
        for log_prob in SCHEDULES[name].log_mask_prob(time)[0]
    ]
    assert torch.allclose(SCHEDULES[name].velocity(at(t))[0], torch.cat(slopes), rtol=1e-9)


@each_schedule
@given(t=times, part=st.floats(1e-3, 1))
@settings(max_examples=30, deadline=None)
def test_reveal_prob_is_the_change_of_alpha(name, t, part):
    schedule, s = SCHEDULES[name], at(part * t)
    masked_then, masked_now = (schedule.log_mask_prob(time).exp() for time in (s, at(t)))
    expected = (masked_now - masked_then) / masked_now
    assert torch.allclose(schedule.reveal_prob(at(t), s), expected, atol=1e-12)


@each_schedule
@given(early=times, late=times)
@settings(max_examples=30, deadline=None)
def test_masks_only_grow(name, early, late):
    early, late = sorted((early, late))
    schedule = SCHEDULES[name]
    assert (schedule.log_mask_prob(at(early)) <= schedule.log_mask_prob(at(late)) + 1e-12).all()


def test_windows_follow_the_order_of_generation():
    """In the middle of a position's window all that come before it in the order are clean."""
    for schedule, order in (
        (WindowSchedule.left_to_right(4, 1e-6), [0, 1, 2, 3]),
        (WindowSchedule.permutation(ORDER, 1e-6), ORDER.tolist()),
    ):
        for k, position in enumerate(order):
            mask_prob = schedule.mask_prob(at(1 - (k + 0.5) / 4))[0]
            assert mask_prob[position].item() == pytest.approx(0.5, abs=1e-5)
            assert all(mask_prob[p] < 1e-5 for p in order[:k]) and all(
                mask_prob[p] > 0.99 for p in order[k + 1 :]
            )
    one, four = WindowSchedule.blocks(4, 4, 1e-3), WindowSchedule.blocks(4, 1, 1e-3)
    assert len(torch.unique(one.mask_prob(at(0.3)))) == 1
    assert torch.equal(four.mask_prob(at(0.3)), SCHEDULES["left to right"].mask_prob(at(0.3)))
    with pytest.raises(ValueError, match="not a permutation"):
        WindowSchedule.permutation(torch.tensor([0, 0, 1]), 1e-3)


def test_last_reverse_step_reveals_everything():
    schedule = PowerSchedule(torch.full((1, 4), 0.05))
    assert (schedule.reveal_prob(torch.tensor([1e-3]), torch.tensor([0.0])) == 1).all()


def test_gradients_are_finite_at_both_ends_of_time():
    for t in (1.0, 1e-300):
        exponent = torch.tensor([[0.05, 0.7, 1.35]], dtype=torch.float64, requires_grad=True)
        time = torch.tensor([t], dtype=torch.float64)
        masked = torch.tensor([[True, True, True]]) if t == 1.0 else torch.tensor([[False, False, False]])
        value = log_q(masked, PowerSchedule(exponent), time)
        value.sum().backward()
        assert value.isfinite().all() and exponent.grad.isfinite().all()


def test_padding_has_no_part_in_log_q_even_at_time_one():
    schedule, t = PowerSchedule(torch.tensor([[0.5, 0.5, 0.5]])), torch.tensor([1.0])
    masked, valid = torch.tensor([[True, True, False]]), torch.tensor([[True, True, False]])
    assert log_q(masked, schedule, t, valid).item() == 0 and log_q(masked, schedule, t).item() == -torch.inf


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=9), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_norm_sig_sums_to_zero_and_leaves_padding_out(logits, padding):
    plain = norm_sig(torch.tensor([logits]))
    assert plain.dtype == torch.float64
    assert plain.sum().item() == pytest.approx(0, abs=1e-12) and plain.abs().max() < 1
    padded = torch.tensor([logits + [7.0] * padding])
    valid = torch.arange(padded.shape[1])[None] < len(logits)
    assert torch.allclose(norm_sig(padded, valid)[:, : len(logits)], plain, atol=1e-15)
    assert (norm_sig(padded, valid)[:, len(logits) :] == 0).all()


def test_corruption_follows_the_schedule_and_a_uniform_of_one_stays():
    generator = torch.Generator().manual_seed(0)
    exponent = torch.tensor([[0.3, 1.0, 2.0]]).expand(20_000, 3)
    uniforms = torch.rand(20_000, 3, generator=generator, dtype=torch.float64)
    x, t = torch.ones(20_000, 3, dtype=torch.long), torch.full((20_000,), 0.4)
    share = (corrupt(x, PowerSchedule(exponent), t, uniforms, mask_id=9) == 9).double().mean(0)
    expected = 0.4 ** exponent[0].double()
    assert ((share - expected).abs() < 4 * (expected * (1 - expected) / 20_000).sqrt()).all()
    at_one = corrupt(x[:1], PowerSchedule(exponent[:1]), torch.ones(1), torch.tensor([[0.0, 0.5, 1.0]]), 9)
    assert at_one.tolist() == [[9, 9, 1]]
    valid = torch.tensor([[True, False, True]])
    padded = corrupt(x[:1], PowerSchedule(exponent[:1]), torch.ones(1), torch.zeros(1, 3), 9, valid)
    assert padded.tolist() == [[9, 1, 9]]
