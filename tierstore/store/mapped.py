"""Leases of frozen records' weights in mappings of their files, without a copy in the host cache.

Behind a DAX file system the processor loads from persistent memory as from any other (AppDirect), so the CPU can compute
with such weights in place. Mappings are read only, and the records are written once. A mapping lives as long as its last
view. The host cache takes no part: these records have no frames in it, and count as neither hits nor misses. Records that
are trained, or in no commit yet, are read into the host cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore._native import Buffer
from tierstore.capabilities import Capability, Finding, probe_dax, resolve
from tierstore.store.committing import Failures
from tierstore.store.config import IoBackendName, StoreConfig
from tierstore.store.disk.drives import Drives
from tierstore.store.format import Group
from tierstore.store.index.live import LiveRecord


def maps_weights(config: StoreConfig, drives: Drives) -> Finding:
    """Whether frozen weights are leased in mapped files. Raises CapabilityError if ``io.mapped_weights`` is ON and they
    cannot be.
    """
    setting = config.io.mapped_weights

    def probe() -> Finding:
        if config.io.backend is not IoBackendName.PMEM:
            return Finding(False, f"io.backend is {config.io.backend.value}")
        if config.disk.on or any(drive.link is not None for drive in drives):
            return Finding(False, "reads are to take the time of a limited link")
        for drive in drives if setting is Capability.AUTO else ():
            if not (dax := probe_dax(drive.path)):
                return dax
        return Finding(True, "files are mapped")

    return resolve("io.mapped_weights", setting, probe)


@dataclass(slots=True)
class MappedWeights:
    """A record's ``weights`` in a mapping of their file. ``checked``: the ticket of the comparison with their checksum; 0
    once it has been waited for.
    """

    weights: Buffer
    checked: int


class MappedRecords:
    """The leases of mapped weights of an open store, if ``mapping`` is in effect. One caller at a time."""

    def __init__(self, mapping: Finding, failures: Failures) -> None:
        self.mapping = mapping
        self._failures = failures
        self._mapped: dict[int, MappedWeights] = {}
        #: The number of leases of mapped weights, and their bytes.
        self.leases = self.leased_bytes = 0

    def find(self, record: LiveRecord) -> MappedWeights | None:
        """The mapped weights of ``record``; None if they have to be read into the host cache. The first call queues the
        check; waiting for it raises ChecksumError or OSError. Raises OSError.
        """
        found = self._mapped.get(record.row)
        if found is None and self.mapping and record.schema.frozen:
            slot = record.slot(Group.WEIGHTS)
            # Before the first commit of a record its write may still be under way.
            if slot is not None and slot.extent.shared(slot.number):
                with self._failures.translated():
                    found = self._mapped[record.row] = MappedWeights(*record.map_weights())
        return found

    def forget(self, record: LiveRecord) -> None:
        """Drops weights whose check failed: the next lease checks them again."""
        del self._mapped[record.row]

    def count(self, found: MappedWeights) -> None:
        """Counts a lease of ``found``, which has been checked."""
        found.checked = 0
        self.leases += 1
        self.leased_bytes += found.weights.nbytes

    def describe(self) -> str:
        """One line for people."""
        where = "in mapped files where the CPU computes in place" if self.mapping else "in the host cache"
        return f"frozen weights: {where} ({self.mapping.reason})"

    def close(self) -> None:
        """Leases nothing more."""
        self._mapped.clear()
