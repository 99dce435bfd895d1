"""The process of a soak that works on the store until its input ends or it is killed.

The protocol is one JSON object per line. The parent sends the possible states of the store: a list of models, one of which
has the store's generation. The child audits the closed store against that one, opens it, reads every record through it,
and follows the plan from there. It says ``begin`` and ``done`` around each commit, reports its resources and counts from
time to time, and says ``failure`` for the first error. It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.bench.probes import usage
from tierstore.bench.soak_plan import (
    FORGETFUL,
    LEARNING_RATE,
    Misuse,
    OperationKind,
    SoakOperation,
    SoakPlan,
    SoakShape,
    StoreModel,
    audit,
    committed_generation,
    content,
    gradient,
    key_of,
    snapshot_name,
    wrong_bytes,
)
from tierstore.errors import BudgetError, StoreError, StoreInUseError, TierstoreError
from tierstore.store import (
    CacheConfig,
    Group,
    IoBackendName,
    IoConfig,
    Lease,
    NewRecord,
    ParameterStore,
    StoreConfig,
    StripeConfig,
)
from tierstore.store.disk.home import IDENTITY

_SAMPLE_S = 0.25
_CHECKING_THREADS = 2
#: None of these changes what is stored, so every life may have a different one.
_POLICIES = ("lfu-decay", "lru", "arc", "w-tinylfu")
_BACKENDS = (IoBackendName.AUTO, IoBackendName.THREADS)
_REFUSALS: Mapping[Misuse, type[Exception]] = {
    Misuse.UNKNOWN_KEY: KeyError,
    Misuse.LEASED_UPDATE: StoreError,
    Misuse.WRONG_GRADIENT: ValueError,
    Misuse.TOO_MUCH_AT_ONCE: BudgetError,
    Misuse.SECOND_OPENER: StoreInUseError,
    Misuse.TAKEN_NAME: StoreError,
}


class SoakFailure(TierstoreError):
    """The store is not what it should be. ``wrong_bytes``: the number of its bytes that are wrong."""

    def __init__(self, text: str, *, wrong: int = 0) -> None:
        super().__init__(text)
        self.wrong_bytes = wrong


class SoakWorker:
    """One life: opens the store, works on it, and reports to ``out`` (a descriptor)."""

    def __init__(self, request: Mapping[str, Any], *, commands: int, out: int) -> None:
        self._directory, *self._further = map(Path, request["directories"])
        self._shape = SoakShape(**request["shape"])
        self._plan = SoakPlan(self._shape)
        self._hypotheses = [(int(h["position"]), h["model"]) for h in request["hypotheses"]]
        self._life = int(request["life"])
        self._commands, self._out = commands, out
        self._counts: Counter[str] = Counter()
        self._position = 0
        self._next_sample_s = 0.0
        self._engine_read = self._engine_written = 0
        self._pool = ThreadPoolExecutor(_CHECKING_THREADS)

    # Messages -----------------------------------------------------------------------------------------------

    def say(self, what: str, **fields: object) -> None:
        """Send a message, whole."""
        line = json.dumps({"say": what, **fields}).encode() + b"\n"
        while line:
            line = line[os.write(self._out, line) :]

    def _report(self, **held: int) -> None:
        """Report what has been done, and the resources held."""
        self._count_engine()
        self.say("sample", counts=dict(self._counts), held=held)

    def _count_engine(self) -> None:
        stats = self._store.core.engine.stats()
        read, written = int(stats["read_bytes"]), int(stats["written_bytes"])
        self._counts["read_bytes"] += read - self._engine_read
        self._counts["written_bytes"] += written - self._engine_written
        self._engine_read, self._engine_written = read, written

    # Life ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the whole life. Raises SoakFailure, and any error that the store should not have raised."""
        self._model = self._begin()
        self._open_store(create=self._model.generation == 0)
        try:
            asyncio.run(self._work())
            self._check_all()
            self._verify()
            self._report()
        finally:
            self._store.close()
            self._pool.shutdown()
        self.say("closed", position=self._position)

    def _begin(self) -> StoreModel:
        """The audited model of the store's present state."""
        generation = 0
        if (self._directory / IDENTITY).exists():
            generation = committed_generation(self._directory)
        found = [(p, m) for p, m in self._hypotheses if m["generation"] == generation]
        if not found:
            expected = " or ".join(str(m["generation"]) for _, m in self._hypotheses)
            raise SoakFailure(f"the store is at commit {generation}, expected {expected}")
        self._position, raw = found[0]
        model = StoreModel(**raw)
        if generation:
            result = audit(self._directory, self._shape, model, further=self._further)
            self._counts["audited_bytes"] += result.verified_bytes
            self._counts["verified_bytes"] += result.verified_bytes
            if result.wrong:
                raise SoakFailure(f"audit after a reopening: {result.wrong[0]}", wrong=result.wrong_bytes)
        return model

    def _config(self) -> StoreConfig:
        return StoreConfig(
            host_budget=self._shape.budget,
            lookahead=self._shape.budget // 8,
            retain=self._shape.retain,
            cache=CacheConfig(policy=_POLICIES[self._life % len(_POLICIES)]),
            io=IoConfig(backend=_BACKENDS[self._life % len(_BACKENDS)]),
            stripe=StripeConfig(directories=tuple(self._further)),
        )

    def _open_store(self, *, create: bool) -> None:
        begun = time.perf_counter()
        if create:
            schemas = self._shape.schemas
            self._store = ParameterStore.create(self._directory, schemas, self._config(), adamw=FORGETFUL)
        else:
            self._store = ParameterStore.open(self._directory, self._config(), adamw=FORGETFUL)
        opened = time.perf_counter() - begun
        self._engine_read = self._engine_written = 0
        if create:
            self._register()
        else:
            self._compare_commits()
            self._check_all()
        self._report()
        self.say("opened", position=self._position, open_s=opened, created=create)

    def _register(self) -> None:
        """Register all records, and make the first commit."""
        shape, seed = self._shape, self._shape.seed

        def new(record: int) -> NewRecord:
            schema = shape.schema(record)
            return NewRecord(
                key_of(record), schema.name, record % 4, lambda: gradient(seed, record, 0, schema.numel)
            )

        self._store.register_many([new(record) for record in range(shape.records)])
        self.say("begin", position=-1)
        self._model.commit()
        self._store.commit()
        self.say("done", position=-1)

    def _compare_commits(self) -> None:
        last, model = self._store.last_commit, self._model
        if last.generation != model.generation:
            raise SoakFailure(f"reopened at commit {last.generation}, expected {model.generation}")
        if last.snapshots != list(model.snapshots):
            raise SoakFailure(f"reopened with snapshots {last.snapshots}, expected {list(model.snapshots)}")

    # Working ------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while not select.select([self._commands], [], [], 0)[0]:
            await self._step()
            if time.monotonic() >= self._next_sample_s:
                self._next_sample_s = time.monotonic() + _SAMPLE_S
                self._report(**usage(self._directory, *self._further))

    async def _step(self) -> None:
        """Run the operation at the position; a commit together with the fetches that follow it, fetches together."""
        operation = self._plan.operation(self._position)
        commits = operation.kind in (OperationKind.COMMIT, OperationKind.SNAPSHOT)
        if not commits and operation.kind is not OperationKind.FETCH:
            self._alone(operation)
            self._advance(operation)
            return
        first, batch = self._position, [operation]
        while len(batch) < self._shape.fetches_at_once + commits:
            following = self._plan.operation(first + len(batch))
            if following.kind is not OperationKind.FETCH:
                break
            batch.append(following)
        tasks = [self._commit(operation, first)] if commits else []
        tasks += [self._fetch(fetch) for fetch in batch[commits:]]
        await asyncio.gather(*tasks)
        for done in batch:
            self._advance(done)

    def _advance(self, operation: SoakOperation) -> None:
        self._counts[operation.kind.value] += 1
        if operation.kind not in (OperationKind.COMMIT, OperationKind.SNAPSHOT):
            self._plan.apply(self._model, self._position)
        self._position += 1

    async def _fetch(self, operation: SoakOperation) -> None:
        lease = await self._store.fetch_async([key_of(r) for r in operation.records], operation.groups)
        loop = asyncio.get_running_loop()
        with lease:
            checked = await asyncio.gather(
                *(
                    loop.run_in_executor(self._pool, self._check, lease, record, operation.groups)
                    for record in operation.records
                )
            )
        self._counts["verified_bytes"] += sum(checked)

    async def _commit(self, operation: SoakOperation, position: int) -> None:
        snapshot = snapshot_name(position) if operation.kind is OperationKind.SNAPSHOT else None
        self.say("begin", position=position)
        begun = time.perf_counter()
        # Concurrent fetches change nothing, so the commit holds the state at its request.
        self._plan.apply(self._model, position)
        state = {"position": str(position).encode()}
        if position % 2:
            generation = await self._store.commit_async(state, snapshot=snapshot)
        else:
            generation = self._store.commit(state, snapshot=snapshot)
        if generation != self._model.generation:
            raise SoakFailure(f"commit {self._model.generation} was acknowledged as {generation}")
        self.say("done", position=position, commit_s=time.perf_counter() - begun)
        self._report()

    def _alone(self, operation: SoakOperation) -> None:
        keys = [key_of(record) for record in operation.records]
        match operation.kind:
            case OperationKind.UPDATE:
                version = self._position + 1
                gradients = {
                    key: gradient(self._shape.seed, record, version, self._shape.schema(record).numel)
                    for key, record in zip(keys, operation.records, strict=True)
                }
                self._store.update(gradients, lr=LEARNING_RATE)
            case OperationKind.PREFETCH:
                self._store.prefetch(keys, operation.groups)
            case OperationKind.VERIFY:
                self._verify()
            case OperationKind.REOPEN:
                self._count_engine()
                self._store.close()
                self._model.reopen()
                self._open_store(create=False)
            case OperationKind.MISUSE:
                self._misuse(operation)
            case _:
                raise AssertionError(operation.kind)

    # Checking -----------------------------------------------------------------------------------------------

    def _check(self, lease: Lease, record: int, groups: Sequence[Group]) -> int:
        """Compare the fetched sections of ``record`` with the model; returns the number of right bytes. On any thread."""
        checked = 0
        schema, view = self._shape.schema(record), lease[key_of(record)]
        expected = content(self._shape.seed, record, self._model.versions[record], schema)
        for group in groups:
            for section in schema.layout(group).sections:
                found = view.copy(section.name)
                wrong = wrong_bytes(found, expected[section.name])
                if wrong:
                    raise SoakFailure(
                        f"{key_of(record)}, section {section.name}: {wrong} of {found.nbytes} bytes are not those of "
                        f"version {self._model.versions[record]}",
                        wrong=wrong,
                    )
                checked += found.nbytes
        return checked

    def _check_all(self) -> None:
        """Check every record through the store, at the live version."""
        groups = (Group.WEIGHTS, Group.MOMENTS)
        for record in range(self._shape.records):
            with self._store.fetch([key_of(record)], groups) as lease:
                self._counts["verified_bytes"] += self._check(lease, record, groups)

    def _verify(self) -> None:
        report = self._store.verify()
        if report.failures:
            raise SoakFailure(f"verify: {report.failures[0]}", wrong=1)

    def _misuse(self, operation: SoakOperation) -> None:
        """Do something that must be refused with the documented error. What it may have changed shows later."""
        misuse, expected = operation.misuse, _REFUSALS[operation.misuse]
        try:
            self._do_wrong(misuse, operation.records[0])
        except Exception as error:
            if type(error) is not expected:
                raise SoakFailure(
                    f"{misuse.value}: {type(error).__name__} ({error}), expected {expected.__name__}"
                ) from error
            self._counts[f"refused: {misuse.value}: {expected.__name__}"] += 1
            return
        raise SoakFailure(f"{misuse.value}: accepted, expected {expected.__name__}")

    def _do_wrong(self, misuse: Misuse, record: int) -> None:
        store, key, schema = self._store, key_of(record), self._shape.schema(record)
        match misuse:
            case Misuse.UNKNOWN_KEY:
                store.fetch(["no such record"])
            case Misuse.LEASED_UPDATE:
                with store.fetch([key]):
                    store.update({key: np.zeros(schema.numel, np.float32)}, lr=LEARNING_RATE)
            case Misuse.WRONG_GRADIENT:
                store.update({key: np.zeros(schema.numel + 1, np.float32)}, lr=LEARNING_RATE)
            case Misuse.TOO_MUCH_AT_ONCE:
                everything = [key_of(r) for r in range(self._shape.records)]
                store.fetch(everything, (Group.WEIGHTS, Group.MOMENTS)).release()
            case Misuse.SECOND_OPENER:
                ParameterStore.open(self._directory, self._config(), adamw=FORGETFUL).close()
            case Misuse.TAKEN_NAME:
                store.register(key, schema.name)


def _main() -> None:
    request = json.loads(sys.stdin.buffer.readline())
    worker = SoakWorker(request, commands=sys.stdin.fileno(), out=sys.stdout.fileno())
    try:
        worker.run()
    except Exception as error:
        wrong = error.wrong_bytes if isinstance(error, SoakFailure) else 0
        worker.say("failure", error=type(error).__name__, text=str(error), wrong_bytes=wrong)
        sys.exit(1)


if __name__ == "__main__":
    _main()
