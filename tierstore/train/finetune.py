"""What a run chooses of a model that it did not make, but imported. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tierstore.errors import ConfigError
from tierstore.model.config import CheckpointActivations
from tierstore.moe.config import SaveActivations


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """How an imported model is trained. Raises ConfigError naming the field."""

    seq_len: int = field(default=1024, metadata={"help": "tokens of a sequence"})
    checkpoint_activations: CheckpointActivations = field(
        default=CheckpointActivations.OFF, metadata={"help": "what the backward pass computes again"}
    )
    expert_activations: SaveActivations = field(
        default=SaveActivations.SAVE, metadata={"help": "keep what experts computed, or compute it again"}
    )
    aux_loss_weight: float | None = field(
        default=None,
        metadata={"help": "weight of the balance loss (none: as the model's configuration has it)"},
    )
    bias_update_speed: float = field(
        default=0.001,
        metadata={
            "help": "change of a router's bias in one step, where a bias balances its experts (0: none)"
        },
    )

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ConfigError(f"seq_len: expected at least 1, got {self.seq_len}")
        for name in ("aux_loss_weight", "bias_update_speed"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}: expected a number of at least 0, got {value}")
