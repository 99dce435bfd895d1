"""Routing logs of inference and training as JSON lines.

Every line is one object: a layer, and the experts that one token (a list of ids) or several tokens (a list of lists, or
the tokens that each expert got) chose in it. Neighbouring lines of one step, layer and phase are one access. Names of
fields are options; the default is the first name known for the kind that the first routing line has.

Where no field says the step, a step begins when the layer number falls, or when a layer comes again for the same request
and the token's number does not rise (a log of one layer only). Where no field says the phase, it is forward.

Several files are the layers of one log, written by one logger a layer: each is cut into steps by itself, and the steps
are merged, forward passes in the order of the layers. Where no field says the layer, the file's name does.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TypeAlias

import numpy as np

from tierstore.errors import DataError
from tierstore.lab.importers import SourceOptions, line_blocks, open_text, refuse_line
from tierstore.lab.importers.plain import KeyNumbers
from tierstore.lab.routing import BACKWARD, FORWARD, Sections, expert_table, expert_unit_flags
from tierstore.trace.format import EventColumns, RecordTable, TraceKind

_FLUSH_UNITS = 1 << 18
_MAX_ID = 1 << 32
_NAMES = ("step", "layer", "experts", "counts", "token", "request", "phase")
#: The names that fields of a kind have by default, most usual first.
KNOWN_FIELDS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "vllm": {
        "step": ("step", "batch_id", "forward_id"),
        "layer": ("layer", "layer_id", "layer_idx"),
        "experts": ("topk_ids", "expert_ids", "topk_experts", "selected_experts", "experts"),
        "counts": (),
        "token": ("token_idx", "token_id", "position"),
        "request": ("req_id", "request_id", "request", "seq_id"),
        "phase": ("phase", "pass"),
    },
    "megatron": {
        "step": ("iteration", "step", "global_step"),
        "layer": ("layer_number", "layer"),
        "experts": ("topk_indices", "top_indices", "expert_indices", "expert_ids", "topk_ids"),
        "counts": ("tokens_per_expert", "expert_counts"),
        "token": (),
        "request": (),
        "phase": ("phase", "pass"),
    },
}
_PHASES = {"forward": FORWARD, "fwd": FORWARD, "backward": BACKWARD, "bwd": BACKWARD}


class LoggedPasses(enum.Enum):
    """The passes that the log holds: all of them, or forward passes, to which backward passes are added."""

    AS_LOGGED = "as-logged"
    ADD_BACKWARD = "add-backward"


@dataclass(frozen=True, kw_only=True)
class JsonOptions(SourceOptions):
    """Names of fields (None: a known one) and what the log holds."""

    step: str | None = field(default=None, metadata={"help": "field of the step"})
    layer: str | None = field(default=None, metadata={"help": "field of the layer"})
    experts: str | None = field(default=None, metadata={"help": "field of the expert ids"})
    counts: str | None = field(default=None, metadata={"help": "field of the tokens that each expert got"})
    token: str | None = field(default=None, metadata={"help": "field of the token's number"})
    request: str | None = field(default=None, metadata={"help": "field of the request that a token is of"})
    phase: str | None = field(default=None, metadata={"help": "field that says forward or backward"})
    passes: LoggedPasses = field(
        default=LoggedPasses.AS_LOGGED, metadata={"help": "add-backward: each pass comes back in reverse"}
    )
    sections: Sections = field(
        default=Sections.WHOLE, metadata={"help": "records as one group, or weights and moments (split)"}
    )
    weight_bytes: int = field(
        default=1, metadata={"help": "bytes of a record's weights, which are one frame", "size": True}
    )


@dataclass(frozen=True, kw_only=True)
class TrainingJsonOptions(JsonOptions):
    """The same, of a training run: its logs hold forward passes only."""

    passes: LoggedPasses = field(
        default=LoggedPasses.ADD_BACKWARD, metadata={"help": "add-backward: each pass comes back in reverse"}
    )


@dataclass(frozen=True, slots=True)
class _Line:
    step: object
    layer: int
    phase: int
    token: int | None
    request: str | int | None
    experts: set[int]


class _Fields:
    """The field of each value; the first line with a layer and experts decides."""

    def __init__(self, kind: str, options: JsonOptions, layer: int | None) -> None:
        self._layer = layer  # if no field has it
        given = {name: getattr(options, name) for name in _NAMES}
        self._known = {name: (given[name],) if given[name] else KNOWN_FIELDS[kind][name] for name in _NAMES}
        self._required = {name for name in _NAMES if given[name]}
        self.names: Mapping[str, str | None] = {}

    def read(self, row: Mapping[str, object]) -> _Line | None:
        """The line, or None for one without routing (a ``meta`` line). Raises ValueError with the reason."""
        if not self.names:
            chosen = {name: next((key for key in self._known[name] if key in row), None) for name in _NAMES}
            no_layer = chosen["layer"] is None and self._layer is None
            if no_layer or (chosen["experts"] is None and chosen["counts"] is None):
                if row.get("type") == "meta":
                    return None
                wanted = [*self._known["layer"], "and", *self._known["experts"], *self._known["counts"]]
                raise ValueError(f"expected fields {' '.join(wanted)}, found {', '.join(row) or 'none'}")
            missing = [name for name in self._required if chosen[name] is None]
            if missing:
                raise ValueError(f"expected the field {self._known[missing[0]][0]}, found {', '.join(row)}")
            self.names = chosen
        elif row.get("type") == "meta":
            return None
        layer = _whole(row, self.names["layer"], "layer")
        token = _whole(row, self.names["token"], "token")
        if layer is None:
            assert self._layer is not None
            layer = self._layer
        step = _whole(row, self.names["step"], "step")
        return _Line(step, layer, self._phase(row), token, self._request(row), self._experts(row))

    def _request(self, row: Mapping[str, object]) -> str | int | None:
        name = self.names["request"]
        if name is None:
            return None
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, str | int | None):
            raise ValueError(f"{name}: expected a request's name or number, found {_shown(value)}")
        return value

    def _phase(self, row: Mapping[str, object]) -> int:
        name = self.names["phase"]
        if name is None:
            return FORWARD
        said = str(row.get(name)).lower()
        if said not in _PHASES:
            raise ValueError(f"{name}: expected one of {', '.join(_PHASES)}, found {row.get(name)!r}")
        return _PHASES[said]

    def _experts(self, row: Mapping[str, object]) -> set[int]:
        name = self.names["experts"]
        if name is not None and name in row:
            return _ids(name, row[name])
        name = self.names["counts"]
        if name is None or name not in row:
            raise ValueError(f"expected the field {name or self.names['experts']}, found {', '.join(row)}")
        counts = row[name]
        if not isinstance(counts, list) or not all(_is_whole(count) for count in counts):
            raise ValueError(f"{name}: expected a list of token counts, found {_shown(counts)}")
        return {expert for expert, count in enumerate(counts) if count}


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_ID


def _whole(row: Mapping[str, object], name: str | None, what: str) -> int | None:
    if name is None:
        return None
    value = row.get(name)
    if not isinstance(value, int) or not _is_whole(value):
        raise ValueError(f"{name}: expected a {what} number, found {_shown(value)}")
    return value


def _ids(name: str, value: object) -> set[int]:
    rows = value if isinstance(value, list) else None
    if rows and all(isinstance(row, list) for row in rows):
        rows = [expert for row in rows for expert in row]
    if rows is None or not all(map(_is_whole, rows)):
        raise ValueError(
            f"{name}: expected expert ids, or a list of them for each token, found {_shown(value)}"
        )
    return set(rows)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(slots=True)
class _Access:
    """The experts of one layer's pass, in the order in which they appear."""

    layer: int
    phase: int
    experts: dict[int, None]


@dataclass(slots=True)
class _Step:
    """The accesses of each pass over the layers; ``name``: the value of the step's field; ``line``: its first line."""

    name: object
    line: int
    passes: list[list[_Access]]
    tokens: set[tuple[str | int | None, int | None]]  # (request, token) of its lines, of merged files


class _Source:
    """One file, cut into steps. ``merged``: it is one of several."""

    def __init__(self, path: Path, kind: str, options: JsonOptions, *, merged: bool) -> None:
        self.path = path
        self._options = options
        self._merged = merged
        found = re.search(r"layers?[^0-9a-z]?(\d+)", path.name, re.IGNORECASE)
        self.fields = _Fields(kind, options, int(found[1]) if found and merged else None)
        self._tokens: dict[str | int | None, int] = {}  # the last of each request in this layer's pass

    def steps(self) -> Generator[_Step]:
        last: _Line | None = None
        step = _Step(None, 0, [[]], set())
        with open_text(self.path, self._options.window_log) as file:
            for first, lines in line_blocks(file):
                for number, text in enumerate(lines, first):
                    line = self._line(number, text)
                    if line is None:
                        continue
                    if last is None or self._begins_step(line, last):
                        if last is not None:
                            yield step
                        self._tokens.clear()
                        step = _Step(line.step, number, [[]], set())
                    elif line.layer < last.layer and line.phase == FORWARD:
                        step.passes.append([])
                    self._take(line, step)
                    last = line
        if last is None:
            raise DataError(f"{self.path}: expected lines with routing, found none")
        yield step

    def _line(self, number: int, text: bytes) -> _Line | None:
        try:
            row = json.loads(text)
            if not isinstance(row, dict):
                raise ValueError(f"expected an object, found {_shown(row)}")
            line = self.fields.read(row)
            if (
                line is not None
                and line.phase == BACKWARD
                and self._options.passes is LoggedPasses.ADD_BACKWARD
            ):
                raise ValueError(
                    "a backward pass, but option passes = add-backward would add it again: "
                    "expected --set passes=as-logged"
                )
            return line
        except json.JSONDecodeError as error:
            reason = f"expected a JSON object: {error.msg} at column {error.colno}"
            raise refuse_line(self.path, number, reason if text.strip() else "an empty line") from error
        except (ValueError, RecursionError) as error:
            raise refuse_line(self.path, number, str(error)) from error

    def _begins_step(self, line: _Line, last: _Line) -> bool:
        if last.step is not None:
            return line.step != last.step
        again = line.layer == last.layer and line.phase == last.phase
        if not again:
            self._tokens.clear()
        before = self._tokens.get(line.request)
        if before is not None and line.token is not None and line.token <= before:
            return True
        # One of several files has no other layer whose lines would end a step: each line is a step.
        alone = again and line.token is None and self._merged
        return alone or (line.layer < last.layer and line.phase == FORWARD) or line.phase < last.phase

    def _take(self, line: _Line, step: _Step) -> None:
        if line.token is not None:
            self._tokens[line.request] = line.token
        if self._merged:
            step.tokens.add((line.request, line.token))
        accesses = step.passes[-1]
        if not accesses or (accesses[-1].layer, accesses[-1].phase) != (line.layer, line.phase):
            accesses.append(_Access(line.layer, line.phase, {}))
        accesses[-1].experts.update(dict.fromkeys(sorted(line.experts)))


#: Step, kind, phase, layer and records of an event.
_Event: TypeAlias = tuple[int, TraceKind, int, int, list[int]]


def _merged_steps(sources: Sequence[_Source]) -> Iterator[_Step]:
    """The steps of all sources, each of which has a part of every step."""
    first = sources[0].path
    with ExitStack() as stack:
        streams = [stack.enter_context(closing(source.steps())) for source in sources]
        for count, parts in enumerate(zip_longest(*streams)):
            if None in parts:
                short = sources[parts.index(None)].path
                longer = next(s.path for s, part in zip(sources, parts, strict=True) if part is not None)
                raise DataError(f"{short}: has {count} steps, and {longer} has more")
            for source, part in zip(sources, parts, strict=True):
                if part.name != parts[0].name:
                    raise refuse_line(
                        source.path,
                        part.line,
                        f"expected step {parts[0].name}, as in {first}, found {part.name}",
                    )
                if part.tokens != parts[0].tokens:
                    raise refuse_line(
                        source.path,
                        part.line,
                        f"a step of other tokens than in {first}, line {parts[0].line}",
                    )
            yield _merged_step(sources, parts)


def _merged_step(sources: Sequence[_Source], parts: Sequence[_Step]) -> _Step:
    passes = []
    for same_pass in zip_longest(*(part.passes for part in parts), fillvalue=[]):
        owner: dict[tuple[int, int], _Source] = {}
        for source, accesses in zip(sources, same_pass, strict=True):
            for access in accesses:
                other = owner.setdefault((access.phase, access.layer), source)
                if other is not source:
                    raise DataError(f"{source.path}: layer {access.layer}, which is in {other.path} too")
        merged = [access for accesses in same_pass for access in accesses]
        passes.append(sorted(merged, key=lambda a: (a.phase, a.layer if a.phase == FORWARD else -a.layer)))
    return _Step(parts[0].name, parts[0].line, passes, parts[0].tokens)


class RoutingLog:
    """Reads a log, from one file or from several that have different layers. Layers and experts are numbered densely
    as they first appear, so gaps do no harm.
    """

    def __init__(self, paths: Sequence[Path], kind: str, options: JsonOptions) -> None:
        self._sources = [_Source(path, kind, options, merged=len(paths) > 1) for path in paths]
        self._options = options
        self._layers = KeyNumbers()
        self._records = KeyNumbers()  # (layer, expert) as the log numbers them

    def chunks(self) -> Iterator[EventColumns]:
        one = len(self._sources) == 1
        steps = self._sources[0].steps() if one else _merged_steps(self._sources)
        events: list[_Event] = []
        units = 0
        for number, step in enumerate(steps):
            for accesses in step.passes:
                found = self._events(number, accesses)
                units += sum(len(records) for *_, records in found)
                events += found
            events.append((number, TraceKind.END_STEP, 0, 0, []))
            if units >= _FLUSH_UNITS:
                yield self._columns(events)
                events, units = [], 0
        if events:
            yield self._columns(events)

    def _events(self, step: int, accesses: Sequence[_Access]) -> list[_Event]:
        """The accesses of one pass over the layers, and of the backward pass where it is added."""
        numbered = []
        for access in accesses:
            layer = self._layers[access.layer]
            records = sorted(self._records[access.layer, expert] for expert in access.experts)
            numbered.append((access.phase, layer, records))
        if self._options.passes is LoggedPasses.ADD_BACKWARD:
            numbered += [(BACKWARD, layer, records) for _, layer, records in reversed(numbered)]
        return [(step, TraceKind.ACCESS, *access) for access in numbered if access[2]]

    def _columns(self, events: Sequence[_Event]) -> EventColumns:
        steps, kinds, phases, layers, records = zip(*events, strict=True)
        counts = [len(units) for units in records]
        return EventColumns.build(
            counts,
            np.array([record for units in records for record in units], np.uint32),
            kinds=kinds,
            phases=phases,
            layers=layers,
            steps=steps,
            flags=expert_unit_flags(np.repeat(np.array(phases, np.uint8), counts), self._options.sections),
        )

    def table(self) -> RecordTable:
        layers = np.array([self._layers[layer] for layer, _ in self._records], np.uint32)
        return expert_table(layers, sections=self._options.sections, weight_bytes=self._options.weight_bytes)

    def names(self) -> Iterator[str]:
        for layer, expert in self._records:
            yield f"{layer}.{expert}"

    def columns(self) -> Mapping[str, str]:
        names = self._sources[0].fields.names
        return {what: "none" if name is None else f"field {name}" for what, name in names.items()}
