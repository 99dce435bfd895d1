"""What ranks run in tests of training with divided tables."""

from typing import Any

from rank_cases import TINY, Settings
from torch import Tensor

from tierstore.config import load
from tierstore.parallel import Mesh
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session


def embedding_gradients(mesh: Mesh, settings: Settings, steps: int) -> dict[str, Any]:
    """Of each micro-batch of each step: this rank's tokens and the gradients of what the embedding gave for them; and the
    whole table before and after, with the steps' learning rates.
    """
    config = load(TrainConfig, None, {**TINY, **settings})
    seen: list[list[tuple[Tensor, Tensor]]] = []
    with open_session(config, Opening.CREATE, mesh=mesh) as trainer:
        model: Any = trainer.model
        embedded = model._embedded

        def watched(tokens_BT: Tensor) -> Tensor:
            x_BTD: Tensor = embedded(tokens_BT)
            if x_BTD.requires_grad:
                x_BTD.register_hook(lambda grad: seen[-1].append((tokens_BT.flatten(), grad.flatten(0, 1))))
            return x_BTD

        model._embedded = watched
        (before,) = trainer.dense.whole(0)
        rates, losses = [], []
        for _ in range(steps):
            seen.append([])
            result = trainer.step()
            rates.append(result.lr)
            losses.append(result.loss)
        (after,) = trainer.dense.whole(0)
    return {"seen": seen, "before": before, "after": after, "rates": rates, "losses": losses}
