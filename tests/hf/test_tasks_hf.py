"""Imported models with several tasks: one process and two ranks compute the same, and own heads are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import imported
from launcher import Ranks
from stored_runs import configuration, train
from tiny_families import make_config, plain_model

from tierstore.errors import ConfigError
from tierstore.hf.importing import ImportOptions, import_model
from tierstore.model.config import ComputeDtype
from tierstore.parallel import Mesh
from tierstore.train.config import TrainConfig


def settings(store: Path, text: Path) -> dict[str, Any]:
    """Rows 2 and 1: two ranks have 2 and 1, or 1 and 2."""
    return {
        "store": store,
        "data.format": "auto",
        "data.batch_size": 3,
        "tasks.a.paths": (str(text),),
        "tasks.a.format": "bytes",
        "tasks.a.rows": 2,
        "tasks.b.paths": (str(text),),
        "tasks.b.format": "bytes",
        "tasks.b.weight": 3.0,
        "steps": 4,
    }


def on_rank(mesh: Mesh, source: Path, given: dict[str, Any]) -> list[float]:
    import_model(source, given["store"], ImportOptions(compute=ComputeDtype.FP32), mesh=mesh)
    return train(configuration(given), mesh=mesh)[0]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    source = tmp_path / "checkpoint"
    plain_model(make_config("mixtral", vocab_size=256)).save_pretrained(source)
    imported(source, tmp_path / "store", compute=ComputeDtype.FP32)
    return tmp_path / "store"


@pytest.mark.slow
def test_two_ranks_compute_what_one_process_does(
    ranks: Ranks, store: Path, text: Path, tmp_path: Path
) -> None:
    expected = train(configuration(settings(store, text)))[0]
    found = ranks.run(2, on_rank, tmp_path / "checkpoint", settings(tmp_path / "several", text))
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0], expected, rtol=2e-5)


def test_own_heads_are_refused(store: Path, text: Path) -> None:
    config: TrainConfig = configuration(settings(store, text))
    own = {name: replace(task, head=type(task.head)("own")) for name, task in config.tasks.items()}
    with pytest.raises(
        ConfigError, match=r"tasks\.a\.head: expected shared: an imported model has one output head"
    ):
        train(replace(config, tasks=own))
