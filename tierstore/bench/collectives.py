"""Fewer, larger messages: what fusion buffers and gradient buckets save, over real ranks on Gloo.

Two modes take turns, round by round, over the same model: ``fused`` (one gather for the slices of a unit, gradients in
buckets) and ``apart`` (every parameter gathered and reduced alone). Both compute the same bits. A round is timed
between barriers, so it is over when the slower rank is; figures are medians over rounds, ``saved_s`` the median
of the rounds' differences.

The model has dense layers only: experts would travel in both modes alike.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tierstore.bench.adamw import Lines
from tierstore.bench.processes.namespaces import namespaces_limited_to
from tierstore.bench.processes.ranks import run_ranks
from tierstore.bench.results.document import Better, Measurement, counted, derived, measured
from tierstore.errors import ConfigError
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.parallel import Group

__all__ = ["CollectivesBench", "measurements", "render", "run"]

_TIMEOUT_S = 600.0
#: The two modes, by the value of ``dense.fusion``.
_MODES = {"fused": "unit", "apart": "parameter"}


@dataclass(frozen=True, kw_only=True)
class CollectivesBench:
    """What to measure: ``layers`` blocks of width ``d_model``, ``tokens`` a step on each rank (one sequence).
    ``namespace_bandwidth``: bytes a second that the kernel lets each rank send (0: no limit).
    """

    ranks: int = 2
    layers: int = 8
    d_model: int = 128
    tokens: int = 64
    rounds: int = 7
    steps: int = 3
    bucket_bytes: int = 32 << 20
    namespace_bandwidth: int = 0

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ConfigError(f"ranks: expected at least 2, got {self.ranks}: one sends no messages")
        for name in ("layers", "d_model", "tokens", "rounds", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.d_model % 8:
            raise ConfigError(f"d_model: expected a multiple of 8, got {self.d_model}")


def run(bench: CollectivesBench) -> dict[str, Any]:
    """Measures, and returns figures ready for JSON. Raises CapabilityError (no namespaces), WorkerError."""
    with namespaces_limited_to(bench.namespace_bandwidth, bench.ranks) as namespaces:
        found = run_ranks(
            "tierstore.bench.collectives",
            [json.dumps(asdict(bench))],
            ranks=bench.ranks,
            timeout_s=_TIMEOUT_S,
            namespaces=namespaces,
        )
    modes: dict[str, Any] = found[0]["modes"]  # between barriers all ranks see the same seconds
    fused, apart = modes["fused"], modes["apart"]
    saved = [a - f for a, f in zip(apart["rounds_s"], fused["rounds_s"], strict=True)]
    return {
        "bench": "collectives",
        "backend": "gloo",
        "ranks": bench.ranks,
        "layers_count": bench.layers,
        "d_model_count": bench.d_model,
        "tokens_count": bench.tokens,
        "rounds_count": bench.rounds,
        "bucket_bytes": bench.bucket_bytes,
        "namespace_bytes_per_s": bench.namespace_bandwidth or None,
        "parameters": found[0]["parameters"],
        "same_bits": found[0]["same_bits"],
        **{name: _summary(mode) for name, mode in modes.items()},
        "saved_s": statistics.median(saved),
        "messages_ratio": apart["collectives"] / fused["collectives"],
    }


def _summary(mode: dict[str, Any]) -> dict[str, Any]:
    rounds = mode["rounds_s"]
    return {
        "step_samples_s": rounds,
        "step_s": statistics.median(rounds),
        "step_min_s": min(rounds),
        "step_max_s": max(rounds),
        "collectives_count": mode["collectives"],
        "sent_bytes": mode["sent_bytes"],
    }


def measurements(result: dict[str, Any]) -> list[Measurement]:
    """What ``run`` found, for a document."""
    found = []
    for mode in _MODES:
        of, how = result[mode], {"messages": mode}
        found += [
            measured("step", of["step_samples_s"], "s", Better.LOWER, parameters=how),
            counted("messages a step", of["collectives_count"], "messages", Better.LOWER, parameters=how),
            counted("sent a step", of["sent_bytes"], "bytes", Better.LOWER, parameters=how),
        ]
    pairs = zip(*(result[mode]["step_samples_s"] for mode in _MODES), strict=True)
    ratios = [fused / apart for fused, apart in pairs]
    return [*found, derived("step fused to apart", ratios, "ratio", Better.LOWER)]


def render(result: dict[str, Any], output: Lines) -> None:
    """The environment, a table and what was saved, for people."""
    rows = [
        (title, *(show(result[mode][name]) for mode in _MODES))
        for title, name, show in (
            ("collectives a step", "collectives_count", str),
            ("sent a step by a rank", "sent_bytes", format_bytes),
            ("step, median", "step_s", format_seconds),
            ("step, fastest", "step_min_s", format_seconds),
            ("step, slowest", "step_max_s", format_seconds),
        )
    ]
    output.table(
        f"{result['ranks']} ranks on {result['backend']}, {result['layers_count']} dense blocks of width "
        f"{result['d_model_count']}, {result['parameters']:,} parameters, {result['rounds_count']} rounds",
        ("", "fused", "a message a parameter"),
        rows,
    )
    output.line(
        f"{result['messages_ratio']:.1f} x fewer messages; a step is {format_seconds(abs(result['saved_s']))} "
        f"{'shorter' if result['saved_s'] >= 0 else 'longer'}"
    )


# One rank ---------------------------------------------------------------------------------------------------


def _rank(bench: CollectivesBench) -> dict[str, Any]:
    import torch

    from tierstore.parallel import ParallelConfig, launch

    torch.set_num_threads(1)
    with launch(ParallelConfig(timeout_s=_TIMEOUT_S), device="cpu") as mesh:
        return _take_turns(bench, mesh.world)


def _take_turns(bench: CollectivesBench, world: Group) -> dict[str, Any]:
    import torch

    runs = {name: _Run(bench, world, fusion) for name, fusion in _MODES.items()}
    for each in runs.values():
        each.step()  # first touch, and connections
    for _ in range(bench.rounds):
        for each in runs.values():
            world.barrier()
            each.round()
    fused, apart = runs.values()
    same = all(
        torch.equal(one, other)
        for unit in range(len(fused.dense.layouts))
        for one, other in zip(fused.dense.whole(unit), apart.dense.whole(unit), strict=True)
    )
    return {
        "parameters": fused.parameters,
        "same_bits": same,
        "modes": {name: each.found() for name, each in runs.items()},
    }


class _Run:
    """One mode: a model with its slices, and the times of its rounds."""

    def __init__(self, bench: CollectivesBench, world: Group, fusion: str) -> None:
        import torch

        from tierstore.dense import DenseConfig, DenseSlices, Fusion, GatherOnDemand, unit_layouts
        from tierstore.model import ModelConfig, Transformer
        from tierstore.store.adamw import AdamWConfig

        self._bench, self._world = bench, world
        self._model = Transformer(
            ModelConfig(
                d_model=bench.d_model,
                n_layers=bench.layers + 1,
                n_heads=4,
                seq_len=bench.tokens,
                moe_every=bench.layers + 1,
            ),
            None,
            mixture=lambda layer: torch.nn.Identity(),
        )
        # A model has at least one layer of experts. It is the last one, and is left out.
        self._model.blocks = self._model.blocks[:-1]
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())
        units = self._model.dense_units()
        config = DenseConfig(fusion=Fusion(fusion), bucket_bytes=bench.bucket_bytes)
        self.dense = DenseSlices(
            units,
            unit_layouts(units, ranks=world.size, fusion=config.fusion),
            group=world,
            device=torch.device("cpu"),
            adamw=AdamWConfig(),
            config=config,
        )
        self.dense.attach(self._model, GatherOnDemand(self.dense, config.reshard))
        generator = torch.Generator().manual_seed(world.rank)
        self._tokens = torch.randint(256, (1, bench.tokens + 1), generator=generator)
        self._rounds_s: list[float] = []
        self._steps = 0

    def step(self) -> None:
        import torch

        self.dense.zero_grad()
        self.dense.begin_micro()
        output = self._model(self._tokens[:, :-1], self._tokens[:, 1:])
        assert output.objective is not None
        torch.autograd.backward(output.objective / self._world.size)
        self.dense.end_micro()
        self.dense.finish()
        self.dense.step(1e-3)
        self._steps += 1

    def round(self) -> None:
        started = time.perf_counter()
        for _ in range(self._bench.steps):
            self.step()
        self._world.barrier()
        self._rounds_s.append((time.perf_counter() - started) / self._bench.steps)

    def found(self) -> dict[str, Any]:
        traffic = self.dense.traffic
        return {
            "rounds_s": self._rounds_s,
            "collectives": (traffic.gathers + traffic.reductions) // self._steps,
            "sent_bytes": (traffic.gather_bytes + traffic.reduction_bytes) // self._steps,
        }


if __name__ == "__main__":
    print(json.dumps(_rank(CollectivesBench(**json.loads(sys.argv[1])))), flush=True)
    # Gloo's threads have aborted processes whose interpreter was being taken apart; the answer is out.
    os._exit(0)
