"""The model that an imported store holds. Imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path

from tierstore.errors import ConfigError
from tierstore.hf.describing import CONFIG_NAME, read_config
from tierstore.hf.manifest import MANIFEST_NAME, Manifest, Weights
from tierstore.hf.spec import HfSpec
from tierstore.moe.lora import LoraConfig
from tierstore.store.disk.home import MODEL_DIRECTORY
from tierstore.train.config import FinetuneConfig


def stored_spec(store: Path, finetune: FinetuneConfig, lora: LoraConfig | None = None) -> HfSpec | None:
    """The model that was imported into ``store``, trained as ``finetune`` and ``lora`` say; None where none was.

    Raises StoreFormatError for a damaged manifest, and ConfigError for a damaged config.json, and where frozen weights were
    to be trained or others to be adapted.
    """
    directory = store / MODEL_DIRECTORY
    if not (directory / MANIFEST_NAME).exists():
        return None
    lora, manifest = lora or LoraConfig(), Manifest.read(store)
    if lora.enabled and manifest.weights is not Weights.FROZEN:
        raise ConfigError(
            f"lora.rank: {store} was imported to train all of the model; tierstore import --frozen makes one for LoRA"
        )
    return HfSpec(
        manifest=manifest,
        finetune=finetune,
        lora=lora,
        config=read_config(directory / CONFIG_NAME),
        directory=directory,
    )
