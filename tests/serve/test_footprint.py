"""Budgets of serving that follow from ``memory``, by hand and for any memory."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses

from tierstore.errors import BudgetError
from tierstore.machine import working_bytes
from tierstore.model.config import ModelConfig
from tierstore.model.spec import spec_of
from tierstore.model.store_schema import expert_record
from tierstore.serve.config import BatchConfig, ServeConfig
from tierstore.serve.footprint import (
    ExpertBudget,
    ServedRecords,
    batch_bytes,
    dense_parameter_bytes,
    fitted_context,
    served_account,
)
from tierstore.store.format import Group, Training
from tierstore.tiers.slots import DeviceKind

SPEC = spec_of(ModelConfig(n_layers=4, d_model=64, n_heads=2, d_ff=128, experts=8, seq_len=512))
SCHEMA = expert_record(SPEC.expert_shape.numel, SPEC.compute_dtype, Training.FROZEN)
CONFIG = ServeConfig(batch=BatchConfig(sequences=2))
SERVED = ExpertBudget(config=CONFIG, spec=SPEC, records=ServedRecords(experts=SCHEMA), device=DeviceKind.CPU)
EACH = sum(part.padded_nbytes for part in SCHEMA.layout(Group.WEIGHTS).sections)
LEAST, FULL = SERVED.least, SERVED.full()
PROCESS = 1000


def beside(context: int) -> int:
    """Bytes of all but the experts."""
    return served_account(CONFIG, SPEC, DeviceKind.CPU, process=PROCESS, context=context).nbytes


def budget(allowed: int, config: ServeConfig = CONFIG) -> int:
    return replace(SERVED, config=config).within(allowed, PROCESS)


def test_an_account_by_hand() -> None:
    """Two sequences of 100 tokens, which one prefill computes; the logits of 2 tokens are less than a block's values."""
    config = replace(CONFIG, host_budget=LEAST)
    account = served_account(config, SPEC, DeviceKind.CPU, process=PROCESS, context=100)
    activations = SPEC.forward_bytes(200, logits=2)
    assert account.parts == {
        "experts": LEAST,
        "process": PROCESS,
        "dense parameters": dense_parameter_bytes(SPEC),
        "keys and values": batch_bytes(SPEC, 2, 100),
        "activations": activations,
        "working memory": working_bytes(0),
    }
    d, rows = 64, 200 * 2
    attention = 200 * d * (9 * 4 + 16)
    mixture = 200 * (2 * d * 4 + 8 * 24) + rows * 4 * d * 4
    assert activations == attention + mixture + 200 * (SPEC.expert_shape.inner_rows + 2 * 128) * 4
    assert SPEC.forward_bytes(200) == max(activations, 200 * 256 * 8)
    on_device = served_account(config, SPEC, DeviceKind.CUDA, process=PROCESS, context=100)
    assert on_device.parts == {"experts": LEAST, "process": PROCESS, "working memory": working_bytes(0)}


def test_budgets_by_hand() -> None:
    """All 32 experts and no more; between them and the least, three quarters of what is left beside a context of 128."""
    assert SERVED.of(FULL).divided().cache == 32 * EACH
    assert budget(1 << 30) == FULL
    assert budget(beside(128) + LEAST) == LEAST
    assert budget(beside(128) + LEAST + 4000) == LEAST + 3000
    given = replace(CONFIG, batch=BatchConfig(sequences=2, context=200))
    assert budget(beside(200) + LEAST + 4000, given) == LEAST + 4000
    with refuses(BudgetError, "memory:", str(beside(128) + LEAST), "batch.sequences"):
        budget(beside(128) + LEAST - 1)


def test_a_model_without_experts() -> None:
    """It gets what a cache of one expert takes, however much memory there is."""
    spec = spec_of(ModelConfig(n_layers=4, d_model=64, n_heads=2, d_ff=128, experts=8, moe_every=0))
    served = replace(SERVED, spec=spec)
    found = served.within(1 << 30, PROCESS)
    assert found in range(served.least, served.least + EACH + 1)
    served.of(found).divided()  # accepts it


@given(spare=st.integers(0, 64 << 20))
def test_all_parts_fit(spare: int) -> None:
    """The budget that memory leaves, with the context that then fits, takes no more than memory."""
    allowed = beside(128) + LEAST + spare
    config = replace(CONFIG, host_budget=budget(allowed))

    def needed(context: int) -> int:
        return served_account(config, SPEC, DeviceKind.CPU, process=PROCESS, context=context).nbytes

    context = fitted_context(needed, config.batch, longest=512, allowed=allowed)
    assert needed(context) <= allowed
    assert 128 <= context <= 512
    assert LEAST <= config.host_budget <= FULL
    SERVED.of(config.host_budget).divided()  # accepts it
