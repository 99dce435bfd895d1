"""The conditions of a run, which each commit records in its ``TrainState``, and the check of a store to resume.

Bits depend on seed, thread count, instruction set, torch's version and the configuration. A resume under other conditions
warns of each difference.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch

from tierstore import _native
from tierstore.config import as_dict
from tierstore.dense import OptimizerState
from tierstore.errors import ConfigError, StoreFormatError
from tierstore.model.store_schema import EXPERT_SCHEMA, PAIR_SCHEMA, TrainState, table_of
from tierstore.parallel import Mesh
from tierstore.parallel.config import RowPlacement
from tierstore.store.core import StoreCore
from tierstore.store.format import MomentFormat, RecordSchema
from tierstore.train.budgets import expert_schema, pair_schema
from tierstore.train.config import TrainConfig
from tierstore.train.tasks import changes, rows_of_tasks
from tierstore.train.vocabulary import VocabularyTables


def conditions(
    config: TrainConfig,
    *,
    threads: int,
    device: torch.device,
    data_crc32: int | None,
    mesh: Mesh,
    vocabulary: VocabularyTables,
) -> dict[str, object]:
    """All conditions that the bits of a run depend on. ``data_crc32``: None for an external loop, whose data, learning
    rates and clipping are unknown.
    """
    settings, spec = config.settings(), config.spec
    own = data_crc32 is not None
    tasks = {name: _task(config, name) for name in config.tasks}
    return {
        **({"tasks": tasks} if tasks else {}),
        "model": settings["model"],
        "data": {**config.data.conditions(), "crc32": data_crc32} if own else {},
        "schedule": settings["schedule"] if own else {},
        "adamw": _adamw(config),
        "clip_norm": config.clip_norm,
        "dense": {
            "fusion": config.dense.fusion.value,  # decides the positions of parameters in a slice
            "stepped_on": device.type if config.dense.optimizer_state is OptimizerState.DEVICE else "cpu",
        },
        "parallel": {
            **mesh.layout.as_json(),
            "rank": mesh.world.rank,
            # Of the whole model, if a pipeline stage has some of its layers.
            **({} if spec.whole is None else {"layers": [spec.layers.start, spec.layers.stop]}),
            **vocabulary.conditions(),
        },
        "torch": torch.__version__,
        "threads": threads,
        "device": device.type,
        "instruction_set": _native.instruction_set().name,
    }


def _task(config: TrainConfig, name: str) -> dict[str, object]:
    """The settings of a task that bits depend on; without paths, since files may move."""
    task = config.tasks[name]
    settings = {key: value for key, value in as_dict(task).items() if key not in ("paths", "rows", "share")}
    return {**settings, "rows": rows_of_tasks(config.tasks, config.data.batch_size)[name]}


def _adamw(config: TrainConfig) -> dict[str, object]:
    """The optimizer's settings. fp32 moments are left out, so that the state of existing stores does not change."""
    settings = as_dict(config.adamw)
    if config.adamw.moments is MomentFormat.FP32:
        del settings["moments"]
    return settings


#: The value of a condition that a store does not record.
_IMPLIED: Mapping[str, object] = {
    "adamw.moments": MomentFormat.FP32.value,
    "parallel.tensor_ranks": 1,
    "parallel.stages": 1,
    "parallel.embedding": RowPlacement.GATHERED.value,
    "parallel.head": RowPlacement.GATHERED.value,
}


def differences(recorded: Mapping[str, object], present: Mapping[str, object], prefix: str = "") -> list[str]:
    """One line for each condition that has changed."""
    lines = []
    for name in sorted(set(recorded) | set(present)):
        implied = _IMPLIED.get(prefix + name)
        was, now = recorded.get(name, implied), present.get(name, implied)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            lines += differences(was, now, f"{prefix}{name}.")
        elif was != now:
            lines.append(f"{prefix}{name}: was {was}, is {now}")
    return lines


# Checks of a store to resume --------------------------------------------------------------------------------


def check_records(config: TrainConfig, schemas: Sequence[RecordSchema]) -> None:
    """Raises ConfigError if the store's records do not fit the run: frozen experts to be trained, trainable ones to be
    adapted, pairs of another rank, moments in another format.
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
            else f"tierstore reshard {config.store} --to NEW --moments {moments.value} converts it to another store"
        )
        raise ConfigError(
            f"adamw.moments: {config.store} keeps moments as {trained.moments.value}, not {moments.value}: "
            f"adamw.moments = {trained.moments.value} continues with it, and {convert}"
        )
    if pairs is not None and kept is not None and kept.numel != pairs.numel:
        raise ConfigError(
            f"lora.rank: the pairs in {config.store} have rank {kept.numel * config.lora.rank // pairs.numel}, not "
            f"{config.lora.rank}: a store keeps one adapter, and another needs an import of its own"
        )


def resumed_state(config: TrainConfig, store: StoreCore, present: dict[str, object]) -> TrainState:
    """The state of ``store`` with the ``present`` conditions. Warns of differences that change bits; raises
    StoreFormatError for another model, or another layout of ranks.
    """
    state = TrainState.unpack(store.committer.state, where=str(config.store))
    recorded, own = dict(state.conditions), dict(present)
    tasks = table_of(recorded.pop("tasks", {})), table_of(own.pop("tasks", {}))
    # The checksum of the data already covers the format of the files.
    changed = [line for line in differences(recorded, own) if not line.startswith("data.format")]
    if any(tasks):  # the checksum is over the text of all tasks
        changed = [line for line in changed if not line.startswith("data.crc32")] + [
            *changes(*tasks, state.tasks)
        ]
    if not state.begun:  # an import does not know what a run will train
        changed = [line for line in changed if not line.startswith("model.lora")]
    kept = ("model.checkpoint", "model.tuning")  # a run may change these
    shape = [
        line for line in changed if line.startswith(("model.", "dense.fusion")) and not line.startswith(kept)
    ]
    if shape:
        raise StoreFormatError(f"{config.store}: the store holds another model ({'; '.join(shape)})")
    layout = [line for line in changed if line.startswith("parallel.")]
    if layout:
        raise StoreFormatError(
            f"{config.store}: made for another layout of ranks ({'; '.join(layout)}); tierstore reshard "
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
