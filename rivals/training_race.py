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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from entrants import OURS, OURS_IN_RAM, Entrant, Outcome, Rival, enter, memory_group, order
from process import RivalError, RivalProcess
from training import Steps, TrainTask, check_workload, make_mixtral

from tierstore.bench.documents import Better, Measurement, counted, derived, measured
from tierstore.bench.harness import at_least, work_directory
from tierstore.bench.probes import Bytes
from tierstore.bench.train import StepDisk
from tierstore.bench.train_bound import bound_s, compulsory
from tierstore.cli.output import Output
from tierstore.errors import DataError
from tierstore.stats import spread
from tierstore.train.config import TrainConfig
from tierstore.units import format_bytes, format_seconds

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
MODELS = ("built-in", "mixtral")
#: Losses of the first steps agree within this, in nats: sums in another order move the last bits of fp32, and no more.
LOSS_TOLERANCE = 1e-3
#: So many steps are compared. Later ones drift apart: a token near the border of two experts goes to another one.
COMPARED_STEPS = 10
_WITHIN_BOUND = 1.10  # a step may take so much of its bound ...
_TIMES_DEEPSPEED = 4.0  # ... or be so many times faster than DeepSpeed's: whichever is slower is the aim
_RESIDENT_SHARE = 0.35  # of DeepSpeed's


@dataclass(frozen=True, kw_only=True)
class TrainingRace:
    """How long to measure, and whom. ``memory_limit``: bytes for each process (0: none). ``timeout_s``: for one request,
    which may compile a library's operators. ``settings``: JSON laid over DeepSpeed's configuration.
    """

    rivals: tuple[str, ...] = tuple(RIVALS)
    model: str = MODELS[0]
    steps: int = 2
    warmup: int = 2
    rounds: int = 5
    memory_limit: int = 0
    timeout_s: float = 900.0
    settings: Path | None = None

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, rounds=self.rounds, warmup=self.warmup)
        at_least(0, memory_limit=self.memory_limit, timeout_s=self.timeout_s)

    def run(self, config: TrainConfig, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
        """The figures. ``config.store`` is a directory for all that is kept on disk, made and removed here.

        Raises ConfigError (what is not part of the comparison; the directory exists), CapabilityError (a Mixtral without
        transformers), OSError. Whatever befalls a rival is in the figures.
        """
        parameters = check_workload(config).architecture.parameters
        entrants, orders = enter(self.rivals, RIVALS), []
        config = replace(config, steps=max(config.steps, self.warmup + self.steps * self.rounds))
        with work_directory(config.store) as directory, contextlib.ExitStack() as stack:
            checkpoint = None
            if self.model == "mixtral":
                say("writing the checkpoint of a Mixtral")
                checkpoint = directory / "mixtral"
                parameters = make_mixtral(config, checkpoint)
            for entrant in entrants.values():
                if entrant.outcome is Outcome.RAN:
                    self._open(entrant, config, directory, checkpoint, stack)
                said = "ready" if entrant.reason is None else f"{entrant.outcome.value}: {entrant.reason}"
                say(f"{entrant.name}: {said}")
            disk: StepDisk | None = None
            for number in range(self.rounds):
                racing = order([name for name, one in entrants.items() if one.process is not None], number)
                orders.append(racing)
                for name in racing:
                    disk = self._turn(entrants[name], config, directory, number, disk, stack)
                    if entrants[name].outcome is Outcome.DIED:
                        say(f"{name}: died: {entrants[name].reason}")
                speeds = ", ".join(
                    f"{name} {config.tokens_per_step / medians(one)[-1]:.0f}"
                    for name, one in entrants.items()
                    if one.process is not None
                )
                say(f"round {number + 1} of {self.rounds}, tokens/s: {speeds}")
            for entrant in entrants.values():
                if entrant.process is not None:
                    entrant.process.close()
            reference = mark_disagreeing(entrants)
            bound = None
            if OURS in ran(entrants):
                try:  # the trace is whole now
                    bound = self._bound(entrants, directory / "trace")
                except (DataError, OSError) as error:
                    say(f"no bound: {error}")
        tokens = config.tokens_per_step
        return {
            "bench": "rivals",
            "model": self.model,
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
            "loss_tolerance": LOSS_TOLERANCE,
            "orders": orders,
            "rivals": [figures(one, entrants, reference, tokens) for one in entrants.values()],
            "against": ratios_to_rivals(entrants, tokens),
            "bound": bound,
        }

    def _open(
        self,
        entrant: Entrant,
        config: TrainConfig,
        directory: Path,
        checkpoint: Path | None,
        stack: contextlib.ExitStack,
    ) -> None:
        """Opens the rival and warms it up, under the limit or, where it does not open there, without."""

        def begin(suffix: str, memory: str, **confined: Any) -> None:
            own = directory / f"{entrant.name}{suffix}"
            task = TrainTask(
                rival=entrant.name,
                module=entrant.rival.module,
                config=config,
                directory=own,
                checkpoint=checkpoint,
                trace=directory / "trace" if entrant.name == OURS else None,
                settings=self.settings,
            )
            try:
                entrant.process = process = RivalProcess(
                    entrant.name, task, own, timeout_s=self.timeout_s, **confined
                )
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
        directory: Path,
        number: int,
        disk: StepDisk | None,
        stack: contextlib.ExitStack,
    ) -> StepDisk | None:
        """The rival's steps of a round; around tierstore's the disk is measured."""
        assert entrant.process is not None
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
            disk = disk or stack.enter_context(contextlib.closing(StepDisk(directory, config, mix)))
            entrant.disk_speeds.setdefault(0, []).append(statistics.harmonic_mean([*before, disk.measured()]))
        return disk

    def _bound(self, entrants: Mapping[str, Entrant], trace: Path) -> dict[str, Any] | None:
        """tierstore's step and what it could take at best, as ``bench train`` has it: max(the same in RAM, compulsory bytes
        over the disk's bandwidth for that mix). ``aim_s``: what a step may take, the slower of 1.10 x the bound and
        DeepSpeed's step / 4; None without DeepSpeed. ``in_ram_step_s``: None where tierstore-ram did not take part.

        Raises DataError, OSError.
        """
        count, who = self.steps * self.rounds, ran(entrants)
        least = compulsory(trace, first_step=self.warmup, steps=count)
        moved = least.least.per(count)
        ours = medians(entrants[OURS])
        in_ram = medians(who[OURS_IN_RAM]) if OURS_IN_RAM in who else None
        measured_speeds = entrants[OURS].disk_speeds.get(0, [])
        speeds = measured_speeds if len(measured_speeds) == len(ours) else [math.inf] * len(ours)
        bounds = [
            bound_s(ram, moved, speed) for ram, speed in zip(in_ram or [0.0] * len(ours), speeds, strict=True)
        ]
        if not all(bounds):  # everything fits, and nothing says what a step takes in RAM
            return None
        to_bound, aims, to_aim = ratios(ours, bounds), None, []
        if TO_BEAT in who:
            slower = [value / _TIMES_DEEPSPEED for value in medians(who[TO_BEAT])]
            aims = [max(_WITHIN_BOUND * a, b) for a, b in zip(bounds, slower, strict=True)]
            to_aim = ratios(ours, aims)
        return {
            "compulsory_policy": least.policy,
            "compulsory_read_bytes": moved.read,
            "compulsory_written_bytes": moved.written,
            "disk_bytes_per_s": statistics.median(speeds) if measured_speeds else None,
            "compulsory_s": statistics.median(moved.total / speed for speed in speeds),
            "in_ram_step_s": None if in_ram is None else statistics.median(in_ram),
            "bound_s": statistics.median(bounds),
            "round_step_to_bound_ratio": to_bound,
            "step_to_bound_ratio": statistics.median(to_bound),
            "aim_s": None if aims is None else statistics.median(aims),
            "round_step_to_aim_ratio": to_aim,
            "step_to_aim_ratio": statistics.median(to_aim) if to_aim else None,
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


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Those of each round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def difference(reference: Sequence[float], losses: Sequence[float]) -> float:
    """The largest between the first losses of both, in nats; infinite where one is not finite."""
    pairs = [*zip(reference, losses, strict=False)][:COMPARED_STEPS]
    apart = [abs(a - b) for a, b in pairs]
    return max((math.inf if math.isnan(value) else value for value in apart), default=math.inf)


def mark_disagreeing(entrants: Mapping[str, Entrant]) -> str | None:
    """Marks each rival that trained something else; returns the rival that the others were compared with."""
    names = [*ran(entrants)]
    if not names:
        return None
    reference = REFERENCE if REFERENCE in names else OURS if OURS in names else names[0]
    for name in names:
        apart = difference(losses_of(entrants[reference]), losses_of(entrants[name]))
        if not apart <= LOSS_TOLERANCE:
            entrants[name].leave(
                Outcome.DISAGREED,
                f"its losses are up to {apart:.3g} nats from those of {reference}: it trains something else",
            )
    return reference


def figures(
    entrant: Entrant, entrants: Mapping[str, Entrant], reference: str | None, tokens: int
) -> dict[str, Any]:
    """What became of a rival. ``loss_difference``: the largest from the reference within the steps compared, in nats."""
    losses = losses_of(entrant)
    known = reference is not None and bool(losses)
    found = {
        "rival": entrant.name,
        **entrant.facts(),
        "open_s": entrant.open_s,
        "losses": losses,
        "loss_difference": difference(losses_of(entrants[str(reference)]), losses) if known else None,
    }
    return found | ({"times": times(rounds_of(entrant), tokens)} if rounds_of(entrant) else {})


def times(rounds: Sequence[Steps], tokens: int) -> dict[str, Any]:
    """The measured steps of one rival: means over all of them, but for what says otherwise.

    Read and written are what its process caused; disk read and written what its disk did meanwhile, for any process.
    """
    seconds = [value for one in rounds for value in one.step_s]
    rates = [tokens / statistics.median(one.step_s) for one in rounds]
    cpu = [one.cpu_s / len(one.step_s) for one in rounds]
    step, rate = spread(seconds), spread(rates)

    def a_step(values: Sequence[int | None]) -> int | None:
        return None if None in values else sum(filter(None, values)) // len(seconds)

    return {
        "step_samples_s": seconds,
        "round_tokens_per_s": rates,
        "tokens_per_s": rate.median,
        "tokens_low_per_s": rate.least,
        "tokens_high_per_s": rate.greatest,
        "step_median_s": step.median,
        "step_p10_s": step.p10,
        "step_p90_s": step.p90,
        "step_cpu_s": statistics.median(cpu),
        "round_step_cpu_s": cpu,
        "peak_resident_bytes": max(one.peak_resident_bytes for one in rounds),
        "step_read_bytes": a_step([one.read_bytes for one in rounds]),
        "step_written_bytes": a_step([one.written_bytes for one in rounds]),
        "disk_step_read_bytes": a_step([one.disk_read_bytes for one in rounds]),
        "disk_step_written_bytes": a_step([one.disk_written_bytes for one in rounds]),
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


def agreed(found: Mapping[str, Any]) -> bool:
    """Whether all that ran trained the same."""
    return not any(one["outcome"] == Outcome.DISAGREED.value for one in found["rivals"])


def measurements(found: Mapping[str, Any]) -> Iterator[Measurement]:
    """For a document: of the rivals that ran and trained the same."""
    for one in found["rivals"]:
        if "times" not in one or one["outcome"] != Outcome.RAN.value:
            continue
        each, how = one["times"], {"rival": one["rival"]}
        yield measured("tokens", each["round_tokens_per_s"], "tokens/s", Better.HIGHER, parameters=how)
        yield measured("step", each["step_samples_s"], "s", Better.LOWER, parameters=how)
        yield measured("processor time a step", each["round_step_cpu_s"], "s", Better.LOWER, parameters=how)
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


def show(found: Mapping[str, Any], output: Output) -> None:
    """A table and the ratios, for people."""
    limit = found["memory_limit_bytes"]
    output.table(
        f"{found['model']} model, {found['parameters'] / 1e6:.0f} M parameters, {found['tokens_per_step_count']} tokens a "
        f"step, {found['rounds']} rounds of {found['steps']} steps"
        + (f", {format_bytes(limit)} each" if limit else ""),
        ("", "tokens/s", "least to greatest", "CPU a step", "peak resident", "read, written a step", "loss apart"),
        [_row(one) for one in found["rivals"]],
    )  # fmt: skip
    for one in found["rivals"]:
        if one["reason"] is not None:
            output.line(f"{one['title']}: {one['outcome']}: {one['reason']}")
        for line in one["description"] if one["rival"] not in (OURS, OURS_IN_RAM) else ():
            output.line(f"{one['title']}: {line}")
        if limit and "times" in one:
            output.line(f"{one['title']}: memory: {one['memory']}")
    output.line(
        f"losses of the first {COMPARED_STEPS} steps are compared with {found['reference']}'s; within {LOSS_TOLERANCE:g} "
        "nats they agree"
    )
    for one in found["against"]:
        output.line(
            f"tierstore / {one['rival']}: tokens/s {one['tokens_ratio']:.2f}, CPU time {one['cpu_ratio']:.2f}, resident "
            f"{one['resident_ratio']:.2f}"
        )
    if (bound := found["bound"]) is None:
        return
    speed, in_ram = bound["disk_bytes_per_s"], bound["in_ram_step_s"]
    output.line(
        f"tierstore's compulsory bytes: {format_bytes(bound['compulsory_read_bytes'])} read and "
        f"{format_bytes(bound['compulsory_written_bytes'])} written a step ({bound['compulsory_policy']})"
        + (f" at {format_bytes(int(speed))}/s take {format_seconds(bound['compulsory_s'])}" if speed else "")
    )
    output.line(
        f"step / bound {bound['step_to_bound_ratio']:.3f}, bound {format_seconds(bound['bound_s'])}"
        + ("" if in_ram is None else f", in RAM {format_seconds(in_ram)}")
    )
    if bound["aim_s"] is not None:
        output.line(
            f"step / aim {bound['step_to_aim_ratio']:.3f}: at most {format_seconds(bound['aim_s'])}, the slower of 1.10 x "
            "the bound and a quarter of DeepSpeed's step"
        )


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    apart = "-" if one["loss_difference"] is None else f"{one['loss_difference']:.1e}"
    if "times" not in one:
        return (one["title"], one["outcome"], *["-"] * 4, apart)
    each = one["times"]
    return (
        one["title"],
        f"{each['tokens_per_s']:.0f}" + ("" if one["reason"] is None else f" ({one['outcome']})"),
        f"{each['tokens_low_per_s']:.0f} to {each['tokens_high_per_s']:.0f}",
        format_seconds(each["step_cpu_s"]),
        format_bytes(each["peak_resident_bytes"]),
        f"{format_bytes(each['step_read_bytes'])}, {format_bytes(each['step_written_bytes'])}",
        apart,
    )
