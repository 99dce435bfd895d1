"""Configuration of a run on several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path

from tierstore.config import check_least, check_positive, key
from tierstore.errors import ConfigError

#: ``ParallelConfig.pipeline_degree``: the run chooses a number of chunks of whole experts at every commit; or once and for
#: all a number that may divide the rows of each expert.
AUTO_DEGREE, AUTO_SPLIT = 0, -1
#: The most parts of an expert's rows.
MOST_PARTS = 16


class RowPlacement(StrEnum):
    """How the rows of a table over the vocabulary reach the tokens that need them."""

    AUTO = "auto"  # whichever sends fewer bytes
    GATHERED = "gathered"  # the whole table is gathered from its ZeRO-3 slices
    PARTITIONED = "partitioned"  # each rank keeps its rows; rows of tokens travel (SE-MoE section 4.3)


class ExchangeMode(StrEnum):
    """How rows travel to the ranks of their experts and back."""

    #: One all-to-all over all ranks of an expert group.
    FLAT = "flat"
    #: Within each node, then between the ranks with the same place in their nodes (SE-MoE, section 4.2).
    HIERARCHICAL = "hierarchical"
    #: Whichever is faster for the size of the messages, according to a short measurement at the start.
    AUTO = "auto"


class Elastic(Enum):
    """What a resumed run does with a store of a different number of ranks.

    OFF refuses it. RESHARD reshards it for the present ranks, keeps the old one until the first commit and continues,
    as ``torchrun --nnodes 1:4 --max-restarts`` needs to work unattended.
    """

    OFF = "off"
    RESHARD = "reshard"


def fewest_experts(experts: int, sharing: int) -> int:
    """The fewest of ``experts`` of a layer that any of ``sharing`` ranks owns, but at least 1."""
    return max(experts // sharing, 1)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks that ``torchrun`` started share the work. No effect in a single process."""

    expert: int = key(0, "ranks per copy of the experts (0: all of a stage; must divide them)")
    tensor: int = key(1, "ranks that compute the same tokens with parts of each layer")
    stages: int = key(1, "pipeline stages")
    stage_blocks: tuple[int, ...] = key((), "blocks of each pipeline stage (default: balanced by parameters)")
    embedding: RowPlacement = key(
        RowPlacement.AUTO, "gather the embedding, or keep its rows partitioned over data ranks"
    )
    head: RowPlacement = key(
        RowPlacement.AUTO, "the same for the head; partitioned, its loss is by vocabulary slices"
    )
    exchange: ExchangeMode = key(
        ExchangeMode.AUTO,
        "how rows reach experts; hierarchical: within nodes, then between",
    )
    node_ranks: int = key(0, "ranks of a node, numbered node by node (0: torchrun's LOCAL_WORLD_SIZE)")
    pipeline_degree: int = key(
        AUTO_DEGREE,
        "chunks of a pass's exchange (PipeMoE); auto-split, or more than a rank's experts, rounds otherwise",
        words={"auto": AUTO_DEGREE, "auto-split": AUTO_SPLIT},
    )
    profile: Path | None = key(
        None,
        "profile of bench machine, or a GPU's name, for auto data.micro_order (none: assumed costs) and auto "
        "pipeline_degree (none: probed costs)",
    )
    elastic: Elastic = key(Elastic.OFF, "reshard the store at a resume with another number of ranks")
    timeout_s: float = key(600.0, "seconds after which an unanswered collective fails")
    grace_s: float = key(5.0, "seconds for a rank to end by itself after another died")

    @property
    def auto_degree(self) -> bool:
        """Whether the run chooses the number of chunks."""
        return self.pipeline_degree in (AUTO_DEGREE, AUTO_SPLIT)

    def divides_experts(self, *, experts: int, sharing: int) -> bool:
        """Whether an expert's rows may travel, and are then computed, in parts."""
        most = fewest_experts(experts, sharing)
        return sharing > 1 and (self.pipeline_degree == AUTO_SPLIT or self.pipeline_degree > most)

    def chunks_cap(self, *, experts: int, sharing: int) -> int:
        """The most chunks that a pass over ``experts`` of a layer, spread over ``sharing`` ranks, may have: 1 if no rows
        travel, else the fewest experts of any rank, times ``MOST_PARTS`` if the configuration divides experts.
        """
        if sharing == 1:
            return 1
        divides = self.divides_experts(experts=experts, sharing=sharing)
        return fewest_experts(experts, sharing) * (MOST_PARTS if divides else 1)

    def most_chunks(self, *, experts: int, sharing: int) -> int:
        """The most chunks that a pass has: ``chunks_cap`` or the configured number. Raises ConfigError if that is higher."""
        cap = self.chunks_cap(experts=experts, sharing=sharing)
        if sharing == 1 or self.auto_degree:
            return cap
        if self.pipeline_degree > cap:
            raise ConfigError(
                f"parallel.pipeline_degree: expected auto, auto-split or at most {cap}, {MOST_PARTS} parts of an expert for "
                f"each of the fewest that a rank owns ({experts} experts of a layer over {sharing} ranks), got "
                f"{self.pipeline_degree}"
            )
        return self.pipeline_degree

    def __post_init__(self) -> None:
        check_least(self, 0, "expert", "node_ranks", table="parallel.")
        check_least(self, 1, "tensor", "stages", table="parallel.")
        check_positive(self, "timeout_s", "grace_s", table="parallel.")
        if any(count < 1 for count in self.stage_blocks):
            raise ConfigError(
                f"parallel.stage_blocks: expected at least 1 each, got {list(self.stage_blocks)}"
            )
        if self.pipeline_degree < 1 and not self.auto_degree:
            raise ConfigError(
                f"parallel.pipeline_degree: expected auto, auto-split or at least 1, got {self.pipeline_degree}"
            )
