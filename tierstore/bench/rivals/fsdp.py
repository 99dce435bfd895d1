"""FSDP2 with its CPU offload, one rank on Gloo: each block is sharded by itself, the rest as one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from tierstore.bench.rivals.rival import Rival, RivalTask, TorchLoop, fused_adamw, set_threads
from tierstore.bench.rivals.workload import fill


class _Fsdp(TorchLoop):
    def describe(self) -> Sequence[str]:
        return [f"torch {torch.__version__}, fully_shard of each block, CPUOffloadPolicy, one rank on Gloo"]


@contextlib.contextmanager
def alone_on_gloo() -> Iterator[None]:
    """A process group of this process alone, which needs no port."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def open_fsdp(task: RivalTask) -> Iterator[Rival]:
    """The workload under FSDP2."""
    set_threads(task.config)
    workload = task.workload()
    with alone_on_gloo():
        mesh = init_device_mesh("cpu", (1,))
        policy = CPUOffloadPolicy(pin_memory=False)  # there is no device to copy to
        module = workload.module().train()
        fill(module, workload.first_weights())
        for block in workload.blocks(module):
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(module, mesh=mesh, offload_policy=policy)
        yield _Fsdp(task, workload, module, fused_adamw(task.config, module))
