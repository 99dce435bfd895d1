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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

from generate_transformers import Opened
from generating import Generated, GenerateTask, Workload

from tierstore.bench.probes import process_bytes
from tierstore.errors import DataError

_SAMPLE_S = 0.01


def generate(server: Any, workload: Workload) -> Generated:
    """The workload, each sequence a request of its own to the ``server``."""

    def ask(number: int) -> dict[str, float]:
        answer = server.handle_completions(
            {
                "prompt": list(prompts[number]),
                # The first token follows from the prompt; each further one is a step.
                "n_predict": workload.new_tokens + 1,
                "temperature": 1.0,
                "top_k": 0,
                "top_p": 1.0,
                "min_p": 0.0,
                "seed": random.Random(f"{workload.seed} {number}").getrandbits(31),
                "ignore_eos": True,
                "cache_prompt": False,
                "return_tokens": True,
                "stream": False,
                "timings_per_token": True,
            }
        )
        plain = json.loads(answer) if isinstance(answer, str | bytes) else answer
        if not isinstance(plain, dict) or "timings" not in plain:
            raise DataError(f"llama.cpp answered: {str(plain)[:200]}")
        return plain["timings"]

    prompts = workload.prompts()
    first, begun, ended = process_bytes()[0], time.perf_counter(), threading.Event()
    samples: list[tuple[float, int]] = []  # bytes read from storage so far, every few milliseconds

    def sample() -> None:
        while not ended.wait(_SAMPLE_S):
            samples.append((time.perf_counter() - begun, process_bytes()[0] - first))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        with ThreadPoolExecutor(workload.batch) as pool:
            times = [*pool.map(ask, range(workload.batch))]
    finally:
        ended.set()
        sampler.join()
    prefill_s = max(one["prompt_ms"] for one in times) / 1e3
    decode_s = max(one["predicted_ms"] for one in times) / 1e3
    prefill_read = max((nbytes for at, nbytes in samples if at <= prefill_s), default=0)
    return Generated(
        prefill_s=prefill_s,
        step_s=[decode_s / workload.new_tokens],
        prefill_read_bytes=prefill_read,
        decode_read_bytes=process_bytes()[0] - first - prefill_read,
    )


@contextlib.contextmanager
def opened(task: GenerateTask) -> Iterator[Opened]:
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
    server = xllamacpp.Server(options)
    described = f"xllamacpp {version('xllamacpp')}, bf16 GGUF, mmap; tokens drawn at temperature 1"
    yield [described], lambda workload: generate(server, workload), None
