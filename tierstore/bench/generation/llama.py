"""llama.cpp, through the wheel ``xllamacpp``: a GGUF file, mapped. The page cache decides what stays.

Its server takes tokens for prompts and gives no way to force those that follow: they are drawn at temperature 1, which for a
random model is nearly uniform. It times itself; of its steps only the mean is known.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from tierstore.bench.generation.contestant import Contestant, ContestantTask, Generated
from tierstore.bench.generation.workload import GenerationWorkload
from tierstore.bench.probes.usage import process_bytes
from tierstore.errors import DataError


class _Mapped(Contestant):
    def __init__(self, server: Any) -> None:
        self._server = server

    def generate(self, workload: GenerationWorkload) -> Generated:
        answers: list[Any] = [None] * workload.batch

        def ask(number: int, prompt: Sequence[int], new: int) -> None:
            seed = random.Random(f"{workload.seed} {number}").getrandbits(31)
            answers[number] = self._server.handle_completions(
                {
                    "prompt": list(prompt),
                    "n_predict": new,
                    "temperature": 1.0,
                    "top_k": 0,
                    "top_p": 1.0,
                    "min_p": 0.0,
                    "seed": seed,
                    "ignore_eos": True,
                    "cache_prompt": False,
                    "return_tokens": True,
                    "stream": False,
                    "timings_per_token": True,
                }
            )

        # The first token follows from the prompt; each further one is a step.
        prompts, new = workload.prompts(), workload.new_tokens + 1
        threads = [
            threading.Thread(target=ask, args=(number, prompt, new)) for number, prompt in enumerate(prompts)
        ]
        with _ReadBytes() as read:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        times, steps = [_timings(answer) for answer in answers], workload.new_tokens
        prefill_s = max(one["prompt_ms"] for one in times) / 1e3
        decode_s = max(one["predicted_ms"] for one in times) / 1e3
        prefill_read = read.after(prefill_s)
        return Generated(
            prefill_s=prefill_s,
            step_s=[decode_s / steps],
            prefill_read_bytes=prefill_read,
            decode_read_bytes=read.total - prefill_read,
        )

    def describe(self) -> Sequence[str]:
        return [f"xllamacpp {version('xllamacpp')}, bf16 GGUF, mmap; tokens drawn at temperature 1"]


class _ReadBytes:
    """Bytes that this process has read from storage since it was entered, every few milliseconds, by a thread."""

    _PERIOD_S = 0.01

    def __enter__(self) -> _ReadBytes:
        self._begun, self._first = time.perf_counter(), process_bytes()[0]
        self._samples: list[tuple[float, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._ended.wait(self._PERIOD_S):
            self._samples.append((time.perf_counter() - self._begun, process_bytes()[0] - self._first))

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.total = process_bytes()[0] - self._first

    def after(self, seconds: float) -> int:
        """Those of the first ``seconds``."""
        return max((nbytes for at, nbytes in self._samples if at <= seconds), default=0)


def _timings(answer: Any) -> dict[str, float]:
    plain = json.loads(answer) if isinstance(answer, str | bytes) else answer
    if not isinstance(plain, dict) or "timings" not in plain:
        raise DataError(f"llama.cpp answered: {str(plain)[:200]}")
    return dict(plain["timings"])


@contextlib.contextmanager
def open_mapped(task: ContestantTask) -> Iterator[Contestant]:
    """Its server on all cores, without warm-up, reordered weights or a cache of prompts."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = str(task.gguf)
    options.n_ctx = task.context * task.sequences
    options.n_parallel = task.sequences
    options.cpuparams.n_threads = task.threads
    options.cpuparams_batch.n_threads = task.threads
    options.warmup = False
    options.n_gpu_layers = 0
    options.no_extra_bufts = True
    options.fit_params = False
    options.cache_ram_mib = 0
    options.verbosity = 0
    options.n_ubatch = 256
    options.port = 0
    options.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    yield _Mapped(xllamacpp.Server(options))
