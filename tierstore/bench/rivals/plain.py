"""Plain torch: everything in memory, the fused AdamW."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from tierstore.bench.rivals.rival import Rival, RivalTask, TorchLoop, fused_adamw, set_threads
from tierstore.bench.rivals.workload import fill


class _Plain(TorchLoop):
    def describe(self) -> Sequence[str]:
        return [f"torch {torch.__version__}, fused AdamW, {torch.get_num_threads()} threads"]


@contextlib.contextmanager
def open_plain(task: RivalTask) -> Iterator[Rival]:
    """The workload as any script would train it."""
    set_threads(task.config)
    workload = task.workload()
    module = workload.module().train()
    fill(module, workload.first_weights())
    yield _Plain(task, workload, module, fused_adamw(task.config, module))
