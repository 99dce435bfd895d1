"""What tierstore asks of a device beside computing: host memory that cannot be pinned, the current device, own loops."""

import contextlib
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulated
import torch
from launcher import Ranks
from rank_cases import TINY
from torch.nn.attention import SDPBackend, sdpa_kernel
from training_cases import FEW_SLOTS, STEPS, train

from tierstore._native import Arena, Engine, HugePages
from tierstore.accelerator import identity, make_current, pinned, usable_bytes
from tierstore.capabilities import Capability
from tierstore.config import load
from tierstore.errors import BudgetError, CapabilityError, ConfigError
from tierstore.moe.config import ExpertShape
from tierstore.parallel import Mesh, RankEnvironment, rank_device
from tierstore.parallel.config import ParallelConfig
from tierstore.parallel.launching import check_devices
from tierstore.tiers import DeviceSlots, open_device_tier
from tierstore.tiers.slots import DeviceKind
from tierstore.timeline import open_timeline, read_slices
from tierstore.train import open_experts
from tierstore.train.config import TrainConfig
from tierstore.train.footprint import fixed_cost
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session


def _refused(mesh: Mesh, store: Path, text: str) -> Any:
    simulated.registration.refuse = True
    try:
        found = train(mesh, store, {}, text)
        with pytest.raises(
            CapabilityError, match=r"^pinned_memory is set to on, .*cudaHostRegister of .* status 1"
        ):
            train(mesh, store.with_name("on"), {"pinned_memory": "on"}, text)
    finally:
        simulated.registration.refuse = False
    return found


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    ranks: Ranks, simulated_ranks: Ranks, tmp_path: Path, text: Path
) -> None:
    ((expected, _, _),) = ranks.run(1, train, tmp_path / "cpu", {}, str(text))
    ((found, violations, counts),) = simulated_ranks.run(1, _refused, tmp_path / "device", str(text))
    assert not violations
    assert found == expected
    expert = load(TrainConfig, None, TINY).model.expert_shape.numel * 4
    for name in ("h2d.pageable_bytes", "d2h.pageable_bytes"):
        assert counts[name] % expert == 0 < counts[name]


def _pinning(mesh: Mesh) -> None:
    device, arena = mesh.device, Arena(8192, HugePages.OFF)
    with pinned(arena, device, Capability.ON) as first, pinned(arena, device, Capability.AUTO) as again:
        assert first
        assert not again
        assert again.reason == "cudaHostRegister of 8192 bytes failed with status 712"
    with (
        pytest.raises(RuntimeError, match="cudaHostUnregister failed with status 713"),
        pinned(arena, device, Capability.ON),  # the first has taken its registration back
    ):
        assert simulated.registration.cudaHostUnregister(arena.address) == 0
    slots = DeviceSlots(64, torch.float32)
    with Engine() as engine:
        tier = open_device_tier(engine, slots, device, HugePages.OFF, pinning=Capability.OFF)
        tier.close()


def test_pinning(simulated_ranks: Ranks) -> None:
    simulated_ranks.run(1, _pinning)


def _reused_memory(mesh: Mesh, store: Path, text: str) -> tuple[bool, dict[str, int]]:
    """Dense parameters that are gathered ahead and that no pass uses; then their memory is freed, and used by others."""
    settings = {**TINY, **FEW_SLOTS, "data.paths": (text,), "dense.optimizer_state": "host", "store": store}
    with open_session(load(TrainConfig, None, settings), Opening.CREATE, mesh=mesh) as trainer:
        trainer.step()
        trainer.commit()
        trainer.dense.gather(0)
        buffer = trainer.dense._units[0].buffer
        address, nbytes = buffer.address, buffer.memory.numel()
    del trainer, buffer
    gc.collect()
    others = [torch.zeros(nbytes, dtype=torch.uint8, device=mesh.device) for _ in range(8)]
    return address in [other.data_ptr() for other in others], simulated.violations()


def test_memory_of_a_closed_session_may_be_used_again(
    simulated_ranks: Ranks, tmp_path: Path, text: Path
) -> None:
    ((reused, violations),) = simulated_ranks.run(1, _reused_memory, tmp_path / "store", str(text))
    assert reused
    assert violations == {}


def _default_budget(mesh: Mesh, store: Path, text: str) -> None:
    """12 experts whose slots take 8 KiB, and three such slots of gradients."""
    config = load(TrainConfig, None, {**TINY, "data.paths": (text,), "store": store})
    beside = fixed_cost(config, 0).device_bytes(config)
    with _memory_left(mesh, beside + 10 * 8192), open_session(config, Opening.CREATE, mesh=mesh) as trainer:
        walk = trainer.experts.walk
        assert walk.slots.count == 7
        trainer.step()
    with open_session(config, Opening.RESUME, mesh=mesh) as trainer:
        assert trainer.experts.walk.slots.count == 12


def _dense_staging(mesh: Mesh, store: Path, text: str) -> None:
    settings = {**TINY, **FEW_SLOTS, "data.paths": (text,), "dense.optimizer_state": "host"}
    config = load(TrainConfig, None, {**settings, "store": store})
    with open_session(config, Opening.CREATE, mesh=mesh) as trainer:
        found = trainer.dense.nbytes
    assert found == fixed_cost(config, 0, device=DeviceKind.CUDA).dense
    assert found.staging > 0


def test_dense_states_on_the_host_are_staged_in_what_is_announced(
    simulated_ranks: Ranks, tmp_path: Path, text: Path
) -> None:
    simulated_ranks.run(1, _dense_staging, tmp_path / "store", str(text))


def test_experts_take_what_is_free(simulated_ranks: Ranks, tmp_path: Path, text: Path) -> None:
    simulated_ranks.run(1, _default_budget, tmp_path / "store", str(text))


@contextlib.contextmanager
def _memory_left(mesh: Mesh, nbytes: int) -> Iterator[None]:
    """``nbytes`` are free on the device, beside the tenth that is kept in reserve."""
    free, total = torch.accelerator.get_memory_info(mesh.device)
    used = total - free
    simulated.set_memory(-(-(used + nbytes) * 10 // 9))
    try:
        assert nbytes <= usable_bytes(mesh.device) < nbytes + 4
        yield
    finally:
        simulated.set_memory(total)


def _out_of_memory(mesh: Mesh, store: Path, text: str) -> None:
    config = load(TrainConfig, None, {**TINY, "data.paths": (text,), "store": store})
    message = r"^simgpu:0 is out of memory: .*; lower device_budget, data\.batch_size or model\.seq_len$"
    with (
        pytest.raises(BudgetError, match=message),
        _memory_left(mesh, 1 << 14),
        open_session(config, Opening.CREATE, mesh=mesh),
    ):
        pass
    with open_session(config, Opening.CREATE, mesh=mesh) as trainer:
        expected = trainer.store.records_crc32c()
    with (
        pytest.raises(BudgetError, match=message),
        open_session(config, Opening.RESUME, mesh=mesh) as trainer,
        _memory_left(mesh, 4096),
    ):
        trainer.step()
    with open_session(config, Opening.RESUME, mesh=mesh) as trainer:
        assert trainer.state.position == 0
        assert trainer.store.records_crc32c() == expected
        trainer.step()


def test_memory_that_runs_out_leaves_the_store_as_it_was_committed(
    simulated_ranks: Ranks, tmp_path: Path, text: Path
) -> None:
    # In a process of its own: freed memory is used again.
    with simulated_ranks.fresh(1, ParallelConfig(timeout_s=30.0)) as world:
        world.run(_out_of_memory, tmp_path / "store", str(text))


def _choosing(mesh: Mesh) -> None:
    assert mesh.device == torch.device("simgpu", 0)
    alone, second = RankEnvironment(), RankEnvironment(rank=1, world=2, local_rank=1)
    assert rank_device("auto", alone) == rank_device("simgpu", alone) == mesh.device
    assert rank_device("auto", second) == torch.device("simgpu", 1)
    assert load(TrainConfig, None, {"device": "simgpu:3"}).device == "simgpu:3"
    with pytest.raises(ConfigError, match=r"^device: expected auto, cpu or cuda, got 'tpu'"):
        load(TrainConfig, None, {"device": "tpu"})
    with pytest.raises(CapabilityError, match=r"^device: cuda was requested, .* finds no CUDA device"):
        rank_device("cuda", alone)
    make_current(rank_device("simgpu:1", alone))
    assert torch.empty(1, device="simgpu").device.index == 1
    make_current(torch.device("cpu"))
    assert identity(mesh.device) != identity(torch.device("simgpu", 1))
    make_current(mesh.device)


def test_the_device_is_chosen_by_name_and_made_current(simulated_ranks: Ranks) -> None:
    simulated_ranks.run(1, _choosing)


def _sharing(mesh: Mesh) -> None:
    import torch.distributed as dist

    def check(ranks: list[tuple[int, str]]) -> None:
        store = dist.HashStore()
        for rank, name in ranks:
            store.set(str(rank), name)
        check_devices(store, RankEnvironment(rank=1, world=3, local_rank=1), mesh.device)

    own = identity(mesh.device)
    check([(0, "another"), (2, "a third")])
    with pytest.raises(ConfigError, match=r"^device: ranks 1 and 2 share a GPU, but each rank needs its own"):
        check([(0, "another"), (2, own)])


def test_ranks_that_share_a_device_are_refused(simulated_ranks: Ranks) -> None:
    simulated_ranks.run(1, _sharing)


def _own_loop(mesh: Mesh, store: Path, device_budget: int = 0) -> tuple[list[list[float]], int]:
    """The outputs of two steps that use each expert, and the bytes copied to the device in them."""
    shape = ExpertShape(8, 16)
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(6, 8, generator=generator)
    expert_TK = torch.tensor([[0], [1], [2], [3], [0], [1]])

    def first(layer: int, expert: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        values: np.ndarray[Any, np.dtype[np.float32]] = (
            np.random.default_rng(expert).normal(size=shape.numel).astype(np.float32)
        )
        return values

    outputs = []
    with open_experts(
        store,
        shape,
        layers=[0],
        experts=4,
        host_budget="1MiB",
        first_weights=first,
        device=mesh.device,
        device_budget=device_budget,
    ) as tiered:
        copied = 0 if mesh.device.type == "cpu" else -simulated.counts().get("h2d.bytes", 0)
        for _ in range(2):
            x, weight_TK = (each.to(mesh.device).requires_grad_() for each in (x_TD, torch.ones(6, 1)))
            with tiered.step(lr=1e-2) as step:
                y_TD = tiered.compute(0, x, expert_TK.to(mesh.device), weight_TK)
                y_TD.square().sum().backward()
                assert step.clip([x], 1e9) > 0
            outputs.append(y_TD.detach().cpu().reshape(-1).tolist())
        if mesh.device.type != "cpu":
            copied += simulated.counts()["h2d.bytes"]
            with (
                torch.no_grad(),
                pytest.raises(ValueError, match=r"^layer 0: its inputs are on cpu, its experts on simgpu"),
            ):
                tiered.compute(0, x_TD, expert_TK, torch.ones(6, 1))
    if mesh.device.type != "cpu":
        assert not simulated.violations()
        with (
            pytest.raises(BudgetError, match=r"^device_budget: 4096 bytes .* the minimum is 12288 bytes$"),
            open_experts(store, shape, layers=[0], experts=4, device=mesh.device, device_budget="4KiB"),
        ):
            pass
    return outputs, copied


def test_a_loop_of_ones_own_on_the_device(ranks: Ranks, simulated_ranks: Ranks, tmp_path: Path) -> None:
    ((expected, _),) = ranks.run(1, _own_loop, tmp_path / "cpu")
    ((two_slots, copied),) = simulated_ranks.run(1, _own_loop, tmp_path / "device")
    ((all_slots, fewer),) = simulated_ranks.run(1, _own_loop, tmp_path / "kept", 1 << 16)
    assert expected == two_slots == all_slots
    # Four passes over 4 experts, of which a step changes all: with two slots each but the first copies two or more.
    expert = ExpertShape(8, 16).numel * 4
    assert fewer // expert == 2 * 4
    assert 4 + 3 * 2 <= copied // expert <= 4 * 4


def _drawn(mesh: Mesh, store: Path, text: str) -> Any:
    """Losses, violations, counts and the timeline's slices of ``STEPS`` steps; the expert copies made."""
    config = load(TrainConfig, None, {**TINY, **FEW_SLOTS, "data.paths": (text,), "store": store})
    path = store.with_suffix(f".{mesh.world.rank}.json")
    torch.manual_seed(0)
    with (
        sdpa_kernel(SDPBackend.MATH),
        open_timeline(path) as timeline,
        open_session(config, Opening.CREATE, mesh=mesh, timeline=timeline) as trainer,
    ):
        simulated.reset()
        begun_us = time.monotonic() * 1e6
        losses = [trainer.step().loss for _ in range(STEPS)]
        counts, ended_us = simulated.counts(), time.monotonic() * 1e6
        copies = trainer.experts.walk.slots.copies
        trainer.commit()
    return losses, simulated.violations(), counts, read_slices(path), copies, (begun_us, ended_us)


def test_a_timeline_shows_when_the_device_works_without_waiting_for_it(
    simulated_ranks: Ranks, tmp_path: Path, text: Path
) -> None:
    """Each copy, gather and pass lies between events of the device; the host waits no more often than without."""
    plain = simulated_ranks.run(2, train, tmp_path / "plain", {}, str(text))
    found = simulated_ranks.run(2, _drawn, tmp_path / "drawn", str(text))
    for ((losses, _, _), _, expected), (drawn, violations, counts, slices, copies, (begun, ended)) in zip(
        plain, found, strict=True
    ):
        assert drawn == losses
        assert not violations
        assert {name: n for name, n in counts.items() if name.startswith("sync.")} == {
            name: n for name, n in expected.items() if name.startswith("sync.")
        }
        assert counts["event.record"] > expected["event.record"]
        loads = [s for s in slices["device copies"] if s.name == "load weights"]
        assert len(loads) == copies > 0
        assert {"copy gradient to host", "load weights"} == {s.name for s in slices["device copies"]}
        for track in ("compute", "gathers", "reduce-scatters", "all-to-alls", "device copies"):
            assert slices[track], track
            # Its clock is the host's, but for the rounding of the device's milliseconds.
            assert all(begun - 100 <= s.begin <= s.end <= ended + 100 for s in slices[track]), track
