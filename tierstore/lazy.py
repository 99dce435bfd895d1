"""Packages whose names are imported when they are first used.

A package that re-exports its modules imports all of them for whoever wants one; where one of them imports torch, that
is a second. ``exports`` makes the package's ``__getattr__`` (PEP 562).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence

__all__ = ["exports"]


def exports(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """``__getattr__`` of ``package``: ``modules`` names its modules and what each of them exports."""
    home = {name: module for module, names in modules.items() for name in names}
    hidden = home.keys() & modules.keys()
    if hidden:  # importing the module makes it an attribute of the package, and that one is found first
        raise ValueError(f"{package}: {sorted(hidden)} are modules and cannot be exported names too")

    def find(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{home[name]}"), name)

    return find
