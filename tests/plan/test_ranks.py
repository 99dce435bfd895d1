"""Plans of several ranks against real ones: what each has on disk and on its device, reads, writes and sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from slowness import mostly_slow

from tierstore.config import as_dict, from_dict
from tierstore.machine_profile import ASSUMED
from tierstore.parallel import Mesh
from tierstore.plan.capacity import Setting, capacity
from tierstore.plan.traffic import step_traffic
from tierstore.plan.workload import StepWorkload
from tierstore.prefetch.operations import Kind, operations
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

if TYPE_CHECKING:
    from launcher import Ranks


def trained(mesh: Mesh, config: dict[str, object]) -> dict[str, int]:
    """What one rank took: bytes of its extents, of its dense parameters, and of eight steps after six."""
    torch.set_num_threads(1)
    with open_session(from_dict(TrainConfig, config), Opening.CREATE, mesh=mesh) as trainer:
        moved = []
        for steps in (6, 8):
            for _ in range(steps):
                trainer.step()
            stats = trainer.store.cache.residency.stats()
            moved.append([getattr(stats, key) for key in ("read_bytes", "written_bytes")])
        trainer.commit()
        directory = trainer.store.directory
        return {
            "extents": sum(path.stat().st_size for path in (directory / "extents").iterdir()),
            "index": (directory / "index" / "data.mdb").stat().st_size,
            "dense": trainer.dense.nbytes.total,
            "read": (moved[1][0] - moved[0][0]) // 8,
            "written": (moved[1][1] - moved[0][1]) // 8,
        }


def sent(mesh: Mesh, config: dict[str, object]) -> dict[str, int]:
    """Collectives of dense parameters in three steps of one rank, after two, and bytes that it sent in them."""
    torch.set_num_threads(1)
    with open_session(from_dict(TrainConfig, config), Opening.CREATE, mesh=mesh) as trainer:
        trainer.step()
        trainer.step()
        before = trainer.dense.traffic.copy()
        for _ in range(3):
            trainer.step()
        return asdict(trainer.dense.traffic.since(before))


SENT: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped micro-batches": {"clip_norm": 0.3, "data.micro_batches": 2},
    "nothing ahead": {"prefetch.gather_depth": 0},
    "far ahead, few buffers": {"prefetch.gather_depth": 4, "dense.buffers": 2},
    "kept gathered": {"dense.reshard": "after-backward", "dense.buffers": 4},
    "bf16": {"model.compute_dtype": "bf16"},
    "bf16, gathered in fp32": {"model.compute_dtype": "bf16", "dense.gather": "fp32"},
}


@pytest.mark.parametrize("name", mostly_slow(SENT, "plain", "far ahead, few buffers"))
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_simulated_is_what_is_sent(
    name: str, count: int, setting: Callable[..., Setting], ranks: Ranks
) -> None:
    """Gathers and reductions of three settled steps, and their bytes: embedding and head are gathered once a step."""
    planned = setting({"model.n_layers": 4} | SENT[name], ranks=count)
    taken = capacity(planned)
    workload = StepWorkload(planned, taken, step_traffic(planned, taken), ASSUMED)

    def listed(steps: int) -> Counter[Kind]:
        moved: Counter[Kind] = Counter()
        for operation in operations(workload.schedule, workload.sizes, steps=steps):
            moved[operation.kind] += operation.nbytes
        return moved

    late, early = listed(5), listed(2)
    for found in ranks.run(count, sent, as_dict(planned.config)):
        assert found["gather_bytes"] == late[Kind.GATHER] - early[Kind.GATHER]
        assert found["reduction_bytes"] == late[Kind.REDUCE] - early[Kind.REDUCE]
        assert (found["gather_bytes"] > 0) == (count > 1)


TAKEN: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, clipped": {"model.compute_dtype": "bf16", "clip_norm": 0.3},
    "nothing guessed, far ahead": {"prefetch.depth": 6, "prefetch.predictor": "none"},
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", TAKEN)
def test_each_rank_takes_what_its_plan_says(
    kind: str, count: int, setting: Callable[..., Setting], ranks: Ranks
) -> None:
    planned = setting({"host_budget": 120 << 10, "model.n_layers": 4} | TAKEN[kind], ranks=count)
    taken = capacity(planned)
    by_name = {term.name: term.nbytes for term in taken.terms}
    traffic = step_traffic(planned, taken)
    for found in ranks.run(count, trained, as_dict(planned.config)):
        assert found["extents"] == by_name["expert extents"] + by_name["dense extents"]
        assert found["index"] == by_name["index"]
        assert found["dense"] == sum(
            by_name.get(name, 0) for name in ("dense state", "fusion buffers", "gradient buffers")
        )
        assert found["read"] == pytest.approx(traffic.read_bytes, abs=1)
        assert found["written"] == pytest.approx(traffic.written_bytes, abs=1)
