"""experiments/layouts.py: its layouts, the device, the fit of overheads, and verdicts. The smoke test runs real ranks."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layouts import DENSE, EXPERT, FITTED, JUDGED, EmulatedModel, Overheads, fit, least_squares, row, summary
from torch import nn

from tierstore.config import load
from tierstore.model.config import ModelConfig
from tierstore.model.transformer import Transformer
from tierstore.moe.source import InMemoryExperts
from tierstore.parallel.config import ExchangeMode, RowPlacement
from tierstore.plan.layouts import obstacle
from tierstore.train.config import TrainConfig


def test_the_layouts_spread_over_all_kinds(tmp_path: Path) -> None:
    assert len(JUDGED) == 24
    assert len({case.name for case in (*JUDGED, *FITTED)}) == len(JUDGED) + len(FITTED)
    judged, fitted = ({replace(case, kind="", nodes=1) for case in cases} for cases in (JUDGED, FITTED))
    assert not judged & fitted
    choices = [case.choice for case in JUDGED]
    assert {choice.ranks.tensor for choice in choices} == {1, 2, 4}
    assert {choice.ranks.stages for choice in choices} == {1, 2, 4}
    assert {choice.degree for choice in choices} == {1, 2, 4}
    assert {choice.ranks.replicas for choice in choices} == {1, 2, 4}
    assert {choice.exchange for choice in choices} == {ExchangeMode.FLAT, ExchangeMode.HIERARCHICAL}
    assert {choice.head for choice in choices} == {RowPlacement.GATHERED, RowPlacement.PARTITIONED}
    for ranks in (1, 2, 4):
        assert sum(case.choice.ranks.world == ranks for case in FITTED) >= 2
    text = tmp_path / "text"
    text.write_bytes(b"text")
    for case in (*JUDGED, *FITTED):
        config = load(TrainConfig, None, case.settings(text))
        assert obstacle(config, case.choice, case.ranks // case.nodes) is None


def test_the_device_waits_for_each_block_and_the_head() -> None:
    """Two tokens of a model of width 8, attention over 4 positions: 2 x 2 x 8 x (4 x 8 + 4) operations a block, and
    2 x 2 x 3 x 8 x 32 for the network of one without experts.
    """
    config = ModelConfig(
        d_model=8, n_layers=2, n_heads=2, seq_len=4, d_ff=8, experts=2, top_k=1, moe_every=2, vocab_size=256
    )
    device = EmulatedModel(config, 2)
    assert device.block_s(2) == pytest.approx(DENSE.latency_s + 2 * 2 * 8 * 36 / 2 / DENSE.per_s)
    assert device.network_s(2) == pytest.approx(DENSE.latency_s + 2 * 2 * 3 * 8 * 32 / 2 / DENSE.per_s)
    assert device.head_s(2) == pytest.approx(DENSE.latency_s + 2 * 2 * 8 * 256 / DENSE.per_s)
    experts = InMemoryExperts(config.expert_shape, layers=range(2), experts=2)
    plain = Transformer(config, experts)
    slowed = Transformer(config, device.source(experts))
    waited: Counter[str] = Counter()
    slowed.load_state_dict(plain.state_dict())
    device.slow_down(slowed)
    for name, module in slowed.named_modules():
        if isinstance(module, nn.Module) and module._forward_pre_hooks:
            waited[name] += 1
    assert waited == {"blocks.0.attention": 1, "blocks.0.ffn": 1, "blocks.1.attention": 1, "norm": 1}
    tokens = torch.arange(4).view(1, 4)
    losses = []
    for model in (plain, slowed):
        output = model(tokens, tokens)
        output.objective.backward()
        losses.append(float(output.loss.detach()))
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[0] == losses[1]
    assert EXPERT.latency_s > 0


def linear(fixed: float, counts: tuple[float, float, float]) -> Callable[[Overheads], float]:
    """A plan that is linear in the overheads."""

    def step_s(overheads: Overheads) -> float:
        each = (overheads.unit_s, overheads.expert_s, overheads.message_s)
        return fixed + sum(count * spent for count, spent in zip(counts, each, strict=True))

    return step_s


def test_overheads_are_found_again() -> None:
    planned = [
        linear(0.3, (6, 8, 0)),
        linear(0.2, (9, 4, 10)),
        linear(0.4, (3, 16, 30)),
        linear(0.1, (1, 1, 9)),
    ]
    true = Overheads(2e-3, 0.5e-3, 1e-3)
    measured_s = [each(true) for each in planned]
    found = fit(planned, measured_s)
    assert [each(found) for each in planned] == pytest.approx(measured_s, rel=0.01)
    assert found.unit_s == pytest.approx(2e-3, rel=0.5)


def test_what_the_measured_steps_do_not_tell_apart_is_shared() -> None:
    """Passes over units and over experts come in the same numbers: neither takes all of the time."""
    planned = [linear(0.3, (4, 4, 0)), linear(0.2, (2, 2, 0))]
    found = fit(planned, [0.3 + 4 * 3e-3, 0.2 + 2 * 3e-3])
    assert found.unit_s + found.expert_s == pytest.approx(3e-3, rel=0.3)
    assert min(found.unit_s, found.expert_s) > 0
    assert found.message_s == 0


#: No numbers of 1e-41: a solution that divides by them is larger than any step that is tried.
_NUMBERS = st.integers(-3000, 3000).map(lambda thousandths: thousandths / 1000)


@given(
    st.lists(st.tuples(*[_NUMBERS] * 3), min_size=3, max_size=5), st.lists(_NUMBERS, min_size=5, max_size=5)
)
def test_no_other_overheads_are_nearer(rows: list[tuple[float, float, float]], values: list[float]) -> None:
    """Against steps in every direction that stays at 0 or above."""
    matrix, wanted = np.array(rows), np.array(values[: len(rows)])
    found = least_squares(matrix, wanted)
    assert found.min() >= 0
    least = np.linalg.norm(matrix @ found - wanted)
    for direction in np.vstack([np.eye(3), -np.eye(3)]) * 0.01:
        other = np.maximum(found + direction, 0)
        assert least <= np.linalg.norm(matrix @ other - wanted) + 1e-6


@pytest.mark.parametrize(("ratio", "within"), [(1.0, 24), (1.14, 24), (1.16, 0), (0.84, 0)])
def test_verdicts(ratio: float, within: int) -> None:
    """Each layout takes 0.5 s in three of its four steps; the second round's median is 5% below."""
    rounds = [[0.5, 0.5], [0.5, 0.45]]
    rows = [row(case, rounds, 0.5 * ratio if case in JUDGED else 0.5) for case in (*JUDGED, *FITTED)]
    found = summary(rows)
    assert (found["within_count"], found["judged_count"]) == (within, 24)
    assert found["worst_error_ratio"] == pytest.approx(abs(ratio - 1))
    assert found["noise_ratio"] == pytest.approx(0.05)
