"""DeepSpeed ZeRO-3, one rank, its own AdamW for processors: state in host memory, or parameters and optimizer on NVMe.

Three things decide whether it trains the same: gradients are clipped at 1.0 unless ``gradient_clipping`` says otherwise; in
fp32 the model must be built under ``zero.Init``; and what a constructor writes into a parameter that is already partitioned
is lost, so that every parameter is filled afterwards. Its native operators are compiled when they are first used (minutes;
kept in ``TORCH_EXTENSIONS_DIR``): g++ and ninja for all, libaio's header for NVMe.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from training import BuiltIn, TorchLoop, TrainTask, alone_on_gloo

_NEVER = 1 << 60
#: Optimizer state is stepped, and swapped, in pieces of this many parameters.
_SUB_GROUP = 10_000_000
#: So many parameters are in memory at a time, and fetched ahead; more where one parameter alone is larger.
_LIVE, _AHEAD = 20_000_000, 8_000_000
_SPARE_BUFFERS = 12


class _DeepSpeedLoop(TorchLoop):
    def __init__(self, task: TrainTask, workload: BuiltIn, engine: Any) -> None:
        super().__init__(task, workload, engine, engine.optimizer)
        self._engine = engine

    def micro(self, tokens_BT: Tensor, targets_BT: Tensor) -> float:
        objective, loss = self._engine(tokens_BT, targets_BT)
        self._engine.backward(objective)  # which divides by the number of micro-batches
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()
        return float(loss.detach())

    def update(self) -> None:
        self._engine.step()


def _buffers(sizes: Sequence[int], most: int) -> int:
    """How many consecutive ones of ``sizes`` can make up ``most`` parameters, and some to spare."""
    longest = first = total = 0
    for last, size in enumerate(sizes):
        total += size
        while total > most:
            total -= sizes[first]
            first += 1
        longest = max(longest, last + 1 - first)
    return longest + _SPARE_BUFFERS


def settings_of(task: TrainTask, device: str, sizes: Sequence[int]) -> dict[str, Any]:
    """DeepSpeed's configuration: ``device`` is cpu or nvme; ``sizes``: of all parameters, in the order of their use."""
    config, adamw = task.config, task.config.adamw
    parameters: dict[str, Any] = {"device": device, "pin_memory": True}
    optimizer: dict[str, Any] = {"device": device, "pin_memory": True}
    limits: dict[str, Any] = {}
    if device == "nvme":
        path = str(task.directory / "nvme")
        live, ahead = max(_LIVE, 2 * max(sizes)), max(_AHEAD, max(sizes))
        limits = {
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
            "stage3_prefetch_bucket_size": ahead,
        }
        # A buffer holds one parameter, whatever its size. With the default's size they would take 2 GB; with its number,
        # or that of the optimizer's, a step ends in an assertion.
        buffers = {"buffer_count": _buffers(sizes, live + ahead), "buffer_size": max(sizes), "max_in_cpu": 0}
        parameters |= {"nvme_path": path, **buffers}
        optimizer |= {"nvme_path": path, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
    adamw_parameters = {
        "lr": config.lr_at(0),
        "betas": list(adamw.betas),
        "eps": adamw.eps,
        "weight_decay": adamw.weight_decay,
        "torch_adam": False,
        "adam_w_mode": True,
    }
    return task.overlaid(
        {
            "train_micro_batch_size_per_gpu": config.data.batch_size,
            "gradient_accumulation_steps": config.data.micro_batches,
            "gradient_clipping": config.clip_norm,
            "steps_per_print": _NEVER,
            "optimizer": {"type": "AdamW", "params": adamw_parameters},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": _SUB_GROUP,
                **limits,
                "offload_param": parameters,
                "offload_optimizer": optimizer,
            },
            "aio": {
                "block_size": 1 << 20,
                "queue_depth": 32,
                "intra_op_parallelism": 2,
                "single_submit": False,
                "overlap_events": True,
            },
        }
    )


@contextlib.contextmanager
def opened(task: TrainTask) -> Iterator[tuple[Sequence[str], Callable[[], float]]]:
    """The description and the step of ``deepspeed-cpu`` or ``deepspeed-nvme``."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    library: Any = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    (task.directory / "nvme").mkdir(parents=True, exist_ok=True)
    workload = task.workload()
    with alone_on_gloo():
        library.init_distributed(dist_backend="gloo", verbose=False)
        with torch.device("meta"):
            sizes = [parameter.numel() for parameter in workload.module().parameters()]
        settings = settings_of(task, task.rival.removeprefix("deepspeed-"), sizes)
        # Without dtype: where an accelerator has no fp16, it is not heeded, and parameters become bf16.
        with library.zero.Init(config_dict_or_path=settings):
            module = workload.module().train()
        first = workload.first_weights()
        for name, parameter in module.named_parameters():
            with library.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
                parameter.copy_(first(name))
        engine, *_ = library.initialize(
            model=module, model_parameters=list(module.parameters()), config=settings
        )
        zero = settings["zero_optimization"]
        places = [f"{kind} on {zero[f'offload_{kind}']['device']}" for kind in ("param", "optimizer")]
        described = (
            f"DeepSpeed {library.__version__} ZeRO-3, {', '.join(places)}, pieces of {zero['sub_group_size']:,}; "
            f"{type(engine.optimizer.optimizer).__name__}"
        )
        try:
            yield [described], _DeepSpeedLoop(task, workload, engine).step
        finally:
            engine.destroy()
