"""Plain torch: everything in memory, the fused AdamW, as any script would train the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from training import TorchLoop, TrainTask, fill


@contextlib.contextmanager
def opened(task: TrainTask) -> Iterator[tuple[Sequence[str], Callable[[], float]]]:
    """The description and the step."""
    workload = task.workload()
    module = workload.module().train()
    fill(module, workload.first_weights())
    described = f"torch {torch.__version__}, fused AdamW, {torch.get_num_threads()} threads"
    yield [described], TorchLoop(task, workload, module).step
