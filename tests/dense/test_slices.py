"""A rank's slices: AdamW as torch does it, records of the store, other numbers of ranks."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_cases import ADAMW, LR, Setting, backward, make_model, slice_model, whole_weights
from launcher import Ranks
from torch import Tensor, nn

from tierstore.dense import dense_schemas, recut, unit_layouts
from tierstore.dense.slices import UnitSlices
from tierstore.parallel import Mesh, RankGroup
from tierstore.store import ParameterStore, RecordSchema, StoreConfig

CPU = torch.device("cpu")
SHAPES = [(3, 5), (7,), (40,)]
BUDGET = StoreConfig(host_budget=1 << 20)


def parameters(seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def test_slices_step_as_torch_steps_the_whole() -> None:
    plain = parameters(1)
    layout = unit_layouts([("u", plain)], ranks=3)[0]
    slices = [UnitSlices(layout, rank, CPU, ADAMW) for rank in range(3)]
    for held in slices:
        held.fill(plain)
    optimizer = torch.optim.AdamW(
        plain, betas=ADAMW.betas, eps=ADAMW.eps, weight_decay=ADAMW.weight_decay, fused=True
    )
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        flat = torch.zeros(layout.padded_numel)
        for span in layout.regions[0].spans:
            made = torch.randn(span.shape, generator=generator)
            plain[span.index].grad = made
            flat[span.offset : span.offset + span.numel] = made.flatten()
        for rank, held in enumerate(slices):
            held.gradient.copy_(flat[rank * layout.slice_numel : (rank + 1) * layout.slice_numel])
            held.step(LR * (step + 1))
        assert sum(float(held.norm()) ** 2 for held in slices) == pytest.approx(
            float(flat.double() @ flat.double())
        )
        optimizer.param_groups[0]["lr"] = LR * (step + 1)
        optimizer.step()
    for array, of in (("weight", None), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        found = torch.cat([held.host[array] for held in slices])
        for span in layout.regions[0].spans:
            wanted = plain[span.index] if of is None else optimizer.state[plain[span.index]][of]
            part = found[span.offset : span.offset + span.numel].view(span.shape)
            torch.testing.assert_close(part, wanted.detach(), rtol=1e-6, atol=1e-7)
        assert torch.count_nonzero(found[layout.regions[0].numel :]) == 0  # padding stays zero


# Commits on ranks -------------------------------------------------------------------------------------------


def _open(path: Path, layouts: list[Any], *, create: bool) -> ParameterStore:
    if create:
        return ParameterStore.create(path, [RecordSchema("expert", 64), *dense_schemas(layouts)], BUDGET)
    return ParameterStore.open(path, BUDGET)


def _steps(group: RankGroup, path: Path, given: dict[str, Any], begin: int, end: int) -> dict[str, Tensor]:
    """Steps ``begin`` to ``end``, from the store at ``path`` unless ``begin`` is 0, with a commit at the end."""
    setting = Setting(**given)
    model = make_model(setting.model)
    dense = slice_model(model, group, setting.dense)
    with _open(path / f"rank{group.rank}", list(dense.layouts), create=begin == 0) as store:
        if begin == 0:
            dense.register(store.core)
        else:
            dense.load(store.core, begin)
        for step in range(begin, end):
            backward(model, dense, group, setting, step)
            dense.finish()
            dense.step(LR)
        dense.save(store.core, end)
        store.commit()
    return whole_weights(model, dense)


def steps(mesh: Mesh, path: Path, given: dict[str, Any], begin: int, end: int) -> dict[str, Tensor]:
    return _steps(mesh.world, path, given, begin, end)


def _recut(path: Path, target: Path, before: int, after: int) -> None:
    """The stores of ``before`` ranks become those of ``after``: what a resume on other ranks does."""
    model = make_model({})
    units = model.dense_units()
    old, new = unit_layouts(units, ranks=before), unit_layouts(units, ranks=after)
    held = [[UnitSlices(layout, rank, CPU, ADAMW) for layout in old] for rank in range(before)]
    for rank in range(before):
        with _open(path / f"rank{rank}", old, create=False) as store:
            for unit in held[rank]:
                unit.load(store.core, 3)
    for rank in range(after):
        with _open(target / f"rank{rank}", new, create=True) as store:
            for number, layout in enumerate(new):
                made = UnitSlices(layout, rank, CPU, ADAMW)
                for name, array in made.host.items():

                    def read(
                        owner: int, offset: int, count: int, name: str = name, n: int = number
                    ) -> Tensor:
                        return held[owner][n].host[name][offset : offset + count]

                    array.copy_(recut(old[number], layout, rank, read))
                made.loaded(3)
                store.register(layout.key, f"dense-{layout.slice_numel}")
                made.save(store.core, 3)
            store.commit()


@pytest.mark.parametrize("state", ["device", "nvme"])
def test_a_commit_brings_the_very_bits_back(ranks: Ranks, tmp_path: Path, state: str) -> None:
    given = asdict(Setting(model={"compute_dtype": "bf16"}, dense={"optimizer_state": state}))
    whole = ranks.run(2, steps, tmp_path / "whole", given, 0, 6)
    ranks.run(2, steps, tmp_path / "cut", given, 0, 3)
    resumed = ranks.run(2, steps, tmp_path / "cut", given, 3, 6)
    for name, value in whole[0].items():
        assert torch.equal(value, resumed[0][name])


def test_moments_on_disk_change_no_bit(tmp_path: Path) -> None:
    """Every store comes back with the same content, too, and a unit that was never stepped has zeros."""
    found, stores = [], []
    for state in ("host", "nvme"):
        path = tmp_path / state
        given = asdict(Setting(pieces=1, dense={"optimizer_state": state}))
        _steps(RankGroup.alone(), path, given, 0, 2)
        found.append(_steps(RankGroup.alone(), path, given, 2, 4))
        with ParameterStore.open(path / "rank0", BUDGET) as store:
            stores.append((store.records_crc32c(), store.info("dense.head").step))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name])
    assert stores[0] == stores[1] == (stores[0][0], 4)


def test_moments_of_steps_that_no_commit_holds_are_gone(tmp_path: Path) -> None:
    given = asdict(Setting(pieces=1, dense={"optimizer_state": "nvme"}))
    _steps(RankGroup.alone(), tmp_path / "whole", given, 0, 2)
    expected = _steps(RankGroup.alone(), tmp_path / "whole", given, 2, 4)
    _steps(RankGroup.alone(), tmp_path / "cut", given, 0, 2)
    model = make_model({})
    dense = slice_model(model, RankGroup.alone(), given["dense"])
    with _open(tmp_path / "cut" / "rank0", list(dense.layouts), create=False) as store:
        dense.load(store.core, 2)
        for step in (7, 8):
            backward(model, dense, RankGroup.alone(), Setting(pieces=1), step)
            dense.step(LR)
    found = _steps(RankGroup.alone(), tmp_path / "cut", given, 2, 4)
    for name, value in expected.items():
        assert torch.equal(value, found[name])


def test_moments_without_a_store_are_an_error_and_new_ones_are_zero(tmp_path: Path) -> None:
    dense = slice_model(make_model({}), RankGroup.alone(), {"optimizer_state": "nvme"})
    with pytest.raises(RuntimeError, match="no records yet"):
        dense.step(LR)
    with _open(tmp_path / "store", list(dense.layouts), create=True) as store:
        dense.register(store.core)
        dense.save(store.core, 0)
        store.commit()
        assert store.verify().failures == []
        whole = slice_model(make_model({}), RankGroup.alone(), {})
        whole.load(store.core, 0)
        for one, other in zip(whole.slices, dense.slices, strict=True):
            assert torch.equal(one.host["weight"], other.host["weight"])
            assert (
                torch.count_nonzero(one.host["exp_avg"]) == torch.count_nonzero(one.host["exp_avg_sq"]) == 0
            )


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 4])
def test_another_number_of_ranks_goes_on(ranks: Ranks, tmp_path: Path, after: int) -> None:
    """The same gradients summed by other ranks: equal up to the order of additions."""
    given = asdict(Setting())
    ranks.run(2, steps, tmp_path / "two", given, 0, 3)
    expected = ranks.run(2, steps, tmp_path / "two-more", given, 0, 5)[0]
    _recut(tmp_path / "two", tmp_path / "other", 2, after)
    if after == 1:
        found = _steps(RankGroup.alone(), tmp_path / "other", given, 3, 5)
    else:
        found = ranks.run(after, steps, tmp_path / "other", given, 3, 5)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
