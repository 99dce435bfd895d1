"""Stages 3 and 5: dense segments as graphs, and the fastest way to serve the model here, by measurement.

**Conversion**: a graph is compiled by the process that runs it, for its processor, so the directory contains no graph, only
the decision and the measurements. The stage compiles every block once and compares the logits with the eager model's.
Graphs round at other points, so they are used only on request.

**Optimisation**: all settings give the same bits, so the fastest is chosen: the number of threads, and whether experts are
predicted. The format of the weights decides the kernels, which the record states.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from tierstore.capabilities import Capability
from tierstore.config import load
from tierstore.deploy.records import DeployConfig, StageContext, StageOutput
from tierstore.deploy.teacher import open_teacher
from tierstore.errors import StoreError, TierstoreError
from tierstore.hf.manifest import Manifest
from tierstore.machine import MemoryAccount, cores
from tierstore.parallel import ParallelConfig, launch
from tierstore.parallel.layout import local_environments
from tierstore.prefetch.predictor import PredictorName
from tierstore.serve.batch import BatchRunner
from tierstore.serve.config import GraphsConfig, ServeConfig
from tierstore.serve.dense import compiled_blocks
from tierstore.serve.opening import ServedParts, open_runner, open_served
from tierstore.units import format_bytes

_PROBED_TOKENS = 32
#: Notes in the stages' records on what replaces the paper's own stages.
_NO_STATIC_GRAPH = (
    "in place of a static graph (SE-MoE, 3.1): the server compiles dense blocks with torch.compile on request"
)
_NO_PASSES = "in place of passes over a graph and fused kernels (SE-MoE, 3.1): threads and predictor chosen by measurement"


def conversion_settings(config: DeployConfig) -> Mapping[str, object]:
    return {"graphs": config.graphs.value}


def convert(context: StageContext, *, compile_graph: Callable[..., Any] | None = None) -> StageOutput:
    """``compile_graph``: makes a function of a graph and its example inputs; None for torch's compiler.

    Raises CapabilityError if this machine cannot compile.
    """
    store, config = context.input_store, context.config
    blocks = Manifest.read(store).layers
    if config.graphs is not Capability.ON:
        off = config.graphs is Capability.OFF
        why = "--graphs off" if off else "graphs give other bits: pass --graphs on to use them"
        return StageOutput(
            figures={"blocks": blocks, "graphs": 0},
            notes=(_NO_STATIC_GRAPH, f"dense segments stay eager: {why}"),
        )
    with open_teacher(store, host_budget=config.host_budget, threads=config.threads) as teacher:
        context.announced(teacher.account(1, _PROBED_TOKENS))
        generator = torch.Generator().manual_seed(0)
        tokens_BT = torch.randint(0, teacher.parts.spec.vocab_size, (1, _PROBED_TOKENS), generator=generator)
        eager = teacher.logits(tokens_BT).float()
        began = time.monotonic()
        graphs = replace(teacher.parts.config, graphs=GraphsConfig(compile=Capability.ON))
        with compiled_blocks(teacher.parts.model, graphs, compile_graph=compile_graph) as made:
            compiled = teacher.logits(tokens_BT).float()
    differs = float((compiled - eager).abs().max())
    context.say(
        f"conversion: {made.compiled} graphs of {blocks} blocks; logits differ by {differs:.2g} at most"
    )
    return StageOutput(
        figures={
            "blocks": blocks,
            "graphs": made.compiled,
            "largest_difference_of_logits": differs,
            "compiled_s": time.monotonic() - began,
        },
        notes=(_NO_STATIC_GRAPH, *(f"computed eagerly: {reason}" for reason in made.refused)),
    )


#: Prompt tokens and decoded tokens of a measured sequence. The first round is not counted.
PROMPT_TOKENS, DECODED_TOKENS, ROUNDS = 64, 16, 3
#: The smallest budget of a server, whatever memory was given.
_LEAST_BUDGET = 64 << 20


def measure(
    store: Path,
    settings: Mapping[str, object],
    ranks: int = 1,
    *,
    announced: Callable[[MemoryAccount], None] = lambda account: None,
) -> dict[str, Any]:
    """Serves a sequence a rank of the model at ``store`` a few times, with the keys of ``ServeConfig`` in ``settings``;
    returns medians over the rounds. Memory and reads are rank 0's. ``load``: the machine's load average over the minute
    before.

    Several ranks are processes of their own on this machine; for one, ``announced`` receives what this process will hold.
    Raises StoreError, BudgetError, OSError.
    """
    gc.collect()  # frees models of earlier stages, which are in reference cycles: their memory must not count here
    if ranks == 1:
        return _measure(store, settings, announced)
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload([__name__])
    # Each rank waits for all, so each gets a process of its own.
    with ProcessPoolExecutor(ranks, mp_context=forked) as pool:
        made = [pool.submit(_as_rank, store, settings, environ) for environ in local_environments(ranks)]
        first, *_ = [each.result() for each in made]
    return first


def _as_rank(store: Path, settings: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, Any]:
    """``_measure`` on the rank of ``environ``. Raises StoreError: others may not survive the way back."""
    ranks = environ["WORLD_SIZE"]
    os.environ.update(environ, LOCAL_WORLD_SIZE=ranks)
    try:
        return _measure(store, settings)
    except (TierstoreError, OSError) as error:
        raise StoreError(f"{store}: rank {environ['RANK']} of {ranks}: {error}") from None


def _measure(
    store: Path,
    settings: Mapping[str, object],
    announced: Callable[[MemoryAccount], None] = lambda account: None,
) -> dict[str, Any]:
    """The figures of ``measure``; nothing on ranks other than 0."""
    context = PROMPT_TOKENS + DECODED_TOKENS + 1
    beside = {"store": store, "device": "cpu", "batch.sequences": 1, "batch.context": context}
    with (
        launch(ParallelConfig(), device="cpu") as mesh,
        open_served(load(ServeConfig, None, {**beside, **settings}), mesh) as parts,
    ):
        runner = open_runner(parts)
        announced(parts.account(runner.model.context))
        if mesh.world.rank:
            runner.follow()
            return {}
        rounds = [_round(parts, runner, number) for number in range(1 + ROUNDS)][1:]
        resident = psutil.Process().memory_info().rss
        runner.end()
        sequences = runner.sequences
    prefill, decode, read = (statistics.median(values) for values in zip(*rounds, strict=True))
    return {
        "prefill_tokens_per_s": sequences * PROMPT_TOKENS / prefill,
        "decode_tokens_per_s": sequences * DECODED_TOKENS / decode,
        "decode_read_bytes_per_token": read / (sequences * DECODED_TOKENS),
        "resident_bytes": resident,
        "load": os.getloadavg()[0],
    }


def _round(parts: ServedParts, runner: BatchRunner, number: int) -> tuple[float, float, float]:
    """Seconds of the prefills and of decoding, and bytes that decoding read."""
    generator = torch.Generator().manual_seed(number)
    size = (runner.sequences, PROMPT_TOKENS)
    prompts = torch.randint(0, parts.spec.vocab_size, size, generator=generator).tolist()
    began = time.perf_counter()
    logits = runner.join(prompts)
    prefilled, before = time.perf_counter(), _read_bytes(parts)
    for _ in range(DECODED_TOKENS):
        logits = runner.step({number: int(logits_V.argmax()) for number, logits_V in logits.items()})
    ended = time.perf_counter()
    for number in logits:
        runner.leave(number)
    return prefilled - began, ended - prefilled, float(_read_bytes(parts) - before)


def _read_bytes(parts: ServedParts) -> int:
    return sum(drive.read_bytes for drive in parts.store.extents.drive_reports())


def optimisation_settings(config: DeployConfig) -> Mapping[str, object]:
    return {"cores": cores(), "threads": config.threads, "graphs": _graphs(config).value}


def optimise(context: StageContext) -> StageOutput:
    """Chooses the settings that decode fastest; among equals, the first."""
    store, config = context.input_store, context.config
    placed: Any = context.before[-1].figures["host_budget"]
    ranks = config.placement.ranks
    found: list[tuple[dict[str, object], dict[str, Any]]] = []
    for threads in [config.threads] if config.threads else sorted({1, max(1, cores() // ranks)}):
        for predictor in (PredictorName.ROUTER, PredictorName.NONE):
            settings: dict[str, object] = {
                "threads": threads,
                "prefetch.predictor": predictor.value,
                # A budget beyond all experts brings nothing; a small one would be all slots and no cache.
                "host_budget": max(int(placed) + _LEAST_BUDGET, _LEAST_BUDGET),
                "graphs.compile": _graphs(config).value,
            }
            profile = measure(store, settings, ranks, announced=context.announced)
            found.append((settings, profile))
            context.say(
                f"optimisation: threads {threads}, guesses by {predictor.value}: decodes "
                f"{profile['decode_tokens_per_s']:.2f} tokens/s, prefill {profile['prefill_tokens_per_s']:.2f}, "
                f"{format_bytes(int(profile['decode_read_bytes_per_token']))} read a token"
            )
            context.check()
    settings, profile = max(found, key=lambda each: each[1]["decode_tokens_per_s"])
    return StageOutput(
        figures={
            "decode_tokens_per_s": profile["decode_tokens_per_s"],
            "prefill_tokens_per_s": profile["prefill_tokens_per_s"],
            "settings": settings,
            "profile": profile,
            "measured": [{**each, **figures} for each, figures in found],
        },
        notes=(_NO_PASSES, *([] if ranks == 1 else [f"serve it with torchrun --nproc-per-node {ranks}"])),
    )


def _graphs(config: DeployConfig) -> Capability:
    """Whether to use graphs: only on request, since they change bits."""
    return Capability.ON if config.graphs is Capability.ON else Capability.OFF
