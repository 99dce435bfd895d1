"""The race of generation: every turn is a process of its own, which opens the model, runs one workload and ends.

So page cache, allocators and caches of one turn do not help another. The page cache of the machine is dropped before each,
and a confined rival lives in a memory cgroup of the same limit, so that what the kernel caches for it counts as its memory.
A rival that is not installed or dies is left out with its reason.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from generating import Generated, GenerateTask, Load, LoadResult, Workload
from process import RivalError, RivalProcess
from raced_model import RacedModel, drop_page_cache, read_ahead_bytes, read_ahead_of

from tierstore import machine
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
from tierstore.bench.probes import Bytes, DiskProbe, MemoryLimit
from tierstore.bench.train_bound import compulsory
from tierstore.cli.options import config_overrides
from tierstore.config import PathKind, check_least, option
from tierstore.errors import ConfigError, DataError
from tierstore.stats import percentile
from tierstore.store.config import IoConfig

REFERENCE, OFFLOADED, MAPPED = "transformers", "accelerate", "llama.cpp"
#: In the order of the table.
RIVALS: Mapping[str, Rival] = MappingProxyType(
    {
        OURS: Rival("tierstore", "generate_tierstore", "transformers", "hf"),
        OURS_IN_RAM: Rival("tierstore, all in memory", "generate_tierstore", "transformers", "hf"),
        REFERENCE: Rival("transformers, all in memory", "generate_transformers", "transformers", "hf"),
        OFFLOADED: Rival("accelerate, disk offload", "generate_accelerate", "accelerate"),
        MAPPED: Rival("llama.cpp, mmap", "generate_llama_cpp", "xllamacpp"),
    }
)
#: These have all the memory that they want: they show what computing takes.
UNCONFINED = frozenset({OURS_IN_RAM, REFERENCE})
#: Decode time per token may take so much of its bound.
WITHIN_BOUND = 1.15
#: What tierstore is to reach of each rival's speed, where it is named: prefill and decoding, by sequences of a batch.
TARGETS: Mapping[tuple[str, str, int], float] = MappingProxyType(
    {
        (MAPPED, "decode", 1): 2.0,
        (OFFLOADED, "decode", 1): 4.0,
        (MAPPED, "prefill", 1): 1.5,
        (MAPPED, "decode", 8): 1.0,
        (OFFLOADED, "decode", 8): 1.0,
    }
)
#: Of the disk's probe.
PROBE_BYTES = 256 << 20


# The race ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One process: what it did, and the most memory that its group has had (page cache included; None without a group)."""

    generated: Generated
    open_s: float
    peak_group_bytes: int | None = None

    def prefill_tokens_per_s(self, asked: Workload) -> float:
        return asked.batch * asked.prompt_tokens / self.generated.prefill_s

    def decode_tokens_per_s(self, asked: Workload) -> float:
        return asked.batch / self.step_s

    @property
    def step_s(self) -> float:
        """The mean step."""
        return statistics.fmean(self.generated.step_s)


@dataclass(frozen=True, kw_only=True)
class GenerationRace(Benchmark):
    """Prefill and decoding by tierstore, transformers, accelerate and llama.cpp, each turn in its own process.

    Rivals that are not installed or die are left out with a reason. Exit status 1: tierstore's choices of tokens are not
    those of transformers.
    """

    model: Path = option(
        help="A directory of transformers or a store.", argument=True, path=PathKind.EXISTING_DIRECTORY
    )
    rivals: str = option(",".join(RIVALS), "The rivals that take part, with commas.")
    imported: Path | None = option(None, "A store of MODEL that is there already.")
    gguf: Path | None = option(None, "A GGUF file of the same weights (default: made, for Qwen3-MoE).")
    memory: int = size_option("1240MiB", "Memory of each confined process (0: no limit).")
    host_budget: int = size_option("512MiB", "Of that, tierstore's memory for experts.")
    batch: str = option("1,8", "Sequences of a batch, several with commas.")
    prompt_tokens: int = option(32, "Tokens of a prompt.")
    new_tokens: int = option(16, "Tokens that are decoded.")
    rounds: int = option(3, "Rounds; each begins with another rival.")
    threads: int = option(0, "Of each rival (0: one for each core).")
    read_ahead: int = size_option("0", "Set the disk's readahead while measuring (0: as it is).")
    load: float = option(0.0, "Then open-loop load on tierstore, at this share of its capacity (0: none).")
    requests: int = option(40, "Requests of that load.")
    timeout: float = option(900.0, "Seconds within which each must answer.")
    settings: tuple[str, ...] = option(
        (), "Set a configuration key of tierstore, KEY=VALUE.", "--set", shown=False
    )
    store: Path = store_option()

    @property
    def saved_as(self) -> str:
        return "generate"

    def __post_init__(self) -> None:
        check_least(self, 1, "rounds", "host_budget", "requests", "prompt_tokens")
        check_least(self, 2, "new_tokens")
        check_least(self, 0, "memory", "read_ahead", "threads", "load", "timeout")
        if not all(part.isdecimal() and int(part) for part in self.batch.split(",")):
            raise ConfigError(f"--batch: expected whole numbers separated by commas, got {self.batch!r}")

    def run(self, progress: Progress) -> Found:
        """Measures in ``store``, made and removed here.

        Raises ConfigError (the directory exists, no GGUF file of that family), CapabilityError (a readahead that cannot be
        set), OSError. Whatever befalls a rival is in the figures.
        """
        return _Race(self, progress).run()


class _Race:
    """A race on its way."""

    def __init__(self, asked: GenerationRace, progress: Progress) -> None:
        self.asked, self._progress = asked, progress
        self._batches = [int(part) for part in asked.batch.split(",")]
        self._threads = asked.threads or machine.cores()
        self._entrants = enter(asked.rivals.split(","), RIVALS)
        self._raced = RacedModel(asked.model, store=asked.imported, gguf=asked.gguf)
        self._confined_by = "nothing: no limit was asked for"
        self._page_cache = "dropped before each"
        self._processes = 0

    def run(self) -> Found:
        asked, raced, say = self.asked, self._raced, self._progress.say
        orders, bounds = [], []
        with work_directory(asked.store) as directory, contextlib.ExitStack() as stack:
            if asked.read_ahead:
                stack.enter_context(read_ahead_of(directory, asked.read_ahead))
            for entrant in self._entrants.values():
                if entrant.reason is not None:
                    say(entrant.left)
            try:
                raced.prepare({*self._racing()}, directory, self._progress)
            except ConfigError as error:
                if MAPPED not in self._racing():
                    raise
                self._leave(self._entrants[MAPPED], Outcome.SKIPPED, str(error))
                raced.prepare({*self._racing()}, directory, self._progress)
            probe = DiskProbe(directory, PROBE_BYTES, (raced.expert_bytes,), IoConfig())
            self._disk = stack.enter_context(contextlib.closing(probe))
            for number in range(asked.rounds):
                orders.append(order(self._racing(), number))
                for batch in self._batches:
                    for name in orders[-1]:
                        if self._entrants[name].outcome is Outcome.RAN:
                            self._turn(self._entrants[name], batch, number)
            for batch in self._batches:
                try:
                    bounds += [self._bound(batch)] if self._turns(OURS, batch) else []
                except (DataError, OSError) as error:
                    say(f"batch {batch}: no bound: {error}")
            load, read_ahead = self._load(), read_ahead_bytes(directory)
        speeds = [
            {"contestant": name, "batch_count": batch, **one.facts(), **self._speeds(name, batch)}
            for batch in self._batches
            for name, one in self._entrants.items()
        ]
        figures = {
            "bench": "generate",
            "model": raced.name,
            "memory_limit_bytes": asked.memory,
            "confined_by": self._confined_by,
            "page_cache": self._page_cache,
            "read_ahead_bytes": read_ahead,
            "host_budget_bytes": asked.host_budget,
            "threads": self._threads,
            "prompt_tokens_count": asked.prompt_tokens,
            "new_tokens_count": asked.new_tokens,
            "rounds": asked.rounds,
            "reference": REFERENCE,
            "orders": orders,
            "speeds": speeds,
            "against": [
                speed_ratios(self._workload(batch), ours, name, theirs)
                for batch in self._batches
                if (ours := self._turns(OURS, batch))
                for name in self._entrants
                if name != OURS and (theirs := self._turns(name, batch))
            ],
            "bounds": bounds,
            "load": load,
        }
        chosen = [
            one["chosen_same_ratio"] for one in speeds
            if one["contestant"] in (OURS, OURS_IN_RAM) and "chosen_same_ratio" in one
        ]  # fmt: skip
        return Found(
            figures=figures,
            measurements=[*measurements(figures)],
            shown=[*shown(figures), *rival_notes(self._entrants)],
            failed=any(ratio != 1.0 for ratio in chosen),
        )

    def _racing(self) -> list[str]:
        return [name for name, one in self._entrants.items() if one.outcome is Outcome.RAN]

    def _turns(self, name: str, batch: int) -> list[Turn]:
        return self._entrants[name].turns.get(batch, []) if name in self._entrants else []

    def _leave(self, entrant: Entrant, outcome: Outcome, reason: str) -> None:
        entrant.leave(outcome, reason)
        self._progress.say(entrant.left)

    def _workload(self, batch: int, seed: int = 7) -> Workload:
        return Workload(
            batch=batch,
            prompt_tokens=self.asked.prompt_tokens,
            new_tokens=self.asked.new_tokens,
            vocabulary=self._raced.vocabulary,
            seed=seed,
        )

    def _speeds(self, name: str, batch: int) -> dict[str, Any]:
        return speed_figures(self._workload(batch), self._turns(name, batch), self._turns(REFERENCE, batch))

    def _turn(self, entrant: Entrant, batch: int, number: int) -> None:
        ours, asked = entrant.name == OURS, self._workload(batch)
        before = self._disk_speed() if ours else 0.0
        trace = self.asked.store / f"trace-{batch}" if ours and number == 0 else None
        try:
            with self._process(entrant, batch, trace) as (process, group):
                generated = process.ask(asked)
                peak = None if group is None else group.use()["peak_bytes"]
                turn = Turn(generated=generated, open_s=process.open_s, peak_group_bytes=peak)
        except (RivalError, OSError) as error:
            self._leave(entrant, Outcome.DIED, f"round {number + 1}, batch {batch}: {error}")
            return
        entrant.turns.setdefault(batch, []).append(turn)
        entrant.description = process.description
        if ours:
            speeds = [before, self._disk_speed()]
            entrant.disk_speeds.setdefault(batch, []).append(statistics.harmonic_mean(speeds))
        self._progress.say(
            f"round {number + 1}, batch {batch}, {entrant.name}: prefill {turn.prefill_tokens_per_s(asked):.2f} and decode "
            f"{turn.decode_tokens_per_s(asked):.2f} tokens/s"
        )

    def _disk_speed(self) -> float:
        return self._disk.bytes_per_s(Bytes(PROBE_BYTES, 0))

    @contextlib.contextmanager
    def _process(
        self, entrant: Entrant, batch: int, trace: Path | None = None
    ) -> Iterator[tuple[RivalProcess, MemoryLimit | None]]:
        """A process of the rival, in a group of its own if it is confined, with a cold page cache."""
        self._processes += 1
        model, name = self._raced, entrant.name
        with contextlib.ExitStack() as stack:
            group: MemoryLimit | None = None
            if self.asked.memory and name not in UNCONFINED:
                made = memory_group(self.asked.memory, str(self._processes), stack)
                if isinstance(made, str):
                    self._confined_by = f"nothing, and the page cache may help: {made}"
                    entrant.memory = self._confined_by
                else:
                    group, entrant.memory = made, "cgroup"
                    self._confined_by = "a memory cgroup of the same limit for each"
            if (reason := drop_page_cache()) is not None:
                self._page_cache = f"not dropped, and may help: {reason}"
            directory = self.asked.store / f"{name}-{self._processes}"
            task = GenerateTask(
                rival=name,
                module=entrant.rival.module,
                directory=directory,
                threads=self._threads,
                sequences=batch,
                context=self.asked.prompt_tokens + self.asked.new_tokens + 1,  # of a token that is not needed
                checkpoint=model.checkpoint,
                store=model.store,
                gguf=model.gguf,
                host_budget=model.experts_budget if name == OURS_IN_RAM else self.asked.host_budget,
                trace=trace,
                settings=config_overrides(self.asked.settings, {}),
            )
            # OpenMP's threads wait as ``tierstore generate`` and ``serve`` have it.
            process = RivalProcess(
                name, task, directory, timeout_s=self.asked.timeout, group=group, omp_wait=None
            )
            stack.callback(process.close)
            yield process, group

    def _bound(self, batch: int) -> dict[str, Any]:
        # The trace's first step is the prefill; its last has no end, since none begins after it.
        steps, speeds = self.asked.new_tokens - 1, self._entrants[OURS].disk_speeds[batch]
        least = compulsory(self.asked.store / f"trace-{batch}", first_step=1, steps=steps)
        in_ram = [statistics.median(turn.generated.step_s) for turn in self._turns(OURS_IN_RAM, batch)]
        bounds, found = bound_figures(
            least, steps, [statistics.median(in_ram)] * len(speeds) if in_ram else [], speeds
        )
        to_bound = ratios([turn.step_s for turn in self._turns(OURS, batch)], bounds)
        return {
            "batch_count": batch,
            **found,
            "round_step_to_bound_ratio": to_bound,
            "step_to_bound_ratio": statistics.median(to_bound),
        }

    def _load(self) -> dict[str, Any] | None:
        """Open-loop load on tierstore, at a share of what its largest batch was measured to serve."""
        batch = max(self._batches)
        turns = self._turns(OURS, batch)
        if not self.asked.load or not turns:
            return None
        busy_s = statistics.median(
            turn.generated.prefill_s + turn.step_s * self.asked.new_tokens for turn in turns
        )
        rate = self.asked.load * batch / busy_s
        load = Load(
            requests=self._workload(self.asked.requests, seed=11), requests_per_s=rate, sequences=batch
        )
        try:
            with self._process(self._entrants[OURS], batch) as (process, _):
                found: LoadResult = process.ask(load)
        except (RivalError, OSError) as error:
            self._progress.say(f"no figures under load: {error}")
            return None
        return {
            "capacity_ratio": self.asked.load,
            "requests": self.asked.requests,
            "requests_per_s": rate,
            "elapsed_s": found.elapsed_s,
            "most_waiting_count": found.most_waiting,
            **{
                f"{name}_p{percent}_s": percentile(values, percent)
                for name, values, percents in (
                    ("first_token", found.first_token_s, (50, 90, 99)),
                    ("between_tokens", found.between_tokens_s, (50, 90, 99)),
                    ("complete", found.complete_s, (50, 99)),
                )
                for percent in percents
            },
        }


# What was found ---------------------------------------------------------------------------------------------


def speed_figures(asked: Workload, turns: Sequence[Turn], reference: Sequence[Turn]) -> dict[str, Any]:
    """One rival with one batch, over rounds. Read bytes are those that its process had read from storage, by token; those of
    ``tier_`` are tierstore's own counts. ``chosen_same_ratio``: the share of the model's own choices that are the
    reference's. Nothing for a rival that had no turn.
    """
    if not turns:
        return {}
    made = [turn.generated for turn in turns]
    steps = [seconds for one in made for seconds in one.step_s]
    prefill = [turn.prefill_tokens_per_s(asked) for turn in turns]
    decode = [turn.decode_tokens_per_s(asked) for turn in turns]
    tokens = asked.batch * asked.new_tokens
    tiers = [one.tiers for one in made if one.tiers is not None]
    demanded = sum(one["hits"] + one["misses"] for one in tiers)
    found = {
        "open_s": statistics.median(turn.open_s for turn in turns),
        "round_prefill_tokens_per_s": prefill,
        "round_decode_tokens_per_s": decode,
        "prefill_tokens_per_s": statistics.median(prefill),
        "decode_tokens_per_s": statistics.median(decode),
        "first_token_s": statistics.median(one.prefill_s for one in made),
        "step_p50_s": percentile(steps, 50),
        "step_p99_s": percentile(steps, 99),
        "prefill_token_read_bytes": round(
            statistics.median(one.prefill_read_bytes for one in made) / (asked.batch * asked.prompt_tokens)
        ),
        "decode_token_read_bytes": round(statistics.median(one.decode_read_bytes for one in made) / tokens),
        **{
            f"tier_token_{name}_bytes": round(statistics.median(one[name] for one in tiers) / tokens)
            for name in ("nvme_read", "speculated", "useful_speculated", "late_prefetch")
            if tiers
        },
        "hit_ratio": sum(one["hits"] for one in tiers) / demanded if demanded else None,
        "peak_resident_bytes": max(turn.generated.peak_resident_bytes for turn in turns),
        "peak_group_bytes": max((turn.peak_group_bytes or 0 for turn in turns), default=0) or None,
        "cpu_s": statistics.median(turn.generated.cpu_s for turn in turns),
        "chosen_same_ratio": same_choices(made[0].chosen, reference[0].generated.chosen)
        if reference
        else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def same_choices(chosen: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float | None:
    """The share of choices that are equal; None where one's are not known."""
    pairs = [
        (a, b)
        for mine, other in zip(chosen, reference, strict=False)
        for a, b in zip(mine, other, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def speed_ratios(asked: Workload, ours: Sequence[Turn], rival: str, theirs: Sequence[Turn]) -> dict[str, Any]:
    """tierstore to one rival with one batch, in the rounds that both have: prefill and decode tokens a second; memory."""
    both = [*zip(ours, theirs, strict=False)]
    prefill = [a.prefill_tokens_per_s(asked) / b.prefill_tokens_per_s(asked) for a, b in both]
    decode = [a.decode_tokens_per_s(asked) / b.decode_tokens_per_s(asked) for a, b in both]
    peaks = [max(turn.peak_group_bytes or 0 for turn in turns) for turns in zip(*both, strict=True)]
    return {
        "rival": rival,
        "batch_count": asked.batch,
        "round_prefill_ratio": prefill,
        "round_decode_ratio": decode,
        "prefill_ratio": statistics.median(prefill),
        "decode_ratio": statistics.median(decode),
        "peak_group_ratio": peaks[0] / peaks[1] if all(peaks) else None,
    }


def measurements(found: Mapping[str, Any]) -> Iterator[Measurement]:
    """For a document."""
    for one in found["speeds"]:
        if one["outcome"] != Outcome.RAN.value or "decode_tokens_per_s" not in one:
            continue
        how: dict[str, float | str] = {"contestant": one["contestant"], "batch": one["batch_count"]}
        for name in ("prefill", "decode"):
            rates = one[f"round_{name}_tokens_per_s"]
            yield measured(name, rates, "tokens/s", parameters=how)
        for name, key in (
            ("read a token, decoding", "decode_token_read_bytes"),
            ("read a token, prefill", "prefill_token_read_bytes"),
            ("peak of the group", "peak_group_bytes"),
            ("peak resident memory", "peak_resident_bytes"),
        ):
            if key in one:
                yield counted(name, one[key], "bytes", Better.LOWER, parameters=how)
        if "hit_ratio" in one:
            yield counted("hits", one["hit_ratio"], "ratio", Better.HIGHER, parameters=how)
    for one in found["against"]:
        how = {"rival": one["rival"], "batch": one["batch_count"]}
        for name in ("prefill", "decode"):
            target = TARGETS.get((one["rival"], name, one["batch_count"]))
            values, label = one[f"round_{name}_ratio"], f"{name} to rival's"
            yield derived(label, values, "ratio", Better.HIGHER, parameters=how, target=target)
        if (peak := one["peak_group_ratio"]) is not None:
            yield derived("peak to rival's", peak, "ratio", Better.LOWER, parameters=how)
    for one in found["bounds"]:
        how, values = {"batch": one["batch_count"]}, one["round_step_to_bound_ratio"]
        yield derived(
            "decode step to bound", values, "ratio", Better.LOWER, parameters=how, target=WITHIN_BOUND
        )
    if found["load"] is not None:
        for name in ("first_token", "between_tokens"):
            label = f"{name.replace('_', ' ')} under load, p99"
            yield measured(label, found["load"][f"{name}_p99_s"], "s")


def shown(found: Mapping[str, Any]) -> Iterator[FigureTable | str]:
    """The rivals by batch, ratios to them, bounds and load, for people."""
    ahead = found["read_ahead_bytes"]
    yield (
        f"memory limited by {found['confined_by']}; page cache: {found['page_cache']}; the disk's readahead: "
        f"{'unknown' if ahead is None else ahead} bytes"
    )
    for batch in dict.fromkeys(one["batch_count"] for one in found["speeds"]):
        yield FigureTable.of_keys(
            f"{found['model']}, batch {batch}: {found['prompt_tokens_count']} tokens of prompt, "
            f"{found['new_tokens_count']} of decoding, {found['threads']} threads, {found['rounds']} rounds",
            [one for one in found["speeds"] if one["batch_count"] == batch], "title", "outcome", "prefill_tokens_per_s",
            "decode_tokens_per_s", "first_token_s", "step_p50_s", "step_p99_s", "decode_token_read_bytes", "hit_ratio",
            "peak_resident_bytes", "peak_group_bytes", "chosen_same_ratio",
        )  # fmt: skip
    against = ("prefill_ratio", "decode_ratio", "peak_group_ratio")
    yield FigureTable.of_keys("", found["against"], "rival", "batch_count", *against, rival="tierstore /")
    yield FigureTable.of_keys(
        "decode step and its bound: the slower of the same in RAM and of its compulsory bytes at the disk's bandwidth",
        found["bounds"], "batch_count", "step_to_bound_ratio", "bound_s", "in_ram_step_s", "compulsory_step_read_bytes",
        "compulsory_policy", "clairvoyant_step_bytes", "disk_bytes_per_s",
    )  # fmt: skip
    yield FigureTable.of_keys(
        "open-loop load on tierstore", [found["load"]] if found["load"] else [], "requests", "capacity_ratio",
        "requests_per_s", "most_waiting_count", "first_token_p50_s", "first_token_p99_s", "between_tokens_p50_s",
        "between_tokens_p99_s", requests_per_s="arrivals",
    )  # fmt: skip
