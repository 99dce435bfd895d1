"""What ranks really send in a step, for plans to be held against."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tierstore.config import load
from tierstore.parallel import Mesh
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session


def step_traffic_of(mesh: Mesh, settings: Mapping[str, Any], store: Path) -> dict[str, int]:
    """Bytes that this rank sends in the second step, by collective; those of dense slices apart, as ``dense``."""
    torch.set_num_threads(1)
    config = load(TrainConfig, None, {**settings, "store": store})
    with open_session(config, Opening.CREATE, mesh=mesh) as trainer:
        trainer.step()
        before = {kind.value: sent.sent_bytes for kind, sent in mesh.traffic().items()}
        trainer.step()
        after = {kind.value: sent.sent_bytes for kind, sent in mesh.traffic().items()}
    return {kind: sent - before[kind] for kind, sent in after.items()}
