"""What both kinds of batches share: sequences in groups, each a padded batch with a cache, whose passes meet.

Shapes: B sequences of a group, T tokens of a pass, S tokens with those before, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tierstore.errors import BudgetError
from tierstore.moe.guessing import PASS_DRIFT, StreamDrift
from tierstore.serve.batch.askers import AskerBits
from tierstore.serve.batch.interface import Joined
from tierstore.serve.batch.meeting import MeetingPasses, Telling
from tierstore.serve.experts.interface import ServedExperts, ServingPhase
from tierstore.serve.model.caches import copied_rows, drop_columns, select_rows, why_apart
from tierstore.serve.model.interface import LayeredCache, ServedModel


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """Sequences whose tokens are one batch, padded on the left. ``mask_BS``: 1 for a token, 0 for padding."""

    numbers: list[int]
    cache: LayeredCache
    mask_BS: Tensor
    drift: StreamDrift

    def forward(self, model: ServedModel, tokens_BT: Tensor) -> Tensor:
        """Logits (B, V) of what follows ``tokens_BT``, of which the last columns of ``mask_BS`` tell."""
        positions_BS = (self.mask_BS.cumsum(-1) - 1).masked_fill(self.mask_BS == 0, 0)
        positions_BT = positions_BS[:, -tokens_BT.shape[1] :]
        token = PASS_DRIFT.set(self.drift)
        try:
            return model.forward(tokens_BT, self.cache, mask_BS=self.mask_BS, positions_BT=positions_BT)
        finally:
            PASS_DRIFT.reset(token)

    def keep(self, rows: Sequence[int]) -> None:
        """The other sequences leave; columns that are padding for all that stay go with them where they can."""
        select_rows(self.cache, rows)
        self.drift = self.drift.select(rows)
        self.numbers = [self.numbers[row] for row in rows]
        self.mask_BS = self.mask_BS[list(rows)]
        columns = int(self.mask_BS.argmax(dim=-1).min())
        if columns and not why_apart(self.cache):
            drop_columns(self.cache, columns)
            self.mask_BS = self.mask_BS[:, columns:]

    def split(self, numbers: Set[int]) -> SequenceGroup:
        """Takes the sequences ``numbers``, which are not all, out into a group of their own."""
        rows = [row for row, number in enumerate(self.numbers) if number in numbers]
        others = [row for row, number in enumerate(self.numbers) if number not in numbers]
        taken = SequenceGroup(
            [self.numbers[row] for row in rows],
            copied_rows(self.cache, rows),
            self.mask_BS[rows],
            self.drift.select(rows),
        )
        self.keep(others)
        return taken


class GroupedRunner(ABC):
    """A ``BatchRunner`` over ``model``, whose experts ``experts`` leases, of at most ``sequences`` sequences.

    Tokens beyond the vocabulary are a ValueError, and a sequence beyond the model's context is a BudgetError; both are
    raised before anything has changed.
    """

    def __init__(
        self,
        model: ServedModel,
        experts: ServedExperts,
        passes: MeetingPasses,
        *,
        sequences: int,
        device: torch.device | None = None,
        askers: AskerBits | None = None,
    ) -> None:
        """``askers``: where ``experts`` are to be told which sequences ask for which. A prompt asks for most of a layer, and
        what its last token asks for says what comes next.
        """
        self.model = model
        self.sequences = sequences
        self._experts = experts
        self._passes = passes
        self._device = device or torch.device("cpu")
        self._askers = askers
        self._groups: list[SequenceGroup] = []
        #: Tokens of each sequence, by number, in the order in which they joined.
        self._lengths: dict[int, int] = {}
        self._joined = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """The sequences in the batch, in the order in which they joined."""
        return tuple(self._lengths)

    @torch.inference_mode()
    def join(self, prompts: Sequence[Sequence[int]]) -> list[Joined]:
        """Prefill: computes ``prompts`` together, each layer once. Raises BudgetError where the batch has no room for so
        many, or a prompt is longer than the model's context.
        """
        self._check_prompts(prompts)
        if not prompts:
            return []
        first = self._joined
        parts = self._parts(range(len(prompts)))
        groups, tokens = [], []
        for part in parts:
            group, tokens_BT = self._new_group([first + row for row in part], [prompts[row] for row in part])
            groups.append(group)
            tokens.append(tokens_BT)
        telling = self._telling(groups, [*self._lengths, *range(first, first + len(prompts))])
        logits = self._forward(ServingPhase.PREFILL, groups, tokens, telling)
        self._joined += len(prompts)
        self._groups += groups
        self._lengths.update((first + row, len(prompt)) for row, prompt in enumerate(prompts))
        return [Joined(number, logits[number]) for number in sorted(logits)]

    @torch.inference_mode()
    def step(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        """Decoding: each sequence of ``tokens`` goes on with one token; returns the logits (V,) of what follows it.

        Raises BudgetError where a sequence has as many tokens as the model's context.
        """
        self._check_tokens(tokens)
        if not tokens:
            return {}
        lengths = {number: length + (number in tokens) for number, length in self._lengths.items()}
        taken = self._take(set(tokens))
        # In a pass the caches change: the sequences are back in the batch when all has gone well.
        self._lengths = {number: length for number, length in lengths.items() if number not in tokens}
        groups = self._arranged(taken)
        del taken
        passes = []
        for group in groups:
            group.mask_BS = torch.cat((group.mask_BS, group.mask_BS.new_ones(len(group.numbers), 1)), dim=1)
            tokens_B = [tokens[number] for number in group.numbers]
            passes.append(torch.tensor(tokens_B, device=self._device).unsqueeze(1))
        logits = self._forward(ServingPhase.DECODE, groups, passes, self._telling(groups, lengths))
        self._groups += groups
        self._lengths = lengths
        return logits

    @torch.inference_mode()
    def leave(self, number: int) -> None:
        """The sequence has ended: its memory is free. KeyError for one that is not in the batch."""
        del self._lengths[number]
        for group in self._groups:
            if number in group.numbers:
                rows = [row for row, each in enumerate(group.numbers) if each != number]
                if rows:
                    group.keep(rows)
                else:
                    self._groups.remove(group)
                return

    def _telling(self, groups: Sequence[SequenceGroup], batch: Collection[int]) -> Telling | None:
        """Who asks, in passes of ``groups``."""
        if self._askers is None:
            return None
        self._askers.update(batch)
        return Telling(self._experts, [self._askers.of(group.numbers) for group in groups])

    def _forward(
        self,
        phase: ServingPhase,
        groups: Sequence[SequenceGroup],
        tokens: Sequence[Tensor],
        telling: Telling | None = None,
    ) -> dict[int, Tensor]:
        """The passes of ``groups`` over ``tokens``: the logits (V,) by sequence."""
        self._experts.begin(phase, sum(each.numel() for each in tokens))
        results = self._passes.run(
            [
                partial(group.forward, self.model, tokens_BT)
                for group, tokens_BT in zip(groups, tokens, strict=True)
            ],
            telling,
        )
        return {
            number: logits_V
            for group, logits_BV in zip(groups, results, strict=True)
            for number, logits_V in zip(group.numbers, logits_BV, strict=True)
        }

    def _new_group(
        self, numbers: list[int], prompts: Sequence[Sequence[int]]
    ) -> tuple[SequenceGroup, Tensor]:
        """A group without anything in its cache, and its tokens (B, T)."""
        longest = max(len(prompt) for prompt in prompts)
        padding = [longest - len(prompt) for prompt in prompts]
        pad = self.model.pad_token
        tokens = [[pad] * before + list(prompt) for before, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * before + [1] * len(prompt) for before, prompt in zip(padding, prompts, strict=True)]
        group = SequenceGroup(
            numbers,
            self.model.new_cache(),
            torch.tensor(mask, device=self._device),
            StreamDrift([len(prompt) for prompt in prompts]),
        )
        return group, torch.tensor(tokens, device=self._device)

    def _take(self, numbers: set[int]) -> list[SequenceGroup]:
        """Takes the sequences ``numbers`` out of the batch, in groups."""
        taken, left = [], []
        for group in self._groups:
            asked = numbers.intersection(group.numbers)
            if not asked:
                left.append(group)
            elif len(asked) == len(group.numbers):
                taken.append(group)
            else:
                taken.append(group.split(asked))
                left.append(group)
        self._groups = left
        return taken

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        if len(self._lengths) + len(prompts) > self.sequences:
            raise BudgetError(
                f"batch.sequences: {len(prompts)} sequences join {len(self._lengths)}, and the batch holds "
                f"{self.sequences}"
            )
        for prompt in prompts:
            if not prompt:
                raise ValueError("a prompt needs at least one token")
            if len(prompt) > self.model.context:
                raise BudgetError(
                    f"batch.context: a prompt of {len(prompt)} tokens, and a sequence holds {self.model.context}"
                )
            self._check_vocabulary(min(prompt), max(prompt))

    def _check_tokens(self, tokens: Mapping[int, int]) -> None:
        for number, token in tokens.items():
            if self._lengths[number] >= self.model.context:
                raise BudgetError(
                    f"batch.context: sequence {number} has {self._lengths[number]} tokens, the most of a sequence"
                )
            self._check_vocabulary(token, token)

    def _check_vocabulary(self, least: int, most: int) -> None:
        if least < 0 or most >= self.model.vocabulary:
            token = least if least < 0 else most
            raise ValueError(f"token {token}: expected 0 to {self.model.vocabulary - 1}")

    @abstractmethod
    def resume(self, prompt: Sequence[int], tokens: Sequence[int]) -> Joined:
        """As in ``BatchRunner``."""

    @abstractmethod
    def describe(self) -> str:
        """One line: how sequences are put together."""

    @abstractmethod
    def _parts(self, rows: Sequence[int]) -> list[list[int]]:
        """Which of the prompts ``rows`` are a group."""

    @abstractmethod
    def _arranged(self, groups: list[SequenceGroup]) -> list[SequenceGroup]:
        """The groups that take a step, as the pass has them."""
