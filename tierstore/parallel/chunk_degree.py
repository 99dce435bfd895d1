"""The number of chunks of a pass over a MoE layer's experts: PipeMoE's question, answered exactly.

A pass sends rows to the ranks of their experts (dispatch), computes them there, and sends results back (combine). In r
chunks, the rows of one chunk travel while another is computed. One network serves both directions, and there is one device.
All dispatches are issued before all combines; with equal chunks, and d, e and c seconds for one chunk's dispatch, experts
and combine, the pass takes ::

    T(r) = max(r d + r c,          the network is never idle
               d + r e + c,        the device is never idle from the first chunk's rows on
               r d + e + c,        the last chunk is dispatched, computed and combined
               d + e + r c)        the first chunk is, and the others' combines follow

    d(r) = starts alpha_a + beta_a bytes / r        e(r) = starts alpha_e + beta_e work / r        c(r) as d(r)

If dispatch and combine move the same bytes, as in a forward pass, the first two terms decide alone (for r = 1 all four are
equal)::

    T(r) = max(2 r a_a + 2 b_a n_d,  2 a_a + 2 b_a n_d / r + r a_e + b_e n_e)

Each term has the form ``A + B r + C / r``: convex, and so is their maximum. Its minimum is at the minimum of one term,
``sqrt(C / B)``, or where two cross, a quadratic equation; the best whole r is next to one of these at most 16 points.
Every term is a lower bound of every schedule in that order, and one of them is attained:
``experiments/pipemoe_solvers.py`` compares them with a discrete-event simulation. Pure functions of their arguments; no
torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import Enum

#: Times that differ by less than this fraction are equal; then the smaller r is better.
_EQUAL = 1e-12
#: The fraction by which another number of chunks must be faster to be chosen.
_WORTH = 0.02
#: The highest r considered if nothing caps it because starts cost nothing.
_HIGHEST = 1 << 20


@dataclass(frozen=True, slots=True)
class ChunkCosts:
    """The costs of one chunk. ``alpha_a``: seconds to start one all-to-all; ``beta_a``: seconds per byte that a rank sends
    in it. ``alpha_e``: seconds that a chunk adds to the computation of its experts; ``beta_e``: seconds per unit of work
    (floating point operations, or whatever ``LayerPass`` counts). Raises ValueError for negative numbers.
    """

    alpha_a: float
    beta_a: float
    alpha_e: float
    beta_e: float

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{each.name}: expected at least 0 seconds, got {value}")


@dataclass(frozen=True, slots=True)
class Share:
    """What a pass needs of the network in one direction, or of the device. ``starts``: per chunk (its messages, or passes
    over its experts); ``amount``: bytes or work of the whole pass.
    """

    starts: float
    amount: float

    def __post_init__(self) -> None:
        for name in ("starts", "amount"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: expected at least 0, got {value}")


@dataclass(frozen=True, slots=True)
class LayerPass:
    """One pass over a layer's experts, of the rank with the most to do."""

    dispatch: Share
    experts: Share
    combine: Share


class Inputs(Enum):
    """Where a backward pass gets the experts' rows from."""

    SAVED = "saved"
    SENT_AGAIN = "sent again"


class WeightGradients(Enum):
    """Where a backward pass computes the gradients of the router's weights (``moe.computing.Weighting``)."""

    #: With the experts: weights travel there, and their gradients back.
    AT_EXPERTS = "at experts"
    #: With the tokens, from outputs, which travel back once more if they were not kept.
    AT_TOKENS = "at tokens"


def forward_pass(rows_bytes: float, work: float) -> LayerPass:
    """Rows of ``rows_bytes`` go to the experts and come back; their products are ``work``."""
    return LayerPass(Share(1, rows_bytes), Share(1, work), Share(1, rows_bytes))


def backward_pass(
    rows_bytes: float,
    work: float,
    *,
    weights_bytes: float = 0.0,
    inputs: Inputs = Inputs.SAVED,
    gradients: WeightGradients = WeightGradients.AT_EXPERTS,
    again: float = 0.0,
) -> LayerPass:
    """The backward pass of ``forward_pass(rows_bytes, work)``, message by message as ``moe.computing`` sends them.

    To the experts: the gradients of their outputs; AT_EXPERTS also the rows' weights (``weights_bytes``); SENT_AGAIN also
    the rows. Back: the gradients of the rows; AT_EXPERTS also those of the weights, else, with SENT_AGAIN, the outputs. Two
    products for each one of the forward pass, plus ``again``: work of the forward pass that is repeated.
    """
    sent, back = [rows_bytes], [rows_bytes]
    if gradients is WeightGradients.AT_EXPERTS:
        sent.append(weights_bytes)
        back.append(weights_bytes)
    elif inputs is Inputs.SENT_AGAIN:
        back.append(rows_bytes)
    if inputs is Inputs.SENT_AGAIN:
        sent.append(rows_bytes)
    return LayerPass(
        Share(len(sent), sum(sent)),
        Share(3 if again else 2, 2 * work + again),
        Share(len(back), sum(back)),
    )


@dataclass(frozen=True, slots=True)
class Degree:
    """The best number of chunks. ``seconds``: T of it; ``wanted``: the best number without a cap."""

    degree: int
    seconds: float
    wanted: int


def worthwhile_degree(costs: ChunkCosts, work: LayerPass, *, present: int, most: int) -> Degree:
    """The number that AUTO changes to from ``present`` chunks: the best number if it is faster by 2%, else ``present``,
    since measurements vary. Raises ValueError.
    """
    best = best_degree(costs, work, most=most)
    stays = pass_seconds(costs, work, present)
    return Degree(present, stays, best.wanted) if stays <= best.seconds * (1 + _WORTH) else best


def chosen_degrees(
    passes: Sequence[tuple[ChunkCosts, LayerPass]], *, present: Sequence[int], owned: int, most: int
) -> list[Degree]:
    """The numbers that AUTO changes to from ``present``, pass by pass: each its own, up to the ``owned`` experts of a rank;
    or, up to ``most``, the multiple of ``owned`` that is best for all passes together, if it is faster by 2%. (They divide
    experts into the same parts, and only multiples have equal chunks.) Raises ValueError.
    """
    whole = [
        worthwhile_degree(costs, work, present=now, most=owned)
        for (costs, work), now in zip(passes, present, strict=True)
    ]
    divided = min(
        (
            [Degree(r, pass_seconds(*one, r), own.wanted) for one, own in zip(passes, whole, strict=True)]
            for r in range(owned, most + 1, owned)
        ),
        key=_together_s,
    )
    return divided if _together_s(divided) * (1 + _WORTH) < _together_s(whole) else whole


def _together_s(degrees: Sequence[Degree]) -> float:
    return sum(one.seconds for one in degrees)


def pass_seconds(costs: ChunkCosts, work: LayerPass, degree: int) -> float:
    """T(r): seconds of ``work`` in ``degree`` equal chunks. Raises ValueError."""
    if degree < 1:
        raise ValueError(f"degree: expected at least 1, got {degree}")
    return max(term.at(degree) for term in _terms(costs, work))


def best_degree(costs: ChunkCosts, work: LayerPass, *, most: int) -> Degree:
    """The number of chunks, at most ``most``, with which ``work`` takes the least time; of equals the smallest.

    ``most`` is the fewest experts that any rank owns, since a chunk has at least one of each. Raises ValueError.
    """
    if most < 1:
        raise ValueError(f"most: expected at least 1, got {most}")
    terms = _terms(costs, work)
    points = list(_points(terms))
    wanted, _ = _least(terms, points, max(most, _HIGHEST))
    degree, seconds = _least(terms, points, most)
    return Degree(degree, seconds, wanted)


@dataclass(frozen=True, slots=True)
class _Term:
    """``constant + by_r r + by_inverse / r``."""

    constant: float
    by_r: float
    by_inverse: float

    def at(self, r: int) -> float:
        return self.constant + self.by_r * r + self.by_inverse / r


def _terms(costs: ChunkCosts, work: LayerPass) -> tuple[_Term, ...]:
    """The four bounds as functions of r."""
    d0, d1 = costs.alpha_a * work.dispatch.starts, costs.beta_a * work.dispatch.amount
    e0, e1 = costs.alpha_e * work.experts.starts, costs.beta_e * work.experts.amount
    c0, c1 = costs.alpha_a * work.combine.starts, costs.beta_a * work.combine.amount
    return (
        _Term(d1 + c1, d0 + c0, 0.0),
        _Term(d0 + c0 + e1, e0, d1 + c1),
        _Term(d1 + e0 + c0, d0, e1 + c1),
        _Term(d0 + e0 + c1, c0, d1 + e1),
    )


def _points(terms: tuple[_Term, ...]) -> Iterator[float]:
    """The points at which the maximum of ``terms`` may be least."""
    for term in terms:
        if term.by_r > 0:
            yield math.sqrt(term.by_inverse / term.by_r)
    for one, other in itertools.combinations(terms, 2):
        # Where one equals the other: b r^2 + a r + c = 0.
        a, b, c = one.constant - other.constant, one.by_r - other.by_r, one.by_inverse - other.by_inverse
        if b == 0.0:
            if a != 0.0:
                yield -c / a
            continue
        inside = a * a - 4 * b * c
        if inside >= 0:
            # The root of the larger sum first, the other from the product of both: no difference of nearly equal numbers.
            larger = -(a + math.copysign(math.sqrt(inside), a)) / 2
            yield larger / b
            if larger != 0.0:
                yield c / larger


def _least(terms: tuple[_Term, ...], points: list[float], most: int) -> tuple[int, float]:
    """The best whole r in 1..most next to ``points``, and T of it."""
    candidates = {1, most}
    for point in points:
        if math.isfinite(point) and point > 0:
            below = math.floor(min(point, most))
            candidates |= {min(max(below, 1), most), min(below + 1, most)}
    times = {r: max(term.at(r) for term in terms) for r in sorted(candidates)}
    limit = min(times.values()) * (1 + _EQUAL)
    return next((r, spent) for r, spent in times.items() if spent <= limit)
