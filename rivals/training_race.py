"""The race of training: each rival lives in a process of its own from beginning to end, and steps only in its turns.

All start from the same weights and take the same batches, learning rates and clipping, so that their losses must agree; a
rival whose losses do not enters no ratio. A rival that is not installed, does not open, or dies is left out with its
reason, and the others go on. With a memory limit each lives in a cgroup of that size (RLIMIT_DATA where none can be made);
one that cannot be opened in it is opened again without, and the table says so.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from entrants import (
    OURS,
    OURS_IN_RAM,
    Entrant,
    Outcome,
    Rival,
    bound_figures,
    enter,
    memory_group,
    order,
    rival_notes,
)
from process import RivalError, RivalProcess
from training import Steps, TrainTask, check_workload, make_mixtral

from tierstore.bench.documents import Better, Measurement, counted, derived, measured
from tierstore.bench.harness import (
    Benchmark,
    FigureTable,
    Found,
    Progress,
    ratios,
    size_option,
    store_option,
    work_directory,
)
from tierstore.bench.probes import Bytes
from tierstore.bench.train import StepDisk
from tierstore.bench.train_bound import compulsory
from tierstore.config import check_least, option
from tierstore.errors import DataError
from tierstore.model.config import ComputeDtype
from tierstore.stats import spread
from tierstore.train.config import TrainConfig

#: The rival whose losses the others are compared with, if it takes part; and the one whose step the aim is made of.
REFERENCE, TO_BEAT = "torch", "deepspeed-nvme"
#: In the order of the table.
RIVALS: Mapping[str, Rival] = MappingProxyType(
    {
        REFERENCE: Rival("plain torch, all in memory", "train_torch"),
        "fsdp2-cpu": Rival("FSDP2, CPU offload", "train_fsdp"),
        "deepspeed-cpu": Rival("DeepSpeed ZeRO-3, on CPU", "train_deepspeed", "deepspeed", "rivals"),
        TO_BEAT: Rival("DeepSpeed ZeRO-3, on NVMe", "train_deepspeed", "deepspeed", "rivals"),
        OURS: Rival("tierstore", "train_tierstore"),
        OURS_IN_RAM: Rival("tierstore, all in memory", "train_tierstore"),
    }
)
#: Losses of the first steps agree within this, in nats: sums in another order move the last bits of the compute type,
#: and no more.
LOSS_TOLERANCES = MappingProxyType({ComputeDtype.FP32: 1e-3, ComputeDtype.BF16: 1e-2})
#: So many steps are compared. Later ones drift apart: a token near the border of two experts goes to another one.
COMPARED_STEPS = 10
_WITHIN_BOUND = 1.10  # a step may take so much of its bound ...
_TIMES_DEEPSPEED = 4.0  # ... or be this many times faster than DeepSpeed's: whichever is slower is the aim
_RESIDENT_SHARE = 0.35  # of DeepSpeed's


class TrainedModel(Enum):
    """What the rivals train."""

    BUILT_IN = "built-in"
    MIXTRAL = "mixtral"  # of transformers, with the sizes of the built-in model; tierstore wraps it


@dataclass(frozen=True, kw_only=True)
class TrainingRace(Benchmark):
    """The same training by plain torch, FSDP2, DeepSpeed ZeRO-3 and tierstore, each in its own process, in turns.

    Rivals that are not installed (pip install tierstore[rivals]), do not open or die are left out with a reason. Exit
    status 1: a rival computed other losses.
    """

    rivals: tuple[str, ...] = option(
        (),
        "A rival that takes part; repeat the option for several (default: all).",
        "--rival",
        shown=False,
    )
    model: TrainedModel = option(
        TrainedModel.BUILT_IN,
        "The built-in model, or a Mixtral of transformers of its sizes, which tierstore wraps.",
    )
    steps: int = option(2, "Steps of each in a round.")
    warmup: int = option(2, "Steps of each before the first round.")
    rounds: int = option(5, "Rounds; each begins with another rival.")
    host_budget: int | None = option(None, "Memory for experts in tierstore.", size=True, key="host_budget")
    memory_limit: int = size_option(
        "0", "Memory of each process: a cgroup, or RLIMIT_DATA without the right to make one (0: no limit)."
    )
    timeout: float = option(900.0, "Seconds within which each must answer; DeepSpeed compiles within them.")
    deepspeed: Path | None = option(None, "JSON laid over DeepSpeed's configuration, key by key.")
    store: Path = store_option(key="store")
    config: TrainConfig = field(default_factory=TrainConfig, metadata={"configuration": ()})

    @property
    def saved_as(self) -> str:
        return "rivals"

    def __post_init__(self) -> None:
        check_least(self, 1, "steps", "rounds", "warmup")
        check_least(self, 0, "memory_limit", "timeout")

    def run(self, progress: Progress) -> Found:
        """Measures in ``store``, made and removed here.

        Raises ConfigError (what is not part of the comparison; the directory exists), CapabilityError (a Mixtral without
        transformers), OSError. Whatever befalls a rival is in the figures.
        """
        sizes = check_workload(self.config)
        parameters, dtype = sizes.architecture.parameters, sizes.compute_dtype
        tolerance = LOSS_TOLERANCES[dtype]
        entrants, orders = enter(self.rivals or tuple(RIVALS), RIVALS), []
        steps = max(self.config.steps, self.warmup + self.steps * self.rounds)
        config = replace(self.config, steps=steps, store=self.store)
        tokens, bound = config.tokens_per_step, None
        with work_directory(self.store) as directory, contextlib.ExitStack() as stack:
            checkpoint = None
            if self.model is TrainedModel.MIXTRAL:
                progress.say("writing the checkpoint of a Mixtral")
                checkpoint = directory / "mixtral"
                parameters = make_mixtral(config, checkpoint)
            for entrant in entrants.values():
                if entrant.outcome is Outcome.RAN:
                    self._open(entrant, TrainTask(config=config, checkpoint=checkpoint), stack)
                progress.say(entrant.left or f"{entrant.name}: ready")
            disk: StepDisk | None = None
            for number in range(self.rounds):
                racing = order([name for name, one in entrants.items() if one.process is not None], number)
                orders.append(racing)
                for name in racing:
                    disk = self._turn(entrants[name], config, number, disk, stack)
                    if entrants[name].outcome is Outcome.DIED:
                        progress.say(entrants[name].left)
                speeds = ", ".join(
                    f"{name} {tokens / medians(one)[-1]:.0f}" for name, one in entrants.items() if one.process
                )
                progress.say(f"round {number + 1} of {self.rounds}, tokens/s: {speeds}")
            for entrant in entrants.values():
                if entrant.process is not None:
                    entrant.process.close()
            reference = mark_disagreeing(entrants, tolerance)
            if OURS in ran(entrants):
                try:  # the trace is whole now
                    bound = self._bound(entrants, directory / "trace")
                except (DataError, OSError) as error:
                    progress.say(f"no bound: {error}")
        figures = {
            "bench": "rivals",
            "model": self.model.value,
            "parameters": parameters,
            "tokens_per_step_count": tokens,
            "steps": self.steps,
            "rounds": self.rounds,
            "warmup_steps": self.warmup,
            "threads": config.threads,
            "clip_norm": config.clip_norm,
            "host_budget_bytes": config.host_budget,
            "memory_limit_bytes": self.memory_limit,
            "reference": reference,
            "compared_steps_count": COMPARED_STEPS,
            "compute_dtype": dtype.value,
            "loss_tolerance": tolerance,
            "orders": orders,
            "rivals": [rival_figures(one, entrants, reference, tokens) for one in entrants.values()],
            "against": ratios_to_rivals(entrants, tokens),
            "bound": bound,
        }
        return Found(
            figures=figures,
            measurements=[*measurements(figures)],
            shown=[*shown(figures), *rival_notes(entrants)],
            failed=any(one.outcome is Outcome.DISAGREED for one in entrants.values()),
        )

    def _open(self, entrant: Entrant, task: TrainTask, stack: contextlib.ExitStack) -> None:
        """Opens the rival and warms it up, under the limit or, where it does not open there, without."""

        def begin(suffix: str, memory: str, **confined: Any) -> None:
            own = replace(
                task,
                rival=entrant.name,
                module=entrant.rival.module,
                directory=self.store / f"{entrant.name}{suffix}",
                trace=self.store / "trace" if entrant.name == OURS else None,
                settings=self.deepspeed,
            )
            try:
                process = RivalProcess(entrant.name, own, own.directory, timeout_s=self.timeout, **confined)
                entrant.process = process
                stack.callback(process.close)
                entrant.turns[0] = [process.ask(self.warmup)]
            except (RivalError, OSError) as error:
                entrant.leave(Outcome.SKIPPED, str(error))
                return
            entrant.memory = memory
            entrant.description, entrant.open_s = process.description, process.open_s

        if not self.memory_limit:
            begin("", "no limit")
            return
        group = memory_group(self.memory_limit, entrant.name, stack)
        how = "RLIMIT_DATA" if isinstance(group, str) else "cgroup"
        begin("", how, **({"data_bytes": self.memory_limit} if isinstance(group, str) else {"group": group}))
        if entrant.process is None:
            reason, entrant.outcome, entrant.reason = entrant.reason, Outcome.RAN, None
            begin("-free", f"no limit: not in the {how}'s ({reason})")

    def _turn(
        self,
        entrant: Entrant,
        config: TrainConfig,
        number: int,
        disk: StepDisk | None,
        stack: contextlib.ExitStack,
    ) -> StepDisk | None:
        """The rival's steps of a round; around tierstore's the disk is measured."""
        ours = entrant.name == OURS
        before = [disk.measured()] if ours and disk is not None else []
        try:
            found: Steps = entrant.process.ask(self.steps)
        except (RivalError, OSError) as error:
            entrant.leave(Outcome.DIED, f"round {number + 1}: {error}")
            return disk
        entrant.turns[0].append(found)
        mix = Bytes(found.read_bytes, found.written_bytes).per(self.steps)
        if ours and mix.total:
            disk = disk or stack.enter_context(contextlib.closing(StepDisk(self.store, config, mix)))
            entrant.disk_speeds.setdefault(0, []).append(statistics.harmonic_mean([*before, disk.measured()]))
        return disk

    def _bound(self, entrants: Mapping[str, Entrant], trace: Path) -> dict[str, Any] | None:
        """The bound of tierstore's step, as ``bench train`` has it. ``aim_s``: what a step may take, the slower of 1.10 x
        the bound and DeepSpeed's step / 4; None without DeepSpeed. Raises DataError, OSError.
        """
        count, who, ours = self.steps * self.rounds, ran(entrants), medians(entrants[OURS])
        least = compulsory(trace, first_step=self.warmup, steps=count)
        speeds = entrants[OURS].disk_speeds.get(0, [])
        known = len(speeds) == len(ours)  # else nothing was moved in some round
        in_ram = medians(who[OURS_IN_RAM]) if OURS_IN_RAM in who else []
        bounds, found = bound_figures(least, count, in_ram, speeds if known else [math.inf] * len(ours))
        if not all(bounds):  # everything fits, and nothing says what a step takes in RAM
            return None
        to_bound, aims = ratios(ours, bounds), []
        if TO_BEAT in who:
            slower = [value / _TIMES_DEEPSPEED for value in medians(who[TO_BEAT])]
            aims = [max(_WITHIN_BOUND * a, b) for a, b in zip(bounds, slower, strict=True)]
        return found | {
            "disk_bytes_per_s": statistics.median(speeds) if known else None,
            "round_step_to_bound_ratio": to_bound,
            "step_to_bound_ratio": statistics.median(to_bound),
            "aim_s": statistics.median(aims) if aims else None,
            "round_step_to_aim_ratio": ratios(ours, aims) if aims else [],
        }


# What was found ---------------------------------------------------------------------------------------------


def ran(entrants: Mapping[str, Entrant]) -> dict[str, Entrant]:
    """The rivals that ran to the end and trained the same."""
    return {name: one for name, one in entrants.items() if one.outcome is Outcome.RAN}


def rounds_of(entrant: Entrant) -> list[Steps]:
    """Its rounds, without the warm-up."""
    return entrant.turns.get(0, [])[1:]


def medians(entrant: Entrant) -> list[float]:
    """The median step of each round."""
    return [statistics.median(one.step_s) for one in rounds_of(entrant)]


def losses_of(entrant: Entrant) -> list[float]:
    """Those of all steps, warm-up included."""
    return [loss for one in entrant.turns.get(0, []) for loss in one.losses]


def difference(reference: Sequence[float], losses: Sequence[float]) -> float:
    """The largest between the first losses of both, in nats; infinite where one is not finite."""
    pairs = [*zip(reference, losses, strict=False)][:COMPARED_STEPS]
    apart = [abs(a - b) for a, b in pairs]
    return max((math.inf if math.isnan(value) else value for value in apart), default=math.inf)


def mark_disagreeing(entrants: Mapping[str, Entrant], tolerance: float) -> str | None:
    """Marks each rival whose losses are more than ``tolerance`` nats from the reference's; returns the reference's name."""
    names = [*ran(entrants)]
    if not names:
        return None
    reference = REFERENCE if REFERENCE in names else OURS if OURS in names else names[0]
    for name in names:
        apart = difference(losses_of(entrants[reference]), losses_of(entrants[name]))
        if not apart <= tolerance:
            entrants[name].leave(
                Outcome.DISAGREED,
                f"its losses are up to {apart:.3g} nats from those of {reference}: it trains something else",
            )
    return reference


def rival_figures(
    entrant: Entrant, entrants: Mapping[str, Entrant], reference: str | None, tokens: int
) -> dict[str, Any]:
    """What became of a rival. ``loss_difference``: the largest from the reference within the steps compared, in nats."""
    losses, rounds = losses_of(entrant), rounds_of(entrant)
    known = reference is not None and bool(losses)
    found = {
        "rival": entrant.name,
        **entrant.facts(),
        "open_s": entrant.open_s,
        "losses": losses,
        "loss_difference": difference(losses_of(entrants[str(reference)]), losses) if known else None,
    }
    return found | ({"times": times(rounds, tokens)} if rounds else {})


def times(rounds: Sequence[Steps], tokens: int) -> dict[str, Any]:
    """The measured steps of one rival: means over all of them, but for what says otherwise.

    Read and written are what its process caused; disk read and written what its disk did meanwhile, for any process.
    """
    seconds = [value for one in rounds for value in one.step_s]
    rates = [tokens / statistics.median(one.step_s) for one in rounds]
    cpu, rate = [one.cpu_s / len(one.step_s) for one in rounds], spread(rates)

    def a_step(name: str) -> int | None:
        values = [getattr(one, name) for one in rounds]
        return None if None in values else sum(values) // len(seconds)

    return {
        "step_samples_s": seconds,
        "round_tokens_per_s": rates,
        "tokens_per_s": rate.median,
        "tokens_low_per_s": rate.least,
        "tokens_high_per_s": rate.greatest,
        "step_cpu_s": statistics.median(cpu),
        "round_step_cpu_s": cpu,
        "peak_resident_bytes": max(one.peak_resident_bytes for one in rounds),
        "step_read_bytes": a_step("read_bytes"),
        "step_written_bytes": a_step("written_bytes"),
        "disk_step_read_bytes": a_step("disk_read_bytes"),
        "disk_step_written_bytes": a_step("disk_written_bytes"),
    }


def ratios_to_rivals(entrants: Mapping[str, Entrant], tokens: int) -> list[dict[str, Any]]:
    """tierstore to each rival: tokens a second and CPU time over rounds, and peak resident memory."""
    who = ran(entrants)
    if OURS not in who:
        return []
    by_name = {name: times(rounds_of(one), tokens) for name, one in who.items()}
    ours, found = by_name.pop(OURS), []
    for name, theirs in by_name.items():
        speeds = ratios(ours["round_tokens_per_s"], theirs["round_tokens_per_s"])
        cpu = ratios(ours["round_step_cpu_s"], theirs["round_step_cpu_s"])
        found.append(
            {
                "rival": name,
                "round_tokens_ratio": speeds,
                "tokens_ratio": statistics.median(speeds),
                "cpu_ratio": statistics.median(cpu),
                "resident_ratio": ours["peak_resident_bytes"] / theirs["peak_resident_bytes"],
            }
        )
    return found


def measurements(found: Mapping[str, Any]) -> Iterator[Measurement]:
    """For a document: of the rivals that ran and trained the same."""
    for one in found["rivals"]:
        if "times" not in one or one["outcome"] != Outcome.RAN.value:
            continue
        each, how = one["times"], {"rival": one["rival"]}
        yield measured("tokens", each["round_tokens_per_s"], "tokens/s", parameters=how)
        yield measured("step", each["step_samples_s"], "s", parameters=how)
        yield measured("processor time a step", each["round_step_cpu_s"], "s", parameters=how)
        resident = each["peak_resident_bytes"]
        yield measured("peak resident memory", resident, "bytes", Better.LOWER, parameters=how)
        for name in ("read", "written"):
            moved = each[f"step_{name}_bytes"]
            yield counted(f"{name} a step", moved, "bytes", Better.LOWER, parameters=how)
    for one in found["against"]:
        how, ratio = {"rival": one["rival"]}, one["resident_ratio"]
        target = _RESIDENT_SHARE if one["rival"] == TO_BEAT else None
        yield derived("speed to rival's", one["round_tokens_ratio"], "ratio", Better.HIGHER, parameters=how)
        yield derived("resident to rival's", ratio, "ratio", Better.LOWER, parameters=how, target=target)
    if (bound := found["bound"]) is not None:
        yield derived("step to bound", bound["round_step_to_bound_ratio"], "ratio", Better.LOWER)
        if bound["round_step_to_aim_ratio"]:
            yield derived("step to aim", bound["round_step_to_aim_ratio"], "ratio", Better.LOWER, target=1.0)


def shown(found: Mapping[str, Any]) -> Iterator[FigureTable | str]:
    """The rivals, ratios to them and the bound, for people."""
    yield FigureTable.of_keys(
        f"{found['model']} model, {found['parameters'] / 1e6:.0f} M parameters in {found['compute_dtype']}, "
        f"{found['tokens_per_step_count']} tokens a step, {found['rounds']} rounds of {found['steps']} steps",
        found["rivals"], "title", "outcome", "times.tokens_per_s", "times.tokens_low_per_s", "times.tokens_high_per_s",
        "times.step_cpu_s", "times.peak_resident_bytes", "times.step_read_bytes", "times.step_written_bytes",
        "loss_difference",
    )  # fmt: skip
    yield (
        f"losses of the first {COMPARED_STEPS} steps are compared with {found['reference']}'s; within "
        f"{found['loss_tolerance']:g} nats they agree"
    )
    against = ("tokens_ratio", "cpu_ratio", "resident_ratio")
    yield FigureTable.of_keys("", found["against"], "rival", *against, rival="tierstore /")
    yield FigureTable.of_keys(
        "tierstore's bound: the slower of the same in RAM and of its compulsory bytes at the disk's bandwidth; its aim: the "
        "slower of 1.10 x the bound and a quarter of DeepSpeed's step", [found["bound"]] if found["bound"] else [],
        "compulsory_policy", "compulsory_step_read_bytes", "compulsory_step_written_bytes", "disk_bytes_per_s",
        "in_ram_step_s", "bound_s", "aim_s",
    )  # fmt: skip
