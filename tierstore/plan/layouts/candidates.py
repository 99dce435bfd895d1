"""The layouts that a number of ranks can take with a model, and which of them its configuration allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tierstore.errors import ConfigError
from tierstore.model.config import ModelConfig
from tierstore.model.division import check_divisible
from tierstore.parallel.config import ExchangeMode, RowPlacement
from tierstore.parallel.layout import Layout
from tierstore.train.combinations import check_combination
from tierstore.train.config import TrainConfig
from tierstore.train.stages.spec import stage_config

#: Into how many chunks an exchange is divided at most.
MOST_CHUNKS = 8


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """A layout of ranks, and how they exchange rows: in ``degree`` chunks, at once or in two steps, with the tables over the
    vocabulary gathered or divided.
    """

    ranks: Layout
    degree: int = 1
    exchange: ExchangeMode = ExchangeMode.FLAT
    rows: RowPlacement = RowPlacement.GATHERED

    @property
    def name(self) -> str:
        """As a table names it: data x expert x tensor x stages, and what is not the default."""
        ranks = self.ranks
        further = [f"r={self.degree}"] if self.degree > 1 else []
        further += [self.exchange.value] if self.exchange is not ExchangeMode.FLAT else []
        further += ["divided tables"] if self.rows is RowPlacement.PARTITIONED else []
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
            "parallel.embedding": self.rows.value,
            "parallel.head": self.rows.value,
        }

    def configure(self, config: TrainConfig, node_ranks: int) -> TrainConfig:
        """``config`` as this layout runs it."""
        parallel = replace(
            config.parallel,
            expert=self.ranks.expert,
            tensor=self.ranks.tensor,
            stages=self.ranks.stages,
            pipeline_degree=self.degree,
            exchange=self.exchange,
            node_ranks=node_ranks,
            embedding=self.rows,
            head=self.rows,
        )
        return replace(config, parallel=parallel)


def layouts_of(ranks: int) -> Iterator[Layout]:
    """Every layout of ``ranks`` ranks, each once."""
    for stages in _divisors(ranks):
        each = ranks // stages
        for expert in _divisors(each):
            yield Layout(stages, each // expert, expert, 1)
            if expert > 1:
                yield Layout(stages, each // expert, expert, expert)


def candidates(config: TrainConfig, ranks: int, node_ranks: int) -> Iterator[LayoutChoice]:
    """What ``ranks`` ranks, ``node_ranks`` of them on each node, could do with ``config``, whether it is allowed or not."""
    for layout in layouts_of(ranks):
        exchanges = layout.tensor == 1 and layout.expert > 1
        modes = [ExchangeMode.FLAT]
        if exchanges and layout.expert > node_ranks > 1 and layout.expert % node_ranks == 0:
            modes.append(ExchangeMode.HIERARCHICAL)
        fewest = config.model.experts // layout.expert
        degrees = [r for r in (1, 2, 4, 8) if r <= min(MOST_CHUNKS, fewest)] if exchanges else [1]
        places = [RowPlacement.GATHERED]
        if layout.data > 1 and layout.stages == 1 and isinstance(config.model, ModelConfig):
            places.append(RowPlacement.PARTITIONED)
        for mode in modes:
            for degree in degrees:
                for place in places:
                    yield LayoutChoice(layout, degree, mode, place)


def obstacle(config: TrainConfig, choice: LayoutChoice, node_ranks: int) -> str | None:
    """Why a run of ``config`` cannot be laid out as ``choice``; None where it can."""
    laid_out, layout = choice.configure(config, node_ranks), choice.ranks
    try:
        check_combination(laid_out, layout)
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
