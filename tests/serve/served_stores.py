"""Stores of tiny models to be served, and what opens them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import imported
from tiny_families import make_config, plain_model

from tierstore.config import load
from tierstore.errors import BudgetError
from tierstore.hf.manifest import Weights
from tierstore.serve.batch import GroupedRunner
from tierstore.serve.config import ServeConfig
from tierstore.serve.opening import ServedParts, open_runner, open_served

#: One thread, as in ``tiny_families``; a tiny machine.
_TINY: dict[str, Any] = {"device": "cpu", "threads": 1, "io.huge_pages": "off", "host_budget": 8 << 20}


def store_of(
    directory: Path,
    family: str,
    dtype: torch.dtype = torch.float32,
    *,
    weights: Weights = Weights.FROZEN,
    **options: Any,
) -> tuple[Any, Path]:
    """transformers' own model, and a store that it was imported into."""
    plain = plain_model(make_config(family, **options), dtype).eval()
    plain.save_pretrained(directory / "model")
    imported(directory / "model", directory / "store", weights=weights)
    return plain, directory / "store"


def serve_config(store: Path, **settings: Any) -> ServeConfig:
    """Keys with ``__`` for dots."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return load(ServeConfig, None, {**_TINY, "store": store, **given})


@contextmanager
def served_store(
    store: Path, *, trace: Path | None = None, **settings: Any
) -> Iterator[tuple[ServedParts, GroupedRunner]]:
    """The store opened, and a runner over it."""
    threads = torch.get_num_threads()
    try:
        with open_served(serve_config(store, **settings), trace=trace) as parts:
            yield parts, open_runner(parts)
    finally:
        torch.set_num_threads(threads)


def least_budget(store: Path) -> int:
    """The smallest host budget, as a refusal names it."""
    return _named_minimum(store, "host_budget", host_budget=1)


def least_ring(store: Path) -> int:
    """The smallest device budget of a ring of one layer: the few slots that there are without one are too few."""
    return _named_minimum(store, "device_budget", ring__memory="ring")


def _named_minimum(store: Path, key: str, **settings: Any) -> int:
    with pytest.raises(BudgetError, match=key) as refusal, served_store(store, **settings):
        pass
    found = re.search(r"minimum is (\d+) bytes", str(refusal.value))
    assert found is not None
    return int(found[1])
