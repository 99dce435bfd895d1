"""Hugging Face models: import, training in the caller's own loop, export. Needs the extra ``[hf]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.hf.adapters import ExportedAdapter as ExportedAdapter
    from tierstore.hf.adapters import export_adapter as export_adapter
    from tierstore.hf.callback import TieredCallback as TieredCallback
    from tierstore.hf.exporting import Exported as Exported
    from tierstore.hf.exporting import export as export
    from tierstore.hf.importing import ImportOptions as ImportOptions
    from tierstore.hf.manifest import Weights as Weights
    from tierstore.hf.stored_weights import Adjustment as Adjustment
    from tierstore.hf.tiered import TieredModel as TieredModel
    from tierstore.hf.tiered import TieredOptimizer as TieredOptimizer
    from tierstore.hf.tiered import TieredStep as TieredStep
    from tierstore.hf.tiered import open_model as open_model
    from tierstore.hf.watching import Autocast as Autocast
    from tierstore.hf.writing import ExportDtype as ExportDtype
    from tierstore.machine import MemoryAccount as MemoryAccount
    from tierstore.model.config import ComputeDtype as ComputeDtype
    from tierstore.quant.layout import CodeFormat as CodeFormat
    from tierstore.store.format import MomentFormat as MomentFormat
    from tierstore.train.stepping import StepError as StepError
else:
    __all__, __getattr__, __dir__ = exports(__name__, __file__)
