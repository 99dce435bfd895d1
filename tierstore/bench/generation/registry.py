"""Who takes part in ``bench generate``. Nothing is imported before it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tierstore.bench.rivals.registry import Entry

#: Ours, ours with everything in RAM (which bounds it), and who is to be beaten.
OURS, OURS_IN_RAM = "tierstore", "tierstore-ram"
IN_RAM, OFFLOADED, MAPPED = "transformers", "accelerate", "llama.cpp"
#: Whose choices of tokens the others' are compared with.
REFERENCE = IN_RAM
#: These have all the memory that they want: they show what computing takes.
UNCONFINED = frozenset({OURS_IN_RAM, IN_RAM})

#: In the order of the table.
CONTESTANTS: Mapping[str, Entry] = MappingProxyType(
    {
        OURS: Entry("tierstore", "generation.tiered:open_tiered", needs="transformers", extra="hf"),
        OURS_IN_RAM: Entry(
            "tierstore, all in memory", "generation.tiered:open_in_ram", needs="transformers", extra="hf"
        ),
        IN_RAM: Entry(
            "transformers, all in memory", "generation.plain:open_in_memory", needs="transformers", extra="hf"
        ),
        OFFLOADED: Entry("accelerate, disk offload", "generation.plain:open_offloaded", needs="accelerate"),
        MAPPED: Entry("llama.cpp, mmap", "generation.llama:open_mapped", needs="xllamacpp"),
    }
)
