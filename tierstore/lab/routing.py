"""Expert routing as events: from the experts that tokens chose to the accesses of decoding and of training.

A record is one expert of one layer, number ``layer * experts + expert``. A step of *decoding* is one access a
layer, forward. A step of *training* is layers 0 to L-1 forward, then L-1 to 0 backward, where each expert
that took part is needed again, and is dirty after the access (its optimizer step).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tierstore.cache.access import Need, Phase
from tierstore.trace.format import EventColumns, RecordTable, TraceKind

FORWARD, BACKWARD = Phase.FORWARD.value, Phase.BACKWARD.value
_STEPS_AT_ONCE_CELLS = 1 << 24  # of masks held at a time
_NUMBERS = 7  # of sequences that an access can tell apart


class Passes(enum.Enum):
    """The passes of a step."""

    FORWARD = "forward"
    FORWARD_BACKWARD = "forward-backward"


class Sections(enum.Enum):
    """The groups of a record: one, or weights and (twice as large) moments, which move separately."""

    WHOLE = "whole"
    SPLIT = "split"


def expert_table(layers: NDArray[np.integer], *, sections: Sections, weight_bytes: int) -> RecordTable:
    """Experts of one size, all stored; ``layers`` [experts] is the layer of each. Weights are one frame."""
    split = sections is Sections.SPLIT
    moments = 2 if split else 0
    return RecordTable.of_columns(
        layers,
        (1, moments, 0),
        (weight_bytes, moments * weight_bytes, 0),
        0b011 if split else 0b001,
        count=len(layers),
    )


def expert_unit_flags(phases: NDArray[np.uint8], sections: Sections) -> NDArray[np.uint16]:
    """Flags of units in accesses of these phases: backward needs every section and leaves it dirty."""
    backward = 0b011_011 if sections is Sections.SPLIT else 0b001_001
    return np.where(phases == BACKWARD, np.uint16(backward), np.uint16(1)).astype(np.uint16)


def expert_masks(topk: NDArray[np.integer], tokens: NDArray[np.int64], experts: int) -> NDArray[np.bool_]:
    """Masks of the experts that any token of a step chose: [steps, layers, experts].

    ``topk`` [all tokens, layers, k] are expert ids, ``tokens`` [steps, tokens a step] indices into it.
    """
    steps, layers = len(tokens), topk.shape[1]
    masks = np.zeros((steps, layers, experts), np.bool_)
    step = np.arange(steps)[:, None, None, None]
    masks[step, np.arange(layers)[:, None], topk[tokens]] = True
    return masks


def expert_requesters(
    topk: NDArray[np.integer], tokens: NDArray[np.int64], numbers: NDArray[np.uint8], experts: int
) -> NDArray[np.uint8]:
    """The sequences that chose an expert, a bit each: [steps, layers, experts].

    ``numbers`` [steps, sequences] are those of the sequences that ``tokens`` [steps, sequences] belong to, 0 to 6.
    """
    steps, layers = len(tokens), topk.shape[1]
    requesters = np.zeros((steps, layers, experts), np.uint8)
    step, layer = np.arange(steps)[:, None, None], np.arange(layers)[:, None]
    for slot in range(tokens.shape[1]):
        bits = np.left_shift(np.uint8(1), numbers[:, slot])[:, None, None]
        requesters[step, layer, topk[tokens[:, slot]]] |= bits
    return requesters


def routing_events(
    masks: NDArray[np.bool_],
    *,
    first_step: int,
    passes: Passes,
    sections: Sections,
    requesters: NDArray[np.uint8] | None = None,
) -> EventColumns:
    """The accesses of the steps in ``masks`` [steps, layers, experts], each step followed by its end.

    A layer that no token chose is no access. ``requesters``, with forward passes alone: as ``expert_requesters`` gives them.
    """
    steps, layers, experts = masks.shape
    order = np.arange(layers)
    phase = np.full(layers, FORWARD, np.uint8)
    if passes is Passes.FORWARD_BACKWARD:
        masks = np.concatenate((masks, masks[:, ::-1]), axis=1)
        order = np.concatenate((order, order[::-1]))
        phase = np.concatenate((phase, np.full(layers, BACKWARD, np.uint8)))
    width = len(order)
    step, pass_of, expert = np.nonzero(masks)
    flags = expert_unit_flags(phase[pass_of], sections)
    if requesters is not None:
        flags |= requesters[step, pass_of, expert].astype(np.uint16) * np.uint16(Need.FIRST_SEQUENCE)
    counts = np.zeros((steps, width + 1), np.int64)  # the last column: the step's end
    counts[:, :width] = masks.sum(axis=2)
    kinds = np.full((steps, width + 1), TraceKind.ACCESS, np.uint8)
    kinds[:, width] = TraceKind.END_STEP
    asked = (counts > 0) | (kinds == TraceKind.END_STEP)
    return EventColumns.build(
        counts[asked],
        order[pass_of] * experts + expert,
        kinds=kinds[asked],
        phases=np.broadcast_to(np.append(phase, Phase.INIT), asked.shape)[asked],
        layers=np.broadcast_to(np.append(order, 0), asked.shape)[asked],
        steps=np.repeat(np.arange(first_step, first_step + steps), asked.sum(axis=1)),
        flags=flags,
    )


def step_blocks(
    tokens: NDArray[np.int64], layers: int, experts: int, k: int
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yields ``tokens`` [steps, tokens a step] in blocks of steps, each with its first step.

    Blocks bound the memory of the masks, and of the ids behind them: ``k`` for each token and layer, eight bytes each.
    """
    cells = max(1, 2 * layers * experts, 8 * tokens.shape[1] * layers * k)
    at_once = max(1, _STEPS_AT_ONCE_CELLS // cells)
    for first in range(0, len(tokens), at_once):
        yield first, tokens[first : first + at_once]


def decoded_sequences(
    prompt_len: NDArray[np.integer], sequences: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The token that each of ``sequences`` slots decodes at each step, as an index, and the number by which accesses
    identify its sequence, 0 to 6: [steps, sequences] each.

    Prompts are taken in order, each by the slot that is free first (of equals the lowest), and decoded one
    token a step. It ends when a slot is free and no prompt is left, so that every step has all sequences.

    A prompt gets the number that has been free for longest (among equals the lowest), so that it is not mistaken for the
    previous prompt; with seven sequences or more, its slot's number modulo 7.
    """
    slot_free_at = np.zeros(sequences, np.int64)
    placed: list[tuple[int, int, int, int]] = []
    token = 0
    for length in prompt_len.tolist():
        slot = int(np.argmin(slot_free_at))
        placed.append((int(slot_free_at[slot]), slot, length, token))
        slot_free_at[slot] += length
        token += length
    steps = int(slot_free_at.min())
    tokens, numbers = np.zeros((steps, sequences), np.int64), np.zeros((steps, sequences), np.uint8)
    number_free_at = [0] * _NUMBERS
    for begin, slot, length, token in sorted(placed):
        end = min(begin + length, steps)
        if begin >= end:
            continue
        number = slot % _NUMBERS
        if sequences < _NUMBERS:
            free = [number for number in range(_NUMBERS) if number_free_at[number] <= begin]
            number = min(free, key=lambda number: (number_free_at[number], number))
        number_free_at[number] = max(number_free_at[number], end)
        tokens[begin:end, slot] = np.arange(token, token + end - begin)
        numbers[begin:end, slot] = number
    return tokens, numbers
