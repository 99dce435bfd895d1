"""Arrays of expert ids, as decoding and as training."""

import numpy as np
from cases import npz

FIRST, SECOND, BOTH = 1 | 1 << 9, 1 | 1 << 10, 1 | 3 << 9  # weights, and the numbers of who asks
# Three tokens of one prompt and one of another; two layers, two of four experts.
TOPK = np.array([[[0, 1], [3, 2]], [[1, 2], [2, 3]], [[0, 3], [0, 1]], [[2, 0], [1, 3]]], np.uint8)


def test_decoding_by_hand(imported, packed):
    accesses, trace, keys = imported(packed(npz(topk=TOPK, prompt_len=np.array([3, 1]))))
    # Records are layer * 4 + expert, ascending; one token a step. The second prompt is another sequence.
    assert accesses == [
        (0, 1, 0, [0, 1], [FIRST]),
        (0, 1, 1, [6, 7], [FIRST]),
        (1, 1, 0, [1, 2], [FIRST]),
        (1, 1, 1, [6, 7], [FIRST]),
        (2, 1, 0, [0, 3], [FIRST]),
        (2, 1, 1, [4, 5], [FIRST]),
        (3, 1, 0, [0, 2], [SECOND]),
        (3, 1, 1, [5, 7], [SECOND]),
    ]
    assert keys[5] == "1.1"
    assert trace.header.capacity_frames == 8
    assert trace.header.table.layers.tolist() == [0] * 4 + [1] * 4


def test_sequences_are_decoded_side_by_side(imported):
    # Slot 0 decodes the first prompt, slot 1 the second, and finds no third after one step.
    accesses, _, _ = imported(npz(topk=TOPK, prompt_len=np.array([3, 1])), sequences=2)
    assert accesses == [
        (0, 1, 0, [0, 1, 2], [FIRST, SECOND, BOTH]),
        (0, 1, 1, [5, 6, 7], [FIRST, SECOND, BOTH]),
    ]


def test_training_by_hand(imported):
    accesses, trace, _ = imported(npz(topk=TOPK[:3]), regime="train", tokens_per_step=2, experts=5)
    # Tokens 0 and 1; the third does not fill a step. Backward: layers in reverse, dirty.
    assert accesses == [
        (0, 1, 0, [0, 1, 2], [1]),
        (0, 1, 1, [7, 8], [1]),
        (0, 2, 1, [7, 8], [9]),
        (0, 2, 0, [0, 1, 2], [9]),
    ]
    assert len(trace.header.records) == 10


def test_weights_and_moments_apart(imported):
    accesses, trace, _ = imported(
        npz(topk=TOPK), regime="train", tokens_per_step=4, sections="split", weight_bytes="1KiB"
    )
    assert [flags for *_, flags in accesses] == [[1], [1], [0b011011], [0b011011]]
    record = trace.header.records[0]
    assert (record.frames, record.bytes, record.stored) == ((1, 2, 0), (1024, 2048, 0), 3)


def test_many_steps_in_several_blocks(imported, monkeypatch):
    rng = np.random.default_rng(1)
    topk = rng.integers(0, 8, (300, 3, 2))
    whole, trace, _ = imported(npz(topk=topk), regime="train", tokens_per_step=3)
    monkeypatch.setattr("tierstore.lab.routing._STEPS_AT_ONCE_CELLS", 500)
    pieces, other, _ = imported(npz(topk=topk), regime="train", tokens_per_step=3)
    assert pieces == whole
    assert np.array_equal(trace.kinds, other.kinds)
    for step in (0, 57, 99):
        chosen = topk[3 * step : 3 * step + 3]
        expected = [
            sorted({layer * 8 + int(e) for e in chosen[:, layer].ravel()}) for layer in (0, 1, 2, 2, 1, 0)
        ]
        assert [records for at, *_, records, _ in whole if at == step] == expected
