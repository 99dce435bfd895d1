"""Calls of the residency core in few words: the columns of an access, decisions as pairs, one record after another."""

import numpy as np

from tierstore import _native
from tierstore._native import Decision


def units(records, flags=1):
    """The columns of an access: records, and for each the same ``flags``."""
    return np.array(records, np.uint32), np.full(len(records), flags, np.uint16)


def pairs(decided):
    """(decision, entry) for each."""
    return [
        (Decision(kind), entry) for kind, entry in zip(decided[0].tolist(), decided[1].tolist(), strict=True)
    ]


class Keys:
    """A core that is asked for one key at a time; ``frames`` of each key."""

    def __init__(self, capacity, policy, frames=(1,) * 10, **options):
        self.core = _native.Residency(capacity, policy=policy, policy_options=options)
        for size in frames:
            self.core.add_record(0, [size, 0, 0], [4096 * size, 0, 0], 1)

    def ask(self, key):
        """The keys that were evicted for it; None for a hit."""
        self.core.begin_access(0, 0, *units([key]))
        decided = pairs(self.core.next_group()[1])
        self.core.end_group()
        evicted = [entry // 4 for kind, entry in decided if kind in (Decision.EVICT, Decision.EVICT_WRITE)]
        return None if decided[-1][0] is Decision.HIT else evicted

    def asked(self, keys):
        return [self.ask(key) for key in keys]

    @property
    def starved(self):
        return self.core.stats().starved
