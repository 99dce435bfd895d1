"""What would leave the experts out, or step parameters twice, raises instead, as long as a model is tiered.

* ``save_pretrained`` would save the dense part alone, as it lies in memory at that moment. It is refused.
* ``state_dict`` gives one entry, which says where the store stands, and ``load_state_dict`` takes that entry, and nothing
  else, and compares. So the checkpoints of ``Trainer`` and accelerate hold no weights, and belong to one commit.
* An optimizer of somebody else that holds parameters of the model would find no gradients. Its step is refused.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tierstore.store.disk.home import read_identity
from tierstore.train.state import TrainState
from tierstore.train.stepping import StepError

#: The only entry of a tiered model's ``state_dict``.
STATE_ENTRY = "tierstore"


@contextlib.contextmanager
def guarded(model: Any, state: TrainState, store: Path) -> Iterator[None]:
    """Guards ``model``, whose training stands at ``state``."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    guards = _Guards(model, state, store.resolve())
    with contextlib.ExitStack() as stack:
        for handle in (
            model.register_state_dict_post_hook(partial(guards.give_state)),  # it is marked: no bound method
            model.register_load_state_dict_pre_hook(guards.take_state),
            model.register_load_state_dict_post_hook(guards.took_state),
            register_optimizer_step_pre_hook(guards.before_optimizer),
        ):
            stack.callback(handle.remove)
        model.save_pretrained = guards.save_pretrained
        stack.callback(vars(model).pop, "save_pretrained")
        yield


def write_marker(directory: Path, model: Any) -> None:
    """Writes ``model``'s ``state_dict``, which says where its store stands, where a checkpoint has its weights. Without a
    configuration beside it nobody takes it for a model.
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), directory / "model.safetensors", {"format": "pt"})


class _Guards:
    def __init__(self, model: Any, state: TrainState, store: Path) -> None:
        self._own = {id(parameter) for parameter in model.parameters()}
        self._state = state
        self._store = store
        self._uuid = read_identity(store)

    def save_pretrained(self, *arguments: Any, **options: Any) -> None:
        raise StepError(
            "save_pretrained would leave out the experts: commit, close the model, and tierstore.hf.export (or tierstore "
            f"export) writes all of {self._store}"
        )

    def give_state(self, module: Any, found: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Makes ``found`` what says where the store stands."""
        found.clear()
        said = json.dumps({"store": self._uuid, "position": self._state.position})
        found[prefix + STATE_ENTRY] = torch.frombuffer(bytearray(said.encode()), dtype=torch.uint8)

    def take_state(self, module: Any, given: dict[str, Any], prefix: str, *others: Any) -> None:
        """Raises StepError unless ``given`` says that training stands where it stands."""
        entry = given.pop(prefix + STATE_ENTRY, None)
        if entry is None or given:
            raise StepError(
                f"load_state_dict: the weights of this model are in {self._store}; others enter by tierstore import"
            )
        said = json.loads(bytes(entry.tolist()))
        if said["store"] != self._uuid:
            raise StepError(f"the checkpoint is of another store than {self._store}")
        if said["position"] != self._state.position:
            raise StepError(
                f"the checkpoint is of step {said['position']}, and {self._store} stands at step {self._state.position}: "
                "resume from the checkpoint of the store's last commit"
            )

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
