"""A small job of ``bench io`` that every file system can run: through the page cache, in small pages."""

from tierstore.bench.io_load import Job, Pages, TransferKind
from tierstore.capabilities import Capability
from tierstore.store.config import IoBackendName

MIB = 1 << 20
CACHED = Job(
    kind=TransferKind.READ,
    block_bytes=64 << 10,
    depth=4,
    backend=IoBackendName.THREADS,
    direct=Capability.OFF,
    pages=Pages.SMALL,
)
