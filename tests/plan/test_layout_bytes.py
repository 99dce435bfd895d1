"""The bytes of a plan against those that real ranks send, for each kind of layout."""

from pathlib import Path
from typing import Any

import pytest
from launcher import Ranks
from tiny_runs import MODEL, RUN
from traffic_cases import step_traffic_of

from tierstore.config import load
from tierstore.parallel import ExchangeMode
from tierstore.parallel.config import RowPlacement
from tierstore.parallel.layout import Layout
from tierstore.plan import ASSUMED
from tierstore.plan.layout_workload import LayoutChoice, stage_workloads
from tierstore.plan.layouts import sent_bytes
from tierstore.train.config import TrainConfig

#: Every token goes to every expert, so that all ranks send alike.
SETTINGS: dict[str, Any] = {
    **RUN,
    **MODEL,
    "host_budget": 4 << 20,
    "model.experts": 4,
    "model.top_k": 4,
    "data.batch_size": 8,
    "data.micro_batches": 2,
    "data.micro_order": "micro",
    "parallel.pipeline_degree": 1,
    "parallel.exchange": "flat",
    "parallel.embedding": "gathered",
    "parallel.head": "gathered",
}
#: Agreements on losses and norms; loads of experts and balance, to each other rank.
AGREED, LOADS = 256, 704


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        (Layout(1, 1, 2, 1), {}),
        (Layout(1, 2, 1, 1), {"expert": 1}),
        (Layout(1, 1, 2, 2), {"tensor": 2}),
        (Layout(2, 1, 1, 1), {"stages": 2}),
        (Layout(1, 2, 2, 1), {"expert": 2}),
        (Layout(1, 2, 2, 2), {"tensor": 2}),
        (Layout(2, 1, 2, 1), {"stages": 2, "expert": 2}),
        (Layout(1, 1, 2, 1), {"pipeline_degree": 2}),
        (Layout(1, 1, 2, 2), {"tensor": 2, "pipeline_degree": 2}),
    ],
    ids=str,
)
def test_ranks_send_what_the_plan_says(
    ranks: Ranks, text: Path, tmp_path: Path, layout: Layout, parallel: dict[str, Any]
) -> None:
    """Rows, reductions, sums and messages of stages to the byte; gathers beside loads of experts, which travel so too."""
    settings = {**SETTINGS, "data.paths": (str(text),)}
    laid_out = settings | {f"parallel.{name}": count for name, count in parallel.items()}
    found = ranks.run(
        layout.world, step_traffic_of, laid_out, tmp_path / "store", exchange=ExchangeMode.FLAT, **parallel
    )
    config = load(TrainConfig, None, settings)
    choice = LayoutChoice(layout, parallel.get("pipeline_degree", 1))
    works = list(stage_workloads(config, choice, ASSUMED, layout.world))
    each = layout.world // layout.stages
    for rank, sent in enumerate(found):
        planned = sent_bytes(works[rank // each])
        assert sent["all_to_all"] == planned["rows_bytes"] + planned["reduce_bytes"]
        assert sent["send"] == planned["stages_bytes"]
        assert 0 <= sent["all_reduce"] - planned["tensor_sums_bytes"] - planned["expert_sums_bytes"] <= AGREED
        assert sent["all_gather"] == pytest.approx(
            planned["gather_bytes"], rel=0.02, abs=AGREED + LOADS * (layout.data - 1)
        )


@pytest.mark.slow
@pytest.mark.parametrize("head", [RowPlacement.GATHERED, RowPlacement.PARTITIONED])
def test_divided_tables_of_stages(ranks: Ranks, text: Path, tmp_path: Path, head: RowPlacement) -> None:
    """Two stages of two data ranks: the first sends for the embedding, the last one for the head, and neither for the
    other's; all bytes together, but for agreements, where ids are spread about evenly.
    """
    settings = {**SETTINGS, "data.paths": (str(text),)}
    layout = Layout(2, 1, 2, 1)
    choice = LayoutChoice(layout, embedding=RowPlacement.PARTITIONED, head=head)
    told = settings | {"parallel.embedding": "partitioned", "parallel.head": head.value, "parallel.stages": 2}
    found = ranks.run(4, step_traffic_of, told, tmp_path / "store", exchange=ExchangeMode.FLAT, stages=2)
    works = list(stage_workloads(load(TrainConfig, None, settings), choice, ASSUMED, 4))
    assert works[0].vocabulary_bytes > 0
    assert (works[1].vocabulary_bytes > 0) is (head is RowPlacement.PARTITIONED)
    for rank, sent in enumerate(found):
        planned = sent_bytes(works[rank // 2])
        assert sum(sent.values()) == pytest.approx(
            planned["sent_bytes"], rel=0.05, abs=2 * AGREED + 2 * LOADS
        )
