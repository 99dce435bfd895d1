"""Forward passes of transformers' models, with the arguments of its own ``generate``: the bits are the same.

Shapes: B sequences, T tokens of this pass, S tokens with those that the cache holds, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from tierstore.errors import ConfigError
from tierstore.hf.sizes import cached_positions
from tierstore.serve.model.interface import LayeredCache


class WrappedModel:
    """``module`` of transformers as a ``ServedModel``. ``context`` 0 is the model's own limit.

    Raises ConfigError for a context beyond it.
    """

    def __init__(self, module: nn.Module, *, context: int = 0) -> None:
        from transformers import DynamicCache

        wrapped: Any = module
        # By it torch chooses between one product and one for each sequence, which round otherwise: parameters are as in a
        # model that transformers has loaded. Passes run in inference mode, without gradients.
        module.requires_grad_(True)
        self._module = module
        self._config: Any = wrapped.config.get_text_config(decoder=True)
        self._new_cache = partial(DynamicCache, config=wrapped.config)
        self._context = checked_context(context, cached_positions(self._config.to_dict()))
        self._options: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if wrapped._supports_logits_to_keep():
            self._options["logits_to_keep"] = 1

    @property
    def context(self) -> int:
        return self._context

    @property
    def vocabulary(self) -> int:
        vocabulary: int = self._config.vocab_size
        return vocabulary

    @property
    def pad_token(self) -> int:
        """The model's own; without one in its vocabulary (-1 is none), its end of text, as in ``generate``, or 0."""
        for name in ("pad_token_id", "eos_token_id"):
            found = getattr(self._config, name, None)
            for token in found if isinstance(found, list) else [found]:
                if token is not None and 0 <= token < self.vocabulary:
                    return int(token)
        return 0

    def new_cache(self) -> LayeredCache:
        cache: LayeredCache = self._new_cache()
        return cache

    def forward(
        self, tokens_BT: Tensor, cache: LayeredCache, *, mask_BS: Tensor, positions_BT: Tensor
    ) -> Tensor:
        output = self._module(
            input_ids=tokens_BT,
            attention_mask=mask_BS,
            position_ids=positions_BT,
            past_key_values=cache,
            **self._options,
        )
        logits: Tensor = output.logits[:, -1].float()
        return logits


def checked_context(asked: int, most: int) -> int:
    """``asked`` tokens of a sequence, or the model's ``most`` for 0. Raises ConfigError for more."""
    if asked > most:
        raise ConfigError(f"batch.context: expected at most {most}, the model's own limit, got {asked}")
    return asked or most
