"""ZeRO-3 slices of dense parameters: fusion buffers, gradient buckets, and the module hooks around layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.dense.config import DenseConfig, Fusion, GatherDtype, OptimizerState, Reshard
    from tierstore.dense.fusion import DenseTraffic
    from tierstore.dense.gates import Gates, PassListener
    from tierstore.dense.layout import DenseBytes, UnitLayout, dense_bytes, recut, unit_layouts
    from tierstore.dense.parameters import DenseSlices, GatherOnDemand
    from tierstore.dense.slices import dense_schemas
else:
    __all__, __getattr__, __dir__ = exports(__name__, __file__)
