"""What an imported model shows to be impossible before any stage has run, which may take hours."""

from __future__ import annotations

from tierstore.deploy.compress.student import check_count
from tierstore.deploy.config import DeployConfig
from tierstore.deploy.segments import BlockBytes, cut
from tierstore.deploy.text import read_windows
from tierstore.errors import ConfigError
from tierstore.hf.stored import stored_spec
from tierstore.train.config import FinetuneConfig


def refuse_early(config: DeployConfig) -> None:
    """Nothing for a built-in model: it is known once it is fused, and the stages refuse the same.

    Raises ConfigError for numbers of experts, blocks and positions that the model does not have, DataError for a text that
    is too short or cannot be read, StoreFormatError, OSError.
    """
    spec = stored_spec(config.store, FinetuneConfig())
    if spec is None:
        return
    count, placement, how = config.compression.experts, config.placement, config.distillation
    if count is not None:
        check_count(spec.manifest, spec.config, count)
    if placement.segments:
        cut([BlockBytes(0, 0)] * spec.manifest.layers, placement.segments)
    if how.text:
        read_windows(how.text, spec.tokenizer, length=how.length, held_out=how.held_out)
        if how.length > spec.positions > 0:
            raise ConfigError(
                f"--length: expected at most {spec.positions}, the positions of the model, got {how.length}"
            )
