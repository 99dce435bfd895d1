"""The host cache over a fake backing that is as slow, and as out of order, as a test wants it to be.

Every transfer waits for an external event, which the test fires in random order and at random moments. A wait
list that lacks a ticket lets a transfer overtake what it must follow, and then some content is not what an
oracle (a number for each entry) says it is.
"""

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore import _native
from tierstore._native import Arena, Buffer, Engine, HugePages, IoBackend, Priority
from tierstore.cache import HostCache
from tierstore.cache.access import Need, Phase
from tierstore.cache.frames import FrameAllocator

FRAME = 4096
SECTIONS = ((FRAME,), (FRAME, 2 * FRAME), (FRAME,))  # of each group; nbytes
RECORDS = 6


def buffer_of(nbytes: int, value: int = 0) -> Buffer:
    arena = Arena(nbytes, HugePages.OFF)
    arena.view()[:] = value
    return Buffer(arena, [(0, nbytes)], nbytes)


class SlowMemory:
    """What records are backed by: transfers are copies that wait until the test lets them go."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine = engine
        self.held: list[int] = []
        self._rng = rng

    def hold(self, after: Sequence[int]) -> int:
        ticket = self.engine.external(after=list(after))
        self.held.append(ticket)
        return ticket

    def let_go(self, share: float) -> None:
        self._rng.shuffle(self.held)
        for _ in range(int(len(self.held) * share)):
            self.engine.complete_external(self.held.pop())

    def copies(self, pairs: Sequence[tuple[Buffer, Buffer]], after: Sequence[int]) -> int:
        held = self.hold(after)
        return self.engine.barrier([self.engine.copy(to, of, after=[held]) for to, of in pairs])


class SlowRecord:
    """The ``Backing`` of one record in a ``SlowMemory``."""

    def __init__(self, memory: SlowMemory, key: str) -> None:
        self.key = key
        self._memory = memory
        self._stored = [[buffer_of(nbytes, 0xEE) for nbytes in sections] for sections in SECTIONS]
        self._last: list[list[int]] = [[] for _ in SECTIONS]

    def read(self, group: int, sections: Sequence[Buffer], after: Sequence[int], priority: Priority) -> int:
        pairs = list(zip(sections, self._stored[group], strict=True))
        ticket = self._memory.copies(pairs, [*after, *self._last[group][:1]])
        self._last[group].append(ticket)
        return ticket

    def write(self, group: int, sections: Sequence[Buffer], after: Sequence[int]) -> int:
        pairs = list(zip(self._stored[group], sections, strict=True))
        ticket = self._memory.copies(pairs, [*after, *self._last[group]])
        self._last[group] = [ticket]
        return ticket


class Player:
    """Plays random accesses and remembers what every entry must hold."""

    def __init__(self, seed: int, frames: int, lookahead: int) -> None:
        self.rng = random.Random(seed)
        self.engine = Engine(backend=IoBackend.THREADS, compute_threads=2)
        self.backing = SlowMemory(self.engine, self.rng)
        residency = _native.Residency(frames, policy="lru", lookahead_frames=min(lookahead, frames))
        self.cache = HostCache(
            engine=self.engine,
            arena=Arena(frames * FRAME, HugePages.OFF),
            frame_bytes=FRAME,
            residency=residency,
            find_backing=[SlowRecord(self.backing, f"e{number}") for number in range(RECORDS)].__getitem__,
        )
        charged = [sum(sections) for sections in SECTIONS]
        self.cache.add_records(np.zeros(RECORDS, np.uint16), SECTIONS, charged, stored=False)
        self.holds: dict[int, int] = {}  # entry -> the value of all of its bytes
        self.seen: list[tuple[Buffer, int, str]] = []
        self.tickets: list[int] = []

    def access(self, records: list[int], need: Need) -> None:
        numbers = np.array(sorted(records), np.uint32)
        flags = np.full(len(records), need, np.uint16)
        for number in numbers.tolist():
            # An entry must exist before it is read: a first access creates it.
            if number * 4 not in self.holds:
                flags[numbers.tolist().index(number)] = Need.STEP | need
        groups = self.cache.begin_access(Phase.USER, 0, numbers, flags)
        for _ in range(groups):
            for unit in self.cache.next_group():
                for group in range(3):
                    if flags[unit] >> group & 1:
                        self._use(int(numbers[unit]) * 4 + group, Need(int(flags[unit])), group)
                self.backing.let_go(self.rng.random() * 0.5)
                if self.rng.random() < 0.5:
                    self.cache.end_unit(unit)
            self.cache.end_group()
        if need & Need.DROP_GRADIENTS:
            for number in records:
                self.holds.pop(number * 4 + 2, None)

    def _use(self, entry: int, need: Need, group: int) -> None:
        if entry in self.holds:
            self._look(entry)
        if need >> (3 + group) & 1:
            value = self.rng.randrange(1, 0xEE)
            before = [self.backing.hold(self.cache.before_write(entry))]
            fills = [
                self.engine.copy(section, buffer_of(section.nbytes, value), after=before)
                for section in self.cache.sections(entry)
            ]
            self.cache.wrote(entry, self.engine.barrier(fills))
            self.holds[entry] = value
            self._look(entry)

    def _look(self, entry: int) -> None:
        """Copies the entry as it stands in program order, whenever that will be carried out."""
        held = self.backing.hold(self.cache.ready(entry))
        for section in self.cache.sections(entry):
            copy = buffer_of(section.nbytes)
            ticket = self.engine.copy(copy, section, after=[held])
            self.cache.reads(entry, ticket)
            self.tickets.append(ticket)
            self.seen.append((copy, self.holds[entry], f"entry {entry}, look {len(self.seen)}"))

    def play(self, length: int) -> None:
        for _ in range(length):
            records = self.rng.sample(range(RECORDS), self.rng.randint(1, RECORDS))
            known = [r for r in records if r * 4 in self.holds]
            match self.rng.randrange(8):
                case 0:
                    self.access(records, Need.WEIGHTS)
                case 1:
                    self.access(records, Need.WEIGHTS | Need.MOMENTS)
                case 2 | 3:
                    self.access(records, Need.STEP)
                case 4:
                    self.access(records, Need.ACCUMULATE)
                case 5:
                    self.access(
                        [r for r in records if r * 4 + 2 in self.holds] or records[:1],
                        Need.STEP_SPILLED | Need.DIRTY_GRADIENTS,
                    )
                case 6:
                    flags = np.full(len(known), Need.WEIGHTS | Need.MOMENTS, np.uint16)
                    self.cache.prefetch(Phase.USER, 0, np.array(known, np.uint32), flags)
                case 7:
                    self.cache.clean()
            if self.rng.random() < 0.3:
                self.cache.residency.end_step()
            self.backing.let_go(self.rng.random())
        self.access(list(range(RECORDS)), Need.WEIGHTS | Need.MOMENTS)

    def wrong(self) -> str:
        """Lets everything go and finds the first look that saw something else."""
        while self.backing.held:
            self.backing.let_go(1.0)
        self.engine.wait_all(self.tickets)
        for copy, value, what in self.seen:
            found = set(copy.array().tolist())
            if found != {value}:
                return f"{what}: {found}, expected {value}"
        return ""

    def close(self) -> None:
        self.engine.close()


Play = Callable[[int, int, int, int], str]


@pytest.fixture
def play() -> Iterator[Play]:
    players: list[Player] = []

    def run(seed: int, frames: int, lookahead: int, length: int) -> str:
        players.append(Player(seed, frames, lookahead))
        players[-1].play(length)
        return players[-1].wrong()

    yield run
    for player in players:
        player.close()


@settings(max_examples=share(60))
@given(
    seed=st.integers(0, 10**6),
    frames=st.integers(5, 40),
    lookahead=st.integers(0, 8),
    length=st.integers(1, 20),
)
def test_content_is_what_program_order_says(seed: int, frames: int, lookahead: int, length: int) -> None:
    player = Player(seed, frames, lookahead)
    try:
        player.play(length)
        assert player.wrong() == ""
    finally:
        player.close()


def caught(play: Play) -> bool:
    return any(play(seed, 9, 4, 20) for seed in range(40))


def test_the_oracle_is_satisfied_where_mutations_are_tried(play: Play) -> None:
    assert not caught(play)


def test_forgetting_the_guards_of_frames_is_caught(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = FrameAllocator.allocate

    def unguarded(self: FrameAllocator, nbytes: Sequence[int]) -> tuple[tuple[Buffer, ...], list[int]]:
        return allocate(self, nbytes)[0], []

    monkeypatch.setattr(FrameAllocator, "allocate", unguarded)
    assert caught(play)


def test_forgetting_readers_is_caught(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCache, "reads", lambda self, entry, ticket: None)
    assert caught(play)


def test_forgetting_what_writes_is_caught(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCache, "before_write", lambda self, entry: self.ready(entry))
    assert caught(play)


def test_failed_decisions_break_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    player = Player(0, 5, 0)
    try:
        player.access([0], Need.STEP)

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(SlowRecord, "write", full)
        with pytest.raises(OSError, match="No space"):
            player.access([1], Need.STEP)
        assert "could not carry out" in player.cache.broken
        player.wrong()
    finally:
        player.close()


def test_sweeping_keeps_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.cache.host_cache._SWEEP_WRITES", 2)
    player = Player(1, 6, 0)
    try:
        for number in range(4):
            player.access([number], Need.STEP)
            player.wrong()
        failed = player.engine.external()
        player.cache.write_backs.add(failed)
        player.engine.complete_external(failed, "it broke")
        for number in range(4):
            player.access([number], Need.STEP)
            player.wrong()
        assert failed in player.cache.write_backs.take()
    finally:
        player.close()
