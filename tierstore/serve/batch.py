"""Sequences that a model continues together: they join, take steps and leave.

Shapes: B sequences of a group, T tokens of a pass, S tokens with those before, V vocabulary.

Sequences are in groups, each a padded batch with a cache. ``BatchRunner`` keeps all sequences in one group;
``InvariantRunner`` gives each a group of its own, and thereby the bits that it gets alone.
The passes of several groups meet at the experts (``MeetingPasses``): one lease of an expert serves all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from greenlet import greenlet
from torch import Tensor

from tierstore.cache.access import ASKERS
from tierstore.errors import BudgetError
from tierstore.moe.computing import ExpertPass
from tierstore.moe.guessing import PASS_DRIFT, StreamDrift
from tierstore.moe.joint import forward_together
from tierstore.moe.source import SourceSlot
from tierstore.serve.experts import ServedExperts, ServingPhase
from tierstore.serve.model import (
    LayeredCache,
    ServedModel,
    copied_rows,
    drop_columns,
    move,
    select_rows,
    why_apart,
)


@dataclass(frozen=True, slots=True)
class Joined:
    """A sequence that is in the batch from now on: its ``number``, and the logits (V,) of what follows its prompt."""

    number: int
    logits_V: Tensor


class AskerBits:
    """A bit for each sequence of a batch, of the ``ASKERS`` that there are.

    A sequence that joins gets the bit that the fewest sequences share, and of equals the one unused for longest, so that a
    policy rarely takes it for an earlier sequence. The same joins and leaves give the same bits.
    """

    def __init__(self) -> None:
        self._bit_of: dict[int, int] = {}
        #: All of them, those first that were given back longest ago.
        self._bits = [1 << number for number in range(ASKERS)]

    def update(self, sequences: Collection[int]) -> None:
        """The batch has these sequences, in the order in which they joined."""
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


def askers_of(calls: Sequence[ExpertPass], bits: Sequence[Sequence[int]]) -> dict[int, int]:
    """The sequences that ask for each expert, a bit each; experts that none asks for are left out.

    ``bits[i]``: of the sequences of ``calls[i]``, whose tokens lie there one sequence after another, as many of each. A
    sequence asks with its last token, from which it goes on.
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


ExpertCall = tuple[Tensor, Tensor, ExpertPass]
#: Receives the calls of a layer, one of each pass, before its experts are leased.
Called = Callable[[Sequence[ExpertPass]], None]


class MeetingPasses:
    """Forward passes that go on side by side over a model whose experts are leased through ``slot``.

    Each pass runs in a greenlet of its own, as the micro-batches of a step in layer order do. It stops where it calls for
    experts; when all have come there, the experts that any of them needs are leased once, and each pass's rows are computed
    by themselves. So a pass has the bits that it has alone.
    """

    def __init__(self, slot: SourceSlot) -> None:
        self._slot = slot

    def run(self, passes: Sequence[Callable[[], Tensor]], called: Called | None = None) -> list[Tensor]:
        """What each of ``passes`` returns. They are passes of one model: all of them call for experts of the same layers.

        Raises what one of them or its source raises; none goes on then.
        """
        if len(passes) == 1 and called is None:
            return [passes[0]()]
        lanes = [greenlet(each) for each in passes]
        self._slot.meeting = self
        try:
            return self._run(lanes, called)
        finally:
            self._slot.meeting = None
            for lane in lanes:
                if not lane.dead:
                    lane.throw()  # ends it: what it has open is closed

    def compute(self, x_TD: Tensor, weight_TK: Tensor, call: ExpertPass) -> Tensor:
        """The experts' results for the pass in progress, which stops here until they are computed (``Meeting``)."""
        parent = greenlet.getcurrent().parent
        assert parent is not None
        result: Tensor = parent.switch((x_TD, weight_TK, call))
        return result

    def _run(self, lanes: Sequence[greenlet], called: Called | None) -> list[Tensor]:
        stops: list[ExpertCall | Tensor] = [lane.switch() for lane in lanes]
        while calls := [stop for stop in stops if not isinstance(stop, Tensor)]:
            if len(calls) < len(lanes):
                raise RuntimeError("some passes of a model end where others call for experts")
            stops.clear()
            if called is not None:
                called([call for _, _, call in calls])
            results = forward_together(self._slot, calls)
            del calls
            stops.extend(lane.switch(results.pop(0)) for lane in lanes)
        return [stop for stop in stops if isinstance(stop, Tensor)]


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


class BatchRunner:
    """Continues at most ``sequences`` sequences with ``model``, whose experts ``experts`` leases. They are one padded batch.

    Sequences join and leave between steps. One caller: the thread that runs the model. If a pass raises (ChecksumError,
    OSError, BudgetError), its sequences have left and all others are as they were: the next call is good.
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
        """With ``askers``, ``experts`` receives the sequences that request each expert. A prompt requests most of a
        layer; the requests of its last token predict the next ones.
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

    @cached_property
    def apart(self) -> str:
        """Why sequences that join at different times are not one batch; empty where they are."""
        return why_apart(self.model.new_cache())

    def describe(self) -> str:
        """One line: how sequences are put together."""
        if self.apart:
            return f"padded: one for the sequences that join together, since {self.apart}"
        return "padded: one for all sequences"

    @torch.inference_mode()
    def join(self, prompts: Sequence[Sequence[int]]) -> list[Joined]:
        """Prefill: computes ``prompts`` (each of at least one token) together, each layer once. Raises BudgetError where
        the batch has no room for so many, or the model's context for one.
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
        called = self._called(groups, [*self._lengths, *range(first, first + len(prompts))])
        logits = self._forward(ServingPhase.PREFILL, groups, tokens, called)
        self._joined += len(prompts)
        self._groups += groups
        self._lengths.update((first + row, len(prompt)) for row, prompt in enumerate(prompts))
        return [Joined(number, logits[number]) for number in sorted(logits)]

    @torch.inference_mode()
    def step(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        """Decoding: each sequence of ``tokens`` goes on with one token; returns the logits (V,) of what follows it. Raises
        BudgetError where a sequence has as many tokens as the model's context.
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
        logits = self._forward(ServingPhase.DECODE, groups, passes, self._called(groups, lengths))
        self._groups += groups
        self._lengths = lengths
        return logits

    def resume(self, prompt: Sequence[int], tokens: Sequence[int]) -> Joined:
        """A sequence joins that had left when its pass failed, with the ``tokens`` (at least one) that followed ``prompt``;
        the logits are of what follows them. Raises what ``join`` and ``step`` do.
        """
        # One prefill: the bits of a padded batch depend on its passes anyway.
        (joined,) = self.join([(*prompt, *tokens)])
        return joined

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

    def _called(self, groups: Sequence[SequenceGroup], batch: Collection[int]) -> Called | None:
        """Tells ``experts`` which sequences ask for which, in passes of ``groups``."""
        if self._askers is None:
            return None
        self._askers.update(batch)
        bits = [self._askers.of(group.numbers) for group in groups]
        return lambda calls: self._experts.tell_askers(askers_of(calls, bits))

    def _forward(
        self,
        phase: ServingPhase,
        groups: Sequence[SequenceGroup],
        tokens: Sequence[Tensor],
        called: Called | None,
    ) -> dict[int, Tensor]:
        """The passes of ``groups`` over ``tokens``: the logits (V,) by sequence."""
        self._experts.begin(phase, sum(each.numel() for each in tokens))
        results = self._passes.run(
            [
                partial(group.forward, self.model, tokens_BT)
                for group, tokens_BT in zip(groups, tokens, strict=True)
            ],
            called,
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

    def _parts(self, rows: Sequence[int]) -> list[list[int]]:
        """Which of the prompts ``rows`` are a group."""
        return [list(rows)]

    def _arranged(self, groups: list[SequenceGroup]) -> list[SequenceGroup]:
        """The groups that take a step, as the pass has them."""
        if len(groups) == 1 or self.apart:
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
    """Each sequence is a group of its own, and gets the bits that it gets alone."""

    def describe(self) -> str:
        return "invariant: each sequence is a pass of its own, and its bits are those that it gets alone"

    def resume(self, prompt: Sequence[int], tokens: Sequence[int]) -> Joined:
        # Token by token, as they were computed before: a prefill of all of them would round otherwise.
        (joined,) = self.join([prompt])
        number, logits_V = joined.number, joined.logits_V
        for token in tokens:
            logits_V = self.step({number: token})[number]
        return Joined(number, logits_V)

    def _parts(self, rows: Sequence[int]) -> list[list[int]]:
        return [[row] for row in rows]

    def _arranged(self, groups: list[SequenceGroup]) -> list[SequenceGroup]:
        return groups
