"""The stages in their order: an explicit list."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.deploy.stage import Stage
from tierstore.deploy.stages.distillation import Distillation
from tierstore.deploy.stages.fusion import Fusion

STAGES: Sequence[Stage] = (Fusion(), Distillation())
