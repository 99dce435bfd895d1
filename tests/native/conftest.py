"""Engines on every backend, and memory to play with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_states import read_log
from engines import Events, MakeEngine

from tierstore import _native as native


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


@pytest.fixture
def events(tmp_path: Path) -> Events:
    """The events in ``tmp_path / "log"`` so far, by a parser written from the log's description."""
    return lambda: read_log(tmp_path / "log")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
