"""Small named arrays that belong to a model beside its parameters, as a commit keeps them. Imports no torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tierstore.errors import StoreFormatError

#: Under which name a commit holds the model's buffers.
BUFFERS_KEY = "buffers"


def pack_arrays(arrays: Mapping[str, npt.NDArray[np.generic]]) -> bytes:
    """Small named arrays as bytes, for a commit's state: a JSON header with its length before it, then the values."""
    header = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    head = json.dumps(header).encode()
    values = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    return struct.pack("<Q", len(head)) + head + values


def unpack_arrays(data: bytes, *, where: str) -> dict[str, npt.NDArray[np.generic]]:
    """What ``pack_arrays`` packed. Raises StoreFormatError naming ``where``."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    try:
        (length,) = struct.unpack_from("<Q", data)
        offset = 8 + length
        for name, (dtype, shape) in json.loads(data[8:offset]).items():
            count = math.prod(shape)
            array = np.frombuffer(data, np.dtype(dtype), count, offset)
            arrays[name] = array.reshape(shape).copy()
            offset += array.nbytes
    except (struct.error, TypeError, ValueError) as error:
        raise StoreFormatError(f"{where}: damaged arrays: {error}") from error
    return arrays


def with_all_buffers(states: Sequence[Mapping[str, bytes]], *, where: str) -> dict[str, bytes]:
    """What the first of ``states`` holds, the small states of commits of pipeline stages, with the buffers of all stages.
    Those that two have are the same. Raises StoreFormatError naming ``where``.
    """
    packed = [state[BUFFERS_KEY] for state in states if BUFFERS_KEY in state]
    if len(states) == 1 or not packed:
        return dict(states[0])
    found: dict[str, npt.NDArray[np.generic]] = {}
    for data in packed:
        for name, array in unpack_arrays(data, where=where).items():
            if not np.array_equal(found.setdefault(name, array), array):
                raise StoreFormatError(f"{where}: {name}: two pipeline stages have other values of it")
    return {**states[0], BUFFERS_KEY: pack_arrays(found)}
