"""Rows of hyperparameters against torch's AdamW, and the history of steps worked by hand."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tierstore.errors import ConfigError, StoreError, StoreFormatError
from tierstore.store.adamw import AdamWConfig, Inactive, StepHistory


def test_row_numbers() -> None:
    config = AdamWConfig(betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    first = config.row(1e-3, 1)
    assert first[5] == np.float32(1 - 0.9)
    assert first[6] == np.float32(math.sqrt(1 - 0.99))
    later = config.row(1e-3, 10_000)
    assert later[5] == later[6] == 1.0
    with pytest.raises(ValueError, match="from 1"):
        config.row(1e-3, 0)


def test_rows_make_torchs_step() -> None:
    config = AdamWConfig()
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(50, generator=generator, dtype=torch.float64)
    torchs = p.clone().requires_grad_()
    optimizer = torch.optim.AdamW([torchs], lr=0.01, betas=config.betas, eps=config.eps, weight_decay=0.1)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for step in range(1, 6):
        grad = torch.randn(50, generator=generator, dtype=torch.float64)
        torchs.grad = grad
        optimizer.step()
        lr, beta1, beta2, eps, decay, correction1, correction2 = config.row(0.01, step).tolist()
        p *= 1 - lr * decay
        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad**2
        p -= lr / correction1 * m / (v.sqrt() / correction2 + eps)
        torch.testing.assert_close(p, torchs.detach(), rtol=1e-5, atol=1e-6)


def test_history_by_hand() -> None:
    """Steps 1, 2 applied; 3 open: a record at step 1 has missed step 2, and steps through 3 with a gradient."""
    history = StepHistory(AdamWConfig())
    for lr in (0.1, 0.2):
        history.begin(lr)
        history.finish()
    history.begin(0.3)
    assert (history.applied, history.current) == (2, 3)
    assert history.missed(1) == 1
    np.testing.assert_array_equal(history.rows(1, 2)[:, 0], np.float32([0.2]))
    rows, reached = history.step_rows(1, 3)
    assert (reached, history.taken) == (3, 1)
    np.testing.assert_array_equal(rows[:, 0], np.float32([0.2, 0.3]))
    history.abandon()
    assert not history.is_open
    with pytest.raises(StoreError, match="no optimizer step is open"):
        history.finish()


def test_a_gradient_that_waited_takes_its_own_step() -> None:
    """While step 3 is open, a record with a gradient of step 2 takes that one, and not the open one."""
    for inactive in Inactive:
        history = StepHistory(AdamWConfig(inactive=inactive))
        for lr in (0.1, 0.2):
            history.begin(lr)
            history.finish()
        history.begin(0.3)
        rows, reached = history.step_rows(1, 2)
        assert (reached, history.taken) == (2, 0)
        np.testing.assert_array_equal(rows, history.config.row(0.2, 2)[None])


def test_steps_out_of_order() -> None:
    history = StepHistory(AdamWConfig())
    with pytest.raises(StoreError, match="no optimizer step is open"):
        _ = history.current
    history.begin(0.1)
    with pytest.raises(StoreError, match="step 1 is open already"):
        history.begin(0.2)
    with pytest.raises(StoreError, match="at optimizer step 1 cannot take step 1"):
        history.step_rows(1, 1)
    assert history.taken == 0


def test_history_forgets_what_no_record_needs() -> None:
    history = StepHistory(AdamWConfig())
    for step in range(5):
        history.begin(float(step))
        history.finish()
    history.forget_before(3)
    np.testing.assert_array_equal(history.rows(3, 5)[:, 0], np.float32([3.0, 4.0]))
    with pytest.raises(ValueError, match="not in the history"):
        history.rows(2, 5)


def test_skip_counts_a_records_own_steps() -> None:
    history = StepHistory(AdamWConfig(inactive=Inactive.SKIP))
    for _ in range(4):
        history.begin(0.5)
        history.finish()
    assert history.missed(0) == 0
    history.begin(0.5)
    rows, reached = history.step_rows(1, 5)
    assert reached == 2
    np.testing.assert_array_equal(rows, history.config.row(0.5, 2)[None])


def test_history_survives_packing() -> None:
    history = StepHistory(AdamWConfig())
    for step in range(3):
        history.begin(0.1 * (step + 1))
        history.finish()
    history.begin(9.0)  # an open step is not part of a commit
    other = StepHistory(AdamWConfig())
    other.unpack(history.pack())
    assert (other.applied, other.is_open) == (3, False)
    np.testing.assert_array_equal(other.rows(0, 3), history.rows(0, 3))
    with pytest.raises(StoreFormatError, match="damaged"):
        other.unpack(b"short")


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("betas", lambda: AdamWConfig(betas=(0.9, 1.0))),
        ("eps", lambda: AdamWConfig(eps=0.0)),
        ("weight_decay", lambda: AdamWConfig(weight_decay=-1.0)),
    ],
)
def test_bad_values_are_named(field: str, make: Callable[[], AdamWConfig]) -> None:
    with pytest.raises(ConfigError, match=f"^{field}:"):
        make()
