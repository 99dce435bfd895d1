"""The mutations that prove the fault tests can still be made: ``python tests/mutations.py`` makes them."""

import pytest
from mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: str(mutation.name))
def test_a_mutation_fits_the_code(mutation: Mutation) -> None:
    assert mutation.search != mutation.replace
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.search) == 1
    if mutation.file.endswith(".py"):  # a file that is not Python fails every test
        compile(text.replace(mutation.search, mutation.replace), mutation.file, "exec")
    for test in mutation.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


def test_mutations_have_names_of_their_own() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
