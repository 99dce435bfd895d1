"""The small state that a commit holds beside the records: where training stands, and under which conditions.

Bits depend on seed, thread count, instruction set, torch's version and the configuration. They are recorded, and a
resume under other conditions says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import torch

from tierstore import _native
from tierstore.config import as_dict
from tierstore.dense import OptimizerState
from tierstore.errors import StoreFormatError
from tierstore.parallel import Mesh
from tierstore.parallel.config import RowPlacement
from tierstore.store.format import MomentFormat
from tierstore.train.config import TrainConfig
from tierstore.train.stages.spec import StageSpec
from tierstore.train.tasks.config import rows_of_tasks
from tierstore.train.tasks.progress import TaskProgress
from tierstore.train.vocabulary import VocabularyChoice

STATE_KEY = "train"
#: What an import says of itself; until its end there is no STATE_KEY.
IMPORT_KEY = "import"


@dataclass
class TrainState:
    """``position``: steps taken from the data, skipped ones included; ``skipped``: non-finite ones of those.

    ``begun``: whether a run has taken up the store; an import leaves one that none has. ``job``: the job of ``torchrun``
    whose ranks may come and go, and which must know its store again.
    """

    position: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    train_loss: float | None = None
    val_loss: float | None = None
    #: In how many chunks forward and backward passes over experts go, where the run chooses.
    chunks: list[int] | None = None
    begun: bool = True
    job: str = ""
    conditions: dict[str, object] = field(default_factory=dict)
    #: Where each task stands that was ever trained here.
    tasks: dict[str, TaskProgress] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """For how many ranks the store was made; 0 when it does not say."""
        parallel = self.conditions.get("parallel")
        count = parallel.get("ranks") if isinstance(parallel, dict) else None
        return count if isinstance(count, int) else 0

    def pack(self) -> bytes:
        values = asdict(self)
        if not self.tasks:  # what stores without never had
            del values["tasks"]
        if not self.job:
            del values["job"]
        return json.dumps(values, sort_keys=True).encode()

    @classmethod
    def unpack(cls, state: Mapping[str, bytes], *, where: str) -> TrainState:
        """Raises StoreFormatError naming ``where`` when the store was not made by training."""
        if STATE_KEY not in state:
            if IMPORT_KEY in state:
                raise StoreFormatError(
                    f"{where}: the import was cut short; the same tierstore import goes on with it"
                )
            raise StoreFormatError(
                f"{where}: the store holds no training state, so there is nothing to resume"
            )
        try:
            values = json.loads(state[STATE_KEY])
            tasks = {name: TaskProgress(**known) for name, known in values.pop("tasks", {}).items()}
            return cls(**values, tasks=tasks)
        except (AttributeError, TypeError, ValueError) as error:
            raise StoreFormatError(f"{where}: the training state is damaged: {error}") from error


def conditions(
    config: TrainConfig,
    *,
    threads: int,
    device: torch.device,
    data_crc32: int | None,
    mesh: Mesh,
    vocabulary: VocabularyChoice,
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
    if not isinstance(config.model, StageSpec):
        return {}
    return {"layers": [config.model.layers.start, config.model.layers.stop]}


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


def table_of(value: object) -> dict[str, object]:
    """``value``, a table of settings as ``as_dict`` gives them."""
    assert isinstance(value, dict)
    return value
