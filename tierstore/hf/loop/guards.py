"""What would leave the experts out, or step parameters twice, raises instead.

A model without its experts stays one when its store is closed, so that what guards its weights stays on it.

* ``save_pretrained``, ``push_to_hub`` and ``state_dict``, of the model or a part of it, would give the dense part alone, as
  it lies in memory at that moment. They are refused, before a file is opened.
* ``load_state_dict`` takes what says where the store stands (``StoreMark``), and nothing else, and compares. So the
  checkpoints of ``Trainer`` and accelerate hold no weights, and belong to one commit.
* An optimizer of somebody else that holds parameters of the model would find no gradients. Its step is refused.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from tierstore.model.store_schema import TrainState
from tierstore.store.disk.home import read_identity
from tierstore.train.stepping import StepError

_ENTRY = "tierstore"
_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


@contextlib.contextmanager
def guarded(model: Any, mark: StoreMark) -> Iterator[None]:
    """Guards ``model``, whose training stands at ``mark``."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    guards = _Guards(model, mark)
    for part in model.modules():
        part.register_state_dict_pre_hook(
            partial(guards.refuse, "state_dict")
        )  # it is marked: no bound method
        if hasattr(part, "save_pretrained"):
            part.save_pretrained = partial(guards.refuse, "save_pretrained")
            part.push_to_hub = partial(guards.refuse, "push_to_hub")
    model.register_load_state_dict_pre_hook(guards.take_state)
    model.register_load_state_dict_post_hook(guards.took_state)
    everywhere = register_optimizer_step_pre_hook(guards.before_optimizer)
    try:
        yield
    finally:
        everywhere.remove()
        model.save_pretrained = partial(guards.refuse, "save_pretrained")  # a callback had its own


class StoreMark:
    """Where training stands, as the one entry of a ``state_dict``: the identity of ``store``, and the step of ``state``."""

    def __init__(self, store: Path, state: TrainState) -> None:
        self.store = store.resolve()
        self._state = state
        self._uuid = read_identity(store)

    def state_dict(self) -> dict[str, Tensor]:
        said = json.dumps({"store": self._uuid, "position": self._state.position})
        return {_ENTRY: torch.frombuffer(bytearray(said.encode()), dtype=torch.uint8)}

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """Raises StepError unless ``given`` says that training stands where it stands."""
        if set(given) != {_ENTRY}:
            raise StepError(
                f"load_state_dict: the weights of this model are in {self.store}; others enter by tierstore import"
            )
        said = json.loads(bytes(given[_ENTRY].tolist()))
        if said["store"] != self._uuid:
            raise StepError(f"the checkpoint is of another store than {self.store}")
        if said["position"] != self._state.position:
            raise StepError(
                f"the checkpoint is of step {said['position']}, and {self.store} stands at step {self._state.position}: "
                "resume from the checkpoint of the store's last commit"
            )

    def write(self, directory: Path) -> None:
        """Writes it where a checkpoint of ``Trainer`` has its weights. No program takes it for a model, for there is no
        configuration beside it. Raises StepError where a model is.
        """
        from safetensors import safe_open
        from safetensors.torch import save_file

        target = directory / _WEIGHTS
        if not (taken := (directory / _CONFIG).exists()) and target.exists():
            with safe_open(target, "pt") as file:
                taken = list(file.keys()) != [_ENTRY]
        if taken:
            raise StepError(
                f"{directory}: holds a model, and no checkpoint of {self.store} may take its place"
            )
        directory.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), target, {"format": "pt"})


class _Guards:
    def __init__(self, model: Any, mark: StoreMark) -> None:
        self._own = {id(parameter) for parameter in model.parameters()}
        self._mark = mark

    def refuse(self, name: str, *arguments: Any, **options: Any) -> NoReturn:
        accelerate = (
            "; for Accelerator.save_state, prepare all but the model and register_for_checkpointing(tiered)"
        )
        raise StepError(
            f"{name} would leave out the experts: commit, close the model, and tierstore.hf.export (or tierstore export) "
            f"writes all of {self._mark.store}{accelerate if name == 'state_dict' else ''}"
        )

    def take_state(self, module: Any, given: dict[str, Any], prefix: str, *others: Any) -> None:
        """Raises StepError unless ``given`` says that training stands where it stands."""
        self._mark.load_state_dict({name.removeprefix(prefix): value for name, value in given.items()})
        given.clear()

    def took_state(self, module: Any, keys: Any) -> None:
        """Nothing is missing: the weights are in the store."""
        keys.missing_keys.clear()
        keys.unexpected_keys.clear()

    def before_optimizer(self, optimizer: Any, arguments: Any, options: Any) -> None:
        """Raises StepError for another's optimizer with parameters of the model."""
        from tierstore.hf.loop.optimizer import TieredOptimizer

        if isinstance(optimizer, TieredOptimizer):
            return
        if any(
            id(parameter) in self._own for group in optimizer.param_groups for parameter in group["params"]
        ):
            raise StepError(
                f"{type(optimizer).__name__} holds parameters of a tiered model, whose gradients it cannot see: step with "
                "tiered.step(lr) or tiered.optimizer(lr)"
            )
