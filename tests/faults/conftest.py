"""The store's directory in memory is a fixture here too."""

from conftest_store import fast_path

__all__ = ["fast_path"]
