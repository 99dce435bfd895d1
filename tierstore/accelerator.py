"""Accelerator support: what ``torch.accelerator``, ``torch.Stream`` and ``torch.Event`` lack.

Device code uses this module or those APIs, never ``torch.cuda``, so it runs on CUDA and on the device that the tests
simulate. ``has_own_memory`` tells an accelerator from the CPU. torch is imported at first use.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import platform
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tierstore.capabilities import Capability, Finding, resolve
from tierstore.errors import BudgetError
from tierstore.stats import Cause, StallLedger, Tier

if TYPE_CHECKING:
    import torch

    from tierstore._native import Arena

_LOG = logging.getLogger("tierstore.accelerator")
#: ``cudaHostRegisterPortable``: every context of the process may copy to and from the memory.
_PORTABLE = 1
#: The waits of the thread that steps for devices, in ``read``. They are no stalls: the device computes meanwhile.
device_waits = StallLedger()


def accelerator_type() -> str | None:
    """torch's name of the available accelerator (``cuda``); None if there is none, or if it cannot register host memory."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and hasattr(_module(found), "cudart") else None


def device_count() -> int:
    """The number of accelerators."""
    import torch

    return 0 if accelerator_type() is None else torch.accelerator.device_count()


def has_own_memory(device: torch.device) -> bool:
    """Whether ``device`` is not the CPU: it has its own memory and runs asynchronously to the host."""
    return device.type != "cpu"


def identity(device: torch.device) -> str:
    """An identifier that is unique to the accelerator, across machines."""
    return f"{platform.node()} {_module(device).get_device_properties(device).uuid}"


def make_current(device: torch.device) -> None:
    """Make ``device`` the default, so that the first device does not get a context, too. Does nothing on the CPU."""
    import torch

    if has_own_memory(device):
        torch.accelerator.set_device_index(device)


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on ``device``. Does nothing on the CPU."""
    import torch

    if has_own_memory(device):
        torch.accelerator.synchronize(device)


def reached(device: torch.device) -> torch.Event:
    """An event that completes when the current stream of ``device`` has done all work queued so far."""
    import torch

    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


class DeviceClock:
    """Tells when the streams of ``device`` reach points in their work. Waits for the device once, when it is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin = self.mark()
        self._origin.synchronize()
        self._origin_ns = time.monotonic_ns()

    def mark(self, stream: torch.Stream | None = None) -> torch.Event:
        """An event behind all work that ``stream`` (None: the current one) has so far."""
        import torch

        event = torch.Event(self._device, enable_timing=True)
        event.record(stream or torch.accelerator.current_stream(self._device))
        return event

    def time_ns(self, event: torch.Event) -> int:
        """When the device reached the completed ``event``, in nanoseconds of CLOCK_MONOTONIC. Later events are measured from
        it, since the device counts milliseconds in fp32.
        """
        self._origin_ns += round(self._origin.elapsed_time(event) * 1e6)
        self._origin = event
        return self._origin_ns


@contextlib.contextmanager
def following(stream: torch.Stream) -> Iterator[None]:
    """Queue work on ``stream``, behind all work that the current stream has so far."""
    stream.wait_event(reached(stream.device))
    with stream:
        yield


def pinned_bytes(nbytes: int) -> int:
    """Bytes that torch's pinned-memory allocator takes for ``nbytes``: the next power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy the CPU tensor ``host`` to ``device``; on the CPU, return ``host`` itself. The host does not wait for the copy:
    torch's pinned-memory allocator keeps the source until the copy has ended.
    """
    return host.pin_memory().to(device, non_blocking=True) if has_own_memory(device) else host


def read(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copy ``tensors``, all on one device, to the host, waiting for the device once. On the CPU, return them unchanged."""
    device = tensors[0].device
    if not has_own_memory(device):
        return list(tensors)
    import torch

    found = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    with device_waits.stall(layer=None, tier=Tier.DEVICE, cause=Cause.COMPUTING):
        torch.accelerator.current_stream(device).synchronize()
    return found


def usable_bytes(device: torch.device) -> int:
    """Free bytes of ``device`` (not the CPU) minus ``device_reserve``; may be negative."""
    import torch

    free, total = torch.accelerator.get_memory_info(device)
    return int(free) - device_reserve(int(total))


def device_reserve(total: int) -> int:
    """The tenth of ``total`` bytes of device memory that plans leave free: for allocator fragmentation, workspaces of
    kernels and collectives, and errors in activation estimates.
    """
    return total // 10


@contextlib.contextmanager
def memory_errors(device: torch.device, settings: str) -> Iterator[None]:
    """Turn torch's OutOfMemoryError into BudgetError. ``settings`` names the settings to lower."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise BudgetError(f"{device} is out of memory: {reason}; lower {settings}") from error


def backends(device: torch.device) -> str:
    """The ``backend`` argument of ``init_process_group`` for ranks that compute on ``device``."""
    import torch.distributed as dist

    if not has_own_memory(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of the random number generator of ``device``, as bytes on the host."""
    state: torch.Tensor = _module(device).get_rng_state(device)
    return state


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    _module(device).set_rng_state(state, device)


@contextlib.contextmanager
def pinned(arena: Arena, device: torch.device, setting: Capability) -> Iterator[Finding]:
    """Register ``arena`` with ``device``, if possible, so that copies to and from it are asynchronous. No copy may be in
    flight when the context ends. Registers nothing on the CPU.

    Raises CapabilityError if ``setting`` is ON and the device refuses, RuntimeError if it fails to unregister.
    """
    if not has_own_memory(device):
        yield Finding(False, "the CPU computes")
        return

    def register() -> Finding:
        status = int(_module(device).cudart().cudaHostRegister(arena.address, arena.nbytes, _PORTABLE))
        if status:
            return Finding(False, f"cudaHostRegister of {arena.nbytes} bytes failed with status {status}")
        return Finding(True, "registered")

    found = resolve("pinned_memory", setting, register)
    if not found and setting is not Capability.OFF:
        _LOG.warning("pinned_memory: copies to and from %s block their caller: %s", device, found.reason)
    try:
        yield found
    finally:
        if found:
            status = int(_module(device).cudart().cudaHostUnregister(arena.address))
            if status:
                raise RuntimeError(f"cudaHostUnregister failed with status {status}")


def probe_accelerator() -> Finding:
    """Whether torch finds a device that tierstore can use."""
    if importlib.util.find_spec("torch") is None:
        return Finding(False, "torch is not installed")
    import torch

    if accelerator_type() is not None:
        return Finding(True, str(_module(torch.accelerator.current_accelerator()).get_device_name(0)))
    if torch.version.cuda is None:
        return Finding(False, f"torch {torch.__version__} is built without CUDA")
    return Finding(False, "torch finds no CUDA device")


def _module(device: torch.device | None) -> Any:
    """torch's module for a type of device: ``torch.cuda``, or the module that another backend registered."""
    import torch

    return torch.get_device_module(device)
