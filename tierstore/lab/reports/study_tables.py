"""A study as tables in Markdown, for people who read documents rather than reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tierstore.lab.results import Outcome, RegimeStudy, Role, Study, TuneResult

_WITHIN = 0.01  # of the best in hindsight: what a choice is held to


def study_markdown(study: Study) -> str:
    """Every table of the study, each under a heading."""
    regimes = study.regimes
    parts = [
        ("Regimes", _regimes(regimes)),
        ("Miss ratio, one cache for all layers", _by_policy(regimes, RegimeStudy.focused, _miss_ratio)),
        (
            "Miss ratio, a quota for each layer",
            _by_policy(regimes, lambda regime: regime.layered, _miss_ratio),
        ),
        ("Distance from the bound", _distances(regimes)),
        ("Written back, MB a step", _by_policy(_writing(regimes), RegimeStudy.focused, _written)),
        ("Read and written, MB a step", _by_policy(_writing(regimes), RegimeStudy.focused, _moved)),
        ("LFU-decay tuned on the first half, against LRU on the second", _against_lru(regimes)),
        ("The tuner's choice on the first half, scored on the second", _choices(regimes)),
        ("Miss ratio over capacity", _over_capacity(regimes)),
    ]
    focus = regimes[0].focus if regimes else 0.0
    head = (
        f"All miss ratios and bytes are simulated, at a capacity of {focus:.0%} of what the trace asks for unless "
        "said otherwise, with no lookahead (nothing is fetched ahead); "
        "contract and hash of each trace are in the first table."
        + (f" Stalls and drive wear (in the report) are estimates: {study.source}." if study.source else "")
        + "\n"
    )
    return head + "".join(f"\n### {title}\n\n{table}" for title, table in parts if table)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its first column set left; nothing without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        return ""
    head = ["| " + " | ".join(columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    return "\n".join([*head, *lines]) + "\n"


def _ratio(value: float) -> str:
    return f"{value:.4f}".removeprefix("0")


def _miss_ratio(one: Outcome) -> str:
    return _ratio(one.miss_ratio)


def _written(one: Outcome) -> str:
    return f"{one.written_per_step / 1e6:,.0f}"


def _moved(one: Outcome) -> str:
    return f"{(one.read_per_step + one.written_per_step) / 1e6:,.0f}"


def _writing(regimes: Sequence[RegimeStudy]) -> list[RegimeStudy]:
    return [regime for regime in regimes if any(one.written_bytes for one in regime.focused())]


def _regimes(regimes: Sequence[RegimeStudy]) -> str:
    columns = ("regime", "steps", "requests", "records", "asked for of a layer", "contract", "trace")
    return _table(
        columns,
        (
            (
                regime.name,
                f"{regime.trace.steps:,}",
                f"{regime.trace.requests:,}",
                f"{regime.trace.records:,}",
                f"{regime.active_per_layer:.1f} of {regime.records_per_layer:.0f}",
                regime.contract,
                f"`{regime.trace.sha256[:12]}`",
            )
            for regime in regimes
        ),
    )


def _by_policy(
    regimes: Sequence[RegimeStudy],
    outcomes_of: Callable[[RegimeStudy], Sequence[Outcome]],
    shown: Callable[[Outcome], str],
) -> str:
    """A row a policy, a column a regime; the best policy of a column is bold."""
    found = [(regime.name, {one.label: one for one in outcomes_of(regime)}) for regime in regimes]
    found = [(name, outcomes) for name, outcomes in found if outcomes]
    labels = list(dict.fromkeys(label for _, outcomes in found for label in outcomes))
    if not found:
        return ""

    def cell(outcomes: dict[str, Outcome], label: str) -> str:
        if label not in outcomes:
            return "-"
        text = shown(outcomes[label])
        policies = [one for one in outcomes.values() if one.role is Role.POLICY]
        least = min(policies, key=lambda one: float(shown(one).replace(",", "")))
        return f"**{text}**" if outcomes[label] in policies and text == shown(least) else text

    no_bound = {
        one.label for _, outcomes in found for one in outcomes.values() if one.role is Role.CLAIRVOYANT
    }
    rows = [
        [
            f"{label} (clairvoyant)" if label in no_bound else label,
            *(cell(outcomes, label) for _, outcomes in found),
        ]
        for label in labels
    ]
    return _table(["policy", *(name for name, _ in found)], rows)


def _distances(regimes: Sequence[RegimeStudy]) -> str:
    rows = []
    for regime in regimes:
        outcomes = regime.focused()
        policies = [one for one in outcomes if one.role is Role.POLICY]
        least = next((one for one in outcomes if one.role is not Role.POLICY), None)
        if least is None:
            continue
        bound = least.miss_ratio
        shown = _ratio(bound) if least.role is Role.BOUND else f"no bound; clairvoyant {_ratio(bound)}"
        best = min(policies, key=lambda one: one.miss_ratio)
        named = {one.policy: one for one in policies}
        above = [
            f"{named[name].miss_ratio - bound:+.4f}" if name in named else "-"
            for name in ("lru", "lfu-decay", "next-use")
        ]
        rows.append((regime.name, shown, best.label, f"{best.miss_ratio - bound:+.4f}", *above))
    columns = ("regime", "bound", "best policy", "best above it", "LRU above it", "LFU-decay", "next-use")
    return _table(columns, rows)


def _described(one: Outcome) -> str:
    return f"{one.label}, {one.scope}"


def _against_lru(regimes: Sequence[RegimeStudy]) -> str:
    rows = [
        (
            regime.name,
            tuned.chosen.label,
            _ratio(tuned.baseline.miss_ratio),
            _ratio(tuned.chosen.miss_ratio),
            f"{tuned.gain:+.4f} ({tuned.gain_low:+.4f} to {tuned.gain_high:+.4f})",
            tuned.verdict.value,
        )
        for regime in regimes
        if (tuned := regime.against_lru) is not None
    ]
    return _table(("regime", "tuned", "LRU", "LFU-decay", "gain, 95% interval", "verdict"), rows)


def _choices(regimes: Sequence[RegimeStudy]) -> str:
    tunings = [(regime, tuned) for regime in regimes for tuned in _tunings(regime)]
    rows = [
        (
            f"{regime.name}, {tuned.chosen.capacity_fraction:.0%}",
            _described(tuned.chosen),
            _ratio(tuned.chosen.miss_ratio),
            _ratio(tuned.baseline.miss_ratio),
            _described(tuned.best),
            _ratio(tuned.best.miss_ratio),
            f"{tuned.regret:.2%}",
            tuned.verdict.value,
        )
        for regime, tuned in tunings
    ]
    if not rows:
        return ""
    table = _table(
        (
            "regime, capacity",
            "chosen",
            "misses",
            "default",
            "best tried, in hindsight",
            "misses",
            "regret",
            "verdict",
        ),
        rows,
    )
    return f"{table}\n{_near(regimes)}\n"


def _near(regimes: Sequence[RegimeStudy]) -> str:
    """How many choices are close to the best tried: of all cases, and of the regimes, at each capacity."""
    choices = {regime.name: [tuned.regret <= _WITHIN for tuned in _tunings(regime)] for regime in regimes}
    tuned = {name: near for name, near in choices.items() if near}
    cases = [near for each in tuned.values() for near in each]
    return (
        f"Within {_WITHIN:.0%} of the best tried, in hindsight: {sum(cases)} of {len(cases)} cases; "
        f"{sum(map(all, tuned.values()))} of {len(tuned)} regimes, at every capacity."
    )


def _tunings(regime: RegimeStudy) -> list[TuneResult]:
    return sorted(regime.tunings, key=lambda tuned: tuned.chosen.capacity_fraction)


def _over_capacity(regimes: Sequence[RegimeStudy]) -> str:
    """LRU, LFU-decay, the best policy of each capacity, and the bound or what is clairvoyant."""
    columns = sorted({_percent(point) for regime in regimes for point in regime.curves[0].points})
    rows = []
    for regime in regimes:
        points = {
            _percent(each[0]): each for each in zip(*(curve.points for curve in regime.curves), strict=True)
        }
        for name in ("lru", "lfu-decay", "best", Role.BOUND.value, Role.CLAIRVOYANT.value):
            cells = [_chosen(name, points[percent]) if percent in points else "" for percent in columns]
            if any(cells):
                rows.append((f"{regime.name}: {name}", *(cell or "-" for cell in cells)))
    return _table(["regime, policy", *(f"{percent}%" for percent in columns)], rows)


def _percent(one: Outcome) -> int:
    return round(100 * one.capacity_fraction)


def _chosen(name: str, outcomes: Sequence[Outcome]) -> str:
    role = Role.POLICY if name in ("lru", "lfu-decay", "best") else Role(name)
    among = [one for one in outcomes if one.role is role and name in ("best", role.value, one.policy)]
    return _ratio(min(one.miss_ratio for one in among)) if among else ""
