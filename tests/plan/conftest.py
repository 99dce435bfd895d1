"""Tiny configurations, and the settings that a plan makes of them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import MODEL, RUN

from tierstore.config import load
from tierstore.plan.capacity import Setting
from tierstore.train.config import TrainConfig
from tierstore.train.files import text_bytes

TINY: dict[str, Any] = {
    **RUN,
    **MODEL,
    "host_budget": 200 << 10,
    "eval_every": 0,
    "sample_tokens": 0,
    "model.experts": 12,
    "model.top_k": 12,
    "data.batch_size": 4,
}


MakeSetting = Callable[..., Setting]


@pytest.fixture
def setting(tmp_path: Path) -> MakeSetting:
    """A setting of a tiny run, every expert of which gets tokens, with ``changes`` by dotted names."""
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 600)

    def make(changes: Mapping[str, Any] | None = None, *, ranks: int = 1) -> Setting:
        own = {"data.paths": (str(text),), "store": tmp_path / "store"}
        config = load(TrainConfig, None, TINY | own | dict(changes or {}))
        return Setting(
            config=config,
            model=config.model.architecture,
            ranks=ranks,
            expert=config.parallel.expert,
            text_bytes=text_bytes(config.data),
        )

    return make
