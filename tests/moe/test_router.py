"""The router: hand-worked choices, losses and capacities; equal bits from equal keys."""

import math
from typing import Any

import pytest
import torch
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.moe import NoiseKey, Router, RouterConfig, RouterNoise


def _router(logits: list[list[float]], **options: Any) -> tuple[Router, torch.Tensor]:
    """A router whose logits are exactly ``logits``: one-hot inputs pick the rows of its weight."""
    table = torch.tensor(logits)
    router = Router(RouterConfig(experts=table.shape[1], **options), table.shape[0])
    with torch.no_grad():
        router.weight.copy_(table.t())
    return router, torch.eye(table.shape[0])


def test_top_two_by_hand() -> None:
    # softmax([ln 4, ln 3, ln 1]) = [4, 3, 1] / 8; softmax([0, ln 2, ln 5]) = [1, 2, 5] / 8
    router, x = _router([[math.log(4), math.log(3), 0.0], [0.0, math.log(2), math.log(5)]])
    routing = router(x, NoiseKey())
    assert routing.expert_TK.tolist() == [[0, 1], [2, 1]]
    torch.testing.assert_close(routing.weight_TK, torch.tensor([[4 / 7, 3 / 7], [5 / 7, 2 / 7]]))
    assert routing.load_E.tolist() == [1, 2, 1]
    # first choices: half to 0, half to 2; mean probabilities (4 + 1, 3 + 2, 1 + 5) / 16
    assert routing.aux_loss.item() == pytest.approx(3 * (0.5 * 5 / 16 + 0.5 * 6 / 16))
    assert routing.z_loss.item() == pytest.approx(math.log(8) ** 2)


def test_top_one_weighs_by_probability() -> None:
    router, x = _router([[math.log(4), math.log(3), 0.0]], top_k=1)
    routing = router(x, NoiseKey())
    assert routing.expert_TK.tolist() == [[0]]
    assert routing.weight_TK.item() == pytest.approx(0.5)


def test_ties_go_to_the_lower_index() -> None:
    router, x = _router([[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]], top_k=3)
    assert router(x, NoiseKey()).expert_TK.tolist() == [[0, 1, 2], [1, 2, 3]]


def test_losses_at_balance_and_at_collapse() -> None:
    even, x = _router((torch.eye(4) * 9).tolist(), top_k=1)
    assert even(x, NoiseKey()).aux_loss.item() == pytest.approx(1.0)
    one, x = _router([[30.0, 0.0, 0.0, 0.0]] * 4, top_k=1)
    assert one(x, NoiseKey()).aux_loss.item() == pytest.approx(4.0)


def test_capacity_drops_in_choice_then_token_order() -> None:
    # Four tokens, all 0 then 1; room for ceil(0.5 * 4 * 2 / 2) = 2 each: the later tokens overflow.
    router, x = _router([[2.0, 1.0]] * 3 + [[1.0, 2.0]], capacity_factor=0.5)
    routing = router(x, NoiseKey())
    # expert 0: first choices of tokens 0, 1 (2 overflows; 3's second choice too)
    # expert 1: first choice of token 3, then second choice of token 0 (1 and 2 overflow)
    assert routing.expert_TK.tolist() == [[0, 1], [0, -1], [-1, -1], [1, -1]]
    assert routing.load_E.tolist() == [2, 2]
    assert routing.weight_TK[routing.expert_TK == -1].abs().sum() == 0
    strong = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(routing.weight_TK[0], torch.tensor([strong, 1 - strong]))


@settings(max_examples=share(40))
@given(
    st.integers(1, 20),
    st.integers(1, 6),
    st.data(),
    st.sampled_from([None, 0.25, 1.0, 1.5]),
    st.integers(0, 99),
)
def test_routing_against_a_loop(
    tokens: int, experts: int, data: st.DataObject, factor: float | None, seed: int
) -> None:
    top_k = data.draw(st.integers(1, experts))
    config = RouterConfig(experts=experts, top_k=top_k, capacity_factor=factor)
    router = Router(config, 3, seed=seed)
    x = torch.randint(-2, 3, (tokens, 3), generator=torch.Generator().manual_seed(seed)).float() * 10
    routing = router(x, NoiseKey())
    probability = (x @ router.weight.t()).softmax(-1).tolist()
    chosen = [sorted(range(experts), key=lambda e: (-p[e], e))[:top_k] for p in probability]
    room = [config.capacity(tokens) or tokens * top_k] * experts
    for k in range(top_k):
        for row in chosen:
            if room[row[k]] == 0:
                row[k] = -1
            else:
                room[row[k]] -= 1
    assert routing.expert_TK.tolist() == chosen
    assert routing.load_E.tolist() == [sum(row.count(e) for row in chosen) for e in range(experts)]
    if factor is None and config.normalized:
        torch.testing.assert_close(routing.weight_TK.sum(-1), torch.ones(tokens))


def test_noise_is_keyed() -> None:
    config = RouterConfig(experts=8, noise=RouterNoise.JITTER, noise_std=0.3)
    router = Router(config, 16, layer=2, seed=5)
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))

    def weights(key: NoiseKey) -> torch.Tensor:
        return router(x, key).weight_TK

    first = weights(NoiseKey(3, 1))
    torch.manual_seed(99)  # the global generator has no say
    assert torch.equal(first, weights(NoiseKey(3, 1)))
    for other in (NoiseKey(3, 0), NoiseKey(4, 1)):
        assert not torch.equal(first, weights(other))
    elsewhere = Router(config, 16, layer=3, seed=5)
    elsewhere.load_state_dict(router.state_dict())
    assert not torch.equal(first, elsewhere(x, NoiseKey(3, 1)).weight_TK)
    router.eval()
    assert torch.equal(weights(NoiseKey(3, 1)), weights(NoiseKey(4, 0)))


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("experts", {"experts": 0}),
        ("top_k", {"top_k": 5}),
        ("top_k", {"top_k": 0}),
        ("aux_loss_weight", {"aux_loss_weight": -1.0}),
        ("z_loss_weight", {"z_loss_weight": math.nan}),
        ("noise", {"noise": "loud"}),
        ("noise_std", {"noise": RouterNoise.JITTER}),
        ("noise_std", {"noise_std": 0.1}),
        ("capacity_factor", {"capacity_factor": 0.0}),
        ("normalize_topk", {"top_k": 1, "normalize_topk": True}),
    ],
)
def test_bad_values_are_named(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{field}:"):
        RouterConfig(**{"experts": 4, **options})
