"""What ``bench generate`` finds: types, how they follow from the runs, and the measurements for a document."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tierstore.bench.generation.contestant import Generated
from tierstore.bench.generation.open_loop import OpenLoopResult
from tierstore.bench.generation.registry import MAPPED, OFFLOADED, OURS, OURS_IN_RAM, REFERENCE
from tierstore.bench.generation.workload import GenerationWorkload
from tierstore.bench.results.document import Better, Measurement, counted, derived, measured
from tierstore.bench.results.figures import IF_ANY, Figures, ratios
from tierstore.stats import percentile

#: Decode time per token may take so much of its bound.
WITHIN_BOUND = 1.15
#: What tierstore is to reach of each rival's speed, where it is named: prefill and decoding, by sequences of a batch.
TARGETS: Mapping[tuple[str, str, int], float] = {
    (MAPPED, "decode", 1): 2.0,
    (OFFLOADED, "decode", 1): 4.0,
    (MAPPED, "prefill", 1): 1.5,
    (MAPPED, "decode", 8): 1.0,
    (OFFLOADED, "decode", 8): 1.0,
}


class ContestantOutcome(Enum):
    """What became of a contestant."""

    RAN = "ran"
    SKIPPED = "skipped"  # not installed, or nothing for it to open
    DIED = "died"  # in a turn: it takes no further part


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One process: what it did, and the most memory that its group has had (page cache included; None without a group)."""

    generated: Generated
    open_s: float
    cpu_s: float
    peak_resident_bytes: int
    peak_group_bytes: int | None
    description: Sequence[str]

    def prefill_tokens_per_s(self, asked: GenerationWorkload) -> float:
        return asked.batch * asked.prompt_tokens / self.generated.prefill_s

    def decode_tokens_per_s(self, asked: GenerationWorkload) -> float:
        return asked.batch / statistics.fmean(self.generated.step_s)


@dataclass(frozen=True, kw_only=True)
class SpeedFigures(Figures):
    """One contestant with one batch, over rounds. Read bytes are those that its process had read from storage, by token;
    those of ``tier_`` are tierstore's own counts. ``chosen_same_ratio``: the share of the model's own choices that are the
    reference's.
    """

    contestant: str
    title: str
    batch_count: int
    outcome: ContestantOutcome
    reason: str | None
    memory: str
    description: Sequence[str]
    open_s: float | None = field(default=None, metadata=IF_ANY)
    round_prefill_tokens_per_s: Sequence[float] = ()
    round_decode_tokens_per_s: Sequence[float] = ()
    prefill_tokens_per_s: float | None = field(default=None, metadata=IF_ANY)
    decode_tokens_per_s: float | None = field(default=None, metadata=IF_ANY)
    first_token_s: float | None = field(default=None, metadata=IF_ANY)
    step_p50_s: float | None = field(default=None, metadata=IF_ANY)
    step_p99_s: float | None = field(default=None, metadata=IF_ANY)
    prefill_token_read_bytes: int | None = field(default=None, metadata=IF_ANY)
    decode_token_read_bytes: int | None = field(default=None, metadata=IF_ANY)
    tier_token_nvme_read_bytes: int | None = field(default=None, metadata=IF_ANY)
    tier_token_speculated_bytes: int | None = field(default=None, metadata=IF_ANY)
    tier_token_useful_speculated_bytes: int | None = field(default=None, metadata=IF_ANY)
    tier_token_late_prefetch_bytes: int | None = field(default=None, metadata=IF_ANY)
    hit_ratio: float | None = field(default=None, metadata=IF_ANY)
    peak_resident_bytes: int | None = field(default=None, metadata=IF_ANY)
    peak_group_bytes: int | None = field(default=None, metadata=IF_ANY)
    cpu_s: float | None = field(default=None, metadata=IF_ANY)
    chosen_same_ratio: float | None = field(default=None, metadata=IF_ANY)


def speed_figures(
    asked: GenerationWorkload, turns: Sequence[Turn], reference: Sequence[Turn], **named: object
) -> SpeedFigures:
    """Those of ``turns``. ``named``: the fields that say who it was."""
    if not turns:
        return SpeedFigures(batch_count=asked.batch, **named)  # type: ignore[arg-type]
    made = [turn.generated for turn in turns]
    steps = [seconds for one in made for seconds in one.step_s]
    prefill = [turn.prefill_tokens_per_s(asked) for turn in turns]
    decode = [turn.decode_tokens_per_s(asked) for turn in turns]
    tokens = asked.batch * asked.new_tokens
    groups = [turn.peak_group_bytes for turn in turns if turn.peak_group_bytes is not None]
    tiers = [one.tiers for one in made if one.tiers is not None]
    asked_for = sum(one.hits + one.misses for one in tiers)

    def by_token(values: Sequence[int]) -> int | None:
        return round(statistics.median(values) / tokens) if values else None

    return SpeedFigures(
        batch_count=asked.batch,
        open_s=statistics.median(turn.open_s for turn in turns),
        round_prefill_tokens_per_s=prefill,
        round_decode_tokens_per_s=decode,
        prefill_tokens_per_s=statistics.median(prefill),
        decode_tokens_per_s=statistics.median(decode),
        first_token_s=statistics.median(one.prefill_s for one in made),
        step_p50_s=percentile(steps, 50),
        step_p99_s=percentile(steps, 99),
        prefill_token_read_bytes=round(
            statistics.median(one.prefill_read_bytes for one in made) / (asked.batch * asked.prompt_tokens)
        ),
        decode_token_read_bytes=by_token([one.decode_read_bytes for one in made]),
        tier_token_nvme_read_bytes=by_token([one.nvme_read_bytes for one in tiers]),
        tier_token_speculated_bytes=by_token([one.speculated_bytes for one in tiers]),
        tier_token_useful_speculated_bytes=by_token([one.useful_speculated_bytes for one in tiers]),
        tier_token_late_prefetch_bytes=by_token([one.late_prefetch_bytes for one in tiers]),
        hit_ratio=sum(one.hits for one in tiers) / asked_for if asked_for else None,
        peak_resident_bytes=max(turn.peak_resident_bytes for turn in turns),
        peak_group_bytes=max(groups, default=None),
        cpu_s=statistics.median(turn.cpu_s for turn in turns),
        chosen_same_ratio=_same(made[0], reference[0].generated) if reference else None,
        **named,  # type: ignore[arg-type]
    )


def _same(one: Generated, reference: Generated) -> float | None:
    """The share of choices that are equal; None where one's are not known."""
    pairs = [
        (a, b)
        for mine, other in zip(one.chosen, reference.chosen, strict=False)
        for a, b in zip(mine, other, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


@dataclass(frozen=True, kw_only=True)
class SpeedRatios(Figures):
    """tierstore to one rival with one batch, by round: prefill and decode tokens a second; and peak memory."""

    rival: str
    batch_count: int
    round_prefill_ratio: Sequence[float]
    round_decode_ratio: Sequence[float]
    prefill_ratio: float
    decode_ratio: float
    peak_group_ratio: float | None


def speed_ratios(
    asked: GenerationWorkload, ours: Sequence[Turn], rival: str, theirs: Sequence[Turn]
) -> SpeedRatios:
    """Of the rounds that both have."""
    count = min(len(ours), len(theirs))
    ours, theirs = ours[:count], theirs[:count]
    prefill = ratios(
        [turn.prefill_tokens_per_s(asked) for turn in ours],
        [turn.prefill_tokens_per_s(asked) for turn in theirs],
    )
    decode = ratios(
        [turn.decode_tokens_per_s(asked) for turn in ours],
        [turn.decode_tokens_per_s(asked) for turn in theirs],
    )
    peaks = [
        max((turn.peak_group_bytes for turn in turns if turn.peak_group_bytes), default=0)
        for turns in (ours, theirs)
    ]
    return SpeedRatios(
        rival=rival,
        batch_count=asked.batch,
        round_prefill_ratio=prefill,
        round_decode_ratio=decode,
        prefill_ratio=statistics.median(prefill),
        decode_ratio=statistics.median(decode),
        peak_group_ratio=peaks[0] / peaks[1] if all(peaks) else None,
    )


@dataclass(frozen=True, kw_only=True)
class DecodeBound(Figures):
    """tierstore's decode step and what it could take at best: max(the same in RAM, compulsory bytes / bandwidth).

    Compulsory bytes are the least that any of the native policies reads of this run's accesses with this run's memory;
    ``clairvoyant_step_read_bytes`` is what knowing the future would read, shown beside. ``in_ram_step_s``: None where
    tierstore-ram did not take part, and the bound is the disk's alone.
    """

    batch_count: int
    compulsory_policy: str
    compulsory_step_read_bytes: int
    clairvoyant_step_read_bytes: int
    disk_bytes_per_s: float
    compulsory_s: float
    in_ram_step_s: float | None
    bound_s: float
    round_step_to_bound_ratio: Sequence[float]
    step_to_bound_ratio: float


@dataclass(frozen=True, kw_only=True)
class LoadFigures(Figures):
    """tierstore under open-loop load. ``capacity_ratio``: the arrivals' share of what a full batch can serve."""

    capacity_ratio: float
    requests: int
    requests_per_s: float
    elapsed_s: float
    most_waiting_count: int
    first_token_p50_s: float
    first_token_p90_s: float
    first_token_p99_s: float
    between_tokens_p50_s: float
    between_tokens_p90_s: float
    between_tokens_p99_s: float
    complete_p50_s: float
    complete_p99_s: float

    @staticmethod
    def of(found: OpenLoopResult, *, share: float, rate: float) -> LoadFigures:
        first, between, complete = found.first_token_s, found.between_tokens_s, found.complete_s
        return LoadFigures(
            capacity_ratio=share,
            requests=len(first),
            requests_per_s=rate,
            elapsed_s=found.elapsed_s,
            most_waiting_count=found.most_waiting,
            first_token_p50_s=percentile(first, 50),
            first_token_p90_s=percentile(first, 90),
            first_token_p99_s=percentile(first, 99),
            between_tokens_p50_s=percentile(between, 50),
            between_tokens_p90_s=percentile(between, 90),
            between_tokens_p99_s=percentile(between, 99),
            complete_p50_s=percentile(complete, 50),
            complete_p99_s=percentile(complete, 99),
        )


@dataclass(frozen=True, kw_only=True)
class GenerateResult(Figures):
    """What ``run`` found. ``orders``: who ran when, round by round. ``confined_by``: what limited memory, or why nothing
    did. ``page_cache``: whether it was dropped before each, or why not. ``read_ahead_bytes``: what the kernel reads at most
    around a page that a mapped file misses, which decides how llama.cpp does (None: not known).
    """

    bench: str = "generate"
    model: str
    memory_limit_bytes: int
    confined_by: str
    page_cache: str
    read_ahead_bytes: int | None
    host_budget_bytes: int
    threads: int
    prompt_tokens_count: int
    new_tokens_count: int
    rounds: int
    reference: str = REFERENCE
    orders: Sequence[Sequence[str]]
    speeds: Sequence[SpeedFigures]
    against: Sequence[SpeedRatios]
    bounds: Sequence[DecodeBound]
    load: LoadFigures | None = field(metadata=IF_ANY)

    @property
    def same_choices(self) -> bool:
        """Whether tierstore chose as the reference did, wherever both ran."""
        return all(
            one.chosen_same_ratio in (None, 1.0)
            for one in self.speeds
            if one.contestant in (OURS, OURS_IN_RAM)
        )


def measurements(result: GenerateResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    for one in result.speeds:
        if one.outcome is not ContestantOutcome.RAN or not one.round_decode_tokens_per_s:
            continue
        how: dict[str, float | str] = {"contestant": one.contestant, "batch": one.batch_count}
        unit, higher = "tokens/s", Better.HIGHER
        yield measured("prefill", one.round_prefill_tokens_per_s, unit, higher, parameters=how)
        yield measured("decode", one.round_decode_tokens_per_s, unit, higher, parameters=how)
        for name, value in (
            ("read a token, decoding", one.decode_token_read_bytes),
            ("read a token, prefill", one.prefill_token_read_bytes),
            ("peak of the group", one.peak_group_bytes),
            ("peak resident memory", one.peak_resident_bytes),
        ):
            if value is not None:
                yield counted(name, value, "bytes", Better.LOWER, parameters=how)
        if one.hit_ratio is not None:
            yield counted("hits", one.hit_ratio, "ratio", higher, parameters=how)
    for against in result.against:
        which: dict[str, float | str] = {"rival": against.rival, "batch": against.batch_count}
        for name, values in (
            ("prefill", against.round_prefill_ratio),
            ("decode", against.round_decode_ratio),
        ):
            target = TARGETS.get((against.rival, name, against.batch_count))
            yield derived(
                f"{name} to rival's", values, "ratio", Better.HIGHER, parameters=which, target=target
            )
        if against.peak_group_ratio is not None:
            yield derived(
                "peak to rival's", against.peak_group_ratio, "ratio", Better.LOWER, parameters=which
            )
    for bound in result.bounds:
        yield derived(
            "decode step to bound",
            bound.round_step_to_bound_ratio,
            "ratio",
            Better.LOWER,
            parameters={"batch": bound.batch_count},
            target=WITHIN_BOUND,
        )
    if result.load is not None:
        yield measured("first token under load, p99", result.load.first_token_p99_s, "s", Better.LOWER)
        yield measured("between tokens under load, p99", result.load.between_tokens_p99_s, "s", Better.LOWER)
