"""What a served model took is free as soon as it is closed and let go of: no cycle keeps it until garbage is collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from served_stores import served_store, store_of
from trained_stores import trained

PROMPTS = [[3, 1, 4, 1], [5, 9]]


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _still_there(store: Path, *, invariant: bool) -> list[str]:
    """Which parts are there still after a prefill, a step and the end."""
    with served_store(store, batch__invariant=invariant) as (parts, runner):
        joined = runner.join(PROMPTS)
        runner.step({each.number: 7 for each in joined})
        kept: dict[str, weakref.ref[object]] = {
            "runner": weakref.ref(runner),
            "module": weakref.ref(parts.model.module),
            "parameter": weakref.ref(next(parts.model.module.parameters())),
            "experts": weakref.ref(parts.experts),
            "store": weakref.ref(parts.store),
            "cache": weakref.ref(parts.store.cache),
        }
    del parts, runner, joined
    return [name for name, reference in kept.items() if reference() is not None]


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize("invariant", [False, True])
def test_a_wrapped_model_is_free_at_its_end(tmp_path: Path, invariant: bool) -> None:
    _, store = store_of(tmp_path, "mixtral", torch.bfloat16)
    assert _still_there(store, invariant=invariant) == []


@pytest.mark.usefixtures("_no_collection")
def test_a_trained_model_is_free_at_its_end(text: Path, tmp_path: Path) -> None:
    trained(text, tmp_path / "store")
    assert _still_there(tmp_path / "store", invariant=False) == []
