"""Where a share of a parameter lies: every split of every tensor, against slicing the whole."""

import itertools
import math
from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st

from lomdm_dist.model import LoMDM
from lomdm_dist.model.initial import draw_start, initialize, starts
from lomdm_dist.ops.hash import hashed_uniforms
from lomdm_dist.parallel.layout import Layout, Piece, boxes, whole_pieces
from tests.model.test_model import tiny_config

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def splits(draw):
    """A shape, a dimension to split over some ranks (dimension 0 with padding), cuts of each share."""
    shape = draw(shapes)
    dim = draw(st.sampled_from([None, *range(len(shape))]))
    ranks = 1 if dim is None else draw(st.integers(1, 4))
    if dim is None:
        layouts = [Layout(shape)]
    else:
        part = -(-shape[dim] // ranks)
        if dim > 0 and shape[dim] % ranks:
            ranks, part = 1, shape[dim]
        layouts = [Layout(shape, dim, part, rank * part) for rank in range(ranks)]
    size = math.prod(layouts[0].held)
    cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
    return shape, layouts, list(itertools.pairwise(cuts))


@given(splits())
def test_the_shares_of_all_ranks_make_the_whole_once(case):
    shape, layouts, cuts = case
    whole = torch.arange(math.prod(shape)).view(shape)
    seen = torch.zeros(shape, dtype=torch.int64)
    for layout in layouts:
        held = torch.full(layout.held, -1)  # padding
        if layout.dim is None:
            held.copy_(whole)
        else:
            here = whole.narrow(
                layout.dim,
                min(layout.first, shape[layout.dim]),
                max(0, min(layout.part, shape[layout.dim] - layout.first)),
            )
            held.narrow(layout.dim, 0, here.shape[layout.dim]).copy_(here)
        for start, end in cuts:
            flat, in_boxes = held.flatten()[start:end], 0
            for box in boxes(layout, start, end - start):
                mine = flat[box.start : box.start + box.numel].view(box.sizes)
                place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                assert torch.equal(mine, whole[place])
                index = [
                    box.index(shape, *part) for part in ((0, box.numel // 2), (box.numel // 2, box.numel))
                ]
                assert torch.equal(torch.cat(index), mine.flatten())
                seen[place] += 1
                in_boxes += box.numel
            assert in_boxes == (flat >= 0).sum(), "all but the padding"
    assert (seen == 1).all()


def test_a_part_of_a_new_model_is_drawn_as_the_whole_is():
    config = tiny_config()
    model = LoMDM(config.model, config.objective)
    initialize(model, seed=3)
    drawn = starts(model)
    for piece in whole_pieces(model):
        size = len(piece.master)
        for start, end in ((0, min(5, size)), (size // 3, size // 2), (size // 2, size)):
            part = Piece(piece.name, piece.layout, start, torch.empty(end - start), {})
            for box in part.boxes():
                out = part.master[box.start : box.start + box.numel]
                index = partial(box.index, piece.layout.shape)
                draw_start(out, 3, piece.name, drawn[piece.name], index)
            assert torch.equal(part.master, piece.master[start:end])


def test_where_parameters_start():
    """Bounds of every matrix and bias; seeds and names apart; a new block is the identity."""
    config = tiny_config(model={"width": 64, "heads": 2})
    model = LoMDM(config.model, config.objective)
    values = dict(model.named_parameters())
    assert values["backbone.blocks.0.mlp_out.bias"].abs().max() <= 1 / 16  # 4 * 64 inputs
    matrix = values["backbone.blocks.0.mlp_out.weight"]
    assert (
        0.99 / 16 < matrix.abs().max() <= 1 / 16 and abs(matrix.mean()) < 4 / 16 / (3 * matrix.numel()) ** 0.5
    )
    assert (values["backbone.blocks.1.norm2.weight"] == 1).all()
    zeros = [name for name, value in values.items() if (value == 0).all()]
    assert {name.split(".")[-2] for name in zeros} == {"modulation", "output", "phi", "psi"}
    assert not torch.equal(matrix, values["backbone.blocks.1.mlp_out.weight"])
    initialize(model, seed=1)
    assert not torch.equal(matrix, LoMDM(config.model, config.objective).backbone.blocks[0].mlp_out.weight)


def test_hashed_numbers_are_uniform_and_independent():
    """Means of blocks of bits, neighbours, keys: each within 5 sigma over 2**18 draws."""
    index = torch.arange(2**18)
    draws = torch.stack([hashed_uniforms(key, index) for key in (0, 1, 2**63, 2**64 - 1)])
    assert draws.min() >= 0 and draws.max() < 1 and draws.dtype == torch.float64
    n = draws.shape[1]
    assert ((draws.mean(dim=1) - 0.5).abs() < 5 / (12 * n) ** 0.5).all()
    for bit in range(1, 33):
        share = ((draws * 2.0**bit).long() & 1).double().mean(dim=1)
        assert ((share - 0.5).abs() < 5 * 0.5 / n**0.5).all(), bit
    centred = draws - 0.5
    for a, b in [
        *itertools.combinations(centred, 2),
        *((row[:-k], row[k:]) for row in centred for k in (1, 2, 64)),
    ]:
        assert (a * b).mean().abs() < 5 / 12 / len(a) ** 0.5
