"""Makes the helpers beside this file, and those of the store's tests, importable."""

import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "store")]

from conftest_store import fast_path

__all__ = ["fast_path"]
