"""The embedding whose rows are divided over ranks: by hand, and bit for bit against one process."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher import Ranks
from torch import Tensor
from torch.nn import functional as F
from vocabulary_cases import Found, first_rows, look_up, look_up_many, look_up_uneven, refused

from tierstore.parallel.layout import TableRows

Case = tuple[Tensor, Tensor, Tensor, float]


def one_process(whole_VD: Tensor, ids_T: Tensor, back_TD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Rows, and the gradient of the table."""
    table = whole_VD.clone().requires_grad_()
    x_TD = (F.embedding(ids_T, table) * scale).to(back_TD.dtype)
    x_TD.backward(back_TD)
    assert table.grad is not None
    return x_TD.detach(), table.grad


def assert_bits(case: Case, found: list[Found]) -> None:
    """All ranks together have the very bits of one process, and zeros in their padding."""
    whole_VD = case[0]
    x_TD, grad_VD = one_process(*case)
    assert torch.equal(torch.cat([rank["x"] for rank in found]), x_TD)
    grads = torch.cat([rank["grad"] for rank in found])
    assert torch.equal(grads[: len(whole_VD)], grad_VD)
    assert not grads[len(whole_VD) :].any()


def drawn(seed: int, vocab: int, width: int, tokens: int, *, scale: float = 1.0) -> Case:
    """Few ids often: sums of many gradients that have no common scale, so that their order shows."""
    generator = torch.Generator().manual_seed(seed)
    ids_T = (torch.rand(tokens, generator=generator) ** 4 * vocab).long()
    back_TD = torch.randn(tokens, width, generator=generator) * torch.logspace(-3, 3, tokens).unsqueeze(1)
    return torch.randn(vocab, width, generator=generator), ids_T, back_TD, scale


def test_rows_by_hand() -> None:
    # 10 rows of 8 over 2 ranks: 5 each, but 16 elements are 2 rows, so 6 and 4 (and 2 of padding).
    table = TableRows(10, 8, 2)
    assert (table.each, table.owned(0), table.owned(1)) == (6, range(6), range(6, 10))
    # 5 rows of 8 over 4: 2 each, and the last rank has padding alone.
    assert [TableRows(5, 8, 4).owned(rank) for rank in range(4)] == [
        range(2),
        range(2, 4),
        range(4, 5),
        range(5, 5),
    ]
    assert TableRows(151_936, 512, 4).each == 37_984


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 9))
def test_every_row_has_one_owner(rows: int, width: int, ranks: int) -> None:
    table = TableRows(rows, width, ranks)
    assert table.each * width % 16 == 0
    assert [row for rank in range(ranks) for row in table.owned(rank)] == list(range(rows))


def test_by_hand(ranks: Ranks) -> None:
    """Two ranks, four rows of width 16, ids 3 1 | 1 0: row 1 gets 2 from rank 0 and 3 from rank 1."""
    table_VD = torch.arange(4.0).unsqueeze(1).expand(4, 16).contiguous()
    back_TD = torch.tensor([1.0, 2.0, 3.0, 4.0]).unsqueeze(1).expand(4, 16).contiguous()
    found = ranks.run(2, look_up, table_VD, torch.tensor([3, 1, 1, 0]), back_TD, 2.0)
    assert [rank["x"][:, 0].tolist() for rank in found] == [[6.0, 2.0], [2.0, 0.0]]
    assert [rank["grad"][:, 0].tolist() for rank in found] == [[8.0, 10.0], [0.0, 2.0]]
    for rank in found:
        assert rank["calls"] == 3
        # How many tokens, in 8 bytes, and 2 ids of 4 bytes to the other rank. Rank 0 gives rows 1 and 0 away and gets row
        # 3, and gradients go back: either way 3 rows of 64 bytes.
        assert rank["sent"] == dict.fromkeys(rank["sent"], 0) | {"all_gather": 8, "all_to_all": 8 + 3 * 64}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bits_of_one_process(ranks: Ranks, size: int) -> None:
    cases = [
        drawn(1, 40, 16, 240),
        drawn(2, 7, 8, 64),  # on four ranks the last has padding alone
        drawn(3, 300, 24, 2400, scale=24**0.5),
        (lambda whole, ids, back, scale: (whole, ids, back.bfloat16(), scale))(*drawn(4, 50, 16, 400)),
        (torch.randn(9, 16), torch.full((16,), 4), torch.randn(16, 16), 1.0),  # one owner has everything
        # Beside 2^24 a 1 is lost when it is added alone, and ones that were added up before are not: summed by rank, as
        # ZeRO-3 gradients are, this has other bits on every processor.
        (
            torch.randn(9, 16),
            torch.full((16,), 4),
            torch.cat([torch.full((1, 16), 2.0**24), torch.ones(15, 16)]),
            1.0,
        ),
    ]
    found = ranks.run(size, look_up_many, cases)
    for number, case in enumerate(cases):
        assert_bits(case, [rank[number] for rank in found])


@settings(deadline=None, max_examples=15)
@given(
    vocab=st.integers(1, 30),
    width=st.sampled_from([1, 3, 8, 16]),
    tokens=st.integers(1, 12),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_any_ids(ranks: Ranks, vocab: int, width: int, tokens: int, seed: int, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, vocab - 1), min_size=2 * tokens, max_size=2 * tokens))
    generator = torch.Generator().manual_seed(seed)
    case = (
        torch.randn(vocab, width, generator=generator),
        torch.tensor(ids),
        torch.randn(2 * tokens, width, generator=generator),
        1.0,
    )
    assert_bits(case, ranks.run(2, look_up, *case))


def test_ranks_may_have_other_numbers_of_tokens(ranks: Ranks) -> None:
    """Also none: then it has gradients of its rows nevertheless, from the others."""
    case = drawn(5, 20, 16, 31)
    for sizes in ([31, 0], [7, 24]):
        assert_bits(case, ranks.run(2, look_up_uneven, *case, sizes))


@pytest.mark.parametrize("bad", [-1, 10, 1 << 40])
def test_an_id_that_is_no_row_is_refused_on_every_rank(ranks: Ranks, bad: int) -> None:
    message = "token 1 of rank 1: expected an id of 0 to 9, the vocabulary's"
    assert ranks.run(2, refused, torch.zeros(10, 16), torch.arange(4), bad) == [message, message]


@pytest.mark.parametrize(
    ("rows", "width", "drawn_at_once"), [(50, 16, 160), (37, 3, 48), (9, 5, 16), (2, 1, 16)]
)
def test_first_rows_are_those_of_the_whole_table(
    ranks: Ranks, rows: int, width: int, drawn_at_once: int
) -> None:
    whole = torch.empty(rows, width)
    torch.nn.init.normal_(whole, std=0.2, generator=torch.Generator().manual_seed(3))
    found = torch.cat(ranks.run(2, first_rows, rows, width, drawn_at_once))
    assert torch.equal(found[:rows], whole)
    assert not found[rows:].any()
