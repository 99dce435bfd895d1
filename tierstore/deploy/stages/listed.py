"""The stages in their order: an explicit list."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.deploy.stage import Stage
from tierstore.deploy.stages.conversion import Conversion
from tierstore.deploy.stages.deployment import Assembly
from tierstore.deploy.stages.distillation import Distillation
from tierstore.deploy.stages.fusion import Fusion
from tierstore.deploy.stages.optimisation import Optimisation
from tierstore.deploy.stages.segmentation import Segmentation

STAGES: Sequence[Stage] = (
    Fusion(),
    Distillation(),
    Conversion(),
    Segmentation(),
    Optimisation(),
    Assembly(),
)
