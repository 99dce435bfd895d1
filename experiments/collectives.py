"""Fewer, larger messages (SE-MoE, section 2.3): what fusion buffers and gradient buckets save, over real ranks on Gloo.

    python experiments/collectives.py [--ranks 2] [--layers 8] [--namespace-bandwidth BYTES_PER_S]

Two modes take turns, round by round, over the same model: ``fused`` (one gather for the slices of a block, gradients in
buckets) and ``apart`` (every parameter gathered and reduced alone). Both compute the same bits. A round is timed
between barriers, so it ends when the slower rank does. The model has dense layers only: experts would travel in both
modes alike. With ``--namespace-bandwidth`` the kernel lets each rank send that many bytes a second (needs root, ip and
tc).

Exit status 1: the modes differ in a bit.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from emulation import OUTPUT, TIMEOUT_S, DenseTraining, finish, options, run_ranks, start, table, timed

from tierstore.bench.namespaces import rank_namespaces
from tierstore.dense import DenseConfig, Fusion, unit_layouts
from tierstore.model import ModelConfig, Transformer
from tierstore.parallel import ParallelConfig, RankGroup, launch
from tierstore.units import format_seconds

MODES = {"fused": Fusion.UNIT, "apart": Fusion.PARAMETER}


class Run(DenseTraining):
    """One mode on one rank: a model with its slices, and the seconds of its rounds."""

    def __init__(self, world: RankGroup, fusion: Fusion, layers: int, d_model: int, tokens: int) -> None:
        config = ModelConfig(
            d_model=d_model, n_layers=layers + 1, n_heads=4, seq_len=tokens, moe_every=layers + 1
        )
        model = Transformer(config, None, mixture=lambda layer: torch.nn.Identity())
        # A model has at least one layer of experts. It is the last one, and is left out.
        units = [unit for unit in model.dense_units() if unit[0] != f"block.{layers}"]
        model.blocks = model.blocks[:-1]
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        layouts = unit_layouts(units, ranks=world.size, fusion=fusion)
        super().__init__(model, units, layouts, world, DenseConfig(fusion=fusion))
        generator = torch.Generator().manual_seed(world.rank)
        self._tokens = torch.randint(256, (1, tokens + 1), generator=generator)
        self._steps = 0
        self.round_s: list[float] = []

    def round(self, steps: int) -> float:
        """Seconds of a step, of ``steps``."""
        self._steps += steps
        return timed(self.group, lambda: self.step(self._tokens), steps)

    def found(self) -> dict[str, Any]:
        traffic = self.slices.traffic
        return {
            "step_samples_s": self.round_s,
            "step_s": statistics.median(self.round_s),
            "collectives_count": (traffic.gathers + traffic.reductions) // self._steps,
            "sent_bytes": (traffic.gather_bytes + traffic.reduction_bytes) // self._steps,
        }


def rank(layers: int, d_model: int, tokens: int, rounds: int, steps: int) -> dict[str, Any]:
    """Both modes in turns on one rank."""
    with launch(ParallelConfig(timeout_s=TIMEOUT_S), device="cpu") as mesh:
        runs = {name: Run(mesh.world, fusion, layers, d_model, tokens) for name, fusion in MODES.items()}
        for each in runs.values():
            each.round(1)  # first touch, and connections
        for _ in range(rounds):
            for each in runs.values():
                each.round_s.append(each.round(steps))
        fused, apart = runs.values()
        same = all(
            torch.equal(one, other)
            for unit in range(len(fused.slices.layouts))
            for one, other in zip(fused.slices.whole(unit), apart.slices.whole(unit), strict=True)
        )
        found = {name: each.found() for name, each in runs.items()}
        return {"parameters": fused.parameters, "same_bits": same, **found}


def main() -> None:
    asked = options(
        __doc__, ranks=2, layers=8, d_model=128, tokens=64, rounds=7, steps=3, namespace_bandwidth=0
    )
    with rank_namespaces(asked.ranks, bandwidth=asked.namespace_bandwidth) as namespaces:
        # Between barriers all ranks see the same seconds.
        found = run_ranks(
            rank, asked.ranks, asked.layers, asked.d_model, asked.tokens, asked.rounds, asked.steps,
            namespaces=namespaces,
        )[0]  # fmt: skip
    fused, apart = (found[name] for name in MODES)
    pairs = zip(apart["step_samples_s"], fused["step_samples_s"], strict=True)
    found["saved_s"] = statistics.median(a - f for a, f in pairs)
    found["messages_ratio"] = apart["collectives_count"] / fused["collectives_count"]
    rows = [
        {"mode": name, **found[name], "fastest_s": min(samples), "slowest_s": max(samples)}
        for name in MODES
        for samples in (found[name]["step_samples_s"],)
    ]
    table(
        f"{asked.ranks} ranks on gloo, {asked.layers} dense blocks of width {asked.d_model}, "
        f"{found['parameters']:,} parameters, {asked.rounds} rounds; of a step",
        rows, "mode", "collectives_count", "sent_bytes", "step_s", "fastest_s", "slowest_s",
    )  # fmt: skip
    OUTPUT.line(
        f"{found['messages_ratio']:.1f} x fewer messages; a step is {format_seconds(abs(found['saved_s']))} "
        f"{'shorter' if found['saved_s'] >= 0 else 'longer'}"
    )
    finish(found, [] if found["same_bits"] else ["fused and apart differ in a bit"])


if __name__ == "__main__":
    start(main)
