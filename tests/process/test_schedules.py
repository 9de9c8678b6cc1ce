import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lomdm_dist.process import PowerSchedule, corrupt, log_q, norm_sig

times = st.floats(1e-9, 1 - 1e-9)
exponents = st.floats(0.05, 3.0)


@given(times, exponents)
@settings(max_examples=50, deadline=None)
def test_power_schedule_is_a_schedule(t, e):
    schedule = PowerSchedule(torch.tensor([[e]], dtype=torch.float64))
    time = torch.tensor([t], dtype=torch.float64)
    mask, keep = schedule.log_mask_prob(time).exp(), schedule.log_keep_prob(time).exp()
    assert mask.item() == pytest.approx(t**e, rel=1e-12)
    assert (mask + keep).item() == pytest.approx(1, abs=1e-12)


@given(times, exponents)
@settings(max_examples=50, deadline=None)
def test_velocity_is_the_derivative(t, e):
    time = torch.tensor([t], dtype=torch.float64, requires_grad=True)
    schedule = PowerSchedule(torch.tensor([[e]], dtype=torch.float64))
    schedule.log_mask_prob(time).sum().backward()  # d/dt log(1 - alpha) = -alpha' / (1 - alpha)
    assert schedule.velocity(time).item() == pytest.approx(time.grad.item(), rel=1e-10)


@given(times, st.floats(0, 1), exponents)
@settings(max_examples=50, deadline=None)
def test_reveal_prob_is_the_change_of_alpha(t, part, e):
    schedule = PowerSchedule(torch.tensor([[e]], dtype=torch.float64))
    time, earlier = (torch.tensor([v], dtype=torch.float64) for v in (t, part * t))
    expected = 1 - part**e
    assert schedule.reveal_prob(time, earlier).item() == pytest.approx(expected, abs=1e-12)


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
