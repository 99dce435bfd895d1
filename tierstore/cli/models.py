"""Which model a command is about: the built-in one, or what a store was imported with; and how a deployed one is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.deploy.records import DEPLOYMENT_NAME, read_deployment
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from tierstore.train.config import TrainConfig


def with_stored_model(config: TrainConfig) -> TrainConfig:
    """``config`` with the model that its store was imported with; as it is where none was.

    Raises ConfigError where ``[model]`` or ``[finetune]`` is of no use, StoreFormatError for a damaged description.
    """
    from tierstore.hf.spec import stored_spec
    from tierstore.model.config import ModelConfig
    from tierstore.train.config import FinetuneConfig

    spec = stored_spec(config.store, config.finetune, config.lora)
    if spec is None:
        if config.finetune != FinetuneConfig():
            raise ConfigError(
                f"finetune: {config.store} holds no imported model; [model] describes the built-in one"
            )
        if config.lora.enabled:
            raise ConfigError(f"lora.rank: {config.store} holds no imported model, and no other is adapted")
        return config
    if config.model != ModelConfig():
        raise ConfigError(
            f"model: {config.store} holds an imported model; [finetune] is what a run chooses of it"
        )
    return replace(config, model=spec)


def deployed_settings(store: Path) -> dict[str, object]:
    """Keys of ``ServeConfig``, by dotted name, that ``tierstore deploy`` found best for ``store``; none where it did not
    make it. Raises StoreFormatError.
    """
    deployment = read_deployment(store)
    return {} if deployment is None else dict(deployment.settings)


def describe_settings(store: Path, deployed: dict[str, object], given: dict[str, object]) -> str:
    """One line: which of the settings that ``store`` was ``deployed`` with hold; those that were ``given`` do not."""
    held = [f"{key} = {value}" for key, value in deployed.items() if key not in given]
    return f"settings of {store / DEPLOYMENT_NAME}: {', '.join(held) or 'none, all were given'}"
