"""Dense parameters of a served model: loaded, and computed with in quick products of few rows or in compiled graphs.

Graphs are those of torch's compiler (step 3 of SE-MoE section 3.1: conversion). Experts stay outside: a block is compiled
up to the call of its experts, and from there on. What the compiler fuses is rounded in other places, so the bits are not
those of the eager model: graphs are off unless they are requested.

The first passes compile (minutes on a small machine; later processes find the kernels in ``graphs.cache``). A graph that the
compiler refuses is computed eagerly, and the reason is kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tierstore.capabilities import Finding, Resolution, resolve
from tierstore.dense import Fusion, unit_layouts
from tierstore.dense.parameters import load_frozen
from tierstore.errors import StoreFormatError
from tierstore.hf.experts import experts_modules
from tierstore.model.interface import Model
from tierstore.model.store_schema import TrainState
from tierstore.moe.products import multiplies_at_once, product
from tierstore.parallel import RankGroup
from tierstore.prefetch.predictor import PredictorName
from tierstore.serve.config import ServeConfig
from tierstore.store.core import StoreCore


def load_dense(
    store: StoreCore, model: Model, state: TrainState, *, compute: torch.dtype, device: torch.device
) -> None:
    """Reads the dense parameters of ``model``, each group once, in the types that passes need, and the model's own state.

    Raises StoreError, ChecksumError, OSError.
    """
    conditions: Any = state.conditions
    try:
        fusion = Fusion(conditions["dense"]["fusion"])
    except (KeyError, TypeError, ValueError) as error:
        raise StoreFormatError(
            f"{store.directory}: the conditions of the run are damaged: {error}"
        ) from error
    narrow = model.cast_parameters()
    # With pairs on attention: what is frozen, and the pairs, as records of their own.
    for units in (model.frozen_units(), model.dense_units()):
        layouts = unit_layouts(units, ranks=1, narrow=narrow, fusion=fusion)
        load_frozen(
            store, units, layouts, group=RankGroup.alone(), device=device, narrow=narrow, compute=compute
        )
    model.module.to(device)  # buffers
    model.load_state(store.committer.state)


class FewRowsLinear(nn.Linear):
    """``nn.Linear`` in bf16 on a CPU, without bias and without gradients."""

    def forward(self, input: Tensor) -> Tensor:
        """``input`` (.., inputs) -> (.., outputs)."""
        # Of rows that lie apart torch may make a product for each sequence; another type it refuses.
        if input.dtype != self.weight.dtype or not input.is_contiguous():
            return super().forward(input)
        out_RN = product(input.view(-1, self.in_features), self.weight)
        return out_RN.view(*input.shape[:-1], self.out_features)


def quicken_linears(module: nn.Module) -> int:
    """Makes what can be of ``module``'s linear layers ``FewRowsLinear``, for passes without gradients; returns how many.
    Their parameters, names and hooks stay.
    """
    found = [
        linear
        for linear in module.modules()
        if type(linear) is nn.Linear
        and [name for name, _ in linear.named_parameters()] == ["weight"]
        and linear.weight.dtype == torch.bfloat16
        and linear.weight.is_contiguous()
        and multiplies_at_once(linear.weight)
    ]
    for linear in found:
        linear.__class__ = FewRowsLinear
    return len(found)


_LOG = logging.getLogger("tierstore.serve")
_Graph = Callable[..., Any]
#: Compilations of one function: each block is one, and prompts and single tokens are others.
_COMPILATIONS_PER_BLOCK = 4


@dataclass(slots=True)
class CompiledBlocks:
    """What became of the blocks of a model."""

    resolution: Resolution
    #: Graphs that have been compiled.
    compiled: int = 0
    #: Why graphs are computed eagerly, each reason once.
    refused: list[str] = field(default_factory=list)


def find_compiler(config: ServeConfig, model: Model) -> Finding:
    """Whether blocks can be compiled."""
    if not any(True for _ in experts_modules(model.module)):
        return Finding(False, "the built-in model has its experts inside of its blocks")
    if config.prefetch.predictor is PredictorName.ROUTER and config.prefetch.depth:
        return Finding(False, "prefetch.predictor = router listens inside of blocks")
    if config.batch.invariant:
        return Finding(False, "batch.invariant promises the bits of eager passes")
    compiler = os.environ.get("CXX", "g++")
    if config.device in ("auto", "cpu") and shutil.which(compiler) is None:
        return Finding(False, f"inductor needs a C++ compiler, and there is no {compiler}")
    return Finding(True, "inductor")


@contextlib.contextmanager
def compiled_blocks(
    model: Model, config: ServeConfig, *, compile_graph: _Graph | None = None
) -> Iterator[CompiledBlocks]:
    """The blocks of ``model`` compile as passes reach them, until the end of the context.

    ``compile_graph``: makes a function of a graph and its example inputs (default: inductor). Raises CapabilityError for
    ``graphs.compile = on`` where it cannot be.
    """
    resolution = resolve("graphs.compile", config.graphs.compile, lambda: find_compiler(config, model))
    blocks = list(model.blocks)
    made = CompiledBlocks(resolution)
    if not resolution:
        yield made
        return
    import torch._dynamo

    experts = [module for _, module in experts_modules(model.module)]
    backend = _backend(made, compile_graph or _inductor)
    with (
        _environment("TORCHINDUCTOR_CACHE_DIR", config.graphs.cache),
        torch._dynamo.config.patch(recompile_limit=_COMPILATIONS_PER_BLOCK * len(blocks)),
    ):
        for module in experts:  # graphs do not depend on where leases come from
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
        for block in blocks:
            block.compile(backend=backend, dynamic=True)
        try:
            yield made
        finally:
            for module in experts:
                del module.forward
            for block in blocks:
                block._compiled_call_impl = None
            torch._dynamo.reset()


def _backend(made: CompiledBlocks, compile_graph: _Graph) -> _Graph:
    from torch._dynamo.exc import RestartAnalysis

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        try:
            compiled = compile_graph(graph, inputs)
        except RestartAnalysis:  # no failure: the compiler wants the graph again, traced otherwise
            raise
        except Exception as error:
            # Of the compiler's own types there are many, and all mean the same.
            reason = (
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            )
            if reason not in made.refused:
                made.refused.append(reason)
                _LOG.warning("graphs.compile: computed eagerly: %s", reason)
            return graph.forward
        made.compiled += 1
        return compiled

    return backend


def _inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, list(inputs))


@contextlib.contextmanager
def _environment(name: str, value: object) -> Iterator[None]:
    """``value`` (None: whatever it is) as the environment variable ``name``."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = str(value)
    try:
        yield
    finally:
        if value is not None and before is None:
            del os.environ[name]
        elif before is not None:
            os.environ[name] = before
