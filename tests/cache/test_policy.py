"""Policies written in Python: the native ones' equals, and what is refused."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from python_lru import PythonLru

from tierstore._native import Candidates, Clock, Residency
from tierstore.cache.policy import PythonPolicy
from tierstore.errors import ConfigError, DataError
from tierstore.trace.files import TraceRecorder, load_trace
from tierstore.trace.replay import replay

HERE = __name__


class Lru(PythonLru):
    def __init__(self) -> None:
        super().__init__()
        self.ticks: list[Clock] = []

    def tick(self, clock: Clock) -> None:
        self.ticks.append(clock)

    def select(self, frames: int, candidates: Candidates) -> Iterable[int]:
        return (entry for entry in list(self.order) if candidates.evictable(entry))


class Talkative(Lru):
    """Has every method that may be had."""

    told: list[tuple[object, ...]]

    def __init__(self, word: str = "") -> None:
        super().__init__()
        Talkative.told = self.mine = [("word", word)]

    def set_capacity(self, frames: int) -> None:
        self.mine.append(("set_capacity", frames))

    def add(self, entry: int, record: int, layer: int, frames: int) -> None:
        self.mine.append(("add", entry, record, layer, frames))

    def access(self, phase: int, layer: int, entries: list[int]) -> None:
        self.mine.append(("access", phase, layer, entries))

    def miss(self, entry: int) -> None:
        self.mine.append(("miss", entry))


class Nobody(Lru):
    def select(self, frames: int, candidates: Candidates) -> Iterable[int]:
        return []


class Twice(Lru):
    def select(self, frames: int, candidates: Candidates) -> Iterable[int]:
        return [next(iter(self.order))] * 2


class Keeper(Lru):
    """Asks about candidates after its choice."""

    kept: Candidates

    def select(self, frames: int, candidates: Candidates) -> Iterable[int]:
        Keeper.kept = candidates
        return list(super().select(frames, candidates))


class Hurt(Lru):
    def hit(self, entry: int) -> None:
        raise ValueError(f"hit by {entry}")


class Incomplete:
    def insert(self, entry: int) -> None: ...


def ask(core: Residency, keys: Iterable[int], phase: int = 0) -> None:
    asked = np.array(sorted(keys), np.uint32)
    groups, _ = core.begin_access(phase, 0, asked, np.ones(len(asked), np.uint16))
    for _ in range(groups):
        core.next_group()
        core.end_group()


def filled(policy: str, capacity: int = 3, **options: float | str) -> Residency:
    core = Residency(capacity, policy=policy, policy_options=options)
    for _ in range(6):
        core.add_record(0, [1, 0, 0], [1, 0, 0], 1)
    return core


def test_it_decides_as_the_native_one_does_live_and_in_a_replay(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    path = tmp_path / "trace"
    core = Residency(7, policy="lru", lookahead_frames=2)
    with TraceRecorder(path, core):
        for _ in range(12):
            core.add_record(0, [1, 2, 0], [1, 2, 0], 3)
        for _ in range(60):
            ask(core, random.choice(12, 4, replace=False).tolist())
            core.end_step()
        live = core.stats()
    written: PythonPolicy = Lru()
    assert isinstance(written, Lru)
    assert replay(path, replace(load_trace(path).header, policy=f"{HERE}:Lru")) == live == replay(path)


def test_what_it_is_told() -> None:
    core = filled(f"{HERE}:Talkative", 2, word="on")
    ask(core, [1], phase=2)
    ask(core, [1, 3])
    core.end_step()
    told = Talkative.told
    assert told[:2] == [("word", "on"), ("set_capacity", 2)]
    assert ("add", 4, 1, 0, 1) in told
    assert ("add", 5, 1, 0, 0) in told
    assert told[-4:] == [("access", 2, 0, [4]), ("miss", 4), ("access", 0, 0, [4, 12]), ("miss", 12)]


def test_candidates_are_lent() -> None:
    core = filled(f"{HERE}:Keeper", 1)
    ask(core, [0])
    ask(core, [1])
    with pytest.raises(ValueError, match="only valid inside select"):
        Keeper.kept.evictable(0)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("Nobody", r"select\(\) named 0 of 1 frames, and entry 0 could go as well"),
        ("Twice", r"select\(\) named entry 0, which cannot go"),
    ],
)
def test_a_choice_that_is_none_is_refused(policy: str, message: str) -> None:
    core = filled(f"{HERE}:{policy}", 2)
    ask(core, [0, 1])
    with pytest.raises(RuntimeError, match=f"{policy}: {message}"):
        ask(core, [2] if policy == "Nobody" else [2, 3])
    assert core.policy_failed
    with pytest.raises(RuntimeError, match="has failed before"):
        core.next_group()


def test_errors_are_the_users_own(tmp_path: Path) -> None:
    core = filled(f"{HERE}:Hurt")
    ask(core, [0])
    assert not core.policy_failed
    with pytest.raises(ValueError, match="hit by 0") as raised:
        ask(core, [0])
    assert raised.value.__notes__ == [f"in cache policy {HERE}:Hurt, hit()"]
    assert core.policy_failed
    path = tmp_path / "trace"
    recording = Residency(2, policy="lru")
    with TraceRecorder(path, recording):
        recording.add_record(0, [1, 0, 0], [1, 0, 0], 1)
        ask(recording, [0])
        ask(recording, [0])
    with pytest.raises(ValueError, match="hit by 0") as replayed:
        replay(path, replace(load_trace(path).header, policy=f"{HERE}:Hurt"))
    assert not isinstance(replayed.value, DataError)


def test_a_trace_alone_does_not_choose_the_code_that_runs(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    core = Residency(2, policy=f"{HERE}:Talkative", policy_options={"word": "on"})
    with TraceRecorder(path, core):
        core.add_record(0, [1, 0, 0], [1, 0, 0], 1)
        ask(core, [0])
        live = core.stats()
    with pytest.raises(ConfigError, match=f"recorded under {HERE}:Talkative, a policy written in Python"):
        replay(path)
    assert replay(path, replace(load_trace(path).header, policy=f"{HERE}:Talkative")) == live
    assert Talkative.told[0] == ("word", "on")


@pytest.mark.parametrize(
    ("policy", "options", "error", "message"),
    [
        ("Incomplete", {}, ValueError, "has no method 'hit'"),
        ("Lru", {"size": 1}, TypeError, "unexpected keyword argument 'size'"),
        ("Missing", {}, ValueError, "has no attribute 'Missing'"),
    ],
)
def test_classes_that_cannot_be_made(
    policy: str, options: dict[str, float | str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Residency(2, policy=f"{HERE}:{policy}", policy_options=options)
