"""The layouts that a number of ranks can take with a model, and which of them its configuration allows.

Candidates differ in what a run can be told: how ranks are divided, how rows travel, which tables are divided, and, where
the configuration leaves it open (``data.micro_order = auto``), in which order micro-batches pass. Whether features go
together is said by ``train.combinations`` alone: what a run refuses is refused here by the same check, with its reason. A
setting that changes nothing in a layout (chunks where no rows travel, tables of a single data rank) is no further candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tierstore.errors import ConfigError
from tierstore.model.config import ModelConfig, check_divisible
from tierstore.parallel.config import ExchangeMode, RowPlacement
from tierstore.parallel.layout import Layout, layout_of, node_grid
from tierstore.train.combinations import check_combination
from tierstore.train.config import TrainConfig
from tierstore.train.files import MicroOrder
from tierstore.train.stages.blocks import stage_config
from tierstore.train.vocabulary import choose_vocabulary

_PLACES = (RowPlacement.GATHERED, RowPlacement.PARTITIONED)


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """A layout of ranks, and how they exchange rows: in ``degree`` chunks, at once or in two steps; ``embedding`` and
    ``head`` gathered or divided; micro-batches in ``order``.
    """

    ranks: Layout
    degree: int = 1
    exchange: ExchangeMode = ExchangeMode.FLAT
    embedding: RowPlacement = RowPlacement.GATHERED
    head: RowPlacement = RowPlacement.GATHERED
    order: MicroOrder = MicroOrder.MICRO

    @property
    def name(self) -> str:
        """As a table names it: data x expert x tensor x stages, and what is not the default."""
        ranks = self.ranks
        further = [f"r={self.degree}"] if self.degree > 1 else []
        further += [self.exchange.value] if self.exchange is not ExchangeMode.FLAT else []
        divided = [
            name
            for name, place in (("embedding", self.embedding), ("head", self.head))
            if place is RowPlacement.PARTITIONED
        ]
        further += ["divided tables"] if len(divided) == 2 else [f"divided {name}" for name in divided]
        further += ["layer order"] if self.order is MicroOrder.LAYER else []
        size = f"data {ranks.data}, expert {ranks.expert}, tensor {ranks.tensor}, stages {ranks.stages}"
        return ", ".join([size, *further])

    @property
    def settings(self) -> dict[str, str]:
        """The settings of a run that is laid out so, by dotted names."""
        ranks = self.ranks
        return {
            "parallel.expert": str(ranks.expert),
            "parallel.tensor": str(ranks.tensor),
            "parallel.stages": str(ranks.stages),
            "parallel.pipeline_degree": str(self.degree),
            "parallel.exchange": self.exchange.value,
            "parallel.embedding": self.embedding.value,
            "parallel.head": self.head.value,
            "data.micro_order": self.order.value,
        }

    def configure(self, config: TrainConfig, node_ranks: int) -> TrainConfig:
        """``config`` as this layout runs it."""
        parallel = replace(
            config.parallel,
            expert=self.ranks.expert,
            tensor=self.ranks.tensor,
            stages=self.ranks.stages,
            pipeline_degree=self.degree,
            profile=None,  # which AUTO alone looks at
            exchange=self.exchange,
            node_ranks=node_ranks,
            embedding=self.embedding,
            head=self.head,
        )
        return replace(config, parallel=parallel, data=replace(config.data, micro_order=self.order))


def layouts_of(ranks: int) -> Iterator[Layout]:
    """Every layout of ``ranks`` ranks, each once."""
    for stages in _divisors(ranks):
        each = ranks // stages
        for expert in _divisors(each):
            yield Layout(stages, each // expert, expert, 1)
            if expert > 1:
                yield Layout(stages, each // expert, expert, expert)


def candidates(config: TrainConfig, ranks: int, node_ranks: int) -> Iterator[LayoutChoice]:
    """What ``ranks`` ranks, ``node_ranks`` of them on each node, could do with ``config``, whether it is allowed or not; in
    one chunk each: ``layouts.workload.degrees_of`` says how many could pay.
    """
    for layout in layouts_of(ranks):
        modes = [ExchangeMode.FLAT]
        if layout.expert > 1 and not isinstance(node_grid(layout.rows("expert"), node_ranks), str):
            modes.append(ExchangeMode.HIERARCHICAL)
        tables = [(embedding, head) for embedding in _PLACES for head in _PLACES]
        for mode in modes:
            for embedding, head in tables if layout.data > 1 else tables[:1]:
                for order in _orders(config):
                    yield LayoutChoice(layout, 1, mode, embedding, head, order)


def _orders(config: TrainConfig) -> list[MicroOrder]:
    asked = config.data.micro_order
    if config.data.micro_batches == 1:
        return [MicroOrder.MICRO]
    return [MicroOrder.MICRO, MicroOrder.LAYER] if asked is MicroOrder.AUTO else [asked]


def most_degree(config: TrainConfig, layout: Layout) -> int:
    """In how many chunks rows of ``layout`` can travel: the fewest experts that any rank owns; 1 where none travel."""
    return max(config.model.experts // layout.expert, 1) if layout.expert > 1 else 1


def obstacle(config: TrainConfig, choice: LayoutChoice, node_ranks: int) -> str | None:
    """Why a run of ``config`` cannot be laid out as ``choice``; None where it can."""
    laid_out, layout = choice.configure(config, node_ranks), choice.ranks
    try:
        layout_of(laid_out.parallel, layout.world)
        check_combination(laid_out, layout)
        laid_out.parallel.most_chunks(experts=config.model.experts, sharing=layout.expert)
        choose_vocabulary(laid_out, ranks=layout.data)
        if layout.tensor > 1 and isinstance(config.model, ModelConfig):
            check_divisible(config.model, layout.tensor)
        stage_config(laid_out, 0, layout.stages)
        if config.data.batch_size % layout.data and not config.tasks:
            raise ConfigError(
                f"data.batch_size: expected a multiple of the {layout.data} data ranks, got {config.data.batch_size}"
            )
        if layout.expert > config.model.experts:
            raise ConfigError(
                f"parallel.expert: expected at most {config.model.experts} experts, got {layout.expert}"
            )
    except ConfigError as error:
        return str(error)
    return None


def _divisors(count: int) -> list[int]:
    return [each for each in range(1, count + 1) if count % each == 0]
