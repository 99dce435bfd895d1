"""Whole parameters to the slices of every rank of a layout, and back: every element once, where it belongs."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.dense import Fusion
from tierstore.dense.layout import Narrow
from tierstore.parallel.layout import Division, Layout
from tierstore.train.stored_model import DenseCut, DenseGroup, DenseParameter, coordinates_of, rank_at


def whole(*shape: int) -> DenseParameter:
    return DenseParameter(shape, Narrow.NO)


def numbered(group: DenseGroup) -> list[torch.Tensor]:
    """Parameters whose elements are all different, and none of them the zero of padding."""
    found, start = [], 1
    for parameter in group[1]:
        made = torch.arange(start, start + torch.Size(parameter.shape).numel(), dtype=torch.float32)
        found.append(made.view(parameter.shape))
        start += made.numel()
    return found


def test_an_example_by_hand() -> None:
    """Queries, keys and values of width 4 above one another, divided over two ranks by halves of each; a norm beside."""
    qkv = DenseParameter((12, 4), Narrow.NO, Division(0, blocks=3))
    out = DenseParameter((4, 4), Narrow.NO, Division(1))
    group = ("block.0", (whole(4), qkv, out))
    ends = [("embedding", (whole(6, 4),)), group, ("head", (whole(4),))]
    cut = DenseCut(ends, Layout(1, 1, 2, 2), Fusion.UNIT, blocks=[range(1)])
    norm, rows, columns = numbered(group)
    first, second = cut.part(1, (norm, rows, columns), 0), cut.part(1, (norm, rows, columns), 1)
    assert cut.record(1).slice_numel == first.numel() == 48  # 4 + 24 + 8, and padding up to a multiple of 16
    assert first[:4].tolist() == second[:4].tolist() == norm.tolist()
    assert torch.equal(first[4:28].view(6, 4), rows[[0, 1, 4, 5, 8, 9]])
    assert torch.equal(second[4:28].view(6, 4), rows[[2, 3, 6, 7, 10, 11]])
    assert torch.equal(second[28:36].view(4, 2), columns[:, 2:])
    assert not first[36:].any()


def test_stages_have_whole_blocks_and_the_ends() -> None:
    """Five blocks in two stages, three and two; in each all of its four ranks."""
    names = ["embedding", *(f"block.{i}" for i in range(5)), "head"]
    groups = [(name, (whole(4),)) for name in names]
    cut = DenseCut(groups, Layout(2, 2, 2, 1), Fusion.UNIT, blocks=[range(3), range(3, 5)])
    assert [cut.groups_of(rank) for rank in (0, 3, 4, 7)] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6]] * 2
    assert cut.holders(3) == [0, 1, 2, 3]
    assert cut.holders(6) == [4, 5, 6, 7]
    assert coordinates_of(Layout(2, 2, 2, 2), 6) == (1, 1, 0)


layouts = st.builds(
    lambda stages, replicas, expert, tensor: Layout(stages, replicas, expert, expert if tensor else 1),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
#: Dimensions that 1, 2 and 4 ranks divide, and others that are not divided.
parameters = st.one_of(
    st.builds(
        lambda rows, columns: DenseParameter((12 * rows, columns), Narrow.YES, Division(0, blocks=3)),
        st.integers(1, 2),
        st.integers(1, 5),
    ),
    st.builds(
        lambda rows, columns: DenseParameter((rows, 4 * columns), Narrow.YES, Division(1)),
        st.integers(1, 5),
        st.integers(1, 3),
    ),
    st.builds(whole, st.integers(1, 40)),
)


@given(st.lists(parameters, min_size=1, max_size=4), layouts, st.sampled_from(Fusion), st.booleans())
def test_what_is_cut_is_joined_again(
    found: list[DenseParameter], layout: Layout, fusion: Fusion, divided: bool
) -> None:
    table = whole(70, 16)
    groups = [(name, (table, *found)) for name in ("embedding", "a", "b", "c", "head")]
    blocks = {1: [range(3)], 2: [range(1), range(1, 3)], 3: [range(1), range(1, 2), range(2, 3)]}
    tables = {("embedding", 0), ("head", 0)} if divided else set()
    cut = DenseCut(groups, layout, fusion, blocks=blocks[layout.stages], tables=tables)
    seen = []
    for number, group in enumerate(groups):
        made = numbered(group)
        slices = {rank: cut.part(number, made, rank) for rank in cut.holders(number)}
        assert all(part.shape == (cut.record(number).slice_numel,) for part in slices.values())
        joined = cut.join(number, slices.__getitem__)
        assert all(torch.equal(one, other) for one, other in zip(joined, made, strict=True))
        seen += cut.holders(number)
    assert set(seen) == set(range(layout.world))
    assert all(rank_at(layout, *coordinates_of(layout, rank)) == rank for rank in range(layout.world))
