"""A pass that fails, for a damaged record or for its own reasons, ends its access; the next one is as if it had not been."""

from pathlib import Path

import pytest
import torch
from refusals import refuses
from served_stores import damaged, leases, logits_of, mean_loss, serving, store_of, trained

from tierstore.errors import ChecksumError
from tierstore.model.store_schema import expert_key
from tierstore.serve.experts import ServingPhase
from tierstore.serve.opening import open_served
from tierstore.store.format import Group
from tierstore.trace.replay import replay

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """An imported store, which no test changes for long, and transformers' logits of ``TOKENS``."""
    plain, store = store_of(tmp_path_factory.mktemp("served"), "qwen3_moe")
    with torch.inference_mode():
        return store, plain(input_ids=TOKENS, use_cache=False).logits


@pytest.mark.parametrize("predictor", ["none", "all", "router"])
@pytest.mark.parametrize("in_place", ["off", "auto"])
@pytest.mark.parametrize("frames", [1, 3, 100])
def test_a_damaged_expert_ends_its_pass_and_no_other(
    served: tuple[Path, torch.Tensor], tmp_path: Path, predictor: str, in_place: str, frames: int
) -> None:
    store, expected = served
    trace = tmp_path / "trace"
    with open_served(serving(store)) as parts:
        nbytes = parts.store.extents.schemas[0].layout(Group.WEIGHTS).slot_bytes
        count = parts.spec.experts
    budget = {"host_budget": (frames + 1) * nbytes, "prefetch.predictor": predictor}
    config = serving(store, {**budget, "weights_in_place": in_place})
    with open_served(config, trace=trace) as parts:
        with damaged(parts, 1, 2) as key:
            for _ in range(3):
                with refuses(ChecksumError, repr(key), "section weight"):
                    leases(parts, 1, [1, 2, 3])
                assert leases(parts, 1, [1, 3]) == [1, 3]
                assert leases(parts, 0, list(range(count)))
        # What was damaged for a while is read again.
        assert leases(parts, 1, [1, 2, 3]) == [1, 2, 3]
        assert torch.equal(logits_of(parts, TOKENS), expected)
        residency = parts.store.cache.residency
        assert not residency.access_open
        live = residency.stats()
    assert replay(trace) == live


def test_a_damaged_expert_in_a_mapped_file(served: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    """It ends its passes until it is whole; the others are leased meanwhile, and logits are those of copied weights."""
    store, expected = served
    mapped = {"io.backend": "pmem", "io.mapped_weights": "on", "host_budget": 1 << 15}
    trace = tmp_path / "trace"
    with open_served(serving(store, mapped), trace=trace) as parts:
        with damaged(parts, 1, 2) as key:
            for _ in range(3):
                with refuses(ChecksumError, repr(key), "section weight", "expert.weights"):
                    leases(parts, 1, [1, 2, 3])
                assert leases(parts, 1, [1, 3]) == [1, 3]
        assert torch.equal(logits_of(parts, TOKENS), expected)
        assert parts.store.mapped.leases > 6
        stats = parts.store.cache.residency.stats()
        assert (stats.hits, stats.misses, stats.read_bytes) == (0, 0, 0)
    assert replay(trace) == stats


def test_a_damaged_expert_with_missed_steps(text: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    batches, expected = trained(text, store)
    with open_served(serving(store, {"host_budget": 1 << 17})) as parts:
        behind = [
            expert
            for expert in range(12)
            if parts.store.optimizer.behind(parts.store.record(expert_key(0, expert)))
        ]
        with damaged(parts, 0, behind[0]) as key:
            for _ in range(2):
                with refuses(ChecksumError, repr(key)):
                    leases(parts, 0, list(range(12)))
                assert leases(parts, 0, behind[1:])
        assert mean_loss(parts, batches) == expected


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_pass_that_raises_between_its_leases(
    served: tuple[Path, torch.Tensor], tmp_path: Path, after: int
) -> None:
    """What the caller holds of it, a traceback with its iterator, keeps nothing pinned."""
    store, expected = served
    trace = tmp_path / "trace"
    with open_served(serving(store, {"host_budget": 1 << 16}), trace=trace) as parts:
        every = list(range(parts.spec.experts))
        kept = []
        for _ in range(10):  # more than there are slots
            parts.experts.begin(ServingPhase.PREFILL, 8)
            walk = parts.experts.forward(0, every)
            for _, lease in zip(range(after), walk, strict=False):
                assert lease.weights.isfinite().all()
            kept.append(walk)
        parts.experts.begin(ServingPhase.PREFILL, 8)
        assert not parts.store.cache.residency.access_open
        assert torch.equal(logits_of(parts, TOKENS), expected)
        live = parts.store.cache.residency.stats()
    assert len(kept) == 10
    assert replay(trace) == live
