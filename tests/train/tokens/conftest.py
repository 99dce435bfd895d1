"""The tokenizer of most tests, made once."""

from pathlib import Path

import pytest
from token_cases import save_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
