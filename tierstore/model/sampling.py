"""Text without a cache of keys: every token is another forward pass over what is there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from tierstore.moe.seeds import keyed_generator


def sample_tokens(
    last_logits: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float,
    seed: int,
    ends: Collection[int] = (),
) -> list[int]:
    """At most ``count`` tokens that follow ``prompt``, sampled at ``temperature`` (0: greedy); one of ``ends`` is the last.

    ``last_logits`` gives logits (V,), fp32 and on the host, of what follows the tokens so far. Raises ValueError for a
    prompt without a token.
    """
    tokens = list(prompt)
    if not tokens:
        raise ValueError("a prompt needs at least one token")
    generator = keyed_generator(seed, "generate")
    for _ in range(count):
        logits = last_logits(tokens)
        if temperature > 0:
            probability = (logits / temperature).softmax(dim=-1)
            tokens.append(int(torch.multinomial(probability, 1, generator=generator)))
        else:
            tokens.append(int(logits.argmax()))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]
