"""The model that everyone generates with: the same weights as a checkpoint, a store and a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path

from tierstore.bench.generation.gguf_file import write_gguf
from tierstore.bench.generation.registry import IN_RAM, MAPPED, OFFLOADED
from tierstore.bench.generation.workload import vocabulary_of
from tierstore.errors import ConfigError
from tierstore.hf.describing import CONFIG_NAME, read_config
from tierstore.hf.manifest import MANIFEST_NAME, Manifest
from tierstore.store.disk.home import MODEL_DIRECTORY

_ROOM = 64 << 20  # beyond the experts, where all of them are to be in memory


class BenchModel:
    """``path`` is a directory of transformers or a store; ``store`` and ``gguf`` are the same model, if they are there
    already. ``prepare`` makes what is missing. Raises ConfigError.
    """

    def __init__(self, path: Path, *, store: Path | None = None, gguf: Path | None = None) -> None:
        stored = (path / MODEL_DIRECTORY / MANIFEST_NAME).exists()
        if stored and store is not None:
            raise ConfigError(f"{path}: is a store; expected no --imported")
        self.checkpoint: Path | None = None if stored else path
        self.store: Path | None = path if stored else store
        self.gguf = gguf
        for given in (path, store, gguf):
            if given is not None and not given.exists():
                raise ConfigError(f"{given}: missing")
        config = read_config(path / MODEL_DIRECTORY if stored else path)
        self.name = str(config.get("model_type", CONFIG_NAME))
        self.vocabulary = vocabulary_of(config)
        self._manifest = Manifest.read(self.store) if self.store is not None else None

    @property
    def manifest(self) -> Manifest:
        """What the store has. Call it after ``prepare``."""
        assert self._manifest is not None
        return self._manifest

    @property
    def expert_bytes(self) -> int:
        """Weights of one expert in the type that computes."""
        return self.manifest.experts.numel * self.manifest.compute.itemsize

    @property
    def experts_budget(self) -> int:
        """A host budget with room for all."""
        return (self.manifest.experts.records + 4) * self.expert_bytes * 9 // 8 + _ROOM

    def prepare(self, contestants: Set[str], directory: Path, say: Callable[[str], None]) -> None:
        """Makes what ``contestants`` need in ``directory``: the store (of which the sizes are read in any case), the
        checkpoint, the GGUF file. Raises ConfigError for a family without the last, StoreError, OSError.
        """
        if self.checkpoint is None and contestants & {IN_RAM, OFFLOADED, MAPPED}:
            from tierstore.hf.exports.exporting import export

            assert self.store is not None
            say("writing a checkpoint of the store")
            export(self.store, directory / "checkpoint")
            self.checkpoint = directory / "checkpoint"
        if self.store is None:
            from tierstore.hf.imports.importing import ImportOptions, import_model
            from tierstore.hf.manifest import Weights

            assert self.checkpoint is not None
            say("importing the checkpoint, frozen")
            self.store = directory / "store"
            import_model(self.checkpoint, self.store, ImportOptions(weights=Weights.FROZEN))
        self._manifest = Manifest.read(self.store)
        if self.gguf is None and MAPPED in contestants:
            assert self.checkpoint is not None
            say("writing a GGUF file of the checkpoint")
            write_gguf(self.checkpoint, directory / "model.gguf")
            self.gguf = directory / "model.gguf"
