"""Buffers of a model in the small states of commits: those of all stages together."""

import numpy as np
import pytest

from tierstore.errors import StoreFormatError
from tierstore.model.store_schema import BUFFERS_KEY, pack_arrays, unpack_arrays, with_all_buffers


def state(**arrays: list[float]) -> dict[str, bytes]:
    return {
        "train": b"1",
        BUFFERS_KEY: pack_arrays({name: np.array(each, np.float32) for name, each in arrays.items()}),
    }


def test_each_stage_has_some() -> None:
    found = with_all_buffers([state(one=[1.0, 2.0]), state(two=[3.0])], where="here")
    assert found.keys() == {"train", BUFFERS_KEY}
    arrays = unpack_arrays(found[BUFFERS_KEY], where="here")
    assert {name: array.tolist() for name, array in arrays.items()} == {"one": [1.0, 2.0], "two": [3.0]}


def test_what_was_just_cut_has_all_in_every_stage() -> None:
    both = state(one=[1.0], two=[2.0])
    assert with_all_buffers([both, both], where="here") == both


def test_a_stage_or_a_model_may_have_none() -> None:
    assert with_all_buffers([{"train": b"1"}, state(two=[3.0])], where="here") == state(two=[3.0])
    assert with_all_buffers([{"train": b"1"}] * 2, where="here") == {"train": b"1"}


def test_stages_that_differ_are_damaged() -> None:
    with pytest.raises(StoreFormatError, match="here: one: two pipeline stages have different values"):
        with_all_buffers([state(one=[1.0]), state(one=[2.0])], where="here")
