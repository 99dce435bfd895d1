"""Memory and messages: the formula, what is allocated, and what tensors really take at their peak."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from dense_cases import LR, Setting, backward, make_model, since, slice_model
from launcher import Ranks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tierstore.config import load
from tierstore.dense import DenseBytes, DenseConfig, DenseTraffic, dense_bytes, unit_layouts
from tierstore.parallel import Mesh, RankGroup


class PeakStorage(TorchDispatchMode):
    """The most bytes that tensors made inside have had at once; those of before do not count."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self._of(t)._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and self._of(tensor)._cdata not in given:
                storage = self._of(tensor)
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return out

    @staticmethod
    def _of(tensor: torch.Tensor) -> torch.UntypedStorage:
        return tensor.untyped_storage()


def _measured(mesh: Mesh, given: dict[str, Any]) -> tuple[DenseBytes, DenseTraffic, int]:
    return measured(mesh.world, Setting(**given))


def measured(group: RankGroup, setting: Setting) -> tuple[DenseBytes, DenseTraffic, int]:
    """What is allocated, the messages of a step, and the peak of what one micro-batch allocates beyond that."""
    model = make_model(setting.model)
    dense = slice_model(model, group, setting.dense)
    backward(model, dense, group, setting, 0)
    dense.step(LR)
    before = replace(dense.traffic)
    peak = PeakStorage()
    with peak:
        backward(model, dense, group, setting, 1)
    dense.step(LR)
    return dense.nbytes, since(dense.traffic, before), peak.peak


def by_formula(setting: Setting, size: int) -> DenseBytes:
    model = make_model(setting.model)
    config = load(DenseConfig, None, setting.dense)
    layouts = unit_layouts(
        model.dense_units(), ranks=size, narrow=model.cast_parameters(), fusion=config.fusion
    )
    return dense_bytes(layouts, config, ranks=size, compute=model.config.compute_dtype.torch)


def test_by_hand() -> None:
    # Width 16, 40 tokens, 3 blocks of which the second has a router (5 x 16) and a network (48 x 16 + 16 x 24), the others
    # one of 128 x 16 + 16 x 64. Blocks: 2 norms of 16, 48 x 16 and 16 x 16: 1056, and 3072 or 1232 for the rest.
    # Embedding 640, head 16 + 640 = 656. On two ranks slices are multiples of 16: 320, 2064, 1152 (1144), 2064, 336 (328).
    found = by_formula(Setting(), 2)
    assert found.slices == 16 * (320 + 2064 + 1152 + 2064 + 336)
    assert found.fusion == 4 * 2 * (320 + 336 + 3 * 2064)
    assert found.gradients == 2 * 4 * 2 * (336 + 2 * 2064)
    assert found.total == found.slices + found.fusion + found.gradients
    alone = by_formula(Setting(), 1)
    # Moments on disk: 8 bytes an element, and 2 x 2 arrays of 8256 bytes, in pages, for the largest slices.
    assert by_formula(Setting(dense={"optimizer_state": "nvme"}), 2).slices == 8 * 5936 + 4 * 12288
    assert (alone.slices, alone.fusion, alone.gradients) == (16 * (640 + 4128 + 2288 + 4128 + 656), 0, 0)


CHANGES = [
    {},
    {"buffers": 1, "gradient_buffers": 1},
    {"reshard": "after-backward"},
    {"fusion": "parameter"},
    {"optimizer_state": "host"},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize(
    "model", [{}, {"compute_dtype": "bf16", "tie_embeddings": "tied"}], ids=["fp32", "bf16"]
)
def test_the_formula_is_what_is_allocated(model: dict[str, Any], changes: dict[str, Any]) -> None:
    setting = Setting(model=model, dense=changes)
    assert measured(RankGroup.alone(), setting)[0] == by_formula(setting, 1)


def test_moments_on_disk_leave_half_of_the_state_in_memory() -> None:
    setting = Setting(dense={"optimizer_state": "nvme"})
    found = slice_model(make_model({}), RankGroup.alone(), setting.dense).nbytes
    assert found == by_formula(setting, 1)
    assert found.fusion == by_formula(Setting(dense={"optimizer_state": "host"}), 1).fusion


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_state_shrinks_with_ranks_and_buffers_do_not_grow_with_depth(ranks: Ranks, size: int) -> None:
    found = {}
    for layers in (4, 8):
        setting = Setting(model={"n_layers": layers}, dense={"buffers": 2})
        outcomes = ranks.run(size, _measured, asdict(setting))
        assert all(nbytes == by_formula(setting, size) for nbytes, _, _ in outcomes)
        alone = by_formula(setting, 1)
        assert outcomes[0][0].slices == pytest.approx(alone.slices / size, rel=0.05)
        found[layers] = outcomes[0]
    assert found[8][0].fusion == found[4][0].fusion
    assert found[8][0].gradients == found[4][0].gradients
    assert found[8][0].slices > 1.6 * found[4][0].slices


@pytest.mark.parametrize("model", [{}, {"compute_dtype": "bf16"}], ids=["fp32", "bf16"])
def test_no_weights_pile_up_outside_of_the_buffers(model: dict[str, Any]) -> None:
    """With activations recomputed, what a micro-batch allocates at its peak hardly grows with depth: nothing holds on to
    weights, gathered, cast or differentiated."""
    peaks, weights = {}, {}
    for layers in (4, 8):
        setting = Setting(
            pieces=1,
            model={**model, "n_layers": layers, "checkpoint_activations": "block", "d_model": 64},
            dense={"optimizer_state": "host", "buffers": 1},
        )
        nbytes, _, peaks[layers] = measured(RankGroup.alone(), setting)
        weights[layers] = nbytes.slices / 16 * 2  # in bf16
    assert peaks[8] - peaks[4] < 0.2 * (weights[8] - weights[4])


@pytest.mark.parametrize("size", [2, 4])
def test_messages_of_a_step(ranks: Ranks, size: int) -> None:
    # Micro-batches of one step: every block is gathered for its forward and again for its backward pass, but the ends once
    # a step; one reduction a unit.
    micros, blocks = 4 // size, 3
    padded = [2 * n for n in (320, 2064, 1152, 2064, 336)]
    if size == 4:
        padded = [4 * n for n in (160, 1040, 576, 1040, 176)]
    for nbytes, traffic, _ in ranks.run(size, _measured, asdict(Setting())):
        assert traffic.gathers == micros * 2 * blocks + 2
        assert traffic.reductions == micros * (blocks + 2)
        share = (size - 1) / size
        assert traffic.gather_bytes == 4 * share * (micros * 2 * sum(padded[1:4]) + padded[0] + padded[4])
        assert traffic.reduction_bytes == 4 * share * micros * sum(padded)
        assert nbytes.fusion > 0
    apart = ranks.run(size, _measured, asdict(Setting(dense={"fusion": "parameter"})))
    # Parameters: 6 in a block with a network, 7 in one with a router; 1 and 2 in the ends.
    assert apart[0][1].gathers == micros * 2 * (6 + 7 + 6) + 3
    assert apart[0][1].reductions == micros * (6 + 7 + 6 + 3)
