"""A store of a tiny model with a tokenizer and a chat template, made as users make one. As a program:

PYTHONPATH=tests/hf:tests/train python tests/serve/tiny_stores.py DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from checkpoints import imported
from tiny_families import make_config, plain_model
from token_cases import save_tokenizer

from tierstore.hf.manifest import Weights

TOKENS = 280


def make_tiny_store(directory: Path, *, context: int = 512, **options: Any) -> Path:
    """A frozen store of a Mixtral with random weights, in ``directory``; its checkpoint is beside it."""
    source = directory.with_name(f"{directory.name}.source")
    config = make_config("mixtral", vocab_size=TOKENS, max_position_embeddings=context, **options)
    plain_model(config, torch.float32).save_pretrained(source)
    save_tokenizer(source, size=TOKENS)
    imported(source, directory, weights=Weights.FROZEN)
    return directory


if __name__ == "__main__":
    print(make_tiny_store(Path(sys.argv[1])))
