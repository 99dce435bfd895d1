"""accelerate's offload: every decoder layer on disk, the rest in memory, the page cache of what is left.

Maps are by layer: those by parameter give NaN with accelerate 1.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from generate_transformers import EXPERTS, Opened, Sequences, load_model
from generating import GenerateTask, timed

from tierstore.capabilities import package_path
from tierstore.hf.describing import transformers


@contextlib.contextmanager
def opened(task: GenerateTask) -> Iterator[Opened]:
    from accelerate import __version__

    model = load_model(task, device_map=layer_map(task), offload_folder=str(task.directory / "offload"))
    described = f"accelerate {__version__}, whole layers on disk, experts: {EXPERTS}"
    yield [described], lambda workload: timed(Sequences(model), workload), None


def layer_map(task: GenerateTask) -> dict[str, str]:
    """Where each module of the model lies."""
    package = transformers()
    with package_path(str(task.checkpoint)) as path:
        config = package.AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = package.AutoModelForCausalLM.from_config(config)
    body = model.base_model_prefix
    places = {name: "cpu" for name, _ in model.named_children() if name != body}
    for name, child in getattr(model, body).named_children():
        if isinstance(child, torch.nn.ModuleList):
            places |= {f"{body}.{name}.{index}": "disk" for index in range(len(child))}
        else:
            places[f"{body}.{name}"] = "cpu"
    return places
