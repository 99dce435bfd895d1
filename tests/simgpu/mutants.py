"""Bugs in the order of copies, computation, messages and steps that the simulated device must find.

They were listed before the checker saw them. Each replaces the one place where ``old`` stands in ``file``.
"""

import importlib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import training_cases

from tierstore.parallel import Mesh


@dataclass(frozen=True)
class Mutant:
    """``pinned``: what goes wrong is in host memory that copies use while the host goes on."""

    name: str
    file: str
    old: str
    new: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    parallel: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False


_TIER = "tierstore/tiers/accelerated.py"
_HOST_BUFFERS = "tierstore/tiers/device.py"
_WALK = "tierstore/prefetch/walking.py"
_SLOTS = "tierstore/prefetch/device_cache.py"
_GRADIENTS = "tierstore/prefetch/gradients.py"
_EXPERTS = "tierstore/prefetch/experts.py"
_CACHE = "tierstore/cache/host_cache.py"
_BOUNDARIES = "tierstore/train/boundaries.py"
_MICRO = {"data.micro_batches": 2, "data.micro_order": "micro"}
_LAYER = {"data.micro_batches": 2, "data.micro_order": "layer"}
_TIGHT = {"host_budget": 200_000, "model.experts": 8}
#: All records fit, and no memory is left for spare buffers.
_NO_SPARE = {"host_budget": 320_000}
#: Experts are read in every pass, and no read has finished when what needs it is queued.
_SLOW_READS = _TIGHT | {"links.disk.latency": 0.01}
_GUARDED = "            self.walk.wait(guards, layer, Tier.HOST, Cause.OPTIMIZER)\n"

MUTANTS = [
    # Weights: slots of the device.
    Mutant("a load does not wait for its slot", _TIER, "self._up.stream.wait_event(idle)", "pass"),
    Mutant(
        "a released slot keeps its old event",
        _TIER,
        "        self._idle[slot] = reached(self.device)\n",
        "        pass\n",
    ),
    Mutant(
        "an event of another stream than computes",
        "tierstore/accelerator.py",
        "event.record(torch.accelerator.current_stream(device))",
        "event.record(torch.Stream(device))",
    ),
    Mutant("a ticket is done when its copy is queued", _TIER, "copy.queue().synchronize()", "copy.queue()"),
    Mutant(
        "a copy does not wait for what it follows",
        _TIER,
        "            self._engine.wait_all(copy.after)\n",
        "",
        _SLOW_READS,
    ),
    Mutant(
        "a load follows nothing",
        _SLOTS,
        "self._cache.sections(entry)[0], guards)",
        "self._cache.sections(entry)[0], [])",
        _SLOW_READS,
    ),
    Mutant(
        "a stepped expert is copied again while it is stepped",
        _SLOTS,
        "self._cache.sections(entry)[0], guards)",
        "self._cache.sections(entry)[0], [])",
        {"device_budget": 1 << 18},
    ),
    Mutant(
        "weights are used before they are there",
        _WALK,
        "        elif self._wait_again(awaited, record, layer):\n",
        "        elif False:\n",
        _SLOW_READS | {"prefetch.depth": 0},
    ),
    Mutant(
        "the compute stream does not wait for a load",
        _TIER,
        "torch.accelerator.current_stream(self.device).wait_event(self._loads[slot].queue())",
        "self._loads[slot].queue()",
    ),
    Mutant(
        "the host cache reads into memory that a load still copies",
        _SLOTS,
        "        self._cache.reads(entry, ticket)\n",
        "",
        _TIGHT,
        pinned=True,
    ),
    Mutant(
        "a slot is free before its expert is computed",
        _WALK,
        "            yield Arrived(unit, self.slots.weights(copy), last, False)\n            self.slots.release()\n",
        "            self.slots.release()\n            yield Arrived(unit, self.slots.weights(copy), last, False)\n",
    ),
    # Gradients: slots of the device, and the pinned buffers that they are copied to.
    Mutant(
        "a gradient is copied before it is complete",
        _TIER,
        "            self._down.stream.wait_event(made)\n",
        "",
    ),
    Mutant(
        "the copy of a gradient has no ticket",
        _TIER,
        "        return buffer, self._leaving.left(slot, self._down.submit(guards, copy).ticket)\n",
        "        self._leaving.left(slot, self._down.submit(guards, copy).ticket)\n        return buffer, []\n",
        pinned=True,
    ),
    Mutant(
        "a gradient slot is free at once",
        _TIER,
        "self._free.append((slot, self._leaving.end(slot, after)))",
        "self._leaving.end(slot, after); self._free.append((slot, []))",
        pinned=True,
    ),
    Mutant(
        "a host buffer is free at once",
        _HOST_BUFFERS,
        "self._free[spare].append((buffer, list(after)))",
        "self._free[spare].append((buffer, []))",
        _NO_SPARE,
        pinned=True,
    ),
    Mutant(
        "gradients share a host buffer",
        _TIER,
        "[(i * slots.gradient_bytes, slots.gradient_bytes)]",
        "[(0, slots.gradient_bytes)]",
        pinned=True,
    ),
    Mutant(
        "a copy on another stream than is waited for",
        _TIER,
        "                with self._stream:\n",
        "                with torch.Stream(self._stream.device):\n",
        pinned=True,
    ),
    Mutant(
        "AdamW does not follow the copy",
        _GRADIENTS,
        "squares=self._squares, after=after",
        "squares=self._squares, after=[]",
        pinned=True,
    ),
    Mutant(
        "a step that may wait does not follow the copy",
        _GRADIENTS,
        "number=step, after=after, priority",
        "number=step, after=[], priority",
        pinned=True,
    ),
    Mutant(
        "the norm of a gradient whose step may wait does not follow the copy",
        _GRADIENTS,
        "self._square(record, copied, self._dtype, after)",
        "self._square(record, copied, self._dtype, [])",
        pinned=True,
    ),
    Mutant(
        "the norm of a kept gradient does not follow its sum",
        _GRADIENTS,
        "record.number, dtype, after=after)",
        "record.number, dtype, after=[])",
        {**_MICRO, "clip_norm": 0.5},
    ),
    Mutant(
        "a sum does not follow the copy",
        _GRADIENTS,
        "before = [*after, *self._cache.before_write(entry)]",
        "before = self._cache.before_write(entry)",
        _MICRO,
        pinned=True,
    ),
    Mutant(
        "a host buffer does not wait for its step",
        _GRADIENTS,
        "reading = [ticket]",
        "reading = []",
        settings=_NO_SPARE,
        pinned=True,
    ),
    Mutant(
        "a gradient is written before its slot is free",
        _EXPERTS,
        _GUARDED + "            gradient = ",
        "            gradient = ",
        pinned=True,
    ),
    Mutant(
        "a sum is written before its slot is free",
        _EXPERTS,
        _GUARDED + "            expert, total = ",
        "            expert, total = ",
        _LAYER,
        pinned=True,
    ),
    # The host cache: memory that the engine reads and writes.
    Mutant(
        "a write does not follow the reads of its memory",
        _CACHE,
        "return [state.ready, *state.readers] if state.ready else list(state.readers)",
        "return []",
        _SLOW_READS | _MICRO,
    ),
    # Dense slices and block inputs on the host.
    Mutant(
        "slices of the host are used before they are there",
        "tierstore/dense/fusion.py",
        "            torch.accelerator.current_stream(self.memory.device).wait_event(self._copied)\n",
        "            pass\n",
        {"dense.optimizer_state": "host"},
    ),
    Mutant(
        "a block input leaves before it is there",
        _BOUNDARIES,
        "            stream.wait_event(made)\n",
        "",
        _LAYER,
    ),
    Mutant(
        "a block input's memory is used again before it has left",
        _BOUNDARIES,
        "tensor.record_stream(stream)",
        "pass",
        _LAYER,
    ),
    Mutant(
        "a block input is used before it has come back",
        _BOUNDARIES,
        "torch.accelerator.current_stream(self._device).wait_event(copied.queue())",
        "copied.queue()",
        _LAYER,
    ),
    Mutant(
        "a block input is written to disk before it has left the device",
        _BOUNDARIES,
        "        return () if copied is None else (copied.ticket,)\n",
        "        return ()\n",
        training_cases.WAYS["boundaries"],
        pinned=True,
    ),
    # Messages between ranks.
    Mutant(
        "dense parameters are used before they are gathered",
        "tierstore/dense/fusion.py",
        "        for work in self._works:\n            work.wait()\n",
        "",
        ranks=2,
    ),
    Mutant(
        "dense gradients are used before they are summed",
        "tierstore/dense/buckets.py",
        "            work.wait()\n",
        "",
        ranks=2,
    ),
    Mutant(
        "rows are used before they have arrived",
        "tierstore/parallel/collectives.py",
        "        self._finish, self._charge = finish, charge\n",
        "        self._finish, self._charge, self._pending = finish, charge, None\n",
        ranks=2,
    ),
    Mutant(
        "replicas' gradients leave before they are summed",
        _GRADIENTS,
        "            work.wait()\n        for step in complete:",
        "            pass\n        for step in complete:",
        ranks=2,
        parallel={"expert": 1},
    ),
    Mutant(
        "replicas' sums are spread before they have come",
        "tierstore/parallel/collectives.py",
        "            gathering.wait()\n",
        "",
        {"model.d_ff": 128},
        ranks=4,
        parallel={"expert": 1},
    ),
]


def violations_of(
    mesh: Mesh, store: Path, number: int | None, settings: Mapping[str, Any], text: str
) -> dict[str, int]:
    """What a run with mutant ``number`` of ``MUTANTS`` (None: with none) breaks, even if it ends with an error."""
    import simulated

    if number is not None:
        apply(MUTANTS[number])
    try:
        training_cases.train(mesh, store, settings, text)
    except Exception as error:
        return {**simulated.violations(), f"ended with {type(error).__name__}: {error}": 0}
    return simulated.violations()


def apply(mutant: Mutant) -> None:
    """Puts the mutant's code into the functions of the imported module, wherever they are known already."""
    module = importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))
    source = Path(str(module.__file__)).read_text()
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: stands {source.count(mutant.old)} times in {mutant.file}")
    changed = dict(vars(module))
    exec(compile(source.replace(mutant.old, mutant.new), str(module.__file__), "exec"), changed)
    _take_code(vars(module), changed)


def _take_code(into: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    for name, old in into.items():
        new = changed.get(name)
        if isinstance(old, types.FunctionType) and isinstance(new, types.FunctionType):
            if old.__code__.co_filename == new.__code__.co_filename:
                old.__code__ = new.__code__
        elif (
            isinstance(old, type)
            and isinstance(new, type)
            and old.__qualname__ == new.__qualname__
            and old is not new
        ):
            _take_code(vars(old), vars(new))
