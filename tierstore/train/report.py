"""The report of a run: the JSON object, the table by tier, and the metrics line of each step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tierstore.decision import Decision
from tierstore.errors import naming
from tierstore.machine import MemoryAccount, peak_resident_bytes
from tierstore.model.store_schema import TaskProgress
from tierstore.moe.source import ChunkDegrees
from tierstore.outputs import OutputKind, check_output
from tierstore.parallel import CollectiveTraffic
from tierstore.stats import delta
from tierstore.store.disk.drives import DriveReport
from tierstore.train.budgets import expert_schema
from tierstore.train.config import TrainConfig
from tierstore.train.step_time import StepTime
from tierstore.train.tasks import rows_of_tasks
from tierstore.train.trainer import StepResult, Trainer
from tierstore.units import DAY_S, drive_life_s, format_bytes, format_seconds


def counters(trainer: Trainer) -> dict[str, int]:
    """Counters of the residency core and the engine since the store was opened."""
    stats = trainer.store.cache.residency.stats()
    names = ("hits", "misses", "evictions", "write_backs", "read_bytes", "written_bytes")
    speculation = ("prefetch_read_bytes", "useful_prefetch_bytes", "wasted_prefetch_bytes")
    counted = {name: getattr(stats, name) for name in (*names, *speculation)}
    mapped = trainer.store.mapped
    counted |= {"mapped_count": mapped.leases, "mapped_bytes": mapped.leased_bytes}
    kept = trainer.boundaries
    if kept is not None:  # in layer order
        counted |= {"boundary_read_bytes": kept.read_bytes, "boundary_written_bytes": kept.written_bytes}
    return counted


@dataclass(frozen=True)
class Instant:
    """The clock (monotonic, seconds) and the bytes written by this rank's engine, read at the same time."""

    at_s: float
    drive_written_bytes: int

    @classmethod
    def now(cls, trainer: Trainer) -> Instant:
        return cls(time.monotonic(), int(trainer.store.engine.stats()["written_bytes"]))


@dataclass(frozen=True)
class Totals:
    """Totals over all ranks: sums of ``counts``; ``peaks`` of resident bytes in rank order. ``stalls`` are those of the
    rank that stalled longest, ``stalled_rank``, for ``stall_s`` seconds; ``step_time`` is the breakdown of its steps'
    time (None without steps).

    ``drives`` are the directories of all ranks, in rank order. ``seconds`` is the duration of the run on this rank.
    """

    seconds: float
    counts: dict[str, int]
    peaks: list[int]
    stalled_rank: int
    stall_s: float
    stalls: list[dict[str, object]]
    step_time: StepTime | None
    #: Bytes written in ``seconds`` by the engine of the rank that wrote most, padding and spills included (not the index).
    drive_written_bytes: int
    drives: list[DriveReport] = field(default_factory=list)
    #: Traffic between ranks since they joined.
    sent: CollectiveTraffic = field(default_factory=CollectiveTraffic)


def totals(trainer: Trainer, begun: Instant) -> Totals:
    """The totals of the run that began at ``begun`` and ends now; a collective."""
    ended = Instant.now(trainer)
    own = (
        counters(trainer) | {"late_prefetch_bytes": trainer.experts.late_prefetch_bytes},
        peak_resident_bytes(),
        trainer.ledger.total_s,
        [stall.as_dict() for stall in trainer.ledger.rows()],
        trainer.timer.total,
        ended.drive_written_bytes - begun.drive_written_bytes,
        trainer.store.extents.drive_reports(),
        list(trainer.mesh.traffic().values()),
    )
    ranks = trainer.mesh.world.all_gather_object(own)
    longest = max(range(len(ranks)), key=lambda rank: ranks[rank][2])
    sent = CollectiveTraffic()
    for rank in ranks:
        for operation in rank[7]:
            sent.add(operation)
    return Totals(
        seconds=ended.at_s - begun.at_s,
        counts={name: sum(rank[0][name] for rank in ranks) for name in own[0]},
        peaks=[rank[1] for rank in ranks],
        stalled_rank=longest,
        stall_s=ranks[longest][2],
        stalls=ranks[longest][3],
        step_time=ranks[longest][4],
        drive_written_bytes=max(rank[5] for rank in ranks),
        drives=[drive for rank in ranks for drive in rank[6]],
        sent=sent,
    )


@dataclass(frozen=True)
class RunSummary:
    """The result of ``tierstore train``. ``records_crc32c`` is None if not requested."""

    config: TrainConfig
    steps: int
    train_loss: float | None
    val_loss: float | None
    tokens: int
    account: MemoryAccount
    totals: Totals
    records_crc32c: int | None = None
    #: The progress of each task that was ever trained in the store.
    tasks: Mapping[str, TaskProgress] = field(default_factory=dict)
    #: Why the run used its micro order.
    micro_order_reason: str = ""
    #: The last numbers of chunks of passes over experts; None if no rows are exchanged.
    chunks: Decision[ChunkDegrees] | None = None
    #: The exchange of rows between ranks, and why; None in a single process.
    exchange: str | None = None

    @property
    def drive_life_days(self) -> float | None:
        """Days that a drive of the stated endurance lasts at this run's write rate; None if no endurance is stated."""
        endurance = self.config.wear.endurance
        if not endurance:
            return None
        return drive_life_s(endurance, self.totals.drive_written_bytes, self.totals.seconds) / DAY_S

    def as_json(self) -> dict[str, object]:
        model = self.config.model
        return {
            "steps": self.steps,
            "train_loss": self.train_loss,
            "val_loss": self.val_loss,
            "elapsed_s": self.totals.seconds,
            "tokens_per_s": self.tokens / self.totals.seconds if self.totals.seconds else 0.0,
            **({"tasks": self._tasks()} if self.config.tasks else {}),
            "parameters": model.architecture.parameters,
            "experts": model.architecture.records,
            "record_bytes": model.architecture.records * expert_schema(self.config).record_bytes,
            "host_budget_bytes": self.account.parts["experts"],
            "ranks": len(self.totals.peaks),
            "micro_order": self.config.data.micro_order.value,
            "micro_order_reason": self.micro_order_reason,
            "chunks": self._chunks(),
            "exchange": self.exchange,
            **_between_nodes(self.totals.sent),
            "peak_resident_bytes": max(self.totals.peaks),
            "fixed_resident_bytes": self.account.nbytes - self.account.parts["experts"],
            "memory": self.account.as_json(),
            **self.totals.counts,
            "stall_s": self.totals.stall_s,
            "stalled_rank": self.totals.stalled_rank,
            "stalls": self.totals.stalls,
            "step_time": None if self.totals.step_time is None else self.totals.step_time.as_dict(),
            "records_crc32c": self.records_crc32c,
            "drives": [drive.as_json() for drive in self.totals.drives],
            "drive_written_bytes": self.totals.drive_written_bytes,
            "drive_life_s": None if self.drive_life_days is None else self.drive_life_days * DAY_S,
        }

    def _chunks(self) -> dict[str, object] | None:
        if self.chunks is None:
            return None
        degrees, facts = self.chunks.value, self.chunks.facts
        return {
            "forward": degrees.forward,
            "backward": degrees.backward,
            "parts_count": degrees.parts,
            "most": facts["most"],
            "reason": facts["reason"],  # without the cost of a cap, which the printed line states
            "costs": facts["costs"],
        }

    def _tasks(self) -> dict[str, object]:
        """The tasks of this run, by name."""
        rows = rows_of_tasks(self.config.tasks, self.config.data.batch_size)
        found: dict[str, object] = {}
        for name, count in rows.items():
            known = self.tasks[name]
            found[name] = {
                "train_loss": known.train_loss,
                "val_loss": known.val_loss,
                "tokens": known.tokens,
                "examples": known.position,
                "rows": count,
            }
        return found


def task_rows_of(summary: RunSummary) -> list[tuple[str, ...]]:
    """One row a task: its part of the batch, the amount trained on, and its losses in nats a token."""

    def loss(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    rows = rows_of_tasks(summary.config.tasks, summary.config.data.batch_size)
    known = {name: summary.tasks[name] for name in rows}
    return [
        (name, str(rows[name]), str(one.position), str(one.tokens), loss(one.train_loss), loss(one.val_loss))
        for name, one in known.items()
    ]


def _between_nodes(sent: CollectiveTraffic) -> dict[str, int]:
    """The traffic between ranks, with that between nodes, if any."""
    if not sent.node_messages:
        return {}
    return {
        "sent_bytes": sent.sent_bytes,
        "sent_messages_count": sent.messages,
        "between_nodes_bytes": sent.node_bytes,
        "between_nodes_messages_count": sent.node_messages,
    }


def tier_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """The rows of the final table: quantity and amount."""
    counts = summary.totals.counts
    asked = counts["hits"] + counts["misses"]
    several = len(summary.totals.peaks) > 1
    each = ", each rank" if several else ""
    sent = summary.totals.sent
    within = (sent.sent_bytes - sent.node_bytes, sent.messages - sent.node_messages)
    links = [("within nodes", *within), ("between nodes", sent.node_bytes, sent.node_messages)]
    rows = [
        ("read from disk", format_bytes(counts["read_bytes"])),
        ("written to disk", format_bytes(counts["written_bytes"])),
        ("hits of the host cache", f"{counts['hits']} of {asked} ({counts['hits'] / max(asked, 1):.1%})"),
        *(
            [("leases in mapped files", f"{counts['mapped_count']}, {format_bytes(counts['mapped_bytes'])}")]
            if counts["mapped_count"]
            else []
        ),
        ("evictions", str(counts["evictions"])),
        *(
            (f"block inputs: {done} disk", format_bytes(counts[f"boundary_{name}_bytes"]))
            for name, done in (("written", "spilled to"), ("read", "read back from"))
            if f"boundary_{name}_bytes" in counts
        ),
        ("prefetched: useful", format_bytes(counts["useful_prefetch_bytes"])),
        ("prefetched: late", format_bytes(counts["late_prefetch_bytes"])),
        ("prefetched: wasted", format_bytes(counts["wasted_prefetch_bytes"])),
        (
            f"stalled, rank {summary.totals.stalled_rank} (the longest)" if several else "stalled",
            f"{format_seconds(summary.totals.stall_s)} of {format_seconds(summary.totals.seconds)}",
        ),
        *(
            (f"sent {where}", f"{format_bytes(nbytes)} in {messages} messages")
            for where, nbytes, messages in links
            if sent.node_messages
        ),
        (f"host budget{each}", format_bytes(summary.account.parts["experts"])),
        (f"memory, as announced{each}", format_bytes(summary.account.nbytes)),
        (
            "peak resident memory, the largest rank" if several else "peak resident memory",
            format_bytes(max(summary.totals.peaks)),
        ),
    ]
    if summary.drive_life_days is not None:
        daily = summary.totals.drive_written_bytes / max(summary.totals.seconds, 1e-9) * DAY_S
        rows.append(
            (
                f"life of a drive of {format_bytes(summary.config.wear.endurance)} endurance",
                f"{summary.drive_life_days:.3g} days at {format_bytes(daily)} a day",
            )
        )
    return rows


def step_rows(total: StepTime) -> list[tuple[str, str, str]]:
    """The time of the steps: each part, and its share."""
    parts = [
        ("computing", total.computing_s),
        ("slowed: in the run queue", total.run_queue_s),
        ("slowed: stolen by the hypervisor", total.stolen_s),
        ("waiting: the device computes", total.device_s or None),
        ("waiting: threads of torch and the engine", total.threads_s),
        *((f"waiting: {cause.value}", seconds) for cause, seconds in total.longest_stalls),
        ("unaccounted", total.unaccounted_s),
    ]
    return [
        (name, format_seconds(seconds), f"{seconds / max(total.wall_s, 1e-9):.1%}")
        for name, seconds in parts
        if seconds is not None
    ]


def _losses(trainer: Trainer, result: StepResult, val_loss: float | None) -> dict[str, object]:
    """By task: the loss of the step, and of the validation after it, if any."""
    known = trainer.state.tasks
    return {
        name: {
            "loss": result.task_losses.get(name),
            "val_loss": None if val_loss is None else known[name].val_loss,
        }
        for name in trainer.config.tasks
    }


class MetricsLog:
    """Writes one JSON line a step, with the counters of that step; a context manager over ``path`` (None: writes nothing).

    A run that is refused before it starts leaves no new file behind.
    """

    def __init__(self, path: Path | None) -> None:
        path = None if path is None else check_output(path, OutputKind.METRICS)
        # Removed again, unless the run starts.
        self._refused = None if path is None or path.exists() else path
        self._file = None if path is None else path.open("ab", buffering=0)
        self._before: dict[str, int] = {}

    def start(self, trainer: Trainer) -> None:
        self._refused = None
        self._before = counters(trainer)

    def record(self, trainer: Trainer, result: StepResult, val_loss: float | None) -> None:
        """Appends the line of a step, whole or not at all. Raises OSError naming the file."""
        if self._file is None:
            return
        now = counters(trainer)
        line = {
            "step": result.step + 1,
            "loss": None if result.skipped else result.loss,
            "val_loss": val_loss,
            **({"tasks": _losses(trainer, result, val_loss)} if trainer.tasks is not None else {}),
            "lr": result.lr,
            "grad_norm": None if result.skipped else result.grad_norm,
            "active_experts": result.active_experts,
            "step_s": result.seconds,
            "stall_s": trainer.ledger.total_s,
            "step_time": None if trainer.timer.last is None else trainer.timer.last.as_dict(),
            **delta(self._before, now),
        }
        self._before = now
        data = memoryview(json.dumps(line).encode() + b"\n")
        whole_bytes = os.fstat(self._file.fileno()).st_size
        try:
            with naming(self._file.name):
                while data:
                    data = data[self._file.write(data) :]
        except OSError:
            with suppress(OSError):  # a device has no length
                self._file.truncate(whole_bytes)
            raise

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._refused is not None:
            self._refused.unlink(missing_ok=True)
