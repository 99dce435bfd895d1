"""The soak's model: by hand, against torch's AdamW, and against a store."""

from copy import deepcopy
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore import _native
from tierstore.bench.soak_plan import FORGETFUL, LEARNING_RATE, StoreModel, content, gradient, wrong_bytes
from tierstore.store import Group, ParameterStore, RecordSchema, StoreConfig, WeightFormat

WHOLE, SPLIT = RecordSchema("whole", 1030), RecordSchema("split", 1030, WeightFormat.SPLIT_BF16)


def test_gradients_are_noise_of_their_own() -> None:
    first = gradient(1, 2, 3, 1000)
    assert np.array_equal(first, gradient(1, 2, 3, 1000))
    assert np.array_equal(first[:10], gradient(1, 2, 3, 10))
    assert (np.abs(first) >= 0.5).all()
    assert (np.abs(first) < 2).all()
    assert 350 < int((first < 0).sum()) < 650
    for other in ((0, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert int((first == gradient(*other, 1000)).sum()) <= 2


def test_content_by_hand() -> None:
    """Each operation of the formula on exact fractions, rounded to single precision where the formula rounds."""
    noise, found = gradient(7, 4, 9, 20), content(7, 4, 9, RecordSchema("r", 20))
    for index, g in enumerate(noise):
        exact = Fraction(float(g))
        below = Fraction(float(np.float32(float(abs(exact) + 1))))
        assert found["exp_avg"][index] == g
        assert found["exp_avg_sq"][index] == np.float32(float(exact * exact))
        assert found["weight"][index] == np.float32(float(-exact / below))


def test_a_registered_record() -> None:
    found = content(7, 4, 0, WHOLE)
    assert np.array_equal(found["weight"], gradient(7, 4, 0, WHOLE.numel))
    assert not found["exp_avg"].any()
    assert not found["exp_avg_sq"].any()


def test_torch_forgets_as_the_model_says() -> None:
    weight = torch.from_numpy(gradient(0, 0, 0, 500).copy()).requires_grad_()
    optimizer = torch.optim.AdamW(
        [weight],
        lr=LEARNING_RATE,
        betas=FORGETFUL.betas,
        eps=FORGETFUL.eps,
        weight_decay=FORGETFUL.weight_decay,
    )
    for version in (5, 6):
        weight.grad = torch.from_numpy(gradient(0, 0, version, 500).copy())
        optimizer.step()
        expected = content(0, 0, version, RecordSchema("r", 500))
        np.testing.assert_allclose(weight.detach().numpy(), expected["weight"], rtol=1e-6)
        state = optimizer.state[weight]
        assert np.array_equal(state["exp_avg"].numpy(), expected["exp_avg"])
        assert np.array_equal(state["exp_avg_sq"].numpy(), expected["exp_avg_sq"])


@pytest.mark.parametrize("schema", [WHOLE, SPLIT], ids=["whole", "split"])
def test_a_store_holds_what_the_model_says(tmp_path: Path, schema: RecordSchema) -> None:
    groups = [Group.WEIGHTS, Group.MOMENTS]
    config = StoreConfig(host_budget=1 << 17)
    with ParameterStore.create(tmp_path / "store", [schema], config, adamw=FORGETFUL) as store:
        store.register("r", schema.name, weight=gradient(3, 8, 0, schema.numel))
        for version in (0, 2, 3, 11):
            if version:
                store.update({"r": gradient(3, 8, version, schema.numel)}, lr=LEARNING_RATE)
            with store.fetch(["r"], groups) as lease:
                expected = content(3, 8, version, schema)
                assert sorted(lease["r"].sections) == sorted(expected)
                for name, section in expected.items():
                    assert lease["r"].copy(name).dtype == section.dtype
                    assert wrong_bytes(lease["r"].copy(name), section) == 0


@settings(max_examples=share(30))
@given(seed=st.integers(0, 2**31), record=st.integers(0, 2**20), version=st.integers(0, 2**40))
def test_split_weights_are_the_whole_ones(seed: int, record: int, version: int) -> None:
    whole, split = content(seed, record, version, WHOLE), content(seed, record, version, SPLIT)
    merged = np.empty(WHOLE.numel, np.float32)
    _native.merge_bf16(merged, split["weight_hi"], split["weight_lo"])
    assert wrong_bytes(merged, whole["weight"]) == 0


def test_wrong_bytes() -> None:
    right = np.arange(10, dtype=np.float32)
    assert wrong_bytes(right.copy(), right) == 0
    wrong = right.copy()
    wrong.view(np.uint8)[[3, 17, 39]] ^= 1
    assert wrong_bytes(wrong, right) == 3
    assert wrong_bytes(right[:9], right) == 40
    odd = np.arange(9, dtype=np.uint8)
    assert wrong_bytes(odd, odd) == 0
    assert wrong_bytes(odd[::-1].copy(), odd) == 8
    assert wrong_bytes(np.array([0.0], np.float32), np.array([-0.0], np.float32)) == 1


def test_versions_by_hand() -> None:
    model = StoreModel(0, [0, 0, 0], retain=1)
    assert model.copies() == 3
    model.commit()
    model.update([1], 5)
    assert model.copies() == 4  # record 1 as it is, and as it was committed
    model.commit("a")
    assert (model.generation, model.committed, model.copies()) == (2, [0, 5, 0], 3)
    model.update([1, 2], 7)
    assert model.copies() == 5
    model.commit()
    model.update([1], 9)
    assert model.copies() == 3 + 2 + 1  # record 1 in three versions: live, committed, of the snapshot
    model.reopen()
    assert model.versions == [0, 7, 7]
    model.update([0], 11)
    model.commit("b")
    assert model.snapshots == {"b": [11, 7, 7]}
    twin = deepcopy(model)
    twin.update([0], 12)
    twin.commit("c")
    assert model.snapshots == {"b": [11, 7, 7]}
    assert StoreModel(**asdict(twin)) == twin
