"""The server over the fake model: in this process for tests, or as a program of its own.

python tests/serve/fake_server.py [ROOM] [PASS_S] [KEY=VALUE of LimitsConfig ...]
"""

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields

import fake_model
from fake_model import FakeRunner

from tierstore.serve.api.app import Keys, Service
from tierstore.serve.api.metrics import ServerMetrics
from tierstore.serve.api.server import ApiServer, listen, url
from tierstore.serve.config import LimitsConfig
from tierstore.serve.engine import Running, ServingEngine

MODEL = "fake"


@dataclass(frozen=True)
class Fake:
    """A server: where, and what it is made of."""

    url: str
    service: Service
    runner: FakeRunner
    server: ApiServer
    socket: socket.socket

    def run(self) -> None:
        """Until the engine has ended."""
        asyncio.run(self.server.serve([self.socket]))


@contextmanager
def prepared(
    *,
    room: int,
    pass_s: float,
    limits: LimitsConfig,
    keys: tuple[str, ...] = (),
    opened: Callable[[], AbstractContextManager[Running]] | None = None,
    opens: Callable[[], object] | None = None,
) -> Iterator[Fake]:
    """A server that is about to run, on a port of its own. ``opened``: another model than the fake. ``opens``: called while
    the model opens, which is not waited for then.
    """
    runner, metrics = FakeRunner(room=room, pass_s=pass_s), ServerMetrics()

    @contextmanager
    def opening() -> Iterator[Running]:
        if opens is not None:
            opens()
        with fake_model.opened(runner) if opened is None else opened() as running:
            yield running

    with (
        listen("127.0.0.1", 0) as bound,
        ServingEngine(opening, sequences=room, limits=limits, metrics=metrics) as engine,
    ):
        metrics.show(engine)
        while opens is None and not engine.opened:
            time.sleep(0.001)
        service = Service(engine=engine, metrics=metrics, limits=limits, keys=Keys(keys), model=MODEL)
        yield Fake(url(bound), service, runner, ApiServer(service.app(), engine, limits), bound)


@contextmanager
def serving(
    *,
    room: int = 8,
    pass_s: float = 0.0,
    limits: LimitsConfig | None = None,
    keys: tuple[str, ...] = (),
    opened: Callable[[], AbstractContextManager[Running]] | None = None,
    opens: Callable[[], object] | None = None,
) -> Iterator[Fake]:
    """A server in a thread of this process."""
    limits = LimitsConfig() if limits is None else limits
    with prepared(room=room, pass_s=pass_s, limits=limits, keys=keys, opened=opened, opens=opens) as fake:
        thread = threading.Thread(target=fake.run)
        thread.start()
        try:
            yield fake
        finally:
            fake.service.engine.close()
            thread.join()


def main() -> None:
    """The program."""
    given = dict(one.split("=") for one in sys.argv[3:])
    kinds = {field.name: type(field.default) for field in fields(LimitsConfig)}
    limits = LimitsConfig(**{name: kinds[name](value) for name, value in given.items()})
    with prepared(room=int(sys.argv[1]), pass_s=float(sys.argv[2]), limits=limits) as fake:
        print(fake.url, flush=True)
        fake.run()


if __name__ == "__main__":
    main()
