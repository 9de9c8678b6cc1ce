"""Corruption, and the bound on -log p(x) that training minimises."""

import torch
from torch import Tensor


def corrupt(
    x: Tensor, schedule, t: Tensor, uniforms: Tensor, mask_id: int, valid: Tensor | None = None
) -> Tensor:
    """z_i = mask_id where u_i < 1 - alpha_i(t), else x_i; all [B, L].

    Where `valid` is False (padding) a position stays, as it does where its uniform is 1.
    """
    masked = uniforms < schedule.log_mask_prob(t).exp()
    if valid is not None:
        masked = masked & valid
    return torch.where(masked, mask_id, x)


def log_q(masked: Tensor, schedule, t: Tensor, valid: Tensor | None = None) -> Tensor:
    """log q(z | x), the log-probability of the mask pattern; bool [B, L] -> [B], float64.

    Where `valid` is False (padding) a position stays for certain.
    """
    log_prob = torch.where(masked, schedule.log_mask_prob(t), schedule.log_keep_prob(t))
    return log_prob.sum(dim=1) if valid is None else torch.where(valid, log_prob, 0.0).sum(dim=1)


def nelbo_integrand(
    ce: Tensor, masked: Tensor, velocity: Tensor, velocity_hat: Tensor
) -> tuple[Tensor, Tensor]:
    """The integrand of the bound at one t, summed over masked positions.

    ce            [B, L] cross-entropy of the network; read at masked positions only
    masked        [B, L] bool
    velocity      [B, L] A, of the forward schedule
    velocity_hat  [B, L] hatA, of the reverse schedule
    returns       main [B] = sum A_i CE_i, and the velocity term [B] =
                  sum A_i log(A_i / hatA_i) - (A_i - hatA_i), which is never negative; float64
    """
    # replaced before the arithmetic, not after: a NaN times zero would still spoil the gradient
    ce = torch.where(masked, ce.to(torch.float64), 0.0)
    velocity = torch.where(masked, velocity, 1.0)
    velocity_hat = torch.where(masked, velocity_hat, 1.0)
    divergence = velocity * (velocity.log() - velocity_hat.log()) - (velocity - velocity_hat)
    return (velocity * ce).sum(dim=1), divergence.sum(dim=1)


def genmd4_integrand(
    log_probs: Tensor, x: Tensor, masked: Tensor, exponent_by_token: Tensor, t: Tensor
) -> Tensor:
    """GenMD4: the exponent of a position is that of its token, and hatA its expectation under the network.

    log_probs [B, L, V], x and masked [B, L], exponent_by_token w [V], t [B] -> [B], float64:
    (1/t) sum over masked of w_x (-log p_x) - w_x + <w, p>. It is the bound's integrand with
    A = w_x / t, hatA = <w, p> / t and the network's distribution reweighted to p w / <w, p>: the
    logarithms of w_x / <w, p> in the two terms cancel.
    """
    weights = exponent_by_token.to(torch.float64)
    log_probs = log_probs.to(torch.float64)
    ce = -log_probs.gather(2, x[..., None])[..., 0]
    expected = log_probs.exp() @ weights
    terms = torch.where(masked, weights[x] * (ce - 1) + expected, 0.0)
    return terms.sum(dim=1) / t.to(torch.float64).reshape(-1)


def rloo_surrogate(log_q1: Tensor, log_q2: Tensor, loss1: Tensor, loss2: Tensor) -> Tensor:
    """1/2 (log q(z1|x) - log q(z2|x)) stopgrad(L1 - L2), all [B].

    Its gradient is that of E_q[L] through q, by REINFORCE with the other sample as the baseline
    (leave-one-out). It reaches the forward schedule only.
    """
    return 0.5 * (log_q1 - log_q2) * (loss1 - loss2).detach()
