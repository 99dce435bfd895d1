"""The built-in model without experts (``model.moe_every = 0``): its bits do not depend on how it is trained either."""

from typing import Any

import pytest
import torch
from launcher import Ranks
from rank_cases import Make, Settings, alone, check_against_one, laid_out
from rank_cases import train as train_rank
from refusals import refuses
from served_stores import served_store
from slowness import mostly_slow
from stage_cases import configured, staged
from test_stage_pipeline import same

from tierstore.errors import ConfigError
from tierstore.store import verify_store
from tierstore.tiers.slots import DeviceKind
from tierstore.train.footprint import product_bytes, router_bytes
from tierstore.train.ranks import Opening
from tierstore.train.resharding import reshard
from tierstore.train.session import open_session

DENSE: Settings = {"model.moe_every": 0, "data.micro_batches": 2}

#: Ways to hold and compute the same.
MANNERS: dict[str, Settings] = {
    "layer order": {"data.micro_order": "layer"},
    "layer order, block inputs on disk": {"data.micro_order": "layer", "boundary_budget": 8192},
    "routers guess": {"prefetch.predictor": "router", "prefetch.depth": 2},
    "no lookahead": {"prefetch.depth": 0, "prefetch.gather_depth": 0},
    "device slots": {"weights_in_place": "off", "device_budget": 100_000},
    "blocks computed again": {"model.checkpoint_activations": "block"},
    "another policy": {"cache.policy": "lru", "cache.write_back_every": 1},
    "tight": {"host_budget": 60_000},
}


def test_by_hand(configure: Any, train: Any) -> None:
    """Two blocks as wide as an expert. Embedding 256 x 16, two of 4 x 16 x 16 + 3 x 16 x 32 + 2 x 16, head 256 x 16 + 16:
    13,392 parameters in four records, and nothing that an expert is read or stepped for.
    """
    config = configure({**DENSE, "steps": 3})
    assert config.model.architecture.parameters == 4096 + 2 * (1024 + 1536 + 32) + 4112 == 13_392
    found = train(config)
    assert found.losses[2] < found.losses[0]
    assert found.stepped == [frozenset()] * 3
    assert (found.stats.hits, found.stats.misses, found.stats.evictions) == (0, 0, 0)
    report = verify_store(config.store)
    assert (report.records, report.failures) == (4, [])


@pytest.mark.parametrize("manner", mostly_slow(MANNERS, "routers guess", "device slots"))
def test_however_it_is_trained_the_bits_are_the_same(manner: str, configure: Any, train: Any) -> None:
    """With a resume in the middle."""
    shared = {**DENSE, "steps": 4, "model.n_layers": 3}
    assert train(configure({**shared, **MANNERS[manner]}), stops=(2,)).bits == train(configure(shared)).bits


def test_settings_of_experts_change_nothing(configure: Any, train: Any) -> None:
    expected = train(configure({**DENSE, "steps": 3}))
    other = {"model.experts": 3, "model.top_k": 1, "model.shared_expert_d_ff": 8, "adamw.moments": "int8"}
    assert train(configure({**DENSE, **other, "steps": 3})).losses == expected.losses


def test_a_block_width_of_its_own(configure: Any) -> None:
    assert configure({**DENSE, "model.d_ff_dense": 48}).model.dense_shape.d_ff == 48


def test_what_only_experts_need_costs_nothing(configure: Any) -> None:
    config = configure({**DENSE, "prefetch.predictor": "router", "model.compute_dtype": "bf16"})
    assert router_bytes(config) == product_bytes(config, DeviceKind.CPU) == 0


@pytest.mark.parametrize("scope", [{}, {"cache.layer_shares": (1.0, 2.0)}])
def test_quotas_of_layers_are_refused(scope: Settings, configure: Any) -> None:
    config = configure({**DENSE, "cache.scope": "layer", **scope})
    with refuses(ConfigError, "cache.scope:", "global", "none"), open_session(config, Opening.CREATE):
        pass
    assert not config.store.exists()


# Ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "layout", "changes"),
    [
        (2, {}, {"clip_norm": 0.5, "parallel.pipeline_degree": "auto", "prefetch.predictor": "router"}),
        (2, {"tensor": 2}, {}),
    ],
    ids=["data", "tensor"],
)
def test_ranks_compute_what_one_process_does(
    ranks: Ranks, settings: Make, size: int, layout: dict[str, int], changes: Settings
) -> None:
    """And resume with the same bits."""
    both = {**DENSE, **changes}
    check_against_one(
        ranks, settings({**both, "parallel.pipeline_degree": 1}), settings(both), size, 2, **layout
    )
    expected = ranks.run(size, train_rank, settings(both), 4, Opening.CREATE, **layout)
    halved = settings(both)
    begun = ranks.run(size, train_rank, halved, 2, Opening.CREATE, **layout)
    rest = ranks.run(size, train_rank, halved, 4, Opening.RESUME, **layout)
    for rank in range(size):
        assert begun[rank][0] + rest[rank][0] == expected[rank][0]
        assert rest[rank][2] == expected[rank][2]


def test_two_stages_have_the_bits_of_one_process(ranks: Ranks, settings: Make) -> None:
    dense = {"model.moe_every": 0, "clip_norm": 0.3}
    one = staged(alone(), settings(dense), 4)
    assert one.active == [0] * 4
    same(ranks.run(2, staged, settings({**dense, "parallel.stages": 2}), 4, stages=2), one)


def test_stages_of_a_store_that_one_process_began(ranks: Ranks, settings: Make) -> None:
    """Resharded after two steps, two stages go on with the losses of one process."""
    dense = {"model.moe_every": 0}
    begun, cut = settings(dense), settings({**dense, "parallel.stages": 2})
    staged(alone(), begun, 2)
    reshard(begun["store"], cut["store"], laid_out(2, stages=2))
    one = staged(alone(), begun, 4, Opening.RESUME)
    for rank in ranks.run(2, staged, cut, 4, Opening.RESUME, stages=2):
        assert rank.losses == one.losses


# Serving ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"weights_in_place": "off", "device_budget": 100_000}])
def test_it_is_served_as_it_is_evaluated(settings: Make, changes: Settings) -> None:
    made = settings({"model.moe_every": 0})
    with open_session(configured(made), Opening.CREATE) as trainer:
        trainer.step()
        trainer.commit()
        (batch, *_) = trainer.data.validation_batches(1)
        trainer.model.module.eval()
        with torch.no_grad():
            expected = trainer.model.run(batch).loss
    with served_store(made["store"], **changes) as (parts, _):
        with torch.inference_mode():
            assert parts.model.run(batch).loss == expected
        assert parts.store.cache.residency.stats().misses == 0


def test_a_ring_of_no_layers_is_refused(settings: Make) -> None:
    made = settings({"model.moe_every": 0})
    staged(alone(), made, 1)
    with (
        refuses(ConfigError, "ring.memory:", "auto or sparse", "ring"),
        served_store(made["store"], ring__memory="ring"),
    ):
        pass
