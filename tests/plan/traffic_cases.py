"""What a plan says of a step, and what ranks really send in it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tierstore.config import load
from tierstore.machine_profile import ASSUMED, Profile
from tierstore.parallel import Mesh
from tierstore.plan.capacity import Setting, capacity
from tierstore.plan.traffic import step_traffic
from tierstore.plan.workload import StepWorkload
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

Make = Callable[..., Setting]


def workload_of(setting: Setting, profile: Profile = ASSUMED) -> StepWorkload:
    taken = capacity(setting)
    return StepWorkload(setting, taken, step_traffic(setting, taken), profile)


def step_traffic_of(mesh: Mesh, settings: Mapping[str, Any], store: Path) -> dict[str, int]:
    """Bytes that this rank sends in the second step, by collective; those of dense slices apart, as ``dense``."""
    config = load(TrainConfig, None, {**settings, "store": store})
    with open_session(config, Opening.CREATE, mesh=mesh) as trainer:
        trainer.step()
        before = {kind.value: sent.sent_bytes for kind, sent in mesh.traffic().items()}
        trainer.step()
        after = {kind.value: sent.sent_bytes for kind, sent in mesh.traffic().items()}
    return {kind: sent - before[kind] for kind, sent in after.items()}
