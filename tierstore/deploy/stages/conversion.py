"""Stage 3: dense segments as graphs, where they are asked for.

A graph is compiled by the process that runs it, for the processor that it runs on, so nothing of it lies in the directory:
this stage leaves the decision, and what it found. It compiles every block once and compares the logits with the eager
model's: graphs round in other places, which is why they are not taken unless they are asked for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tierstore.capabilities import Capability
from tierstore.deploy.checking import verify_checks
from tierstore.deploy.config import DeployConfig, StageName
from tierstore.deploy.records import StageRecord
from tierstore.deploy.stage import StageContext, StageOutput
from tierstore.deploy.teacher import Teacher, open_teacher
from tierstore.hf.manifest import Manifest
from tierstore.serve.config import GraphsConfig
from tierstore.serve.graphs import CompiledBlocks, compiled_blocks

_PROBED_TOKENS = 32


class ConversionStage:
    """See the module. ``compile_graph``: makes a function of a graph and its example inputs; None for torch's compiler."""

    name = StageName.CONVERSION

    def __init__(self, compile_graph: Callable[..., Any] | None = None) -> None:
        self._compile_graph = compile_graph

    def settings(self, config: DeployConfig) -> Mapping[str, object]:
        return {"graphs": config.graphs.value}

    def run(self, context: StageContext) -> StageOutput:
        before, store, config = context.before[-1], context.input_store, context.config
        blocks = Manifest.read(store).layers
        if config.graphs is not Capability.ON:
            why = (
                "--graphs off"
                if config.graphs is Capability.OFF
                else "graphs give other bits: --graphs on asks for them"
            )
            return StageOutput(
                store=store,
                checks=before.checks,
                figures={"blocks": blocks, "graphs": 0},
                notes=(f"dense segments stay eager: {why}",),
            )
        with open_teacher(store, host_budget=config.host_budget, threads=config.threads) as teacher:
            return self._converted(context, teacher, blocks)

    def verify(self, root: Path, record: StageRecord) -> None:
        verify_checks(root / record.store, record.checks)

    def _converted(self, context: StageContext, teacher: Teacher, blocks: int) -> StageOutput:
        generator = torch.Generator().manual_seed(0)
        tokens_BT = torch.randint(0, teacher.spec.vocab_size, (1, _PROBED_TOKENS), generator=generator)
        eager = teacher.logits(tokens_BT).float()
        began = time.monotonic()
        with self._compiled(teacher) as made:
            compiled = teacher.logits(tokens_BT).float()
        differs = float((compiled - eager).abs().max())
        context.say(
            f"conversion: {made.compiled} graphs of {blocks} blocks; logits differ by {differs:.2g} at most"
        )
        return StageOutput(
            store=context.input_store,
            checks=context.before[-1].checks,
            figures={
                "blocks": blocks,
                "graphs": made.compiled,
                "largest_difference_of_logits": differs,
                "compiled_s": time.monotonic() - began,
            },
            notes=tuple(f"computed eagerly: {reason}" for reason in made.refused),
        )

    @contextlib.contextmanager
    def _compiled(self, teacher: Teacher) -> Iterator[CompiledBlocks]:
        """Raises CapabilityError where nothing can be compiled."""
        parts = teacher.parts
        config = replace(parts.config, graphs=GraphsConfig(compile=Capability.ON))
        with compiled_blocks(parts.model, config, compile_graph=self._compile_graph) as made:
            yield made
