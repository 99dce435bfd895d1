"""Packages whose names are imported when they are first used.

A package that re-exports its modules imports all of them even if only one is used; where one of them imports torch, that
takes a second. Such a package lists its imports once, for type checkers, and ``exports`` performs them on first use
(PEP 562)::

    if TYPE_CHECKING:
        from tierstore.train.trainer import Trainer as Trainer
    else:
        __all__, __getattr__, __dir__ = exports(__name__, __file__)

``as`` marks a name as exported for the type checkers of users (PEP 484). ``docs/API.md`` lists these names.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path


def exported(file: str) -> dict[str, str]:
    """The names that the package with the source ``file`` exports, and the module of each."""
    return dict(_imports(ast.parse(Path(file).read_text(encoding="utf-8"))))


def exports(package: str, file: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of ``package``, whose source is ``file``. Raises ValueError for a name
    clash.
    """
    home = exported(file)
    names = sorted(home)
    # Importing a module makes it an attribute of its package, which hides an exported name of the same spelling.
    inside = {module.removeprefix(f"{package}.").split(".")[0] for module in home.values()}
    if hidden := [name for name, module in home.items() if name in inside and module != package]:
        raise ValueError(f"{package}: {hidden} are modules and cannot be exported names too")

    def find(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if home[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(home[name]), name)

    return names, find, lambda: names


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each name that is imported under ``if TYPE_CHECKING``, and its module."""
    for block in tree.body:
        if (
            isinstance(block, ast.If)
            and isinstance(block.test, ast.Name)
            and block.test.id == "TYPE_CHECKING"
        ):
            for statement in block.body:
                if isinstance(statement, ast.ImportFrom) and statement.module is not None:
                    for alias in statement.names:
                        yield alias.name, statement.module
