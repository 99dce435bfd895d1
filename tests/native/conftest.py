"""Engines on every backend, and memory to play with."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierstore import _native as native

MakeEngine = Callable[..., native.Engine]


@pytest.fixture(params=[name.lower() for name in native.IoBackend.__members__ if name != "AUTO"])
def make_engine(request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    """Makes engines of the parametrised backend with the options given, and closes them."""
    backend = native.IoBackend[request.param.upper()]
    engines: list[native.Engine] = []

    def make(**options: Any) -> native.Engine:
        try:
            engines.append(native.Engine(backend=backend, **options))
        except OSError as error:
            pytest.skip(f"no {request.param} here: {error}")
        assert engines[-1].backend == request.param
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make_engine: MakeEngine) -> native.Engine:
    return make_engine()


@pytest.fixture
def arena() -> native.Arena:
    return native.Arena(4 << 20, native.HugePages.OFF)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[native.File]:
    """An empty file of 1 MiB."""
    with native.File(tmp_path / "data", create=native.FileCreate.YES) as opened:
        opened.allocate(0, 1 << 20)
        yield opened


@dataclass(frozen=True)
class Event:
    """One record of the event log; its layout stands in native/io/recording.hpp."""

    kind: str
    ticket: int
    offset: int
    text: str
    data: bytes


_EVENTS = ["WRITE_SUBMIT", "WRITE_DONE", "SYNC_SUBMIT", "SYNC_DONE", "MARK", "PUNCH_SUBMIT", "PUNCH_DONE"]


def _parse(log: bytes) -> Iterator[Event]:
    at = 0
    while at < len(log):
        kind, ticket, offset, text_bytes = struct.unpack_from("<BQQI", log, at)
        at += 21
        text = log[at : at + text_bytes].decode()
        at += text_bytes
        (data_bytes,) = struct.unpack_from("<Q", log, at)
        at += 8
        name = _EVENTS[kind - 1]
        yield Event(name, ticket, offset, text, log[at : at + data_bytes])
        at += data_bytes
    assert at == len(log)


@pytest.fixture
def events(tmp_path: Path) -> Callable[[], list[Event]]:
    """The events in ``tmp_path / "log"`` so far, by a parser written from the log's description."""
    return lambda: list(_parse((tmp_path / "log").read_bytes()))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
