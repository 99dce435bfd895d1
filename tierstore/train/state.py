"""The conditions of a run, which a commit records in its ``TrainState``.

Bits depend on seed, thread count, instruction set, torch's version and the configuration. A resume under other
conditions says so.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tierstore import _native
from tierstore.config import as_dict
from tierstore.dense import OptimizerState
from tierstore.parallel import Mesh
from tierstore.parallel.config import RowPlacement
from tierstore.store.format import MomentFormat
from tierstore.train.config import TrainConfig
from tierstore.train.tasks.config import rows_of_tasks
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
    """Everything that the bits of a run depend on. ``data_crc32``: None where a loop brings its own data, learning rates
    and clipping, of which nothing is known.
    """
    settings = config.settings()
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
            "fusion": config.dense.fusion.value,  # says where in a slice a parameter lies
            "stepped_on": device.type if config.dense.optimizer_state is OptimizerState.DEVICE else "cpu",
        },
        "parallel": {
            "ranks": mesh.world.size,
            "expert_ranks": mesh.expert.size,
            "tensor_ranks": mesh.tensor.size,
            "stages": mesh.stages,
            "rank": mesh.world.rank,
            **_layers(config),
            **vocabulary.conditions(),
        },
        "torch": torch.__version__,
        "threads": threads,
        "device": device.type,
        "instruction_set": _native.instruction_set().name,
    }


def _layers(config: TrainConfig) -> dict[str, object]:
    """Which layers of the model the rank has, where a pipeline stage has some of them."""
    spec = config.spec
    return {} if spec.whole is None else {"layers": [spec.layers.start, spec.layers.stop]}


def _task(config: TrainConfig, name: str) -> dict[str, object]:
    """What the bits of a run depend on of a task; its files may have moved."""
    task = config.tasks[name]
    settings = {key: value for key, value in as_dict(task).items() if key not in ("paths", "rows", "share")}
    return {**settings, "rows": rows_of_tasks(config.tasks, config.data.batch_size)[name]}


def _adamw(config: TrainConfig) -> dict[str, object]:
    """The optimizer's settings; fp32 moments are not mentioned, so that stores that have them stay as they were."""
    settings = as_dict(config.adamw)
    if config.adamw.moments is MomentFormat.FP32:
        del settings["moments"]
    return settings


#: What a condition is that is not recorded.
_IMPLIED: Mapping[str, object] = {
    "adamw.moments": MomentFormat.FP32.value,
    "parallel.tensor_ranks": 1,
    "parallel.stages": 1,
    "parallel.embedding": RowPlacement.GATHERED.value,
    "parallel.head": RowPlacement.GATHERED.value,
}


def differences(recorded: Mapping[str, object], present: Mapping[str, object], prefix: str = "") -> list[str]:
    """One line for each condition that is not what it was."""
    lines = []
    for name in sorted(set(recorded) | set(present)):
        implied = _IMPLIED.get(prefix + name)
        was, now = recorded.get(name, implied), present.get(name, implied)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            lines += differences(was, now, f"{prefix}{name}.")
        elif was != now:
            lines.append(f"{prefix}{name}: was {was}, is {now}")
    return lines
