"""What an access requests: its phase, and the flags of each record, as the residency core and traces have them."""

from __future__ import annotations

from enum import IntEnum, IntFlag

#: Sequences of a batch that an access can distinguish.
SEQUENCES = 7

#: An entry of the host cache, one group of one record, has the number ``record * GROUP_STRIDE + group``.
GROUP_STRIDE = 4


class Phase(IntEnum):
    """Which part of the program an access belongs to (as in ``native/cache/policy.hpp``; policies may look at it)."""

    INIT = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    USER = 4
    EXPORT = 5


class Need(IntFlag):
    """Of each record: the groups that must be resident, that are dirty at the end, and that are then discarded."""

    WEIGHTS = 1 << 0
    MOMENTS = 1 << 1
    GRADIENTS = 1 << 2
    DIRTY_WEIGHTS = 1 << 3
    DIRTY_MOMENTS = 1 << 4
    DIRTY_GRADIENTS = 1 << 5
    DROP_GRADIENTS = 1 << 8

    #: In an access: the first sequence of a batch requests the record (in a prompt: with its last token); the bits
    #: above it are the next six's.
    FIRST_SEQUENCE = 1 << 9

    STEP = WEIGHTS | MOMENTS | DIRTY_WEIGHTS | DIRTY_MOMENTS
    ACCUMULATE = GRADIENTS | DIRTY_GRADIENTS
    STEP_SPILLED = STEP | GRADIENTS | DROP_GRADIENTS
