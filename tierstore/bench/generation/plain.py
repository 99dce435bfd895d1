"""transformers with everything in memory, and with accelerate's offload of whole layers to disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tierstore.bench.generation.contestant import (
    Contestant,
    ContestantTask,
    Continued,
    Generated,
    TierUse,
    timed,
)
from tierstore.bench.generation.workload import GenerationWorkload
from tierstore.capabilities import package_path
from tierstore.hf.packages import quiet_transformers, transformers

_EXPERTS = "grouped_mm"


class _Sequences(Continued):
    """A forward pass of a model of transformers, and its cache."""

    def __init__(self, model: Any) -> None:
        self._model, self._cache = model, None

    def _forward(self, tokens: Sequence[Sequence[int]]) -> list[int]:
        with torch.inference_mode():
            made = self._model(
                input_ids=torch.tensor(tokens), past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
        self._cache = made.past_key_values
        chosen: list[int] = made.logits[:, -1].argmax(-1).tolist()
        return chosen

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        return self._forward(prompts)

    def step(self, tokens: Sequence[int]) -> list[int]:
        return self._forward([[token] for token in tokens])

    def tier_use(self) -> TierUse | None:
        return None


class _Plain(Contestant):
    def __init__(self, model: Any, *said: str) -> None:
        self._model, self._said = model, said

    def generate(self, workload: GenerationWorkload) -> Generated:
        return timed(_Sequences(self._model), workload)

    def describe(self) -> Sequence[str]:
        return self._said


def _load(task: ContestantTask, **options: Any) -> Any:
    package = transformers()
    torch.set_num_threads(task.threads)
    package.utils.logging.disable_progress_bar()
    with quiet_transformers(), package_path(str(task.checkpoint)) as path:
        model = package.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, experts_implementation=_EXPERTS, **options
        )
    return model.eval()


@contextlib.contextmanager
def open_in_memory(task: ContestantTask) -> Iterator[Contestant]:
    """The whole model in memory."""
    yield _Plain(_load(task), f"transformers {transformers().__version__}, experts: {_EXPERTS}")


@contextlib.contextmanager
def open_offloaded(task: ContestantTask) -> Iterator[Contestant]:
    """Every decoder layer on disk, the rest in memory. Maps by layer: those by parameter give NaN with accelerate 1.15."""
    from accelerate import __version__

    model = _load(task, device_map=layer_map(task), offload_folder=str(task.directory / "offload"))
    yield _Plain(model, f"accelerate {__version__}, whole layers on disk, experts: {_EXPERTS}")


def layer_map(task: ContestantTask) -> Mapping[str, str]:
    """Where each module of the model lies."""
    package = transformers()
    with package_path(str(task.checkpoint)) as path:
        config = package.AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = package.AutoModelForCausalLM.from_config(config)
    body = model.base_model_prefix
    places: dict[str, str] = {}
    for name, _ in model.named_children():
        if name != body:
            places[name] = "cpu"
    for name, child in getattr(model, body).named_children():
        if isinstance(child, torch.nn.ModuleList):
            places |= {f"{body}.{name}.{index}": "disk" for index in range(len(child))}
        else:
            places[f"{body}.{name}"] = "cpu"
    return places
