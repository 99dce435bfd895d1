"""Makes the helpers beside this file, and those of the store's tests, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "store"))

from conftest_store import fast_path

__all__ = ["fast_path"]
