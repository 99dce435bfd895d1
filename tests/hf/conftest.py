"""transformers warns of much that is no concern of these tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
