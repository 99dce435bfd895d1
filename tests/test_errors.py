"""tierstore.errors: the tree is the one that its docstring draws, and all of it is exported."""

import inspect

from tierstore import errors


def test_all_names_every_error() -> None:
    defined = [name for name, value in vars(errors).items() if inspect.isclass(value)]
    assert sorted(defined) == sorted(errors.__all__) == errors.__all__


def test_the_docstring_draws_every_error_under_its_parent() -> None:
    parents: list[str] = []
    drawn = {}
    for line in (errors.__doc__ or "").splitlines():
        words = [word for word in line.split() if word in errors.__all__]
        if not words:
            continue
        depth = (line.index(words[0]) - 4) // 4
        parents[depth:] = [words[0]]
        drawn[words[0]] = parents[depth - 1] if depth else "Exception"
    assert drawn == {name: getattr(errors, name).__bases__[0].__name__ for name in errors.__all__}


def test_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.DataError, ValueError)
    assert issubclass(errors.BudgetError, MemoryError)
