"""The packages of the optional extra ``[hf]``, imported when they are first needed, or one clear error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tierstore.capabilities import require_package
from tierstore.errors import CapabilityError

#: The releases of transformers that this package is tested with: from the first, below the second.
TRANSFORMERS = ((5, 7), (6, 0))


def transformers(purpose: str = "a model of Hugging Face") -> Any:
    """The package transformers. Raises CapabilityError when it is missing, or of a release that does not fit."""
    module = require_package("transformers", purpose)
    found = tuple(int(part) for part in module.__version__.split(".")[:2] if part.isdigit())
    low, high = TRANSFORMERS
    if not low <= found < high:
        raise CapabilityError(
            f"{purpose} needs transformers >= {low[0]}.{low[1]}, < {high[0]}, and {module.__version__} is installed: "
            'pip install "tierstore[hf]"'
        )
    return module


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps what transformers would log from stderr, but errors."""
    logging = transformers().utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
