"""Seeds that depend on their purpose, never on what was drawn before.

Everything random (initial values, router noise, data order) has its own key: so an expert's initial weights do not
depend on how many experts were made before it, a recomputed layer sees the same noise again, and a resumed run draws the
same numbers as an uninterrupted one.
"""

from __future__ import annotations

import hashlib

import torch


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) from ``parts``; any change in any part, or in their order, gives another seed."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keyed_generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by ``parts``. Always on the CPU, so that every device draws the same numbers."""
    generator = torch.Generator(device="cpu")
    generator.manual_seed(derive_seed(*parts))
    return generator
