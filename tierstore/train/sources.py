"""A run's data by its configuration: bytes, or documents in the tokens of the model's tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError
from tierstore.train.data import TextData
from tierstore.train.files import DataConfig, DataFormat, Packing, text_files

if TYPE_CHECKING:
    from tierstore.train.tokens.data import TokenData


def open_data(
    config: DataConfig,
    *,
    seq_len: int,
    vocab_size: int,
    tokenizer: Path | None,
    store: Path,
    together: str = "",
    first: bool = True,
    barrier: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TextData | TokenData:
    """What ``config`` says to train on.

    ``tokenizer``: the directory with the tokenizer's files (None: bytes). ``store``: the job's directory, which keeps the
    tokens. ``together``: why this model cannot keep documents apart in a sequence (empty: it can). Of several ranks the
    ``first`` tokenises, and all meet at ``barrier``. ``progress`` is called with bytes that were tokenised and bytes in all.

    Raises DataError, ConfigError, CapabilityError, StoreInUseError, OSError.
    """
    if tokenizer is None or config.format is DataFormat.BYTES:
        return _open_bytes(config, seq_len=seq_len)
    from tierstore.train.tokens.data import TokenData
    from tierstore.train.tokens.making import check_vocabulary, find_tokens, tokenise
    from tierstore.train.tokens.token_files import TokenFiles

    if config.max_bytes != DataConfig().max_bytes:
        raise ConfigError(
            "data.max_bytes: documents are tokenised whole; it limits text whose bytes are the tokens"
        )
    packing, note = _packing(config, together)
    files = text_files(config)
    if first:
        made = tokenise(store, files, config, tokenizer=tokenizer, vocabulary=vocab_size, progress=progress)
        TokenFiles(made).verify()
    else:
        made = find_tokens(store, files, config, tokenizer=tokenizer)
    barrier()
    opened = TokenFiles(made)
    check_vocabulary(opened.index.vocabulary, vocab_size, tokenizer)
    return TokenData(config, opened, packing, seq_len=seq_len, tokenizer=tokenizer, note=note)


def _packing(config: DataConfig, together: str) -> tuple[Packing, str]:
    if config.packing is Packing.AUTO:
        return (Packing.SEPARATE, f"not packed: {together}") if together else (Packing.DOCUMENTS, "")
    if config.packing is Packing.DOCUMENTS and together:
        raise ConfigError(
            f"data.packing: documents cannot be packed: {together}; choose separate or concatenate"
        )
    return config.packing, ""


def _open_bytes(config: DataConfig, *, seq_len: int) -> TextData:
    if config.format not in (DataFormat.AUTO, DataFormat.BYTES):
        raise ConfigError(
            f"data.format: {config.format.value} needs a tokenizer, and the model has none; expected auto or bytes"
        )
    for name, default in (("column", ""), ("separator", ""), ("packing", Packing.AUTO)):
        if getattr(config, name) != default:
            raise ConfigError(f"data.{name}: documents are tokenised for it, and here every byte is a token")
    return TextData(config, seq_len=seq_len)
