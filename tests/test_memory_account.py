"""Accounts of a process's memory, by hand; and what it may take if it is not told."""

from __future__ import annotations

import pytest
from refusals import refuses

from tierstore import memory_account
from tierstore.errors import BudgetError
from tierstore.machine import Memory
from tierstore.memory_account import (
    MemoryAccount,
    allowed_bytes,
    peak_resident_bytes,
    resident_bytes,
    working_bytes,
)

MIB = 1 << 20
ACCOUNT = MemoryAccount({"experts": 256 * MIB, "text": 0, "process": 512 * MIB})


def test_an_account_by_hand() -> None:
    assert ACCOUNT.nbytes == 768 * MIB
    assert ACCOUNT.describe() == "memory: 768 MiB: process 512 MiB, experts 256 MiB"
    assert ACCOUNT.compare(384 * MIB) == "memory: 768 MiB announced, 384 MiB at the peak (50%)"
    assert ACCOUNT.as_json() == {
        "announced_bytes": 768 * MIB,
        "parts": [
            {"part": "experts", "held_bytes": 256 * MIB},
            {"part": "text", "held_bytes": 0},
            {"part": "process", "held_bytes": 512 * MIB},
        ],
    }


def test_an_account_that_does_not_fit_names_what_would() -> None:
    ACCOUNT.check(768 * MIB, "the batch")
    with refuses(BudgetError, "memory:", str(768 * MIB), "the batch", "process 512 MiB"):
        ACCOUNT.check(768 * MIB - 1, "the batch")


@pytest.mark.parametrize(("limit", "expected"), [(None, 0.8 * 6000), (4000, 0.8 * 4000), (8000, 0.8 * 6000)])
def test_what_a_process_may_take(limit: int | None, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is told; or else 80% of what is available, or of a container's limit if that is less."""
    machine = Memory(total_bytes=10_000, available_bytes=6000, limit_bytes=limit)
    monkeypatch.setattr(memory_account, "memory", lambda: machine)
    assert allowed_bytes(7) == 7
    assert allowed_bytes(0) == int(expected)


def test_memory_is_measured() -> None:
    before = resident_bytes()
    held = bytearray(b"x" * (64 * MIB))
    assert resident_bytes() >= before + 60 * MIB
    assert peak_resident_bytes() >= len(held)
    assert working_bytes(400) - working_bytes(0) == 100
