"""The specification of a pipeline stage: the whole model's values, and of its parameters the stage's."""

from __future__ import annotations

import pytest

from tierstore.errors import ConfigError
from tierstore.model import ModelConfig
from tierstore.model.spec import spec_of

WHOLE = spec_of(
    ModelConfig(d_model=16, n_layers=4, n_heads=2, seq_len=8, d_ff=8, experts=4, vocab_size=32, moe_every=2)
)
FIRST = WHOLE.stage(range(3), held=2)
LAST = WHOLE.stage(range(3, 4), held=1)


def test_values_are_those_of_the_whole_model() -> None:
    for name in (
        "seq_len",
        "vocab_size",
        "d_model",
        "compute_dtype",
        "expert_codes",
        "experts",
        "expert_shape",
    ):
        assert getattr(FIRST, name) == getattr(WHOLE, name), name
    assert FIRST.settings() == WHOLE.settings()
    assert FIRST.whole is WHOLE
    assert WHOLE.whole is None


def test_every_parameter_is_in_one_stage() -> None:
    """Blocks 1 and 3 have experts. The first stage has the embedding, the last one norm and head."""
    whole = WHOLE.architecture
    assert [unit.numel for unit in FIRST.architecture.units] == [
        *(unit.numel for unit in whole.units[:4]),
        0,
    ]
    assert [unit.numel for unit in LAST.architecture.units] == [0, whole.units[4].numel, whole.units[5].numel]
    assert (FIRST.moe_layers, LAST.moe_layers) == ((1,), (3,))
    assert FIRST.architecture.parameters + LAST.architecture.parameters == whole.parameters
    assert (WHOLE.begins, WHOLE.ends, FIRST.ends, LAST.begins) == (True, True, False, False)


def test_units_of_a_model_without_any_stay_none() -> None:
    assert FIRST.adapter_units == ()
    assert WHOLE.own((1, 2, 3, 4, 5, 6), 0) == (1, 2, 3, 4, 5, 6)
    assert FIRST.own((1, 2, 3, 4, 5, 6), 0) == (1, 2, 3, 4, 0)
    assert LAST.own((1, 2, 3, 4, 5, 6), 0) == (0, 5, 6)


def test_a_stage_holds_activations_of_several_micro_batches() -> None:
    once = WHOLE.pass_bytes(8, range(3))
    assert FIRST.activation_bytes(8) == 2 * once + 4 * 8 * 16 * 4
    assert once < WHOLE.pass_bytes(8, range(4))


def test_what_is_a_stage_is_not_cut_again() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.stages.*a stage"):
        FIRST.check_stages()
    with pytest.raises(ConfigError, match=r"data\.micro_order.*stage"):
        FIRST.layer_order_bytes(8, 2)


def test_another_value_is_another_stage_of_the_same_blocks() -> None:
    varied = FIRST.vary("seq_len", 4)
    assert (varied.seq_len, varied.layers, varied.held) == (4, range(3), 2)
