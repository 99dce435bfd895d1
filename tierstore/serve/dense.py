"""Dense parameters of a served model: loading, fast products of few rows, and compiled graphs.

Graphs are compiled by ``torch.compile`` (step 3 of SE-MoE section 3.1: conversion). Experts stay outside: a block is
compiled up to the call of its experts, and after it. Fused operations round differently from the eager model, so graphs are
off by default.

The first passes compile (minutes on a small machine; later processes find the kernels in ``graphs.cache``). A graph that
the compiler refuses runs eagerly, and the reason is kept.
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

from tierstore.capabilities import Finding, resolve
from tierstore.dense import unit_layouts
from tierstore.dense.parameters import load_frozen
from tierstore.hf.experts import experts_modules
from tierstore.model.interface import Model
from tierstore.model.store_schema import TrainState, reading_conditions, table_of
from tierstore.model.transformer import Transformer
from tierstore.moe.products import multiplies_at_once, product
from tierstore.parallel import RankGroup
from tierstore.parallel.layout import TableRows
from tierstore.prefetch.predictor import PredictorName
from tierstore.serve.config import ServeConfig
from tierstore.store.core import StoreCore
from tierstore.train.stored_model import stored_fusion
from tierstore.train.vocabulary import places_of, recorded_placements


def load_dense(
    store: StoreCore,
    model: Model,
    state: TrainState,
    *,
    group: RankGroup,
    compute: torch.dtype,
    device: torch.device,
) -> None:
    """Load the dense parameters of ``model``, each group once, in the types that passes need, and the model's own state.

    ``group``: the ranks whose stores have slices of them. It is a collective.
    Raises StoreError, ChecksumError, PeerError, OSError.
    """
    fusion = stored_fusion(state, where=str(store.directory))
    narrow = model.cast_parameters()
    tables: dict[tuple[str, int], TableRows] = {}
    if isinstance(model, Transformer):
        with reading_conditions(str(store.directory)):
            placements = recorded_placements(table_of(state.conditions["parallel"]))
        rows = TableRows(model.config.vocab_size, model.config.d_model, group.size)
        tables = dict.fromkeys(places_of(model.config, placements), rows)
    # With LoRA pairs on attention, frozen parameters and pairs have separate records.
    for units in (model.frozen_units(), model.dense_units()):
        layouts = unit_layouts(units, ranks=group.size, narrow=narrow, fusion=fusion, tables=tables)
        load_frozen(store, units, layouts, group=group, device=device, narrow=narrow, compute=compute)
    model.module.to(device)  # buffers
    model.load_state(store.committer.state)


class FewRowsLinear(nn.Linear):
    """``nn.Linear`` in bf16 on a CPU, without bias and without gradients."""

    def forward(self, input: Tensor) -> Tensor:
        """``input`` (.., inputs) -> (.., outputs)."""
        # If rows are not contiguous, torch may compute one product for each sequence; it refuses mixed types.
        if input.dtype != self.weight.dtype or not input.is_contiguous():
            return super().forward(input)
        out_RN = product(input.view(-1, self.in_features), self.weight)
        return out_RN.view(*input.shape[:-1], self.out_features)


def quicken_linears(module: nn.Module) -> int:
    """Turn all suitable linear layers of ``module`` into ``FewRowsLinear``, for passes without gradients; return their
    number. Parameters, names and hooks are kept.
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
#: Most compilations of a block's function, for each block: prompts and single tokens are compiled separately.
_COMPILATIONS_PER_BLOCK = 4


@dataclass(slots=True)
class CompiledBlocks:
    """The result of compiling a model's blocks."""

    compiling: Finding
    #: Number of compiled graphs.
    compiled: int = 0
    #: Why graphs run eagerly, each reason once.
    refused: list[str] = field(default_factory=list)


def find_compiler(config: ServeConfig, model: Model) -> Finding:
    """Whether blocks can be compiled."""
    if not any(True for _ in experts_modules(model.module)):
        return Finding(False, "the built-in model has its experts inside its blocks")
    if config.prefetch.predictor is PredictorName.ROUTER and config.prefetch.depth:
        return Finding(False, "prefetch.predictor = router has hooks inside blocks")
    if config.batch.invariant:
        return Finding(False, "batch.invariant promises the bits of eager passes")
    compiler = os.environ.get("CXX", "g++")
    if config.device in ("auto", "cpu") and shutil.which(compiler) is None:
        return Finding(False, f"inductor needs a C++ compiler, but {compiler} was not found")
    return Finding(True, "inductor")


@contextlib.contextmanager
def compiled_blocks(
    model: Model, config: ServeConfig, *, compile_graph: _Graph | None = None
) -> Iterator[CompiledBlocks]:
    """Compile the blocks of ``model`` as passes reach them, until the end of the context.

    ``compile_graph``: turns a graph and its example inputs into a function (default: inductor). Raises CapabilityError if
    ``graphs.compile = on`` is not possible.
    """
    compiling = resolve("graphs.compile", config.graphs.compile, lambda: find_compiler(config, model))
    blocks = list(model.blocks)
    made = CompiledBlocks(compiling)
    if not compiling:
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
        except RestartAnalysis:  # not a failure: the compiler wants to trace the graph again
            raise
        except Exception as error:
            # The compiler raises errors of many types; all mean that it cannot compile the graph.
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
    """Set the environment variable ``name`` to ``value`` within the context (None: leave it as it is)."""
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
