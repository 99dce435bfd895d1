"""What a step takes on machines that nobody has here: the graph of a real step, timed with their data sheets.

    python experiments/clock.py [--models large small] [--places device host drives] [--tokens 8192 65536]

**The graph.** The trainer runs on the simulated device (``tests/simgpu``), which writes down in program order what the host
queues and waits for: kernels, copies, collectives, the engine's tickets, each with its operations or bytes and with what it
follows. Nothing in a run depends on the times below, so one graph serves all profiles, and its time is the same to the last
digit. ``plan``'s simulator gives it a profile's times: the host, the device, each direction of the link, host memory (AdamW
and other work of the engine) and the drives serve one operation at a time.

**The scale.** Two models of 45 billion expert parameters: 8 experts of 176 M in each of 32 layers, top 2, and 128 of
7.3 M in 48 layers, top 8. Widths, tokens and sequences are divided by 16. So products are divided by 16^3 = 4,096, and the
bytes of weights, gradients, optimizer states and activations all by 16^2 = 256, which the times undo: every ratio is the
real model's. Launches and host calls are as many as the real model's. (With all the tokens, at 1/256 of a profile's
operations, bytes of activations would count 16 times.) Sequences have 1,024 tokens, because torch's own attention, without
a fused kernel, writes all scores down; the vocabulary is 4,096.

**The bound** of a step is the largest of: the kernels, each direction of the link, AdamW at host memory's bandwidth, and the
drives, each alone. Exit status 1: a step takes more than 1.10 of it, or a measured step differs by 10% from its prediction.

**The check** (``--loads``): a step over copy links at these shares of its time without limits, measured here on the
simulated device, against the graph with host costs measured without limits.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from emulation import OUTPUT, finish, options, start
from torch.nn.attention import SDPBackend, sdpa_kernel

from tierstore.config import load
from tierstore.machine_profile import Profile, find_profile
from tierstore.parallel import ParallelConfig, launch
from tierstore.plan.predict import Run, simulate
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session
from tierstore.train.trainer import Trainer
from tierstore.units import format_seconds

sys.path += [str(Path(__file__).parents[1] / "tests" / name) for name in ("simgpu", "parallel")]
import simulated
import simulated_build
from simulated import ENGINE, HOST, Node

TARGET, ERROR = 1.10, 0.10
SCALE = 16
DRIVES = 4
_SEQUENCE = 1024
#: A launch through torch or a call of the engine, and the least time of a kernel, in seconds: assumed.
_HOST_S, _KERNEL_S = 5e-6, 2e-6
#: Bytes a second of a GPU's own memory, by its data sheet, and the share of them that kernels reach: assumed.
_MEMORY = {"H100": 3.35e12, "A100": 2.039e12, "RTX4090": 1.008e12}
_REACHED = 0.8
_MODELS: Mapping[str, Mapping[str, int]] = {
    "large": {"d_model": 4096, "d_ff": 14336, "experts": 8, "top_k": 2, "n_layers": 32},
    "small": {"d_model": 2048, "d_ff": 1184, "experts": 128, "top_k": 8, "n_layers": 48},
}
_WIDTHS = ("d_model", "d_ff")
_HEADS = 8
#: A link without limits that has turns nevertheless.
_FAST = 1 << 50


# The graph with times ---------------------------------------------------------------------------------------


class Timed(NamedTuple):
    """An operation of ``resource`` that takes ``seconds``; ``node``: the index of what it is part of. ``due``: as in
    ``Occupying``; of what the engine may leave until it is idle, the index of the first node that needs it.
    """

    resource: str
    seconds: float
    after: tuple[int, ...]
    node: int
    due: int = 0


@dataclass(frozen=True)
class Machine:
    """Seconds of a graph's nodes on a machine. ``host``: what the thread spends on the node with an index; ``work``: the
    resource and time of the rest.
    """

    host: Callable[[int], float]
    work: Callable[[Node], tuple[str, float]]


def machine(profile: Profile, memory_bytes_per_s: float, drives: int = DRIVES, scale: int = SCALE) -> Machine:
    """The machine of ``profile``, for graphs of models whose widths and tokens were divided by ``scale``."""

    def work(node: Node) -> tuple[str, float]:
        nbytes, operations = node.nbytes * scale**2, node.operations * scale**3
        if node.what in ("engine read", "engine write"):
            cost = profile.disk_read if node.what == "engine read" else profile.disk_write
            return "drives", nbytes / (cost.per_s * drives)
        if node.stream == ENGINE:
            return "host memory", nbytes / profile.adamw.per_s
        if node.what.startswith("collective "):
            return "collectives", profile.all_to_all.seconds(nbytes)
        if node.what in ("h2d", "d2h"):
            return node.what, profile.copy.seconds(nbytes)
        spent = max(operations / profile.dense_flops.per_s, nbytes / memory_bytes_per_s)
        return "device", _KERNEL_S + spent

    return Machine(lambda index: _HOST_S, work)


def timed(nodes: Sequence[Node], on: Machine) -> Run[Timed]:
    """When each operation of the graph runs ``on`` a machine. The host's part of a node follows the node before, and what it
    waits for; the rest follows the host's part and what it follows itself.
    """
    operations: list[Timed] = []
    last: list[int] = []
    needed: dict[int, int] = {}  # by node, the first one that follows it
    for index, node in enumerate(nodes):
        for before in node.after:
            needed.setdefault(before, index)
    for index, node in enumerate(nodes):
        after = tuple(last[before] for before in node.after)
        waits = after if node.stream == HOST else ()
        operations.append(Timed("host", on.host(index), waits, index))
        if node.stream != HOST:
            resource, seconds = on.work(node)
            due = needed.get(index, len(nodes)) if node.what.startswith("engine idle") else 0
            operations.append(Timed(resource, seconds, (len(operations) - 1, *after), index, due))
        last.append(len(operations) - 1)
    return simulate(operations, lambda each: each.seconds, in_order=["host"])


class Step(NamedTuple):
    """A step in the steady state: its time; the seconds by resource that it needs; those on its critical path, by what is
    done. ``adamw_s``: what its AdamW steps alone need of host memory.
    """

    step_s: float
    busy_s: dict[str, float]
    path_s: dict[str, float]
    adamw_s: float

    @property
    def bound_s(self) -> float:
        """The longest of what each resource has to do; of host memory, AdamW alone counts."""
        bounds = {**self.busy_s, "host memory": self.adamw_s}
        return max(seconds for resource, seconds in bounds.items() if resource != "host")


def steady(nodes: Sequence[Node], run: Run[Timed]) -> Step:
    """The mean of the steps between the graph's marks ``step`` but the first, before which nothing was left to do."""
    marks = [i for i, each in enumerate(run.operations) if nodes[each.node].what == "step"]
    begin, end, count = marks[1], marks[-1], len(marks) - 2
    busy: Counter[str] = Counter()
    path: Counter[str] = Counter()
    adamw = 0.0
    for each in run.operations[begin + 1 : end + 1]:
        busy[each.resource] += each.seconds / count  # type: ignore[assignment]
        if nodes[each.node].what.endswith("adamw") and each.resource == "host memory":
            adamw += each.seconds / count
    for index in run.critical_path(end):
        inside = run.ended[index] - max(run.begun[index], run.ended[begin])
        if inside > 0:
            resource, what = run.operations[index].resource, nodes[run.operations[index].node].what
            kind = what if resource in ("host memory", "drives") else resource
            path[kind] += inside / count  # type: ignore[assignment]
    return Step((run.ended[end] - run.ended[begin]) / count, dict(busy), dict(path), adamw)


# Recording --------------------------------------------------------------------------------------------------


def settings_of(model: str, tokens: int, place: str, layers: int = 0) -> dict[str, Any]:
    """Settings of a scaled ``model`` that trains ``tokens`` tokens a step, with its experts at ``place``."""
    shape = {**_MODELS[model], **({"n_layers": layers} if layers else {})}
    shape |= {name: shape[name] // SCALE for name in _WIDTHS}
    numel = 3 * shape["d_model"] * shape["d_ff"]
    experts = shape["experts"] * shape["n_layers"]
    state = experts * (12 * numel + 3 * 4096)
    slots = experts + 1 if place == "device" else max(experts // 8, 4)
    return {
        **{f"model.{name}": value for name, value in shape.items()},
        "model.n_heads": _HEADS,
        "model.seq_len": _SEQUENCE // SCALE,
        "model.compute_dtype": "bf16",
        "data.batch_size": tokens // _SEQUENCE,
        "device_budget": (slots + 4) * (2 * numel + 4096),
        "host_budget": (state // 4 if place == "drives" else state * 5 // 4) + 8 * (2 * numel + 4096),
    }


@contextmanager
def training(settings: Mapping[str, Any]) -> Iterator[Trainer]:
    """A new run on the simulated device."""
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory, "text")
        generator = torch.Generator().manual_seed(0)
        text.write_bytes(bytes(torch.randint(32, 127, (1 << 18,), generator=generator).tolist()))
        made = {"device": "simgpu", "threads": 1, "commit_every": 0, "io.huge_pages": "off", **settings}
        config = load(
            TrainConfig, None, {**made, "data.paths": (str(text),), "store": Path(directory, "store")}
        )
        with (
            sdpa_kernel(SDPBackend.MATH),
            launch(ParallelConfig(), device="simgpu") as mesh,
            open_session(config, Opening.CREATE, mesh=mesh) as trainer,
        ):
            yield trainer


def recorded(trainer: Trainer, steps: int) -> tuple[list[Node], dict[int, float]]:
    """The graph of ``steps`` steps after two others, and the seconds that the engine's tickets took."""
    engine: Any = trainer.store.engine
    for _ in range(2):
        trainer.step()
    engine.record_spans(1 << 18)
    nodes = simulated.record_steps(trainer.step, steps)
    engine.wait_all([node.ticket for node in nodes if node.ticket])
    spans, _ = engine.drain_spans()
    return nodes, {ticket: (end_ns - begin_ns) / 1e9 for _, _, ticket, begin_ns, end_ns, _ in spans}


# The check against measured steps ---------------------------------------------------------------------------


def measured_machine(nodes: Sequence[Node], tickets: Mapping[int, float], link_bytes_per_s: float) -> Machine:
    """This machine, with a copy link of ``link_bytes_per_s``. The simulated device computes and copies on the host's thread,
    so what that thread did between its waits is the host's part of each node.
    """
    spent, before = [], nodes[0].end_ns
    for node in nodes:
        until = node.begin_ns if node.stream == HOST else node.end_ns
        spent.append((until - before) / 1e9)
        before = node.end_ns

    def work(node: Node) -> tuple[str, float]:
        if node.what == "engine hold":
            return "link", node.nbytes / link_bytes_per_s
        if node.stream == ENGINE:
            return "host memory", tickets.get(node.ticket, 0.0)
        return "device", 0.0

    return Machine(spent.__getitem__, work)


def check_loads(loads: Sequence[float], steps: int) -> list[dict[str, float]]:
    """Steps over limited copy links, measured and predicted. ``loads``: the seconds of a step's copies on the link, as
    shares of a step's time without limits.
    """
    settings = {
        "model.d_model": 128, "model.d_ff": 512, "model.experts": 8, "model.n_layers": 4, "model.n_heads": 2,
        "model.seq_len": 32, "data.batch_size": 32, "host_budget": 256 << 20, "device_budget": 10 * (4 * 3 * 128 * 512),
    }  # fmt: skip

    def median_s(bandwidth: float) -> float:
        with training({**settings, "links.copy.bandwidth": round(bandwidth)}) as trainer:
            found = [trainer.step().seconds for _ in range(steps + 2)]
        return statistics.median(found[2:])

    with training({**settings, "links.copy.bandwidth": _FAST}) as trainer:
        nodes, tickets = recorded(trainer, 4)
    moved = sum(node.nbytes for node in nodes if node.what == "engine hold") / 4
    findings = []
    for load_ratio in loads:
        computing_s = median_s(_FAST)  # in turns with the limited one: the machine's speed drifts
        bandwidth = moved / (load_ratio * computing_s)
        measured_s = median_s(bandwidth)
        alone = steady(nodes, timed(nodes, measured_machine(nodes, tickets, _FAST)))
        slower = computing_s / alone.step_s  # recording has a cost, and this machine's speed may have drifted
        on_link = timed(nodes, measured_machine(nodes, tickets, bandwidth * slower))
        predicted_s = slower * steady(nodes, on_link).step_s
        findings.append({
            "load_ratio": load_ratio, "computing_s": computing_s, "measured_s": measured_s,
            "predicted_s": predicted_s, "error_ratio": predicted_s / measured_s - 1,
        })  # fmt: skip
    return findings


def main() -> None:
    given = options(
        __doc__, models=tuple(_MODELS), places=("device", "host", "drives"), tokens=(8192, 65536), profiles=("H100",),
        layers=0, steps=3, loads=(0.6, 0.8, 1.0, 1.5), check_steps=12,
    )  # fmt: skip
    torch.set_num_threads(1)
    simulated.load(simulated_build.build())
    simulated.set_memory(64 << 30)
    simulated.widen_products()
    machines = {name: machine(find_profile(Path(name)), _REACHED * _MEMORY[name]) for name in given.profiles}
    findings, failures = [], []
    for model, tokens, place in itertools.product(given.models, given.tokens, given.places):
        with training(settings_of(model, tokens, place, given.layers)) as trainer:
            nodes, _ = recorded(trainer, given.steps)
        for name, on in machines.items():
            step = steady(nodes, timed(nodes, on))
            row = {"model": model, "tokens": tokens, "place": place, "profile": name, **step._asdict()}
            row |= {"bound_s": step.bound_s, "bound_ratio": step.step_s / step.bound_s}
            findings.append(row)
            if step.step_s > TARGET * step.bound_s:
                failures.append(
                    f"{model}, {tokens} tokens, {place}, {name}: {row['bound_ratio']:.2f} of the bound"
                )
            OUTPUT.line(describe(row))
    checked = check_loads(given.loads, given.check_steps)
    for each in checked:
        OUTPUT.line(
            f"copies {each['load_ratio']:.0%} of {format_seconds(each['computing_s'])}: measured "
            f"{format_seconds(each['measured_s'])}, predicted {format_seconds(each['predicted_s'])} "
            f"({each['error_ratio']:+.1%})"
        )
        if abs(each["error_ratio"]) > ERROR:
            failures.append(f"copies at {each['load_ratio']:.0%}: predicted {each['error_ratio']:+.1%} off")
    finish({"steps": findings, "checks": checked}, failures)


def describe(row: Mapping[str, Any]) -> str:
    """A line of the table: the step, its bound, and what it has of each resource and on its critical path."""
    busy, path = (
        ", ".join(
            f"{name} {format_seconds(each)}"
            for name, each in sorted(row[key].items(), key=lambda i: -i[1])[:6]
        )
        for key in ("busy_s", "path_s")
    )
    return (
        f"{row['model']} {row['tokens']} tokens, {row['place']}, {row['profile']}: "
        f"{format_seconds(row['step_s'])} = {row['bound_ratio']:.2f} x {format_seconds(row['bound_s'])}; "
        f"busy: {busy}, AdamW {format_seconds(row['adamw_s'])}; critical path: {path}"
    )


if __name__ == "__main__":
    start(main)
