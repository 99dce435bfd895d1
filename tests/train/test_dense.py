"""How dense parameters are held changes no bit of a training run."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from refusals import refuses

from tierstore.errors import StoreFormatError
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

Make = Callable[[Mapping[str, Any]], TrainConfig]
Run = Callable[..., Any]
BASE: dict[str, Any] = {"steps": 4, "model.compute_dtype": "bf16", "data.micro_batches": 2, "clip_norm": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"dense.gather": "fp32"},
        {"dense.optimizer_state": "host", "dense.buffers": 1, "dense.bucket_bytes": "1KiB"},
        {"dense.optimizer_state": "nvme"},
        {"dense.reshard": "after-backward", "model.checkpoint_activations": "block"},
        {"dense.optimizer_state": "host", "model.tie_embeddings": "untied", "dense.gradient_buffers": 1},
    ],
    ids=str,
)
def test_no_dense_setting_changes_a_bit(configure: Make, train: Run, changes: dict[str, Any]) -> None:
    expected = train(configure(BASE))
    found = train(configure(BASE | changes), stops=(2,))
    assert found.bits == expected.bits
    assert found.norms == expected.norms


def test_slices_of_another_fusion_are_refused(configure: Make, train: Run) -> None:
    config = configure({"steps": 1})
    train(config)
    changed = configure({"store": config.store, "dense.fusion": "parameter"})
    with (
        refuses(StoreFormatError, "dense.fusion: was unit, is parameter"),
        open_session(changed, Opening.RESUME),
    ):
        pass
