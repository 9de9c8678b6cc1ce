"""Draws docs/schedules.png: alpha and velocity of each schedule, a curve a position.

python docs/draw_schedules.py
"""

from pathlib import Path

import matplotlib
import torch

matplotlib.use("agg")
from matplotlib import pyplot

from lomdm_dist.model.lomdm import GAMMA_MAX, GAMMA_MIN
from lomdm_dist.process import PolynomialSchedule, PowerSchedule, WindowSchedule, norm_sig

EPS = 1e-3  # of the windows; larger than the default, so that one sees it
LOGITS = torch.tensor([[2.5, 0.5, -0.5, -2.5]])
ORDER = torch.tensor([2, 0, 3, 1])
SCHEDULES = {
    "mdlm\nevery exponent 1": PowerSchedule(torch.ones(1, 1)),
    "lomdm\n0.7 + 0.65 NormSig": PowerSchedule(0.7 + 0.65 * norm_sig(LOGITS)),
    "genmd4\nan exponent a token": PowerSchedule(torch.tensor([[1.8, 1.2, 0.8, 0.4]])),
    "lomdm, polynomial\nMuLAN": PolynomialSchedule(
        torch.tensor([[1.5, 0.5, 0.0, -0.5]]),
        torch.tensor([[0.5, 0.2, 0.0, -0.3]]),
        torch.tensor([[0.2, 0.6, 1.0, 1.4]]),
        GAMMA_MIN,
        GAMMA_MAX,
    ),
    "window\nleft to right": WindowSchedule.left_to_right(4, EPS),
    "window\npermutation 2, 0, 3, 1": WindowSchedule.permutation(ORDER, EPS),
    "window\nblocks of 2": WindowSchedule.blocks(4, 2, EPS),
}


def main() -> None:
    t = torch.linspace(0.002, 1, 1000, dtype=torch.float64)
    figure, axes = pyplot.subplots(
        2,
        len(SCHEDULES),
        figsize=(2.3 * len(SCHEDULES), 4.6),
        sharex=True,
        sharey="row",
        layout="constrained",
    )
    colors = matplotlib.colormaps["viridis"]([0.0, 0.3, 0.6, 0.9])
    for (name, schedule), (above, below) in zip(SCHEDULES.items(), axes.T, strict=True):
        alphas, velocities = (1 - schedule.mask_prob(t)).T, schedule.velocity(t).T
        for i, (alpha, velocity) in enumerate(zip(alphas, velocities, strict=True)):
            style = {"color": colors[i], "label": f"position {i}", "linestyle": ["-", "--", ":", "-."][i]}
            above.plot(t, alpha, **style)
            below.semilogy(t, velocity, **style)
        above.set_title(name, fontsize=10)
        below.set(xlabel="time t", ylim=(3e-3, 3e2))
    axes[0, 0].set_ylabel("alpha: still clean")
    axes[1, 0].set_ylabel("velocity A")
    axes[0, 1].legend(fontsize=7)
    figure.savefig(Path(__file__).with_name("schedules.png"), dpi=110)


if __name__ == "__main__":
    main()
