"""Libraries of the extra ``hf``, imported when they are used."""

from __future__ import annotations

import importlib
from typing import Any

from tierstore.errors import CapabilityError

_ADVICE = 'pip install "tierstore[hf]"'


def parquet_module() -> Any:
    """``pyarrow.parquet``. Raises CapabilityError."""
    return _imported("pyarrow.parquet", "Parquet files")


def transformers_module() -> Any:
    """``transformers``. Raises CapabilityError."""
    return _imported("transformers", "a model's tokenizer")


def _imported(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split(".")[0]
        raise CapabilityError(
            f"{what}: needs {package}, which cannot be imported ({error}): {_ADVICE}"
        ) from error
