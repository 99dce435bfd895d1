"""Hugging Face models: import, training in the caller's own loop, export. Needs the extra ``[hf]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.hf.adapters import ExportedAdapter, export_adapter
    from tierstore.hf.callback import TieredCallback
    from tierstore.hf.exporting import Exported, export
    from tierstore.hf.importing import ImportOptions
    from tierstore.hf.manifest import Weights
    from tierstore.hf.stored_weights import Adjustment
    from tierstore.hf.tiered import TieredModel, TieredOptimizer, TieredStep, open_model
    from tierstore.hf.watching import Autocast
    from tierstore.hf.writing import ExportDtype
    from tierstore.machine import MemoryAccount
    from tierstore.model.config import ComputeDtype
    from tierstore.quant.layout import CodeFormat
    from tierstore.store.format import MomentFormat
    from tierstore.train.stepping import StepError
else:
    __getattr__, __dir__ = exports(__name__, __file__)

__all__ = [
    "Adjustment",
    "Autocast",
    "CodeFormat",
    "ComputeDtype",
    "ExportDtype",
    "Exported",
    "ExportedAdapter",
    "ImportOptions",
    "MemoryAccount",
    "MomentFormat",
    "StepError",
    "TieredCallback",
    "TieredModel",
    "TieredOptimizer",
    "TieredStep",
    "Weights",
    "export",
    "export_adapter",
    "open_model",
]
