"""Batches of sequences, which join, take decode steps and leave.

Shapes: B sequences of a group, T tokens of a pass, S tokens including earlier ones, V vocabulary.

Sequences form groups, each a padded batch with a cache. ``BatchRunner`` keeps all sequences in one group where caches allow
it; ``InvariantRunner`` gives each its own group, and thereby the same bits as if it were alone. The passes of several groups
meet at the experts (``LockstepPasses``): one lease of an expert serves all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from tierstore.cache.access import SEQUENCES
from tierstore.errors import BudgetError
from tierstore.moe.computing import ExpertPass
from tierstore.moe.guessing import PASS_DRIFT, StreamDrift
from tierstore.parallel import RankGroup
from tierstore.serve.experts import CachedExperts, ServingPhase
from tierstore.serve.model import (
    LayeredCache,
    ServedModel,
    copied_rows,
    drop_columns,
    move,
    select_rows,
    why_apart,
)
from tierstore.serve.passes import Called, LockstepPasses, ServedRanks
from tierstore.timeline import NullTimeline, OperationSpans, TimelineSink, Track


class SequenceBits:
    """Gives each sequence of a batch one of ``SEQUENCES`` bits, by which cache policies tell sequences apart.

    A sequence that joins gets the bit that the fewest sequences share, and among equals the one unused for longest, so that
    a policy rarely confuses it with an earlier sequence. The same joins and leaves give the same bits.
    """

    def __init__(self) -> None:
        self._bit_of: dict[int, int] = {}
        #: All bits, the least recently released first.
        self._bits = [1 << number for number in range(SEQUENCES)]

    def update(self, sequences: Collection[int]) -> None:
        """Set the sequences of the batch, in the order in which they joined."""
        for gone in [sequence for sequence in self._bit_of if sequence not in sequences]:
            bit = self._bit_of.pop(gone)
            self._bits.remove(bit)
            self._bits.append(bit)
        for sequence in sequences:
            if sequence not in self._bit_of:
                held = Counter(self._bit_of.values())
                self._bit_of[sequence] = min(self._bits, key=held.__getitem__)

    def of(self, sequences: Iterable[int]) -> list[int]:
        """The bits of these sequences."""
        return [self._bit_of[sequence] for sequence in sequences]


def requesters_of(calls: Sequence[ExpertPass], bits: Sequence[Sequence[int]]) -> dict[int, int]:
    """The bits of the sequences that request each expert; experts without requests are left out.

    ``bits[i]``: the bits of the sequences of ``calls[i]``, whose tokens are stored sequence by sequence, equally many each.
    Only the last token of a sequence counts.
    """
    found: dict[int, int] = {}
    for call, own in zip(calls, bits, strict=True):
        plan = call.plan
        each = len(plan.place_TK) // len(own)
        for bit, places in zip(own, plan.place_TK[each - 1 :: each].tolist(), strict=True):
            for place in places:
                if place < plan.rows:  # not dropped
                    expert = bisect_right(plan.offsets, place) - 1
                    found[expert] = found.get(expert, 0) | bit
    return found


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """Sequences that form one batch, padded on the left. ``mask_BS``: 1 for a token, 0 for padding."""

    numbers: list[int]
    cache: LayeredCache
    mask_BS: Tensor
    drift: StreamDrift

    def forward(self, model: ServedModel, tokens_BT: Tensor) -> Tensor:
        """Compute the logits (B, V) that follow ``tokens_BT``; ``mask_BS`` must already include these tokens."""
        positions_BS = (self.mask_BS.cumsum(-1) - 1).masked_fill(self.mask_BS == 0, 0)
        positions_BT = positions_BS[:, -tokens_BT.shape[1] :]
        token = PASS_DRIFT.set(self.drift)
        try:
            return model.forward(tokens_BT, self.cache, mask_BS=self.mask_BS, positions_BT=positions_BT)
        finally:
            PASS_DRIFT.reset(token)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the sequences in ``rows``. If the cache allows it, drop columns that are padding for all of them."""
        select_rows(self.cache, rows)
        self.drift = self.drift.select(rows)
        self.numbers = [self.numbers[row] for row in rows]
        self.mask_BS = self.mask_BS[list(rows)]
        columns = int(self.mask_BS.argmax(dim=-1).min())
        if columns and not why_apart(self.cache):
            drop_columns(self.cache, columns)
            self.mask_BS = self.mask_BS[:, columns:]

    def split(self, numbers: Set[int]) -> SequenceGroup:
        """Move the sequences ``numbers`` (some, not all) to a new group, which is returned."""
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


class BatchRunner:
    """Continues at most ``sequences`` sequences as one padded batch. ``experts`` leases the experts of ``model``.

    Sequences join and leave between steps. Only the model's thread may call it. If a pass raises (ChecksumError, OSError,
    BudgetError), its sequences have left, all others are unchanged, and further calls work. A token outside the vocabulary
    raises ValueError and a sequence beyond the model's context BudgetError, both before anything changes.
    """

    def __init__(
        self,
        model: ServedModel,
        experts: CachedExperts,
        passes: LockstepPasses,
        *,
        sequences: int,
        device: torch.device | None = None,
        requesters: SequenceBits | None = None,
        ranks: RankGroup | None = None,
        timeline: TimelineSink | None = None,
        operations: OperationSpans | None = None,
    ) -> None:
        """With ``requesters``, ``experts`` learns which sequences request each expert. Of a prompt only the last token
        counts: a prompt requests most of a layer, but its last token predicts the next requests.

        ``ranks``: the sequences are divided over them (``ServedRanks``), and ``passes`` are ``JointPasses``. ``timeline``
        shows the passes, and after each what ``operations`` recorded.
        """
        self.model = model
        self.sequences = sequences
        self._experts = experts
        self._passes = passes
        self._device = device or torch.device("cpu")
        self._requesters = requesters
        self._ranks = ServedRanks(ranks or RankGroup.alone())
        self._timeline = timeline or NullTimeline()
        self._operations = operations
        #: The groups of this rank's sequences.
        self._groups: list[SequenceGroup] = []
        #: The length of each sequence in tokens, by its number, in the order in which they joined.
        self._lengths: dict[int, int] = {}
        self._joined = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """The sequences in the batch, in the order in which they joined."""
        return tuple(self._lengths)

    @cached_property
    def apart(self) -> str:
        """Why sequences that join at different times cannot form one batch; empty if they can."""
        return why_apart(self.model.new_cache())

    def describe(self) -> str:
        """One line on how sequences are batched."""
        if self.apart:
            return f"padded, only sequences that joined together, since {self.apart}"
        return "padded, all sequences together"

    @torch.inference_mode()
    def join(self, prompts: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """Prefill: compute ``prompts`` (at least one token each) together, each layer once; return the number of each
        sequence, in order, and the logits (V,) that follow its prompt. Raises BudgetError if the batch cannot hold all of
        them, or a prompt exceeds the model's context.
        """
        self._check_prompts(prompts)
        if not prompts:
            return {}
        self._ranks.send(("join", prompts))
        first = self._joined
        numbers = range(first, first + len(prompts))
        self._ranks.update([*self._lengths, *numbers])
        parts = self._parts([row for row, number in enumerate(numbers) if self._ranks.owns(number)])
        groups, tokens = [], []
        for part in parts:
            group, tokens_BT = self._new_group([first + row for row in part], [prompts[row] for row in part])
            groups.append(group)
            tokens.append(tokens_BT)
        called = self._called(groups, [*self._lengths, *numbers])
        logits = self._forward(ServingPhase.PREFILL, groups, tokens, called, numbers)
        self._joined += len(prompts)
        self._groups += groups
        self._lengths.update(zip(numbers, map(len, prompts), strict=True))
        return dict(sorted(logits.items()))

    @torch.inference_mode()
    def step(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        """Decode: add one token to each sequence in ``tokens``; return the logits (V,) that follow. Raises BudgetError if a
        sequence already has as many tokens as the model's context.
        """
        self._check_tokens(tokens)
        if not tokens:
            return {}
        self._ranks.send(("step", tokens))
        lengths = {number: length + (number in tokens) for number, length in self._lengths.items()}
        taken = self._take(set(tokens))
        # A pass changes the caches, so its sequences return to the batch only if it succeeds.
        self._lengths = {number: length for number, length in lengths.items() if number not in tokens}
        groups = self._arranged(taken)
        del taken
        passes = []
        for group in groups:
            group.mask_BS = torch.cat((group.mask_BS, group.mask_BS.new_ones(len(group.numbers), 1)), dim=1)
            tokens_B = [tokens[number] for number in group.numbers]
            passes.append(torch.tensor(tokens_B, device=self._device).unsqueeze(1))
        called = self._called(groups, lengths)
        logits = self._forward(ServingPhase.DECODE, groups, passes, called, list(tokens))
        self._groups += groups
        self._lengths = lengths
        return logits

    def resume(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[int, Tensor]:
        """Join a sequence again that left when its pass failed, with the ``tokens`` (at least one) after its ``prompt``;
        return its number and the logits that follow them. Raises what ``join`` and ``step`` do.
        """
        # One prefill: the bits of a padded batch depend on its passes anyway.
        (joined,) = self.join([(*prompt, *tokens)]).items()
        return joined

    @torch.inference_mode()
    def leave(self, number: int) -> None:
        """Remove a sequence and free its memory. Raises KeyError if it is not in the batch."""
        del self._lengths[number]
        self._ranks.send(("leave", number))
        for group in self._groups:
            if number in group.numbers:
                rows = [row for row, each in enumerate(group.numbers) if each != number]
                if rows:
                    group.keep(rows)
                else:
                    self._groups.remove(group)
                return

    def idle(self) -> None:
        """Without sequences on several ranks: find out whether the others are alive. Raises PeerError."""
        self._ranks.send(("idle",))

    def end(self) -> None:
        """End ``follow`` on the other ranks. Raises PeerError."""
        self._ranks.send(None)

    def follow(self) -> None:
        """On a rank other than 0: make the calls of the runner of rank 0, until its ``end``. Raises PeerError."""
        while (call := self._ranks.receive()) is not None:
            name, *arguments = call
            getattr(self, name)(*arguments)

    def _called(self, groups: Sequence[SequenceGroup], batch: Collection[int]) -> Called | None:
        """A callback that tells ``experts`` which sequences of ``groups`` request which experts; None without requesters."""
        if self._requesters is None:
            return None
        self._requesters.update(batch)
        bits = [self._requesters.of(group.numbers) for group in groups]
        return lambda calls: self._experts.set_requesters(requesters_of(calls, bits))

    def _forward(
        self,
        phase: ServingPhase,
        groups: Sequence[SequenceGroup],
        tokens: Sequence[Tensor],
        called: Called | None,
        numbers: Sequence[int],
    ) -> dict[int, Tensor]:
        """Run the passes of ``groups`` over ``tokens``; return the logits (V,) of the sequences ``numbers``, those of all
        ranks.
        """
        count = sum(each.numel() for each in tokens)
        self._experts.begin(phase, count)
        with self._timeline.span(Track.COMPUTE, f"{phase.value} {count}"):
            results = self._passes.run(
                [
                    partial(group.forward, self.model, tokens_BT)
                    for group, tokens_BT in zip(groups, tokens, strict=True)
                ],
                called,
            )
        if self._operations is not None:
            self._operations.drain()
        logits = {
            number: logits_V
            for group, logits_BV in zip(groups, results, strict=True)
            for number, logits_V in zip(group.numbers, logits_BV, strict=True)
        }
        return self._ranks.gather(logits, numbers, self.model.vocabulary, self._device)

    def _new_group(
        self, numbers: list[int], prompts: Sequence[Sequence[int]]
    ) -> tuple[SequenceGroup, Tensor]:
        """A group with an empty cache, and its tokens (B, T)."""
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
        """Take the sequences ``numbers`` out of the batch; return them in groups."""
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
                f"batch.sequences: {len(prompts)} sequences cannot join {len(self._lengths)}: the batch holds at most "
                f"{self.sequences}"
            )
        for prompt in prompts:
            if not prompt:
                raise ValueError("a prompt needs at least one token")
            if len(prompt) > self.model.context:
                raise BudgetError(
                    f"batch.context: a prompt of {len(prompt)} tokens exceeds the context of {self.model.context}"
                )
            self._check_vocabulary(min(prompt), max(prompt))

    def _check_tokens(self, tokens: Mapping[int, int]) -> None:
        for number, token in tokens.items():
            if self._lengths[number] >= self.model.context:
                raise BudgetError(
                    f"batch.context: sequence {number} has {self._lengths[number]} tokens, which fill the context"
                )
            self._check_vocabulary(token, token)

    def _check_vocabulary(self, least: int, most: int) -> None:
        if least < 0 or most >= self.model.vocabulary:
            token = least if least < 0 else most
            raise ValueError(f"token {token}: expected 0 to {self.model.vocabulary - 1}")

    def _parts(self, rows: Sequence[int]) -> list[list[int]]:
        """Divide the prompts ``rows`` into groups."""
        return [list(rows)] if rows else []

    def _arranged(self, groups: list[SequenceGroup]) -> list[SequenceGroup]:
        """The groups of a step's pass: ``groups`` merged into one where caches allow it."""
        if len(groups) <= 1 or self.apart:
            return groups
        groups.sort(key=lambda group: group.numbers)
        length = max(group.mask_BS.shape[1] for group in groups)
        padding = [length - group.mask_BS.shape[1] for group in groups]
        cache = self.model.new_cache()
        move([group.cache for group in groups], cache, padding)
        mask_BS = torch.cat(
            [
                torch.nn.functional.pad(group.mask_BS, (columns, 0))
                for group, columns in zip(groups, padding, strict=True)
            ]
        )
        numbers = [number for group in groups for number in group.numbers]
        drift = StreamDrift.joined([group.drift for group in groups])
        return [SequenceGroup(numbers, cache, mask_BS, drift)]


class InvariantRunner(BatchRunner):
    """Puts each sequence into its own group, so that it has the same bits as if it were alone."""

    def describe(self) -> str:
        return "invariant, each sequence is its own pass, with the same bits as alone"

    def resume(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[int, Tensor]:
        # Token by token, as they were computed before: one prefill of all tokens would round differently.
        ((number, logits_V),) = self.join([prompt]).items()
        for token in tokens:
            logits_V = self.step({number: token})[number]
        return number, logits_V

    def _parts(self, rows: Sequence[int]) -> list[list[int]]:
        return [[row] for row in rows]

    def _arranged(self, groups: list[SequenceGroup]) -> list[SequenceGroup]:
        return groups
