"""Generation by tierstore and by others, in turns, in one run (docs/BENCH.md).

Every turn is a process of its own, which opens the model, runs one workload and ends: page cache, allocators and caches of
one turn do not help another. The page cache is dropped before each, and whoever is confined lives in a memory cgroup of the
same limit, so that what the kernel caches for it counts as its memory. Rounds begin with another contestant each time.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tierstore import machine
from tierstore.bench.checks import at_least, work_directory
from tierstore.bench.generation.contestant import ContestantTask
from tierstore.bench.generation.figures import (
    ContestantOutcome,
    DecodeBound,
    GenerateResult,
    LoadFigures,
    SpeedFigures,
    Turn,
    speed_figures,
    speed_ratios,
)
from tierstore.bench.generation.models import BenchModel
from tierstore.bench.generation.open_loop import OpenLoop, OpenLoopResult
from tierstore.bench.generation.page_cache import drop_page_cache, read_ahead_bytes, read_ahead_of
from tierstore.bench.generation.registry import (
    CONTESTANTS,
    MAPPED,
    OURS,
    OURS_IN_RAM,
    REFERENCE,
    UNCONFINED,
)
from tierstore.bench.generation.worker import MODULE, Ran
from tierstore.bench.generation.workload import GenerationWorkload
from tierstore.bench.probes.disk import Bytes, DiskProbe
from tierstore.bench.probes.memory_limit import MemoryLimit
from tierstore.bench.processes.spawn import WorkerError
from tierstore.bench.results.figures import ratios
from tierstore.bench.rivals.run import order
from tierstore.bench.rivals.worker import Confinement, RivalProcess
from tierstore.bench.training.bound import bound_s, compulsory
from tierstore.errors import CapabilityError, ConfigError, DataError
from tierstore.store.config import IoConfig

_PROBE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class GenerationBench:
    """What to measure, and whom. ``memory``: bytes for each confined process (0: no limit). ``host_budget``: tierstore's
    experts, of that memory. ``read_ahead``: the disk's while it is measured (0: as it is). ``load``: the share of capacity
    at which requests arrive in the end (0: no such load). ``timeout_s``: for one answer. ``settings``: of tierstore's
    configuration.
    """

    contestants: tuple[str, ...] = tuple(CONTESTANTS)
    memory: int = 1240 << 20
    host_budget: int = 512 << 20
    batches: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 32
    new_tokens: int = 16
    rounds: int = 3
    threads: int = 0
    read_ahead: int = 0
    load: float = 0.0
    requests: int = 40
    timeout_s: float = 900.0
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least(1, rounds=self.rounds, host_budget=self.host_budget, requests=self.requests)
        at_least(1, prompt_tokens=self.prompt_tokens)
        at_least(2, new_tokens=self.new_tokens)
        at_least(0, memory=self.memory, read_ahead=self.read_ahead)
        at_least(0, threads=self.threads, load=self.load, timeout=self.timeout_s)
        if not self.batches or min(self.batches) < 1:
            raise ConfigError(f"batch: expected sizes of at least 1, got {self.batches}")
        for name in self.contestants:
            if name not in CONTESTANTS:
                raise ConfigError(f"rivals: expected one of {', '.join(CONTESTANTS)}, got {name}")
        if not self.contestants or len({*self.contestants}) != len(self.contestants):
            raise ConfigError(f"rivals: expected names, each once, got {', '.join(self.contestants)}")

    @property
    def context(self) -> int:
        """Tokens of a sequence, with room for the one that nobody asked for."""
        return self.prompt_tokens + self.new_tokens + 1


@dataclass(kw_only=True)
class _Entrant:
    """A contestant on its way: its turns by batch, the seconds of its disk's bytes where they were measured."""

    name: str
    outcome: ContestantOutcome = ContestantOutcome.RAN
    reason: str | None = None
    memory: str = "no limit"
    turns: dict[int, list[Turn]] = field(default_factory=dict)
    disk_speeds: dict[int, list[float]] = field(default_factory=dict)


def run(
    model: BenchModel, bench: GenerationBench, directory: Path, say: Callable[[str], None] = lambda _: None
) -> GenerateResult:
    """Measures. ``directory``: for all that is kept on disk, made and removed here.

    Raises ConfigError (the directory exists, no GGUF file of that family), CapabilityError
    (a readahead that cannot be set), OSError. Whatever befalls a contestant is in
    the result.
    """
    with work_directory(directory), contextlib.ExitStack() as stack:
        if bench.read_ahead:
            stack.enter_context(read_ahead_of(directory, bench.read_ahead))
        race = _Race(model, bench, directory, say)
        race.prepare(stack)
        for number in range(bench.rounds):
            race.round(number)
        race.bound()
        race.loaded()
        return race.result()


class _Race:
    def __init__(
        self, model: BenchModel, bench: GenerationBench, directory: Path, say: Callable[[str], None]
    ) -> None:
        self._model, self._bench, self._directory, self._say = model, bench, directory, say
        self._threads = bench.threads or machine.cores()
        self._entrants = {name: _Entrant(name=name) for name in bench.contestants}
        self._orders: list[list[str]] = []
        self._bounds: list[DecodeBound] = []
        self._load: LoadFigures | None = None
        self._page_cache = "dropped before each"
        self._confined_by = "nothing: no limit was asked for"
        self._disk: DiskProbe | None = None
        self._number = 0

    def prepare(self, stack: contextlib.ExitStack) -> None:
        """Leaves out who cannot take part, and makes what the others need."""
        for entrant in self._entrants.values():
            missing = CONTESTANTS[entrant.name].missing()
            if missing is not None:
                self._leave(entrant, ContestantOutcome.SKIPPED, missing)
        racing = {name for name, one in self._entrants.items() if one.outcome is ContestantOutcome.RAN}
        try:
            self._model.prepare(racing, self._directory, self._say)
        except ConfigError as error:
            if MAPPED not in racing:
                raise
            self._leave(self._entrants[MAPPED], ContestantOutcome.SKIPPED, str(error))
            self._model.prepare(racing - {MAPPED}, self._directory, self._say)
        self._disk = stack.enter_context(
            contextlib.closing(
                DiskProbe(self._directory, _PROBE_BYTES, (self._model.expert_bytes,), IoConfig())
            )
        )

    def _leave(self, entrant: _Entrant, outcome: ContestantOutcome, reason: str) -> None:
        entrant.outcome, entrant.reason = outcome, reason
        self._say(f"{entrant.name}: {outcome.value}: {reason}")

    def _workload(self, batch: int, seed: int = 7) -> GenerationWorkload:
        return GenerationWorkload(
            batch=batch,
            prompt_tokens=self._bench.prompt_tokens,
            new_tokens=self._bench.new_tokens,
            vocabulary=self._model.vocabulary,
            seed=seed,
        )

    # A round ------------------------------------------------------------------------------------------------

    def round(self, number: int) -> None:
        """Everyone's turn, with each batch."""
        racing = [name for name, one in self._entrants.items() if one.outcome is ContestantOutcome.RAN]
        self._orders.append(order(racing, number))
        for batch in self._bench.batches:
            for name in self._orders[-1]:
                entrant = self._entrants[name]
                if entrant.outcome is ContestantOutcome.RAN:
                    self._turn(entrant, batch, number)

    def _turn(self, entrant: _Entrant, batch: int, number: int) -> None:
        ours = entrant.name == OURS
        before = self._disk_speed() if ours else 0.0
        trace = self._trace(batch) if ours and number == 0 else None
        try:
            with self._process(entrant, batch, trace) as (process, group):
                asked = self._workload(batch)
                ran = Ran.of(process.ask({"workload": asked.as_json()}))
                turn = Turn(
                    generated=ran.generated,
                    open_s=process.ready.open_s,
                    cpu_s=ran.cpu_s,
                    peak_resident_bytes=ran.peak_resident_bytes,
                    peak_group_bytes=None if group is None else group.use().peak_bytes,
                    description=process.ready.description,
                )
        except (WorkerError, OSError) as error:
            self._leave(entrant, ContestantOutcome.DIED, f"round {number + 1}, batch {batch}: {error}")
            return
        entrant.turns.setdefault(batch, []).append(turn)
        if ours:
            speeds = [before, self._disk_speed()]
            entrant.disk_speeds.setdefault(batch, []).append(statistics.harmonic_mean(speeds))
        self._say(
            f"round {number + 1}, batch {batch}, {entrant.name}: prefill {turn.prefill_tokens_per_s(asked):.2f} and decode "
            f"{turn.decode_tokens_per_s(asked):.2f} tokens/s"
        )

    def _disk_speed(self) -> float:
        assert self._disk is not None
        return self._disk.bytes_per_s(Bytes(_PROBE_BYTES, 0))

    def _trace(self, batch: int) -> Path:
        return self._directory / f"trace-{batch}"

    @contextlib.contextmanager
    def _process(
        self, entrant: _Entrant, batch: int, trace: Path | None = None
    ) -> Iterator[tuple[RivalProcess, MemoryLimit | None]]:
        """A process of the contestant, in a group of its own if it is confined, with a cold page cache."""
        self._number += 1
        limit = 0 if entrant.name in UNCONFINED else self._bench.memory
        with contextlib.ExitStack() as stack:
            group = None
            if limit:
                group, entrant.memory = self._group(limit, stack)
            reason = drop_page_cache()
            if reason is not None:
                self._page_cache = f"not dropped, and may help: {reason}"
            directory = self._directory / f"{entrant.name}-{self._number}"
            task = ContestantTask(
                contestant=entrant.name,
                directory=directory,
                threads=self._threads,
                sequences=batch,
                context=self._bench.context,
                checkpoint=self._model.checkpoint,
                store=self._model.store,
                gguf=self._model.gguf,
                host_budget=self._budget(entrant.name),
                trace=trace,
                settings=self._bench.settings,
            )
            process = RivalProcess(
                entrant.name,
                config=task,
                directory=directory,
                timeout_s=self._bench.timeout_s,
                confinement=Confinement(group=group),
                module=MODULE,
            )
            stack.callback(process.close)
            yield process, group

    def _budget(self, name: str) -> int:
        return self._model.experts_budget if name == OURS_IN_RAM else self._bench.host_budget

    def _group(self, limit: int, stack: contextlib.ExitStack) -> tuple[MemoryLimit | None, str]:
        try:
            group = MemoryLimit(limit, name=str(self._number))
        except CapabilityError as error:
            self._confined_by = f"nothing, and the page cache may help: {error}"
            return None, self._confined_by
        stack.callback(group.close)
        self._confined_by = "a memory cgroup of the same limit for each"
        return group, "cgroup"

    # The bound, and load ------------------------------------------------------------------------------------

    def bound(self) -> None:
        """For each batch, what tierstore's decode step could take at best."""
        for batch in self._bench.batches:
            ours = self._turns(OURS, batch)
            if not ours:
                continue
            try:
                self._bounds.append(self._bound(batch, ours))
            except (DataError, OSError) as error:
                self._say(f"batch {batch}: no bound: {error}")

    def _bound(self, batch: int, ours: Sequence[Turn]) -> DecodeBound:
        # The trace's first step is the prefill; its last has no end, since none begins after it.
        steps = self._bench.new_tokens - 1
        least = compulsory(self._trace(batch), first_step=1, steps=steps)
        moved = least.least.per(steps)
        speeds = self._entrants[OURS].disk_speeds[batch]
        in_ram = [statistics.median(turn.generated.step_s) for turn in self._turns(OURS_IN_RAM, batch)]
        step_s = [statistics.fmean(turn.generated.step_s) for turn in ours]
        ram = statistics.median(in_ram) if in_ram else 0.0
        bounds = [bound_s(ram, moved, speed) for speed in speeds]
        to_bound = ratios(step_s, bounds)
        return DecodeBound(
            batch_count=batch,
            compulsory_policy=least.policy,
            compulsory_step_read_bytes=moved.read,
            clairvoyant_step_read_bytes=least.clairvoyant.per(steps).read,
            disk_bytes_per_s=statistics.median(speeds),
            compulsory_s=statistics.median(moved.total / speed for speed in speeds),
            in_ram_step_s=ram or None,
            bound_s=statistics.median(bounds),
            round_step_to_bound_ratio=to_bound,
            step_to_bound_ratio=statistics.median(to_bound),
        )

    def _turns(self, name: str, batch: int) -> list[Turn]:
        return self._entrants[name].turns.get(batch, []) if name in self._entrants else []

    def loaded(self) -> None:
        """Open-loop load on tierstore, at a share of what its largest batch was measured to serve."""
        bench, batch = self._bench, max(self._bench.batches)
        turns = self._turns(OURS, batch)
        if not bench.load or not turns:
            return
        busy_s = statistics.median(
            turn.generated.prefill_s + statistics.fmean(turn.generated.step_s) * bench.new_tokens
            for turn in turns
        )
        rate = bench.load * batch / busy_s
        asked = OpenLoop(
            requests=bench.requests,
            requests_per_s=rate,
            sequences=batch,
            prompt_tokens=bench.prompt_tokens,
            new_tokens=bench.new_tokens,
            vocabulary=self._model.vocabulary,
        )
        try:
            with self._process(self._entrants[OURS], batch) as (process, _):
                found = OpenLoopResult(**process.ask({"load": asked.as_json()}))
        except (WorkerError, OSError) as error:
            self._say(f"no figures under load: {error}")
            return
        self._load = LoadFigures.of(found, share=bench.load, rate=rate)

    # What was found -----------------------------------------------------------------------------------------

    def result(self) -> GenerateResult:
        bench = self._bench
        return GenerateResult(
            model=self._model.name,
            memory_limit_bytes=bench.memory,
            confined_by=self._confined_by,
            page_cache=self._page_cache,
            read_ahead_bytes=read_ahead_bytes(self._directory),
            host_budget_bytes=bench.host_budget,
            threads=self._threads,
            prompt_tokens_count=bench.prompt_tokens,
            new_tokens_count=bench.new_tokens,
            rounds=bench.rounds,
            orders=self._orders,
            speeds=[self._speed(one, batch) for batch in bench.batches for one in self._entrants.values()],
            against=[
                speed_ratios(self._workload(batch), ours, name, theirs)
                for batch in bench.batches
                if (ours := self._turns(OURS, batch))
                for name in self._entrants
                if name != OURS and (theirs := self._turns(name, batch))
            ],
            bounds=self._bounds,
            load=self._load,
        )

    def _speed(self, entrant: _Entrant, batch: int) -> SpeedFigures:
        turns, reference = entrant.turns.get(batch, []), self._turns(REFERENCE, batch)
        return speed_figures(
            self._workload(batch),
            turns,
            reference,
            contestant=entrant.name,
            title=CONTESTANTS[entrant.name].title,
            outcome=entrant.outcome,
            reason=entrant.reason,
            memory=entrant.memory,
            description=turns[0].description if turns else (),
        )
