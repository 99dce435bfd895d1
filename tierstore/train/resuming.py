"""What a run finds in a store that it goes on with: whether its records and its state are what the run asks for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from tierstore.errors import ConfigError, StoreFormatError
from tierstore.model.store_schema import EXPERT_SCHEMA, PAIR_SCHEMA, TrainState, table_of
from tierstore.store.core import StoreCore
from tierstore.store.format import RecordSchema
from tierstore.train.budgets import expert_schema, pair_schema
from tierstore.train.config import TrainConfig
from tierstore.train.state import differences
from tierstore.train.tasks.progress import changes


def check_records(config: TrainConfig, schemas: Sequence[RecordSchema]) -> None:
    """Raises ConfigError where frozen experts were to be trained, or others to be adapted, or by pairs of another rank, or
    where the store keeps other moments.
    """
    held = {schema.name: schema for schema in schemas}
    found, pairs = held.get(EXPERT_SCHEMA), pair_schema(config)
    if found is not None and found.frozen is not expert_schema(config).frozen:
        raise ConfigError(
            f"lora.rank: the experts of {config.store} are {found.training.value}: "
            + (
                "only LoRA trains beside them (train --lora RANK)"
                if found.frozen
                else "LoRA needs an import with --frozen"
            )
        )
    if found is not None and found.quantized is not None:
        raise ConfigError(
            f"{config.store}: its experts are kept in {found.weight_format.value}, for forward passes alone: LoRA needs an "
            "import with --frozen and without --weights"
        )
    kept, moments = held.get(PAIR_SCHEMA), config.adamw.moments
    trained = kept if found is not None and found.frozen else found
    if trained is not None and trained.moments is not moments:
        convert = (
            "a store keeps one adapter"
            if trained is kept
            else f"tierstore reshard {config.store} --to NEW --moments {moments.value} makes another store of it"
        )
        raise ConfigError(
            f"adamw.moments: {config.store} keeps moments as {trained.moments.value}, not {moments.value}: "
            f"adamw.moments = {trained.moments.value} goes on with it, and {convert}"
        )
    if pairs is not None and kept is not None and kept.numel != pairs.numel:
        raise ConfigError(
            f"lora.rank: the pairs in {config.store} have rank {kept.numel * config.lora.rank // pairs.numel}, not "
            f"{config.lora.rank}: a store keeps one adapter, and another needs an import of its own"
        )


def resumed_state(config: TrainConfig, store: StoreCore, present: dict[str, object]) -> TrainState:
    """The state of ``store`` under the conditions of the ``present``. Warns of those that change bits; raises
    StoreFormatError for another model, or for ranks that are laid out otherwise.
    """
    state = TrainState.unpack(store.committer.state, where=str(config.store))
    recorded, own = dict(state.conditions), dict(present)
    tasks = table_of(recorded.pop("tasks", {})), table_of(own.pop("tasks", {}))
    # What the files are read as shows in the checksum of what was read.
    changed = [line for line in differences(recorded, own) if not line.startswith("data.format")]
    if any(tasks):  # the text is that of all tasks
        changed = [line for line in changed if not line.startswith("data.crc32")] + [
            *changes(*tasks, state.tasks)
        ]
    if not state.begun:  # an import does not know what will be trained
        changed = [line for line in changed if not line.startswith("model.lora")]
    kept = ("model.checkpoint", "model.tuning")  # a run may choose these
    shape = [
        line for line in changed if line.startswith(("model.", "dense.fusion")) and not line.startswith(kept)
    ]
    if shape:
        raise StoreFormatError(f"{config.store}: the store holds another model ({'; '.join(shape)})")
    layout = [line for line in changed if line.startswith("parallel.")]
    if layout:
        raise StoreFormatError(
            f"{config.store}: made by ranks that were laid out otherwise ({'; '.join(layout)}); tierstore reshard "
            "makes a store for this layout"
        )
    if changed and state.begun:
        warnings.warn(
            f"{config.store}: this run will not be bit-identical to one that was never interrupted: "
            + "; ".join(changed),
            stacklevel=3,
        )
    state.conditions, state.begun = present, True
    return state
