"""tierstore.lazy: names that are imported on first use."""

import sys
from pathlib import Path

import pytest

from tierstore.lazy import exports

SOURCE = """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lazy_example import inner
    from lazy_example.inner import value
else:
    ...
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "lazy_example").mkdir()
    file = tmp_path / "lazy_example/__init__.py"
    file.write_text(SOURCE)
    (tmp_path / "lazy_example/inner.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield file
    for name in [name for name in sys.modules if name.startswith("lazy_example")]:
        del sys.modules[name]


def test_a_name_is_imported_when_it_is_used(package: Path) -> None:
    names, find, listed = exports("lazy_example", str(package))
    assert names == listed() == ["inner", "value"]
    assert "lazy_example.inner" not in sys.modules
    assert find("value") == 3
    assert find("inner") is sys.modules["lazy_example.inner"]
    with pytest.raises(AttributeError, match="module 'lazy_example' has no attribute 'other'"):
        find("other")


def test_a_name_that_a_module_would_hide_is_refused(package: Path) -> None:
    package.write_text(SOURCE.replace("import value", "import inner"))
    with pytest.raises(ValueError, match="'inner'"):
        exports("lazy_example", str(package))
