"""The paper's formulas: its own sums, its garbled one, and what equation 1 admits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.model.architecture import Architecture, DenseUnit
from tierstore.plan.semoe import PaperDevice, largest_sparse, paper_bytes


def _model(dense: int, expert: int, experts: int, layers: int) -> Architecture:
    return Architecture(
        units=(DenseUnit(matrices=0, others=dense),),
        moe_layers=tuple(range(layers)),
        experts=experts,
        expert_numel=expert,
        top_k=1,
    )


def test_the_dense_states_are_sixteen_bytes_a_parameter() -> None:
    """fp16 parameter and gradient, fp32 master, momentum and variance: not the 2 + 2 + 2 + 2 + 4 that is printed."""
    assert paper_bytes(_model(1000, 10, 1, 1), 0.0).gpu == (2 + 2 + 4 + 4 + 4) * 1000


def test_by_hand() -> None:
    """D = 100, S = 4 x 2 x 50 = 400, L = 2, alpha = 1/2."""
    found = paper_bytes(_model(100, 50, 4, 2), 0.5)
    assert found.gpu == 16 * 100 + 4 * 0.5 * 400 / 2
    assert found.cpu == 16 * 0.5 * 400
    assert found.ssd == 12 * 400


@settings(deadline=None, max_examples=60)
@given(
    gpu=st.integers(1 << 20, 1 << 30),
    cpu=st.integers(1 << 20, 1 << 30),
    ssd=st.integers(1 << 20, 1 << 34),
    devices=st.integers(1, 8),
    dense=st.integers(0, 1 << 22),
    layers=st.integers(1, 16),
    alpha=st.sampled_from([0.0, 0.125, 0.5, 1.0]),
)
def test_the_largest_model_is_the_largest(
    gpu: int, cpu: int, ssd: int, devices: int, dense: int, layers: int, alpha: float
) -> None:
    """It fits, and one with a thousandth more does not."""
    device = PaperDevice(gpu, cpu, ssd)
    most = largest_sparse(device, devices, dense=dense, layers=layers, alpha=alpha)

    def fits(sparse: int) -> bool:
        one = _model(dense, sparse, 1, 1)
        found = paper_bytes(one, alpha / layers)
        rest = paper_bytes(one, alpha)
        return type(found)(found.gpu, rest.cpu, rest.ssd).fits(device, devices)

    if most == 0:
        assert 16 * dense >= devices * gpu
        return
    assert fits(max(most - 8, 0))
    assert not fits(most + most // 1000 + 8)


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_shares_are_shares(alpha: float) -> None:
    with pytest.raises(ConfigError, match="alpha"):
        paper_bytes(_model(1, 1, 1, 1), alpha)
