"""transformers with the whole model in memory: its choices of tokens are the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from generating import Generated, GenerateTask, Workload, timed

from tierstore.capabilities import package_path
from tierstore.hf.describing import quiet_transformers, transformers

EXPERTS = "grouped_mm"
#: The description, what generates a workload, and what serves a load: nothing.
Opened = tuple[Sequence[str], Callable[[Workload], Generated], None]


class Sequences:
    """A forward pass of a model of transformers, and its cache of keys and values."""

    def __init__(self, model: Any) -> None:
        self._model, self._cache = model, None

    def prefill(self, tokens: Sequence[Sequence[int]]) -> list[int]:
        with torch.inference_mode():
            made = self._model(
                input_ids=torch.tensor(tokens), past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
        self._cache = made.past_key_values
        return made.logits[:, -1].argmax(-1).tolist()

    def step(self, tokens: Sequence[int]) -> list[int]:
        return self.prefill([[token] for token in tokens])


def load_model(task: GenerateTask, **options: Any) -> Any:
    """The task's checkpoint in bf16."""
    package = transformers()
    torch.set_num_threads(task.threads)
    package.utils.logging.disable_progress_bar()
    with quiet_transformers(), package_path(str(task.checkpoint)) as path:
        model = package.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, experts_implementation=EXPERTS, **options
        )
    return model.eval()


@contextlib.contextmanager
def opened(task: GenerateTask) -> Iterator[Opened]:
    model = load_model(task)
    described = f"transformers {transformers().__version__}, experts: {EXPERTS}"
    yield [described], lambda workload: timed(Sequences(model), workload), None
