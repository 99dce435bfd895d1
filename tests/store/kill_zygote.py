"""A process that has imported the store and forks a child for each line it is told: children start in no
time.

Lines in: a directory and a seed. A child opens the store there and commits in a loop until it is killed, and
says on standard output ``pid N``, ``begin GENERATION CRC`` before each commit and ``done GENERATION`` after
it.
"""

import os
import sys

import numpy as np

from tierstore.store import ParameterStore, StoreConfig


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def commit_forever(directory: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with ParameterStore.open(directory, StoreConfig(host_budget=80_000)) as store:
        while True:
            keys = sorted(rng.choice(store.keys, 2, replace=False).tolist())
            numel = store.info(keys[0]).schema.numel
            store.update({key: rng.standard_normal(numel).astype(np.float32) for key in keys}, lr=1e-2)
            say(f"begin {store.last_commit.generation + 1} {store.records_crc32c()}")
            say(f"done {store.commit()}")


def main() -> None:
    assert "torch" not in sys.modules
    say("ready")
    for line in sys.stdin:
        directory, seed = line.split()
        pid = os.fork()
        if pid == 0:
            try:
                say(f"pid {os.getpid()}")
                commit_forever(directory, int(seed))
            except BaseException as error:
                say(f"failed {error!r}")
            finally:
                os._exit(1)
        os.waitpid(pid, 0)
        say("gone")


if __name__ == "__main__":
    main()
