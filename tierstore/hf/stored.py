"""The model that an imported store holds. Imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path

from tierstore.hf.describing import CONFIG_NAME, read_config
from tierstore.hf.manifest import MANIFEST_NAME, MODEL_DIRECTORY, Manifest
from tierstore.hf.spec import HfSpec
from tierstore.train.finetune import FinetuneConfig


def stored_spec(store: Path, finetune: FinetuneConfig) -> HfSpec | None:
    """The model that was imported into ``store``, trained as ``finetune`` says; None where none was.

    Raises StoreFormatError for a damaged manifest, and ConfigError for a damaged config.json.
    """
    directory = store / MODEL_DIRECTORY
    if not (directory / MANIFEST_NAME).exists():
        return None
    return HfSpec(
        manifest=Manifest.read(store),
        finetune=finetune,
        config=read_config(directory / CONFIG_NAME),
        directory=directory,
    )
