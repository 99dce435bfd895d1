"""Makes the helpers beside this file importable, and the directory in memory a fixture."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from conftest_store import fast_path, small_disk

__all__ = ["fast_path", "small_disk"]
