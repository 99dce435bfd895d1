"""One event loop does it all: gradients arrive as files, and are applied while the next ones are read.

Needs aiofiles. Run it with a directory that does not exist yet:  python examples/async_updates.py /tmp/async
"""

import asyncio
import sys
from pathlib import Path

import aiofiles
import numpy as np

from tierstore.store import ParameterStore, RecordSchema, StoreConfig

NUMEL = 1 << 16
STEPS = 12


async def read_gradient(path: Path) -> np.ndarray:
    async with aiofiles.open(path, "rb") as file:
        return np.frombuffer(await file.read(), np.float32)


async def main(directory: Path) -> None:
    directory.mkdir()
    rng = np.random.default_rng(0)
    files = [directory / f"gradient.{step}" for step in range(STEPS)]
    for path in files:  # somebody else would write these
        path.write_bytes(rng.standard_normal(NUMEL, np.float32).tobytes())

    schema = RecordSchema("expert", numel=NUMEL)
    with ParameterStore.create(directory / "store", [schema], StoreConfig(host_budget=16 * NUMEL)) as store:
        for i in range(4):
            store.register(f"expert.{i}", "expert")
        await store.commit_async()
        coming = asyncio.create_task(read_gradient(files[0]))
        for step in range(STEPS):
            gradient = await coming
            if step + 1 < STEPS:
                coming = asyncio.create_task(read_gradient(files[step + 1]))
            await store.update_async({f"expert.{step % 4}": gradient}, lr=1e-3)
        generation = await store.commit_async()
        with await store.fetch_async(["expert.0"]) as lease:
            moved = float(np.abs(lease["expert.0"].copy("weight")).max())
    print(f"{STEPS} updates in commit {generation}; the largest weight of expert.0 is {moved:.6f}")


asyncio.run(main(Path(sys.argv[1])))
