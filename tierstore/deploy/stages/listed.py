"""The stages in their order: an explicit list."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.deploy.stage import DeployStage
from tierstore.deploy.stages.conversion import ConversionStage
from tierstore.deploy.stages.deployment import AssemblyStage
from tierstore.deploy.stages.distillation import DistillationStage
from tierstore.deploy.stages.fusion import FusionStage
from tierstore.deploy.stages.optimisation import OptimisationStage
from tierstore.deploy.stages.segmentation import SegmentationStage

STAGES: Sequence[DeployStage] = (
    FusionStage(),
    DistillationStage(),
    ConversionStage(),
    SegmentationStage(),
    OptimisationStage(),
    AssemblyStage(),
)
