"""Who takes part: names, what must be installed, and what opens each. Nothing is imported before it is opened."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierstore.bench.rivals.rival import RivalOpener

#: The one whose ratios to the others are told, the one with everything in RAM that bounds it, and what it is to beat.
OURS, OURS_IN_RAM, TO_BEAT = "tierstore", "tierstore-ram", "deepspeed-nvme"
#: Whose losses the others are compared with, if it takes part.
REFERENCE = "torch"


@dataclass(frozen=True, slots=True)
class Entry:
    """``opener``: ``module:function`` of this package. ``needs``: a module that must be there, of the ``extra``."""

    title: str
    opener: str
    needs: str = "torch"
    extra: str = ""

    def missing(self) -> str | None:
        """Why it cannot take part; None if it can."""
        if importlib.util.find_spec(self.needs) is not None:
            return None
        return f"{self.needs} is not installed (pip install tierstore[{self.extra}])"

    def load(self) -> RivalOpener:
        """Imports it."""
        module, _, name = self.opener.partition(":")
        opener: RivalOpener = getattr(importlib.import_module(f"tierstore.bench.rivals.{module}"), name)
        return opener


#: In the order of the table.
RIVALS: Mapping[str, Entry] = MappingProxyType(
    {
        REFERENCE: Entry("plain torch, all in memory", "plain:open_plain"),
        "fsdp2-cpu": Entry("FSDP2, CPU offload", "fsdp:open_fsdp"),
        "deepspeed-cpu": Entry(
            "DeepSpeed ZeRO-3, on CPU", "deepspeed:open_on_cpu", needs="deepspeed", extra="rivals"
        ),
        TO_BEAT: Entry(
            "DeepSpeed ZeRO-3, on NVMe", "deepspeed:open_on_nvme", needs="deepspeed", extra="rivals"
        ),
        OURS: Entry("tierstore", "tiered:open_tiered"),
        OURS_IN_RAM: Entry("tierstore, all in memory", "tiered:open_in_ram"),
    }
)
