"""What experiments share: real ranks on this machine, an emulated device, and how findings are printed.

A rank is a process of its own; ranks meet on the loopback, or in network namespaces. The emulated device is the calling
thread asleep: what is computed, sent and waited for is what a training run does, and only products with an expert's
weights, or whole passes, take the time that they would take on such a device. So figures hold on a machine that others
use, and with fewer cores than ranks.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from tierstore.bench.harness import FigureTable
from tierstore.bench.namespaces import RankNamespace
from tierstore.cli.output import Output, OutputMode
from tierstore.dense import DenseConfig, DenseSlices, GatherOnDemand
from tierstore.dense.layout import UnitLayout
from tierstore.errors import TierstoreError
from tierstore.links import wait_until
from tierstore.machine_profile import Cost
from tierstore.model import Transformer
from tierstore.moe.source import ExpertLease, ExpertSource
from tierstore.outputs import to_json
from tierstore.parallel import RankGroup
from tierstore.parallel.layout import local_environments
from tierstore.store.adamw import AdamWConfig

T = TypeVar("T")
TIMEOUT_S = 600.0
_CLONE_NEWNET = 0x40000000
#: What ranks import is imported once, by the process that they are forked from.
PRELOADED = ("torch.distributed.pipelining", "tierstore.train.session")
#: Products with its weights that an expert has in a pass: two either way.
_PRODUCTS = 2


def run_ranks(
    function: Callable[..., T], count: int, *arguments: object, namespaces: Sequence[RankNamespace] = ()
) -> list[T]:
    """``function(*arguments)`` on each of ``count`` ranks at once; what each returned, in rank order. With ``namespaces``
    each rank lives in its own.

    ``function`` is of a module; it finds its rank as ``tierstore.parallel.launch`` does. Raises RuntimeError, naming the
    rank, when one fails or gives no answer within ``TIMEOUT_S`` seconds; the others are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    ranks = []
    for rank, environ in enumerate(local_environments(count)):
        ours, theirs = context.Pipe(duplex=False)
        environ |= {
            "LOCAL_WORLD_SIZE": str(count),
            "OMP_WAIT_POLICY": "passive",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        inside = namespaces[rank] if namespaces else None
        process = context.Process(
            target=_as_rank, args=(theirs, environ, inside, function, arguments), daemon=True
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        until = time.monotonic() + TIMEOUT_S
        return [_answer(rank, ours, until) for rank, (_, ours) in enumerate(ranks)]
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()


def _answer(rank: int, pipe: Connection, until: float) -> Any:
    if not pipe.poll(max(0.0, until - time.monotonic())):
        raise RuntimeError(f"rank {rank}: no answer in time")
    try:
        failed, answer = pipe.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank}: ended without an answer") from None
    if failed:
        raise RuntimeError(f"rank {rank}: {answer}")
    return answer


def _as_rank(
    pipe: Connection,
    environ: Mapping[str, str],
    inside: RankNamespace | None,
    function: Callable[..., object],
    arguments: Sequence[Any],
) -> None:
    os.environ.update(environ)
    if inside is not None:
        # This thread alone enters it; those of Gloo are made from this one.
        with open(f"/run/netns/{inside.name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns", namespace.name)
        os.environ.update(inside.environment)
    torch.set_num_threads(1)
    try:
        pipe.send((False, function(*arguments)))
    except Exception as error:
        pipe.send((True, f"{type(error).__name__}: {error}"))
    pipe.close()
    # Gloo's threads have aborted processes whose interpreter was being taken apart; the answer is out.
    os._exit(0)


def timed(group: RankGroup, step: Callable[[], object], count: int = 1) -> float:
    """Seconds of a ``step``, of ``count``: between barriers of ``group``, so that all ranks see those of the slowest."""
    group.barrier()
    started = time.perf_counter()
    for _ in range(count):
        step()
    group.barrier()
    return (time.perf_counter() - started) / count


class DenseTraining:
    """Steps of ``model``, whose parameters, all of them of ``units``, lie in slices on the ranks of ``group``."""

    def __init__(
        self,
        model: Transformer,
        units: Sequence[tuple[str, Sequence[nn.Parameter]]],
        layouts: Sequence[UnitLayout],
        group: RankGroup,
        config: DenseConfig,
    ) -> None:
        self.model, self.group = model, group
        cpu, adamw = torch.device("cpu"), AdamWConfig()
        self.slices = DenseSlices(units, layouts, group=group, device=cpu, adamw=adamw, config=config)
        self.slices.attach(model, GatherOnDemand(self.slices, config.reshard))

    def step(self, tokens_BT: Tensor) -> float:
        """One step over ``tokens_BT``, each of which but the first is predicted; its loss."""
        self.slices.zero_grad()
        self.slices.begin_micro()
        output = self.model(tokens_BT[:, :-1], tokens_BT[:, 1:])
        torch.autograd.backward(output.objective / self.group.size)
        self.slices.end_micro()
        self.slices.finish()
        self.slices.step(1e-3)
        return float(output.loss.detach())


# The emulated device ----------------------------------------------------------------------------------------


def taking(x: Tensor, forward_s: float, backward_s: float) -> Tensor:
    """``x``, whose forward and backward pass take these seconds on a device that the rank waits for."""

    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            wait_until(time.monotonic_ns() + round(forward_s * 1e9))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            wait_until(time.monotonic_ns() + round(backward_s * 1e9))
            return gradient

    apply: Any = Passing.apply
    passed: Tensor = apply(x)
    return passed


class SleepingDevice:
    """A device on which an expert's forward pass over a number of rows costs ``speed``, and its backward pass twice that.
    It computes one product after another, while the thread that launches waits.
    """

    def __init__(self, speed: Cost) -> None:
        self.speed = speed
        #: What is launched takes this many times as long as a forward pass.
        self.times = 1

        class SlowWeights(Tensor):
            @classmethod
            def __torch_function__(
                cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
            ) -> Any:
                made = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
                if func is torch.mm:
                    self.product(args[0].shape[0])
                return made

        self._slow_weights = SlowWeights

    def product(self, rows: int) -> None:
        """Returns when one of an expert's products over ``rows`` rows is done."""
        spent = self.times * self.speed.seconds(rows) / _PRODUCTS
        if spent > 0:
            wait_until(time.monotonic_ns() + round(spent * 1e9))

    def holding(self, flat: Tensor) -> Tensor:
        """``flat`` as weights whose products, and those of its views, take their time here."""
        return flat.as_subclass(self._slow_weights)


class SlowExperts:
    """The experts of ``source``, whose products take their time on ``device``."""

    def __init__(self, source: ExpertSource, device: SleepingDevice) -> None:
        self._source, self._device = source, device

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        return self._slow(self._source.forward(layer, experts), times=1)

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        return self._slow(self._source.backward(layer, experts), times=2)

    def _slow(self, leases: Iterator[ExpertLease], *, times: int) -> Iterator[ExpertLease]:
        for lease in leases:
            self._device.times = times
            yield replace(lease, weights=self._device.holding(lease.flat))


# Options and findings ---------------------------------------------------------------------------------------


def options(description: str | None, **defaults: Any) -> argparse.Namespace:
    """The options of an experiment: ``--name`` for each of ``defaults``, of its type; several values for a tuple, none for
    False.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        kind = type(default[0]) if isinstance(default, tuple) else str if default is None else type(default)
        several = "+" if isinstance(default, tuple) else None
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
            continue
        parser.add_argument(flag, type=kind, nargs=several, default=default, help=f"default: {default}")
    return parser.parse_args()


def table(title: str, rows: Sequence[Mapping[str, object]], *keys: str, **headings: str) -> None:
    """Prints what ``rows`` have of ``keys``, as benchmarks print figures: each value in the unit that its key ends in, under
    the key without it, or under that of ``headings``.
    """
    made = FigureTable.of_keys(title, rows, *keys, **headings)
    OUTPUT.table(title, list(made.columns), made.cells)


def finish(findings: object, failures: Sequence[str] = ()) -> None:
    """Prints ``findings`` as one line of JSON (numbers that are not finite as null), and ends: with status 1 where there
    are ``failures``, which it names.
    """
    print(json.dumps(to_json(findings), allow_nan=False), flush=True)
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(1 if failures else 0)


def start(main: Callable[[], None]) -> NoReturn:
    """Runs an experiment. What cannot be measured here ends it with one line and status 2."""
    try:
        main()
    except (TierstoreError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


#: Where experiments print.
OUTPUT = Output(OutputMode.HUMAN)
