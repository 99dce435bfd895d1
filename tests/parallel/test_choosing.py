"""What AUTO decides when the ranks have joined, and that all of them decide alike."""

from functools import partial
from typing import Any

import pytest
import torch
from launcher import RankFailedError, Ranks

from tierstore.links import CollectiveLink, LinkConfig, LinksConfig, open_link
from tierstore.parallel import (
    Collective,
    ExchangeMode,
    HierarchicalExchange,
    LimitedGroup,
    Mesh,
    ParallelConfig,
    limited_groups,
)
from tierstore.parallel.collectives import Channel
from tierstore.parallel.launching import measured_model
from tierstore.parallel.layout import NodeGrid


def _choice(mesh: Mesh) -> tuple[str, str, int]:
    probed = mesh.traffic()[Collective.ALL_TO_ALL].calls
    return type(mesh.exchange).__name__, mesh.exchange_choice.describe(), probed


def test_nothing_is_measured_where_nothing_can_be_chosen(ranks: Ranks) -> None:
    said = (
        "exchange: auto, flat (each expert group of 2 is within one node of 2 ranks (neither parallel.node_ranks nor "
        "LOCAL_WORLD_SIZE says where nodes end))"
    )
    with ranks.fresh(2) as world:
        assert world.run(_choice) == [("FlatExchange", said, 0)] * 2
    flat = ParallelConfig(exchange=ExchangeMode.FLAT, node_ranks=2, timeout_s=30.0)
    with ranks.fresh(4, flat) as world:
        assert world.run(_choice) == [("FlatExchange", "exchange: flat, flat (as configured)", 0)] * 4


def test_auto_measures_and_all_ranks_decide_alike(ranks: Ranks) -> None:
    with ranks.fresh(4, ParallelConfig(node_ranks=2, timeout_s=30.0)) as world:
        found = world.run(_choice)
    assert all(one[:2] == found[0][:2] for one in found)
    assert "a message between nodes costs" in found[0][1]
    assert found[0][0] in ("FlatExchange", "SizedExchange")


def _over_links(mesh: Mesh, message_s: float, within_s: float) -> float:
    """From which messages on two steps no longer pay, by the fitted model, where links cost so much."""
    node = CollectiveLink(open_link(LinkConfig(latency=message_s)))
    within = CollectiveLink(open_link(LinkConfig(latency=within_s)))
    make = partial(LimitedGroup, link=within, node=node, node_ranks=2)
    assert isinstance(mesh.exchange, HierarchicalExchange)

    def limited(group: Any) -> Any:
        return make(group.rank, group.ranks, {Channel.EXCHANGE: group.communicator(Channel.EXCHANGE)})

    neighbours, rail = (limited(group) for group in mesh.exchange.groups)
    hierarchical = HierarchicalExchange(neighbours, rail)
    slow = _With(mesh, limited(mesh.expert))
    return measured_model(slow, NodeGrid(2, 2), hierarchical, sizes=(64, 128), rounds=2).below_bytes  # type: ignore[arg-type]


class _With:
    """A mesh whose expert group is another."""

    def __init__(self, mesh: Mesh, expert: Any) -> None:
        self.world, self.expert = mesh.world, expert


def test_the_model_follows_the_links(ranks: Ranks) -> None:
    """A message between nodes costs 0.1 s, and two steps save one of two; or their step within the node costs 0.2 s more."""
    run = partial(ranks.run, 4, _over_links, node_ranks=2, exchange=ExchangeMode.HIERARCHICAL)
    assert all(below > 64 for below in run(0.1, 0.0))
    assert run(0.0, 0.2) == [0.0] * 4


def _told(mesh: Mesh, node_ranks: list[int], modes: list[str]) -> None:
    from dataclasses import replace

    from tierstore.parallel.collectives import RankGroup
    from tierstore.parallel.launching import with_exchange
    from tierstore.parallel.mesh import GroupMaker

    rank = mesh.world.rank
    config = ParallelConfig(exchange=ExchangeMode(modes[rank]))
    environment = replace(mesh.environment, local_world=node_ranks[rank])
    maker = GroupMaker(make=RankGroup, blame=lambda within_s: None, timeout_s=30.0)
    with_exchange(config, replace(mesh, environment=environment), maker)


def test_ranks_that_were_told_otherwise(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError) as failed:
        ranks.run(4, _told, [2, 2, 1, 1], ["hierarchical"] * 4)
    assert (
        str(failed.value).count(
            "parallel.exchange: hierarchical is impossible: nodes have different numbers of ranks"
        )
        == 4
    )
    with pytest.raises(RankFailedError) as failed:
        ranks.run(4, _told, [2] * 4, ["flat", "flat", "auto", "flat"])
    assert str(failed.value).count("parallel.exchange: rank 2 has auto, but rank 0 has flat") == 4


class _Recorded:
    def __init__(self) -> None:
        self.messages: list[int] = []

    def reserve(self, nbytes: int) -> int:
        self.messages.append(nbytes)
        return 0


def _by_link(mesh: Mesh) -> list[list[int]]:
    """Messages over the three links: rank r sends rank d ten times d + 1 bytes."""
    link, exchange, node = _Recorded(), _Recorded(), _Recorded()
    world = mesh.world
    group = LimitedGroup(
        world.rank, world.ranks, world._communicators, link=link, exchange=exchange, node=node, node_ranks=2
    )
    splits = [1, 2, 3, 4]
    given = torch.zeros(10, 10, dtype=torch.uint8)
    came = [world.rank + 1] * 4
    group.all_to_all(given.new_empty(sum(came), 10), given, came, splits).wait()
    group.all_gather(torch.empty(4), torch.ones(1)).wait()
    return [link.messages, exchange.messages, node.messages]


def test_each_message_to_another_node_takes_its_own_turn(ranks: Ranks) -> None:
    """Nodes are ranks 0, 1 and 2, 3. A gather sends each other 4 bytes."""
    gathered = [4, 4]
    assert ranks.run(4, _by_link, node_ranks=2) == [
        [[4], [20], [30, 40, *gathered]],
        [[4], [10], [30, 40, *gathered]],
        [[4], [40], [10, 20, *gathered]],
        [[4], [30], [10, 20, *gathered]],
    ]


def test_the_node_link_alone_limits_groups() -> None:
    made = limited_groups(LinksConfig(node=LinkConfig(latency=1.0)))
    assert isinstance(made, partial)
    assert made.func is LimitedGroup
    assert made.keywords["node"] is not None
    assert LinksConfig(node=LinkConfig(latency=1e-3)).describe() == "links limited: node any speed after 1 ms"
