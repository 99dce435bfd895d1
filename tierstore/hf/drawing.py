"""The states of the random generators that a pass draws from: the host's, and its device's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Bytes of a value.
_VALUE = 8


def generator_states(devices: Sequence[torch.device]) -> Tensor:
    """The states of the host's generator and of those of ``devices``, as int64 values on the host."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return torch.cat(states).view(torch.int64)


def set_generator_states(values: Tensor, devices: Sequence[torch.device]) -> None:
    """Takes up what ``generator_states`` gave."""
    states, begin = values.contiguous().view(torch.uint8), 0
    for device, size in zip([None, *devices], _sizes(devices), strict=True):
        # In memory of its own: torch 2.13 reads a state as a struct, and crashes where it is not aligned as one.
        state = states[begin : begin + size].clone()
        begin += size
        if device is None:
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)


def state_values(devices: Sequence[torch.device]) -> int:
    """How many values ``generator_states`` gives."""
    return sum(_sizes(devices)) // _VALUE


def _sizes(devices: Sequence[torch.device]) -> list[int]:
    return [
        torch.get_rng_state().numel(),
        *(torch.cuda.get_rng_state(device).numel() for device in devices),
    ]
