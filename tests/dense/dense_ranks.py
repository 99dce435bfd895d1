"""Runs of ``dense_cases`` on real ranks. A file of its own: ranks load the file of a case under another name."""

from dataclasses import asdict
from typing import Any

from dense_cases import Outcome, Setting, train_group
from launcher import Ranks

from tierstore.parallel import Mesh


def train(mesh: Mesh, setting: dict[str, Any]) -> Outcome:
    """The case of one rank."""
    return train_group(mesh.world, Setting(**setting))


def on_ranks(ranks: Ranks, size: int, setting: Setting) -> list[Outcome]:
    """``setting`` over ``size`` ranks: what each saw."""
    return ranks.run(size, train, asdict(setting))
