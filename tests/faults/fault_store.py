"""A store on the fault file system: in a process of its own, for what may end or hang one.

Arguments: a directory for the mount, a backend, rules as JSON, and what to do once they are in force. It prints,
as JSON, the outcome of each step: ``[step, exception type, errno, file, message]`` or ``[step, "ok", ...]``.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tierstore.store import IoBackendName, IoConfig, ParameterStore, StoreConfig

NUMEL = 3000


def config(backend: str) -> StoreConfig:
    return StoreConfig(host_budget=1 << 20, io=IoConfig(backend=IoBackendName(backend)))


def tell(step: str, action: Callable[[], object]) -> None:
    try:
        action()
        print(json.dumps([step, "ok", 0, "", ""]), flush=True)
    except BaseException as error:
        code, path = getattr(error, "errno", 0), str(getattr(error, "filename", ""))
        print(json.dumps([step, type(error).__name__, code, path, str(error)]), flush=True)


def main() -> None:
    directory, backend, *steps = sys.argv[1:]
    store = ParameterStore.open(Path(directory), config(backend))
    print(json.dumps(["open", "ok", 0, "", ""]), flush=True)
    sys.stdin.readline()  # until the rules are in force
    actions: dict[str, Callable[[], object]] = {
        "fetch": lambda: store.fetch(["e2"]).release(),
        "update": lambda: store.update({"e1": np.ones(NUMEL, np.float32)}, lr=0.1),
        "commit": store.commit,
        "verify": store.verify,
        "close": store.close,
    }
    for step in steps:
        tell(step, actions[step])


if __name__ == "__main__":
    main()
