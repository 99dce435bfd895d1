"""The device that computes where it is not the CPU: what ``torch.accelerator``, ``torch.Stream`` and ``torch.Event`` lack.

Code that uses a device asks here or there, never ``torch.cuda``: it runs on CUDA, and on the device that the tests
simulate. Whoever must know asks ``has_own_memory``. Imports torch at first use.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tierstore.capabilities import Capability, Finding, Resolution, resolve
from tierstore.errors import BudgetError

if TYPE_CHECKING:
    import torch

    from tierstore._native import Arena

_LOG = logging.getLogger("tierstore.accelerator")
#: ``cudaHostRegisterPortable``: every context of the process may copy to and from the memory.
_PORTABLE = 1


def accelerator_type() -> str | None:
    """What torch calls the accelerator that there is (``cuda``); None where there is none, or none that registers host
    memory.
    """
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and hasattr(_module(found), "cudart") else None


def device_count() -> int:
    """How many accelerators there are."""
    import torch

    return 0 if accelerator_type() is None else torch.accelerator.device_count()


def has_own_memory(device: torch.device) -> bool:
    """Whether ``device`` computes with memory of its own, and goes on while the host does: it is not the CPU."""
    return device.type != "cpu"


def identity(device: torch.device) -> str:
    """What no other accelerator, of this machine or another, is called."""
    return f"{platform.node()} {_module(device).get_device_properties(device).uuid}"


def make_current(device: torch.device) -> None:
    """What names no device uses ``device`` from now on: without it, the first one would be given a context, too."""
    import torch

    if has_own_memory(device):
        torch.accelerator.set_device_index(device)


def synchronize(device: torch.device) -> None:
    """Waits until ``device`` has done all that is queued. Nothing on the CPU."""
    import torch

    if has_own_memory(device):
        torch.accelerator.synchronize(device)


def reached(device: torch.device) -> torch.Event:
    """An event that occurs when the current stream of ``device`` has done all work queued so far."""
    import torch

    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


@contextlib.contextmanager
def following(stream: torch.Stream) -> Iterator[None]:
    """Work goes to ``stream``, after all that the current stream has so far."""
    stream.wait_event(reached(stream.device))
    with stream:
        yield


def pinned_bytes(nbytes: int) -> int:
    """What torch's allocator of pinned memory takes for ``nbytes``: the next power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``host``, a CPU tensor, on ``device``. The host does not wait for the copy: pinned memory of torch's allocator holds
    the content until the copy has ended. On the CPU ``host`` itself.
    """
    return host.pin_memory().to(device, non_blocking=True) if has_own_memory(device) else host


def read(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """``tensors``, all of one device, on the host, which waits for the device once. On the CPU ``tensors`` themselves."""
    device = tensors[0].device
    if not has_own_memory(device):
        return list(tensors)
    import torch

    found = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    torch.accelerator.current_stream(device).synchronize()
    return found


def usable_bytes(device: torch.device) -> int:
    """Memory of ``device``, which is not the CPU, that is free now beside ``device_reserve``; may be negative."""
    import torch

    free, total = torch.accelerator.get_memory_info(device)
    return int(free) - device_reserve(int(total))


def device_reserve(total: int) -> int:
    """What is never planned with of ``total`` bytes of device memory, a tenth: the allocator's fragments, workspaces of
    kernels and of collectives, and what estimates of activations miss.
    """
    return total // 10


@contextlib.contextmanager
def memory_errors(device: torch.device, settings: str) -> Iterator[None]:
    """Raises BudgetError in place of torch's OutOfMemoryError. ``settings``: names of those to lower."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise BudgetError(f"{device} is out of memory: {reason}; lower {settings}") from error


def backends(device: torch.device) -> str:
    """The backends of ranks that compute on ``device``, as ``init_process_group`` takes them."""
    import torch.distributed as dist

    if not has_own_memory(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of the random numbers of ``device``, as bytes on the host."""
    state: torch.Tensor = _module(device).get_rng_state(device)
    return state


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    _module(device).set_rng_state(state, device)


@contextlib.contextmanager
def pinned(arena: Arena, device: torch.device, setting: Capability) -> Iterator[Resolution]:
    """Registers ``arena`` with ``device``, if it can be, so that copies to and from it are asynchronous. When the context
    ends, no copy may be in flight. On the CPU nothing is registered.

    Raises CapabilityError for ON where the device refuses, RuntimeError where it does not take the registration back.
    """
    if not has_own_memory(device):
        yield Resolution("pinned_memory", setting, Capability.OFF, "the CPU computes")
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
    """What torch has for one type of device: ``torch.cuda``, or what a backend registered in its place."""
    import torch

    return torch.get_device_module(device)
