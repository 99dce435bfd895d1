"""FSDP2 with its CPU offload, one rank on Gloo: each block is sharded by itself, the rest as one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from training import TorchLoop, TrainTask, alone_on_gloo, fill


@contextlib.contextmanager
def opened(task: TrainTask) -> Iterator[tuple[Sequence[str], Callable[[], float]]]:
    """The description and the step."""
    workload = task.workload()
    with alone_on_gloo():
        mesh = init_device_mesh("cpu", (1,))
        policy = CPUOffloadPolicy(pin_memory=False)  # there is no device to copy to
        module = workload.module().train()
        fill(module, workload.first_weights())
        for block in workload.blocks(module):
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(module, mesh=mesh, offload_policy=policy)
        described = (
            f"torch {torch.__version__}, fully_shard of each block, CPUOffloadPolicy, one rank on Gloo"
        )
        yield [described], TorchLoop(task, workload, module).step
