"""The public interface: what is exported is what docs/API.md lists, and it can be used without a look inside."""

import ast
import dataclasses
import enum
import importlib
import inspect
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
MODULES = (
    "tierstore",
    "tierstore.config",
    "tierstore.errors",
    "tierstore.store",
    "tierstore.train",
    "tierstore.hf",
    "tierstore.plan",
    "tierstore.lab",
    "tierstore.trace",
)


def documented() -> dict[str, list[str]]:
    """The names of each module in docs/API.md: those with an entry, enumerations, and those described elsewhere."""
    sections = re.split(r"^## `([\w.]+)`$", (ROOT / "docs/API.md").read_text(), flags=re.MULTILINE)[1:]
    return {
        module: re.findall(r"^- `(\w+)`: ", text, flags=re.MULTILINE)
        + re.findall(
            r"`(\w+)`",
            " ".join(
                re.findall(
                    r"^(?:Enumerations and configurations|Described elsewhere): [^.]*", text, re.MULTILINE
                )
            ),
        )
        for module, text in zip(sections[::2], sections[1::2], strict=True)
    }


def test_every_public_name_is_described_once() -> None:
    page = (ROOT / "docs/API.md").read_text()
    described = re.findall(r"^- `(\w+)`: ", page, flags=re.MULTILINE)
    for listed in re.findall(r"^Enumerations and configurations: ([^.]*)", page, flags=re.MULTILINE):
        described += re.findall(r"`(\w+)`", listed)
    assert sorted(described) == sorted({name for names in documented().values() for name in names})


def test_the_documentation_lists_the_public_modules() -> None:
    assert tuple(documented()) == MODULES


@pytest.mark.parametrize("name", MODULES)
def test_exports_equal_the_documentation(name: str) -> None:
    module = importlib.import_module(name)
    assert len(module.__all__) == len(set(module.__all__))
    assert sorted(documented()[name]) == sorted(module.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_every_name_resolves_and_is_listed(name: str) -> None:
    module = importlib.import_module(name)
    assert set(module.__all__) <= set(dir(module))
    for export in module.__all__:
        getattr(module, export)
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", MODULES)
def test_importing_takes_no_torch(name: str) -> None:
    program = f"import sys, {name}; dir({name}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize(
    "name",
    ["ParameterStore", "StoreError", "TrainConfig", "plan_run", "load_requests", "tune", "import_trace"],
)
def test_what_needs_no_torch_takes_none(name: str) -> None:
    program = f"import sys, tierstore; tierstore.{name}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# Signatures -------------------------------------------------------------------------------------------------


def home(cls: type) -> str:
    """The public module in which ``cls`` is defined; of what lies elsewhere, the first that exports it."""
    around = [name for name in MODULES[1:] if f"{cls.__module__}.".startswith(f"{name}.")]
    exporting = [name for name in MODULES if cls.__name__ in importlib.import_module(name).__all__]
    return [*around, *exporting[1:], *exporting][0]


def namespace(function: object) -> dict[str, object]:
    """What annotations of a module may name besides its globals: its imports under TYPE_CHECKING."""
    found: dict[str, object] = {}
    for block in ast.parse(inspect.getsource(sys.modules[function.__module__])).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for node in block.body:
                if isinstance(node, ast.Import):
                    for alias in node.names:  # `import a.b` binds a
                        bound = alias.name if alias.asname else alias.name.partition(".")[0]
                        found[alias.asname or bound] = importlib.import_module(bound)
                if isinstance(node, ast.ImportFrom) and node.module is not None:
                    imported = importlib.import_module(node.module)
                    found |= {
                        alias.asname or alias.name: getattr(imported, alias.name) for alias in node.names
                    }
    return found


def hints(thing: object) -> dict[str, object]:
    return typing.get_type_hints(thing, localns=namespace(thing))


def ours(hint: object) -> Iterator[type]:
    """The classes of tierstore that an annotation names."""
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        if hint.__module__.startswith("tierstore"):
            yield hint
        return
    for inner in hint if isinstance(hint, list) else typing.get_args(hint):
        yield from ours(inner)


def methods(cls: type) -> Iterator[object]:
    """The public methods that ``cls`` and its bases in tierstore define."""
    for base in cls.__mro__:
        if base.__module__.startswith("tierstore"):
            for name, member in vars(base).items():
                function = getattr(member, "__func__", member)
                public = not name.startswith("_") or name in ("__getitem__", "__enter__", "__iter__")
                # A specification of a model is a value to its user; what builds the model is the trainer.
                public = public and name not in ("build", "first_weights")
                if public and inspect.isfunction(inspect.unwrap(function)):
                    yield inspect.unwrap(function)


def attributes(cls: type) -> Iterator[type]:
    """The classes of what a result holds: its fields and properties."""
    if dataclasses.is_dataclass(cls):
        for field, hint in hints(cls).items():
            if not field.startswith("_"):
                yield from ours(hint)


def signature(export: object, results: set[type]) -> set[type]:
    """The classes that calling ``export`` names; of a class, its constructor and methods. Results of other calls are not
    constructed by users.
    """
    if not isinstance(export, type):
        return {cls for hint in hints(inspect.unwrap(export)).values() for cls in ours(hint)}  # type: ignore[arg-type]
    if issubclass(export, enum.Enum | BaseException):
        return set()
    named = {cls for method in methods(export) for hint in hints(method).values() for cls in ours(hint)}
    if export not in results and not getattr(export, "_is_protocol", False):
        if dataclasses.is_dataclass(export):
            taken = {field.name for field in dataclasses.fields(export) if field.init}
            named |= {cls for name, hint in hints(export).items() if name in taken for cls in ours(hint)}
        elif inspect.isfunction(export.__init__):  # object's own takes nothing
            named |= {cls for hint in hints(export.__init__).values() for cls in ours(hint)}
    return named - {export}


def results(exports: Iterable[object]) -> set[type]:
    """The classes that exported functions and methods return, and those of what these hold."""
    found: set[type] = set()
    for export in exports:
        calls = methods(export) if isinstance(export, type) else [inspect.unwrap(export)]  # type: ignore[arg-type]
        for call in calls:
            found |= set(ours(hints(call).get("return")))
    todo = list(found)
    while todo:
        held = set(attributes(todo.pop())) - found
        found |= held
        todo += held
    return found


def exports(module: ModuleType) -> list[object]:
    found = [getattr(module, name) for name in module.__all__]
    return [one for one in found if callable(one) and one.__module__.startswith("tierstore")]


@pytest.mark.parametrize("name", MODULES)
def test_the_types_of_signatures_are_exported_with_them(name: str) -> None:
    """A class that another public module defines is held to this there."""
    found = exports(importlib.import_module(name))
    returned = results(found)
    missing = {
        f"{export.__qualname__}: {cls.__module__}.{cls.__name__}"  # type: ignore[attr-defined]
        for export in found
        if not isinstance(export, type) or home(export) == name
        for cls in signature(export, returned)
        if cls not in found and not issubclass(cls, BaseException)
    }
    assert not missing, "\n".join(sorted(missing))
