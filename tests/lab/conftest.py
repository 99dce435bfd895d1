"""Packs sources to import."""

import gzip
import lzma

import pytest
from cases import zstd

_PACKINGS = {"plain": bytes, "gzip": gzip.compress, "xz": lzma.compress, "zstd": zstd.compress}


@pytest.fixture(params=_PACKINGS)
def packed(request):
    """What is done to a source's bytes: nothing, or packed (under the same name)."""
    return _PACKINGS[request.param]
