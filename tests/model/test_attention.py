"""Attention, rotary positions and norm, each against its definition."""

import math

import pytest
import torch
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.model.attention import Attention, RMSNorm, rotary_tables, rotate
from tierstore.model.tables import cross_entropy


@settings(max_examples=share(25))
@given(
    st.integers(1, 12), st.sampled_from([2, 4, 10]), st.sampled_from([100.0, 10_000.0]), st.integers(0, 99)
)
def test_rotation_is_a_complex_product(positions: int, width: int, theta: float, seed: int) -> None:
    x = torch.randn(
        2, 3, positions, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    half = width // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    turned = torch.empty_like(pairs)
    for s in range(positions):
        for i in range(half):
            angle = s * theta ** (-2 * i / width)
            turned[..., s, i] = pairs[..., s, i] * complex(math.cos(angle), math.sin(angle))
    found = rotate(x, *rotary_tables(positions, width, theta))
    torch.testing.assert_close(found, torch.cat((turned.real, turned.imag), dim=-1), rtol=1e-5, atol=1e-6)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    cos, sin = rotary_tables(40, 8, 10_000.0)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned_q, turned_k = (rotate(x.expand(1, 1, 40, 8), cos, sin)[0, 0] for x in (query, key))
    products = turned_q @ turned_k.t()
    for distance in (0, 1, 7):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)


def test_attention_against_a_softmax_by_hand() -> None:
    attention = Attention(12, 3, seed=1).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.mul_(20)
    x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cos, sin = rotary_tables(9, 4, 100.0)
    wanted = torch.zeros_like(x)
    for b in range(2):
        query, key, value = (x[b] @ attention.qkv[i * 12 : i * 12 + 12].t() for i in range(3))
        for h in range(3):
            part = slice(4 * h, 4 * h + 4)
            q, k = (rotate(y[:, part], cos[:7], sin[:7]) for y in (query, key))
            scores = q @ k.t() / math.sqrt(4)
            scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf)
            wanted[b, :, part] = scores.softmax(-1) @ value[:, part]
    torch.testing.assert_close(attention(x, cos, sin), wanted @ attention.out.t(), rtol=1e-6, atol=1e-6)


def test_attention_never_looks_ahead() -> None:
    attention = Attention(8, 2)
    cos, sin = rotary_tables(6, 4, 100.0)
    x = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 4:] += 1
    before, after = attention(x, cos, sin), attention(changed, cos, sin)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_norm_by_hand() -> None:
    norm = RMSNorm(2, 0.5)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0]))
    # mean square (9 + 16) / 2 = 12.5; with eps 13
    wanted = torch.tensor([3.0, 8.0]) / math.sqrt(13)
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), wanted)
    assert norm(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("chunk", [1, 35, 10**6])
def test_cross_entropy_in_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.model.tables.CHUNK_LOGITS", chunk)
    generator = torch.Generator().manual_seed(0)
    x, head = torch.randn(11, 4, generator=generator), torch.randn(7, 4, generator=generator)
    targets = torch.randint(0, 7, (11,), generator=generator)
    x, head = x.double().requires_grad_(), head.double().requires_grad_()
    loss = cross_entropy(x, head, targets)
    wanted = -(x @ head.t()).log_softmax(-1)[torch.arange(11), targets].mean()
    torch.testing.assert_close(loss, wanted)
    found = torch.autograd.grad(loss, (x, head))
    for a, b in zip(found, torch.autograd.grad(wanted, (x, head)), strict=True):
        torch.testing.assert_close(a, b)
