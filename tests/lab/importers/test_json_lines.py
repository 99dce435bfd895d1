"""Routing logs of inference and of training."""

import numpy as np
import pytest
from cases import json_lines as lines
from effort import share, with_fixtures
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import DataError
from tierstore.lab.importing import SourceKind, import_trace
from tierstore.trace.files import load_trace


def route(token, layer, *ids):
    return {"type": "route", "req_id": "r1", "token_idx": token, "layer": layer, "topk_ids": list(ids)}


META = {"type": "meta", "model_id": "a model", "top_k": 2}


def test_a_token_a_line(imported, packed):
    # A batch of two tokens, then one token; each through layers 4 and 6. The layer falls: a new step.
    log = lines(
        META, route(0, 4, 9, 1), route(1, 4, 1, 3), route(0, 6, 9, 2), route(1, 6, 9, 2), route(0, 4, 9, 1)
    )
    accesses, trace, keys = imported(packed(log))
    assert keys == ["4.1", "4.9", "4.3", "6.2", "6.9"]  # as they first appear; those of one line ascending
    assert accesses == [(0, 1, 0, [0, 1, 2], [1]), (0, 1, 1, [3, 4], [1]), (1, 1, 0, [0, 1], [1])]
    assert trace.header.table.layers.tolist() == [0, 0, 0, 1, 1]


def test_a_log_of_one_layer(imported):
    # Tokens 0 and 1 of a prompt, then one decoded token at a time: its number does not rise.
    accesses, _, _ = imported(lines(route(0, 0, 1), route(1, 0, 2), route(0, 0, 2), route(0, 0, 3)))
    assert [(step, records) for step, _, _, records, _ in accesses] == [(0, [0, 1]), (1, [1]), (2, [2])]


def test_requests_side_by_side(imported):
    # Three requests, each at a token of its own, through two layers: a step a token.
    log = lines(
        *(
            {**route(token + first, layer, request), "req_id": f"r{request}"}
            for token in range(3)
            for layer in range(2)
            for request, first in enumerate((10, 0, 0))
        )
    )
    accesses, _, _ = imported(log)
    assert [(a[0], a[2], len(a[3])) for a in accesses] == [
        (step, layer, 3) for step in range(3) for layer in range(2)
    ]
    # One layer only: a request comes again with the same number.
    again = lines(*({**route(7, 0, request), "req_id": request} for request in (1, 2, 1, 2)))
    accesses, _, _ = imported(again)
    assert [(a[0], len(a[3])) for a in accesses] == [(0, 2), (1, 2)]


def test_backward_passes_are_not_added_again(imported):
    log = lines(
        *(
            {"iteration": 1, "layer_number": layer, "phase": phase, "tokens_per_expert": [1, 1]}
            for phase, layers in (("forward", (1, 2)), ("backward", (2, 1)))
            for layer in layers
        )
    )
    with pytest.raises(DataError, match="line 3: a backward pass, but option passes = add-backward"):
        imported(log, SourceKind.MEGATRON)
    accesses, _, _ = imported(log, SourceKind.MEGATRON, passes="as-logged")
    assert [(phase, layer) for _, phase, layer, _, _ in accesses] == [(1, 0), (1, 1), (2, 1), (2, 0)]


def test_a_batch_a_line_with_its_number(imported):
    log = lines(
        {"layer": 0, "batch_id": 12, "topk_experts": [[3, 7], [7, 1]]},
        {"layer": 1, "batch_id": 12, "topk_experts": [[3, 7], [7, 3]]},
        {"layer": 1, "batch_id": 13, "topk_experts": [[0]]},
    )
    accesses, _, _ = imported(log)
    assert [(a[0], a[2], len(a[3])) for a in accesses] == [(0, 0, 3), (0, 1, 2), (1, 1, 1)]


def test_training_comes_back_in_reverse(imported):
    log = lines(
        {"iteration": 5, "layer_number": 1, "tokens_per_expert": [2, 0, 1]},
        {"iteration": 5, "layer_number": 2, "tokens_per_expert": [0, 3, 0]},
        {"iteration": 6, "layer_number": 1, "tokens_per_expert": [0, 0, 3]},
    )
    accesses, _, keys = imported(log)
    assert keys == ["1.0", "1.2", "2.1"]
    assert accesses == [
        (0, 1, 0, [0, 1], [1]),
        (0, 1, 1, [2], [1]),
        (0, 2, 1, [2], [9]),
        (0, 2, 0, [0, 1], [9]),
        (1, 1, 0, [1], [1]),
        (1, 2, 0, [1], [9]),
    ]
    accesses, _, _ = imported(log, passes="as-logged")
    assert len(accesses) == 3


def test_micro_batches_each_have_their_passes(imported):
    rows = [
        {"iteration": 1, "layer_number": layer, "topk_indices": [[micro]]}
        for micro in (0, 1)
        for layer in (1, 2)
    ]
    accesses, _, _ = imported(lines(*rows))
    assert [(a[0], a[1], a[2], a[3]) for a in accesses] == [
        (0, 1, 0, [0]),
        (0, 1, 1, [1]),
        (0, 2, 1, [1]),
        (0, 2, 0, [0]),
        (0, 1, 0, [2]),
        (0, 1, 1, [3]),
        (0, 2, 1, [3]),
        (0, 2, 0, [2]),
    ]


def test_phases_and_names_that_are_given(imported):
    rows = [
        {"n": 3, "l": layer, "who": [1], "way": way}
        for way, order in (("fwd", (0, 1)), ("bwd", (1, 0)))
        for layer in order
    ]
    accesses, _, _ = imported(
        lines(*rows, {"n": 4, "l": 0, "who": [1], "way": "forward"}),
        SourceKind.VLLM,
        step="n",
        layer="l",
        experts="who",
        phase="way",
    )
    assert [a[:3] for a in accesses] == [(0, 1, 0), (0, 1, 1), (0, 2, 1), (0, 2, 0), (1, 1, 0)]
    assert accesses[2][4] == [9]


def test_the_step_without_a_number_ends_with_its_backward_pass(imported):
    rows = [
        {"layer": layer, "topk_ids": [1], "phase": phase}
        for phase, order in (("forward", (0, 1)), ("backward", (1, 0)))
        for layer in order
    ]
    accesses, _, _ = imported(lines(*rows, *rows), SourceKind.VLLM)
    assert [a[0] for a in accesses] == [0] * 4 + [1] * 4


def test_long_logs_are_several_chunks(tmp_path, monkeypatch):
    rng = np.random.default_rng(2)
    source, one, other = tmp_path / "log", tmp_path / "one", tmp_path / "other"
    rows = [route(0, layer, *rng.integers(0, 9, 2).tolist()) for _ in range(50) for layer in range(4)]
    source.write_bytes(lines(META, *rows))
    import_trace(source, one)
    monkeypatch.setattr("tierstore.lab.importers.json_lines._FLUSH_UNITS", 7)
    import_trace(source, other)
    left, right = load_trace(one), load_trace(other)
    assert np.array_equal(left.records, right.records)
    assert np.array_equal(left.kinds, right.kinds)
    assert np.array_equal(left.steps, right.steps)
    assert len(left.records) >= 200


# Several files of one log ------------------------------------------------------------------------------------


@pytest.fixture
def merged(tmp_path):
    """Imports logs by file name; what a summary, the trace's events and the names of records say."""

    def run(files, **options):
        paths = []
        for name, data in files.items():
            paths.append(tmp_path / name)
            paths[-1].write_bytes(data)
        found = import_trace(
            paths, tmp_path / "trace", kind=SourceKind.VLLM, options=options, keys=tmp_path / "keys"
        )
        return found, (tmp_path / "keys").read_text().splitlines()

    return run


def test_a_file_a_layer(merged, tmp_path, packed):
    # Token numbers begin again in each step: two tokens, then one. The files come in no order; their lines say the layer.
    found, keys = merged(
        {
            "b.jsonl": packed(lines(META, route(0, 6, 9, 2), route(1, 6, 9, 2), route(0, 6, 5))),
            "a.jsonl": packed(lines(META, route(0, 4, 9, 1), route(1, 4, 1, 3), route(0, 4, 9, 1))),
        }
    )
    assert keys == ["4.1", "4.9", "4.3", "6.2", "6.9", "6.5"]
    trace = load_trace(tmp_path / "trace")
    assert (found.steps, trace.layers.tolist(), trace.steps.tolist()) == (
        2,
        [0, 1, 0, 0, 1, 0],
        [0, 0, 0, 1, 1, 1],
    )
    assert trace.records.tolist() == [0, 1, 2, 3, 4, 0, 1, 5]


def test_the_name_of_a_file_says_its_layer(merged, tmp_path):
    # A line is a batch: neither step nor token.
    batches = {"run-layer_12.jsonl": [[3]], "run-layer_2.jsonl": [[1, 2]]}
    logs = {name: lines(*({"topk_ids": ids} for ids in [first, [[7]]])) for name, first in batches.items()}
    found, keys = merged(logs)
    assert (found.steps, keys) == (2, ["2.1", "2.2", "12.3", "2.7", "12.7"])
    with pytest.raises(DataError, match=r"other\.jsonl: line 1: expected fields layer"):
        merged({"other.jsonl": logs["run-layer_2.jsonl"], **logs})


@with_fixtures(share(60))
@given(
    st.lists(  # steps, of tokens, of layers, of experts
        st.integers(1, 3).flatmap(
            lambda tokens: st.lists(
                st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=3, max_size=3),
                min_size=tokens,
                max_size=tokens,
            )
        ),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
    st.permutations(range(3)),
    st.sampled_from(["as-logged", "add-backward"]),
)
def test_a_log_is_what_its_layers_merge_to(tmp_path, steps, numbered, order, passes):
    rows = []
    for number, tokens in enumerate(steps):
        for layer in range(3):
            for token, ids in enumerate(tokens):
                row = route(token, layer, *ids[layer])
                rows.append({**row, "step": number} if numbered else row)
    whole = tmp_path / "whole"
    whole.write_bytes(lines(*rows))
    files = []
    for layer in order:
        files.append(tmp_path / f"part{layer}")
        files[-1].write_bytes(lines(META, *(row for row in rows if row["layer"] == layer)))
    if not any(row["topk_ids"] for row in rows):
        return
    found = [
        import_trace(
            source, tmp_path / "trace", options={"passes": passes}, keys=tmp_path / f"keys{len(source)}"
        )
        for source in ([whole], files)
    ]
    assert found[0] == found[1]  # the sha256 of all events among the rest
    assert (tmp_path / "keys1").read_bytes() == (tmp_path / "keys3").read_bytes()
