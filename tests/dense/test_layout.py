"""The slice index: by hand, and re-cutting against whole arrays."""

import pytest
import torch
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tierstore.dense.config import Fusion
from tierstore.dense.layout import Gathered, Narrow, Span, UnitLayout, layouts_of_shapes, recut, unit_layouts
from tierstore.parallel.layout import TableRows

quick = settings(max_examples=share(40))
shapes = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=2).map(tuple), st.booleans()),
    min_size=1,
    max_size=5,
)


def layout_of(
    parameters: list[tuple[tuple[int, ...], bool]], ranks: int, fusion: Fusion = Fusion.UNIT
) -> UnitLayout:
    made = [nn.Parameter(torch.empty(shape)) for shape, _ in parameters]
    narrow = [p for p, (_, cast) in zip(made, parameters, strict=True) if cast]
    return unit_layouts([("u", made)], ranks=ranks, narrow=narrow, fusion=fusion)[0]


def test_by_hand() -> None:
    # 20 + 6 + 7 elements for two ranks. One region: 33, so slices of 32 (a multiple of 16, and 2 x 16 < 33), 64 in all.
    one = layout_of([((4, 5), False), ((6,), False), ((7,), False)], 2)
    assert one.key == "dense.u"
    assert one.regions[0].spans == (Span(0, 0, (4, 5)), Span(1, 20, (6,)), Span(2, 26, (7,)))
    assert (one.slice_numel, one.padded_numel, one.gathered_bytes(torch.bfloat16)) == (32, 64, 256)
    # The matrix may travel in bf16: 13 fp32 elements in slices of 16 come first, then 20 in slices of 16.
    two = layout_of([((4, 5), True), ((6,), False), ((7,), False)], 2)
    assert [region.narrow for region in two.regions] == [Narrow.NO, Narrow.YES]
    assert [region.slice_numel for region in two.regions] == [16, 16]
    assert two.gathered_bytes(torch.bfloat16) == 32 * 4 + 32 * 2
    assert [span for _, span in two.slices()] == [slice(0, 16), slice(16, 32)]
    assert len(layout_of([((4, 5), True), ((6,), False)], 2, Fusion.PARAMETER).regions) == 2


def test_recut_by_hand() -> None:
    # 40 elements: 2 slices of 32 become 3 of 16. Rank 1 of 3 has elements 16 to 31, rank 2 has 32 to 39 and padding.
    old, new = layout_of([((40,), False)], 2), layout_of([((40,), False)], 3)
    for before, after, rank, reads in (
        (old, new, 1, [(0, 16, 16)]),
        (old, new, 2, [(1, 0, 8)]),
        (new, old, 0, [(0, 0, 16), (1, 0, 16)]),
    ):
        found: list[tuple[int, int, int]] = []

        def read(*of: int, found: list[tuple[int, int, int]] = found) -> torch.Tensor:
            found.append(of)  # type: ignore[arg-type]
            return torch.full((of[2],), float(len(found)))

        slices = recut(before, after, rank, read)
        assert found == reads
        expected = [float(number + 1) for number, (_, _, count) in enumerate(reads) for _ in range(count)]
        assert slices.tolist() == expected + [0.0] * (after.slice_numel - len(expected))


def slices_of(layout: UnitLayout, values: list[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    """What each rank holds of parameters ``values``, from whole padded regions."""
    regions = []
    for region in layout.regions:
        whole = torch.zeros(region.padded_numel)
        for span in region.spans:
            whole[span.offset : span.offset + span.numel] = values[span.index].flatten()
        regions.append(whole.view(ranks, region.slice_numel))
    return [torch.cat([region[rank] for region in regions]) for rank in range(ranks)]


@quick
@given(shapes, st.integers(1, 5), st.integers(1, 5), st.sampled_from(list(Fusion)))
def test_recut_is_cutting_the_whole(
    parameters: list[tuple[tuple[int, ...], bool]], before: int, after: int, fusion: Fusion
) -> None:
    values = [torch.randn(shape) for shape, _ in parameters]
    old, new = layout_of(parameters, before, fusion), layout_of(parameters, after, fusion)
    held = slices_of(old, values, before)
    for rank, expected in enumerate(slices_of(new, values, after)):
        found = recut(old, new, rank, lambda r, start, count: held[r][start : start + count])
        assert torch.equal(found, expected)


def test_other_parameters_cannot_be_recut() -> None:
    with pytest.raises(ValueError, match=r"dense\.u.*not the same parameters"):
        recut(layout_of([((4,), False)], 1), layout_of([((5,), False)], 2), 0, lambda *of: torch.zeros(0))


def table_layout(vocab: int, width: int, ranks: int, gathered: Gathered) -> UnitLayout:
    """A norm, and a table of ``vocab`` rows."""
    places = [("u", 1)] if gathered is Gathered.NO else []
    shapes = [("u", [(Narrow.NO, (width,)), (Narrow.NO, (vocab, width))])]
    return layouts_of_shapes(shapes, ranks=ranks, tables=places)[0]


def test_a_table_by_hand() -> None:
    # A norm of 8 in a region of 32 for two ranks; 10 rows of 8 in slices of 6 rows: 5 are no multiple of 16 elements.
    layout = table_layout(10, 8, 2, Gathered.NO)
    norm, table = layout.regions
    assert (norm.slice_numel, table.slice_numel, layout.slice_numel) == (16, 48, 64)
    assert (norm.gathered, table.gathered) == (Gathered.YES, Gathered.NO)
    assert table.table == TableRows(10, 8, 2)
    assert (layout.padded_numel, layout.exchanged_numel) == (128, 32)
    assert layout.gathered_bytes(torch.float32) == 128
    assert [layout.divided(index) for index in (0, 1)] == [False, True]


def test_a_parameter_may_be_a_ranks_own_rows() -> None:
    norm, rows = nn.Parameter(torch.empty(8)), nn.Parameter(torch.empty(6, 8))
    found = unit_layouts([("u", [norm, rows])], ranks=2, tables={("u", 1): TableRows(10, 8, 2)})
    assert found == [table_layout(10, 8, 2, Gathered.NO)]


@quick
@given(
    st.integers(1, 20),
    st.sampled_from([1, 3, 8, 16]),
    st.tuples(st.integers(1, 5), st.sampled_from(Gathered)),
    st.tuples(st.integers(1, 5), st.sampled_from(Gathered)),
)
def test_recut_between_gathered_and_divided(
    vocab: int, width: int, before: tuple[int, Gathered], after: tuple[int, Gathered]
) -> None:
    values = [torch.randn(width), torch.randn(vocab, width)]
    old, new = table_layout(vocab, width, *before), table_layout(vocab, width, *after)
    held = slices_of(old, values, before[0])
    for rank, expected in enumerate(slices_of(new, values, after[0])):
        found = recut(old, new, rank, lambda r, start, count: held[r][start : start + count])
        assert torch.equal(found, expected)
