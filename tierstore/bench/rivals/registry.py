"""Who takes part: names, what must be installed, and what opens each. Nothing is imported before it is opened."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

#: The one whose ratios to the others are told, the one with everything in RAM that bounds it, and what it is to beat.
OURS, OURS_IN_RAM, TO_BEAT = "tierstore", "tierstore-ram", "deepspeed-nvme"
#: Whose losses the others are compared with, if it takes part.
REFERENCE = "torch"


@dataclass(frozen=True, slots=True)
class Entry:
    """``opener``: ``module:function`` of ``tierstore.bench``. ``needs``: a module that must be there, of the ``extra``, or
    by its own name where no extra has it.
    """

    title: str
    opener: str
    needs: str = "torch"
    extra: str = ""

    def missing(self) -> str | None:
        """Why it cannot take part; None if it can."""
        if importlib.util.find_spec(self.needs) is not None:
            return None
        wanted = f"tierstore[{self.extra}]" if self.extra else self.needs
        return f"{self.needs} is not installed (pip install {wanted})"

    def load(self) -> Any:
        """Imports it: a ``RivalOpener``, or a ``ContestantOpener`` of ``bench.generation``."""
        module, _, name = self.opener.partition(":")
        return getattr(importlib.import_module(f"tierstore.bench.{module}"), name)


#: In the order of the table.
RIVALS: Mapping[str, Entry] = MappingProxyType(
    {
        REFERENCE: Entry("plain torch, all in memory", "rivals.plain:open_plain"),
        "fsdp2-cpu": Entry("FSDP2, CPU offload", "rivals.fsdp:open_fsdp"),
        "deepspeed-cpu": Entry(
            "DeepSpeed ZeRO-3, on CPU", "rivals.deepspeed:open_on_cpu", needs="deepspeed", extra="rivals"
        ),
        TO_BEAT: Entry(
            "DeepSpeed ZeRO-3, on NVMe", "rivals.deepspeed:open_on_nvme", needs="deepspeed", extra="rivals"
        ),
        OURS: Entry("tierstore", "rivals.tiered:open_tiered"),
        OURS_IN_RAM: Entry("tierstore, all in memory", "rivals.tiered:open_in_ram"),
    }
)
