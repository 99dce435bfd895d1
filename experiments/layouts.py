"""Steps of real training in many layouts of 1, 2 and 4 ranks, and what ``tierstore plan --layouts`` predicts for them.

    python experiments/layouts.py [--ranks 1 2 4] [--rounds 3] [--steps 2]

The model computes on an emulated device: the calling thread sleeps, in both passes, where a real device would compute
(in front of a block's attention for all but its network, in front of the network of a block without experts, in front of
the last norm for the head, and in each product with an expert's weights). Links are limited, experts are all in the
host's cache, all else is what training does.

The device and the links take known times. Unknown is what training itself takes on this machine, with that many ranks:
to drive a pass over a unit's dense part, to drive one over an expert, and a message. These three are the latencies of
``Profile``'s costs. They are fitted on ten layouts of other sizes, so that the relative errors of the plan have the
least sum of squares; none of those is judged. Layouts take turns, in changing order. A step has ended when all ranks
have taken it.

Exit status 1: fewer than 20 of 24 judged layouts are within 15%, or as large a part of those that ``--ranks`` chooses.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from emulation import OUTPUT, SleepingDevice, SlowExperts, finish, options, run_ranks, start, table, taking
from torch import Tensor, nn

from tierstore.config import load
from tierstore.dense.gates import PassListener
from tierstore.errors import ConfigError
from tierstore.links import LinkConfig
from tierstore.machine_profile import ASSUMED, Cost, Profile
from tierstore.model.config import ModelConfig
from tierstore.model.transformer import Block, Transformer
from tierstore.moe.source import ExpertSource, JointSource
from tierstore.parallel import Mesh, RankEnvironment
from tierstore.parallel.config import ExchangeMode, ParallelConfig, RowPlacement
from tierstore.parallel.launching import launch, with_exchange
from tierstore.parallel.layout import Layout
from tierstore.parallel.limited import limited_groups
from tierstore.parallel.mesh import GroupMaker, build_mesh
from tierstore.plan.layout_workload import LayoutChoice, stage_workloads
from tierstore.plan.layouts import layout_cost
from tierstore.stats import percentile
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_parts
from tierstore.train.setup import Loop
from tierstore.train.step_time import StepTimer, ThreadTimes, stolen_while_running
from tierstore.train.trainer import Trainer
from tierstore.units import format_seconds

#: How far a predicted step may be from the measured one, and in how many of the judged layouts it must not be farther.
ERROR = 0.15
WITHIN, OF = 20, 24
TEXT_BYTES = 1 << 16
GATHER = LinkConfig(bandwidth=12_000_000, latency=0.5e-3)
EXCHANGE = LinkConfig(bandwidth=6_000_000, latency=0.5e-3)
#: Between nodes: a rank's part of a slower adapter.
NODE = LinkConfig(bandwidth=3_000_000, latency=3e-3)
#: The emulated device: starting a pass over a block, and over an expert's rows, and floating point operations a second.
DENSE, EXPERT = Cost(1e-3, 2e8), Cost(0.5e-3, 2e8)
#: What loopback carries, bytes a second: the limited links are far slower.
LOOPBACK = 1e9

GATHERED, DIVIDED, TWO_STEPS = RowPlacement.GATHERED, RowPlacement.PARTITIONED, ExchangeMode.HIERARCHICAL

# The layouts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layout, on ``nodes`` of two ranks each or one node, and what is trained in it: ``rows`` sequences of ``seq_len``
    tokens on each data rank in each of ``micro_batches``, with ``further`` settings.
    """

    kind: str
    choice: LayoutChoice
    rows: int = 2
    seq_len: int = 64
    micro_batches: int = 1
    layers: int = 2
    nodes: int = 1
    further: tuple[tuple[str, Any], ...] = ()

    @property
    def ranks(self) -> int:
        return self.choice.ranks.world

    @property
    def name(self) -> str:
        beside = [f"{self.nodes} nodes"] if self.nodes > 1 else []
        for name in ("rows", "seq_len", "micro_batches", "layers"):
            if (size := getattr(self, name)) != getattr(Case, name):
                beside.append(f"{size} {name.replace('_', '-')}")
        return f"{self.ranks} ranks: {', '.join([self.choice.name, *beside])}"

    def settings(self, text: Path) -> dict[str, Any]:
        """The settings of a run in this layout, which trains on ``text``; all its experts fit in the host's cache."""
        links = {"gather": GATHER, "exchange": EXCHANGE, "node": NODE if self.nodes > 1 else LinkConfig()}
        limits = {
            f"links.{name}.{key}": getattr(link, key)
            for name, link in links.items()
            for key in ("bandwidth", "latency")
        }
        return {
            "device": "cpu", "threads": 1, "host_budget": 24 << 20, "commit_every": 0, "io.huge_pages": "off",
            "model.vocab_size": 512, "model.d_model": 64, "model.n_layers": self.layers, "model.n_heads": 4,
            "model.seq_len": self.seq_len, "model.d_ff": 64, "model.experts": 8, "model.top_k": 2,
            "data.paths": (str(text),), "data.batch_size": self.rows * self.choice.ranks.data,
            "data.micro_batches": self.micro_batches, "data.micro_order": "micro", "schedule.lr": 1e-6,
            "parallel.node_ranks": self.ranks // self.nodes, "parallel.timeout_s": 120.0,
            **self.choice.settings, **limits, **dict(self.further),
        }  # fmt: skip


def case(
    kind: str, stages: int, replicas: int, expert: int, tensor: int = 1, *, degree: int = 1, rows: RowPlacement = GATHERED,
    exchange: ExchangeMode = ExchangeMode.FLAT, **size: int,
) -> Case:  # fmt: skip
    layout = Layout(stages, replicas, expert, tensor)
    choice = LayoutChoice(layout, degree, exchange, embedding=rows, head=rows)
    return Case(kind=kind, choice=choice, **size)  # type: ignore[arg-type]


JUDGED = (
    case("one rank", 1, 1, 1),
    case("one rank", 1, 1, 1, micro_batches=2),
    case("expert", 1, 1, 2),
    case("chunks", 1, 1, 2, degree=2),
    case("chunks", 1, 1, 2, degree=4),
    case("copies", 1, 2, 1),
    case("tensor", 1, 1, 2, 2),
    case("divided tables", 1, 1, 2, rows=DIVIDED),
    case("stages", 2, 1, 1, micro_batches=4),
    case("expert", 1, 1, 4),
    case("chunks", 1, 1, 4, degree=2),
    case("copies", 1, 2, 2),
    case("copies", 1, 4, 1),
    case("tensor", 1, 1, 4, 4),
    case("tensor and data", 1, 2, 2, 2),
    case("divided tables", 1, 1, 4, rows=DIVIDED),
    case("nodes", 1, 1, 4, nodes=2),
    case("nodes, two steps", 1, 1, 4, exchange=TWO_STEPS, nodes=2),
    case("nodes, two steps, chunks", 1, 1, 4, degree=2, exchange=TWO_STEPS, nodes=2),
    case("nodes, copies", 1, 2, 2, nodes=2),
    case("stages", 4, 1, 1, micro_batches=4, layers=4),
    case("stages and expert", 2, 1, 2, micro_batches=2),
    case("stages and tensor", 2, 1, 2, 2, micro_batches=2),
    case("stages, expert, chunks", 2, 1, 2, degree=2, micro_batches=4),
)
#: Those that costs are fitted on: none is judged, and none has the size of one that is.
FITTED = (
    case("one rank", 1, 1, 1, seq_len=48),
    case("one rank", 1, 1, 1, layers=3, seq_len=32),
    case("expert", 1, 1, 2, seq_len=48),
    case("copies", 1, 2, 1, layers=3, seq_len=32),
    case("tensor", 1, 1, 2, 2, layers=3, seq_len=48),
    case("stages", 2, 1, 1, seq_len=48, micro_batches=2),
    case("expert", 1, 1, 4, seq_len=48),
    case("copies", 1, 2, 2, layers=3, seq_len=32),
    case("tensor and data", 1, 2, 2, 2, seq_len=96),
    case("stages and expert", 2, 1, 2, seq_len=48, micro_batches=3),
)

# The plan, and the costs of this machine --------------------------------------------------------------------


@dataclass(frozen=True)
class Overheads:
    """Seconds of this machine's own work: to drive a pass over a unit and one over an expert; and a message."""

    unit_s: float = 0.0
    expert_s: float = 0.0
    message_s: float = 0.0

    def profile(self, ranks: int) -> Profile:
        """The emulated device with these overheads."""
        message = Cost(self.message_s, LOOPBACK)
        dense = Cost(DENSE.latency_s + self.unit_s, DENSE.per_s)
        expert = Cost(EXPERT.latency_s + self.expert_s, EXPERT.per_s)
        return replace(
            ASSUMED, ranks=ranks, gather=message, reduce_scatter=message, all_to_all=message, dense_flops=dense,
            expert_flops=expert,
        )  # fmt: skip


def planned(of: Case, text: Path) -> Callable[[Overheads], float]:
    """The seconds of a step of ``of`` as the plan sees it, for any overheads."""
    config = load(TrainConfig, None, of.settings(text))
    works = list(stage_workloads(config, of.choice, ASSUMED, of.ranks // of.nodes))

    def step_s(overheads: Overheads) -> float:
        profile = overheads.profile(of.ranks)
        return layout_cost([replace(work, profile=profile) for work in works]).step_s

    return step_s


def fit(plans: Sequence[Callable[[Overheads], float]], measured_s: Sequence[float]) -> Overheads:
    """Overheads, none below 0, with which ``plans`` take ``measured_s`` seconds as nearly as possible; of those that fit
    about equally well, small ones: a ridge in which (5, 1, 1) ms are as bad as a relative error of 1%.
    """
    found, wanted, difference = np.zeros(3), np.array(measured_s, float), 1e-4

    def errors(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        took = np.array([step_s(Overheads(*values.tolist())) for step_s in plans], float)
        return np.asarray(took / wanted - 1, float)

    ridge = 0.01 * np.diag(1 / np.array([5e-3, 1e-3, 1e-3]))
    for _ in range(4):
        now = errors(found)
        slopes = np.stack([(errors(found + step) - now) / difference for step in difference * np.eye(3)], 1)
        found = least_squares(np.vstack([slopes, ridge]), np.concatenate([slopes @ found - now, np.zeros(3)]))
    return Overheads(*found.tolist())


def least_squares(
    matrix: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The x of no negative element with the least ``|matrix x - wanted|``, the smallest of several: for few columns, all
    sets of those that are not 0 are tried.
    """
    columns = matrix.shape[1]
    best, least = np.zeros(columns), float(np.linalg.norm(wanted))
    for count in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), count):
            x = np.zeros(columns)
            x[list(chosen)] = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
            distance = float(np.linalg.norm(matrix @ x - wanted))
            if x.min() >= 0 and distance < least * (1 - 1e-9):
                best, least = x, distance
    return best


# Steps of real ranks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EmulatedModel:
    """The device of one rank, which has ``tensor`` parts of the matrices of ``config``'s blocks."""

    config: ModelConfig
    tensor: int

    def block_s(self, tokens: int) -> float:
        """A block's forward pass outside its network: four square matrices, and attention over all positions."""
        width = self.config.d_model
        return DENSE.seconds(2 * tokens * width * (4 * width + self.config.seq_len) / self.tensor)

    def network_s(self, tokens: int) -> float:
        """The network of a block without experts."""
        return DENSE.seconds(2 * tokens * self.config.dense_shape.numel / self.tensor)

    def head_s(self, tokens: int) -> float:
        return DENSE.seconds(2 * tokens * self.config.d_model * self.config.vocab_size)

    def slow_down(self, model: nn.Module) -> None:
        """Makes the passes of ``model``, a whole one or that of a stage, take their time."""
        assert isinstance(model, Transformer)
        for block in model.blocks:
            assert isinstance(block, Block)
            block.attention.register_forward_pre_hook(_waiting(self.block_s))
            if block.ffn is not None:
                block.ffn.register_forward_pre_hook(_waiting(self.network_s))
        if model.ends:
            model.norm.register_forward_pre_hook(_waiting(self.head_s))

    def listener(self, queue: PassListener) -> PassListener:
        return queue

    def source(self, experts: JointSource) -> ExpertSource:
        speed = Cost(EXPERT.latency_s, EXPERT.per_s / (2 * self.config.expert_shape.numel))
        return SlowExperts(experts, SleepingDevice(speed))


def _waiting(seconds: Callable[[int], float]) -> Callable[[nn.Module, Any], Any]:
    """A hook that makes forward passes take ``seconds`` of their tokens, and backward passes twice that."""

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = arguments[0]
        spent = seconds(x.numel() // x.shape[-1])
        return (taking(x, spent, 2 * spent), *arguments[1:])

    return hook


@contextlib.contextmanager
def laid_out(config: TrainConfig, joined: Mesh) -> Iterator[Mesh]:
    """The mesh that ``config`` asks for, over the ranks that have ``joined``, and with its limited links. A collective."""
    if joined.world.size == 1:
        yield joined
        return
    groups, parallel = limited_groups(config.links), config.parallel
    environment = RankEnvironment.from_environment()
    maker = GroupMaker(make=groups, blame=lambda within_s: None, timeout_s=parallel.timeout_s)
    mesh = build_mesh(parallel, environment, joined.device, maker)
    mesh = replace(mesh, job_store=joined.job_store)
    mesh = with_exchange(parallel, mesh, maker)
    yield mesh
    joined.world.barrier()
    mesh.close()
    for communicator in maker.communicators:
        if communicator is not dist.group.WORLD:  # which others will use
            dist.destroy_process_group(communicator)


def sessions(cases: Sequence[Case], directory: Path) -> Iterator[Trainer]:
    """A trainer of each case in turn on the emulated device, which has taken a first step."""
    with launch(ParallelConfig(timeout_s=120.0), device="cpu") as joined:
        for number, each in enumerate(cases):
            settings = {**each.settings(directory / "text"), "store": directory / f"store-{number}"}
            config = load(TrainConfig, None, settings)
            assert isinstance(config.model, ModelConfig)
            device = EmulatedModel(config.model, config.parallel.tensor)
            # A session is closed before the next one is opened: the threads of idle ones take time, too.
            with (
                laid_out(config, joined) as mesh,
                open_parts(config, Opening.CREATE, loop=Loop.OWN, watch=device, mesh=mesh) as parts,
                contextlib.closing(ThreadTimes()) as threads,
            ):
                assert parts.data is not None
                trainer = Trainer(parts, parts.data, StepTimer(parts.ledger, threads, stolen_while_running()))
                device.slow_down(trainer.model.module)
                trainer.step()  # first touch
                yield trainer


def timed(trainer: Trainer, steps: int) -> list[float]:
    """Seconds of ``steps`` steps."""
    taken = []
    for _ in range(steps):
        trainer.mesh.world.barrier()
        started = time.perf_counter()
        trainer.step()
        taken.append(time.perf_counter() - started)
    return taken


def rank(cases: Sequence[Case], directory: Path, steps: int) -> list[list[float]]:
    """Seconds of ``steps`` steps of each case, in a new session each, behind a first step."""
    return [timed(trainer, steps) for trainer in sessions(cases, directory)]


def measure(cases: Sequence[Case], directory: Path, rounds: int, steps: int) -> dict[Case, list[list[float]]]:
    """Seconds of each case's steps, by round."""
    found: dict[Case, list[list[float]]] = {each: [] for each in cases}
    for number in range(rounds):
        for ranks in sorted({each.ranks for each in cases}):
            of = [each for each in (cases if number % 2 == 0 else cases[::-1]) if each.ranks == ranks]
            answers = run_ranks(rank, ranks, of, directory, steps)
            for each, taken in zip(of, zip(*answers, strict=True), strict=True):
                found[each].append([max(seconds) for seconds in zip(*taken, strict=True)])
            for store in directory.glob("store-*"):
                shutil.rmtree(store)
    return found


def row(of: Case, rounds: Sequence[Sequence[float]], predicted_s: float) -> dict[str, Any]:
    samples = [seconds for steps in rounds for seconds in steps]
    median = statistics.median(samples)
    again = [statistics.median(steps) / median for steps in rounds]
    ratio = predicted_s / median
    return {
        "layout": of.name,
        "kind": of.kind,
        "ranks_count": of.ranks,
        "judged": of in JUDGED,
        "step_samples_s": samples,
        "step_s": median,
        "predicted_step_s": predicted_s,
        "predicted_to_measured_ratio": ratio,
        "within": abs(ratio - 1) <= ERROR,
        # Of the round that is farthest from all.
        "again_ratio": max(again, key=lambda each: abs(each - 1)),
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    judged = [each for each in rows if each["judged"]]
    return {
        "within_count": sum(each["within"] for each in judged),
        "judged_count": len(judged),
        "worst_error_ratio": max(abs(each["predicted_to_measured_ratio"] - 1) for each in judged),
        # By how much the steps of a round differ from those of all, in nine layouts of ten.
        "noise_ratio": percentile([abs(each["again_ratio"] - 1) for each in rows], 90),
    }


def main() -> None:
    asked = options(__doc__, ranks=(1, 2, 4), rounds=3, steps=2)
    known = {each.ranks for each in JUDGED}
    if not known.issuperset(asked.ranks):
        raise ConfigError(f"--ranks: expected some of {sorted(known)}, got {list(asked.ranks)}")
    cases = [each for each in (*JUDGED, *FITTED) if each.ranks in asked.ranks]
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        # Bytes of even frequency: experts of a model that has learned nothing then get about as many tokens each.
        (directory / "text").write_bytes(random.Random(0).randbytes(TEXT_BYTES))
        plans = {each: planned(each, directory / "text") for each in cases}
        rounds = measure(cases, directory, asked.rounds, asked.steps)
    medians = {each: statistics.median(itertools.chain(*of)) for each, of in rounds.items()}
    overheads = {}
    for ranks in asked.ranks:
        of = [each for each in FITTED if each.ranks == ranks]
        overheads[ranks] = fit([plans[each] for each in of], [medians[each] for each in of])
    rows = [row(each, rounds[each], plans[each](overheads[each.ranks])) for each in cases]
    found = summary(rows)
    table(
        f"step, medians of {asked.rounds} rounds of {asked.steps}", rows, "layout", "kind", "judged", "step_s",
        "predicted_step_s", "predicted_to_measured_ratio", "within",
    )  # fmt: skip
    for ranks, fitted in overheads.items():
        OUTPUT.line(
            f"fitted with {ranks} rank(s): {format_seconds(fitted.unit_s)} a pass over a unit, "
            f"{format_seconds(fitted.expert_s)} over an expert, {format_seconds(fitted.message_s)} a message"
        )
    OUTPUT.line(
        f"within 15%: {found['within_count']} of {found['judged_count']}; worst {found['worst_error_ratio']:.1%}; "
        f"noise {found['noise_ratio']:.1%}"
    )
    failures = []
    if found["within_count"] * OF < WITHIN * found["judged_count"]:
        failures.append(f"{found['within_count']} of {found['judged_count']} judged layouts are within 15%")
    found["overheads"] = {str(ranks): asdict(each) for ranks, each in overheads.items()}
    finish({**found, "layouts": rows}, failures)


if __name__ == "__main__":
    start(main)
