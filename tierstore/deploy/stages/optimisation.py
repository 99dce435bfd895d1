"""Stage 5: how the model is served fastest here: measured, not assumed.

Each way gives the same bits, so the fastest is taken: threads, and whether experts are guessed. Which kernels compute is
decided by how the weights are kept, and is stated with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierstore.capabilities import Capability
from tierstore.deploy.checking import verify_checks
from tierstore.deploy.config import DeployConfig, StageName
from tierstore.deploy.measuring import ServedSettings, fastest, measure, rows
from tierstore.deploy.records import StageRecord
from tierstore.deploy.stage import StageContext, StageOutput
from tierstore.machine import cores
from tierstore.prefetch.predictor import PredictorName
from tierstore.units import format_bytes

#: What the least budget of a server is, whatever the memory that was given.
_LEAST_BUDGET = 64 << 20


class OptimisationStage:
    """See the module."""

    name = StageName.OPTIMISATION

    def settings(self, config: DeployConfig) -> Mapping[str, object]:
        return {"cores": cores(), "threads": config.threads, "graphs": _graphs(config).value}

    def run(self, context: StageContext) -> StageOutput:
        before, store = context.before[-1], context.input_store
        placed: Any = before.figures["host_budget"]
        # A budget beyond all experts holds nothing more; a small one would be all slots and no cache.
        budget = max(int(placed) + _LEAST_BUDGET, _LEAST_BUDGET)
        ways = self._ways(context.config, budget)
        found = []
        for way in ways:
            profile = measure(store, way)
            found.append((way, profile))
            context.say(
                f"optimisation: threads {way.threads}, guesses by {way.predictor.value}: decodes "
                f"{profile.decode_tokens_per_s:.2f} tokens/s, prefill {profile.prefill_tokens_per_s:.2f}, "
                f"{format_bytes(int(profile.decode_read_bytes_per_token))} read a token"
            )
            context.check()
        chosen, profile = fastest(found)
        return StageOutput(
            store=store,
            checks=before.checks,
            figures={
                "decode_tokens_per_s": profile.decode_tokens_per_s,
                "prefill_tokens_per_s": profile.prefill_tokens_per_s,
                "settings": chosen.as_json(),
                "profile": profile.as_json(),
                "measured": rows(found),
            },
        )

    def verify(self, root: Path, record: StageRecord) -> None:
        verify_checks(root / record.store, record.checks)

    @staticmethod
    def _ways(config: DeployConfig, budget: int) -> list[ServedSettings]:
        threads = [config.threads] if config.threads else sorted({1, cores()})
        return [
            ServedSettings(threads=count, predictor=predictor, host_budget=budget, graphs=_graphs(config))
            for count in threads
            for predictor in (PredictorName.ROUTER, PredictorName.NONE)
        ]


def _graphs(config: DeployConfig) -> Capability:
    """Graphs change bits: they are for who asks for them."""
    return Capability.ON if config.graphs is Capability.ON else Capability.OFF
