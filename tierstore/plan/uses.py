"""What a model is planned for: full training, low-rank adaptation, serving; and what each trains."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tierstore.errors import ConfigError
from tierstore.hf.sizes import pair_parameters
from tierstore.hf.spec import HfSpec
from tierstore.model.store_schema import PAIR_SCHEMA
from tierstore.moe.lora import PairShape
from tierstore.store.format import MomentFormat, RecordSchema

#: The rank of pairs where none is given.
DEFAULT_RANK = 16


class Use(StrEnum):
    """What is done with a model. All but ``FULL`` read their experts and never write them."""

    FULL = "full"  # every parameter is trained
    LORA = "lora"  # low-rank pairs of attention and of experts; those of experts are records
    LORA_ATTENTION = "lora-attention"  # low-rank pairs of attention alone
    SERVE = "serve"  # forward passes


@dataclass(frozen=True, kw_only=True)
class ModelUsage:
    """A use of one model. ``attention``: parameters of attention's pairs by dense unit; ``pairs``: the record of one
    expert's pairs. ``tokens``: of one pass of one rank, where they are not those of a micro-batch.
    """

    use: Use = Use.FULL
    rank: int = 0
    attention: tuple[int, ...] = ()
    pairs: RecordSchema | None = None
    tokens: int = 0

    @property
    def frozen(self) -> bool:
        """Whether experts are read only."""
        return self.use is not Use.FULL

    @property
    def trains(self) -> bool:
        """Whether there are backward passes."""
        return self.use is not Use.SERVE


FULL_TRAINING = ModelUsage()


def usage_of(spec: HfSpec, use: Use, rank: int, moments: MomentFormat = MomentFormat.FP32) -> ModelUsage:
    """How ``use`` uses the model, with pairs of ``rank`` whose moments are kept as ``moments``. Raises ConfigError."""
    if use in (Use.FULL, Use.SERVE):
        return ModelUsage(use=use)
    if rank < 1:
        raise ConfigError(f"--lora: expected at least 1, got {rank}")
    attention = tuple(pair_parameters(spec.manifest, rank))
    if use is Use.LORA_ATTENTION:
        return ModelUsage(use=use, rank=rank, attention=attention)
    try:
        numel = PairShape(spec.expert_shape, rank, float(rank)).numel
    except ConfigError as error:
        raise ConfigError(str(error).replace("lora.rank", "--lora")) from error
    pairs = RecordSchema(PAIR_SCHEMA, numel, moments=moments)
    return ModelUsage(use=use, rank=rank, attention=attention, pairs=pairs)
