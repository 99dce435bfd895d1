"""Directories for stores, as fixtures."""

from conftest_store import fast_path, small_disk

__all__ = ["fast_path", "small_disk"]
