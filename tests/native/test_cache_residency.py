"""The residency core on cases small enough to work by hand."""

import numpy as np
import pytest
from core_calls import pairs, units

from tierstore import _native
from tierstore._native import Decision as D
from tierstore._native import Scope

NEED_W = 1
NEED_ALL = 7
CHANGE_W = NEED_W | NEED_W << 3
FORWARD, BACKWARD, OPTIMIZER, USER = 1, 2, 3, 4
NO_ONE = np.zeros(0, np.uint32)


def make(capacity, records=8, frames=(1, 0, 0), stored=7, layers=1, **options):
    core = _native.Residency(capacity, **{"policy": "lru", **options})
    for record in range(records):
        core.add_record(record * layers // records, frames, [4096 * f for f in frames], stored)
    return core


def access(core, records, flags=NEED_W, layer=0):
    groups, _ = core.begin_access(0, layer, *units(records, flags))
    out = []
    for _ in range(groups):
        _, demanded, ahead = core.next_group()
        out.append((pairs(demanded), pairs(ahead), pairs(core.end_group())))
    return out


def test_the_case_from_the_literature():
    # 3 layers x 4 experts, 2 slots a layer, sets {0,1},{0,2},{0,1},{0,3},{0,1}. In each layer: 0 and 1
    # miss, then 0 hits each time (it is in the set, so nothing evicts it) and the other misses: 4 and 6.
    core = make(6, records=12, layers=3, scope=Scope.LAYER, layer_quotas=[2, 2, 2])
    for chosen in ([0, 1], [0, 2], [0, 1], [0, 3], [0, 1]):
        for layer in range(3):
            access(core, [4 * layer + expert for expert in chosen], layer=layer)
        core.end_step()
    stats = core.stats()
    assert (stats.hits, stats.misses) == (12, 18)
    assert [(layer.hits, layer.misses) for layer in stats.by_layer] == [(4, 6)] * 3
    assert stats.evictions == 12
    assert stats.read_bytes == 18 * 4096


def test_no_entry_of_an_access_evicts_another():
    core = make(3)
    access(core, [0, 1, 2])
    # 0 is the oldest, but it is needed: 1 goes, not 0.
    assert access(core, [0, 5]) == [([(D.EVICT, 4), (D.HIT, 0), (D.FETCH, 20)], [], [])]


def served(core, records, flags=NEED_W):
    """The groups of an access: their units, and the entries that each fetches."""
    groups, _ = core.begin_access(0, 0, *units(records, flags))
    out = []
    for _ in range(groups):
        group, demanded, _ = core.next_group()
        out.append((group.tolist(), [entry for kind, entry in pairs(demanded) if kind == D.FETCH]))
        core.end_group()
    return out


def test_an_access_larger_than_the_capacity_is_split_in_record_order():
    core = make(3)
    groups, bounds = core.begin_access(0, 0, *units([0, 1, 2, 3, 4, 5, 6]))
    assert groups == 3
    assert bounds.tolist() == [0, 3, 6, 7]


def test_what_is_resident_is_served_first_when_an_access_is_split():
    core = make(3)
    access(core, [0, 1, 2, 3, 4])  # groups 0 1 2, then 3 4: LRU leaves 2, 3 and 4
    # In record order all five would be read again, each evicting the next. Residents first: 2, 3 and 4 are
    # hits, and only 0 and 1 are read.
    assert served(core, [0, 1, 2, 3, 4]) == [([2, 3, 4], []), ([0, 1], [0, 4])]
    core = make(3, group_order=_native.GroupOrder.KEY)
    access(core, [0, 1, 2, 3, 4])
    assert served(core, [0, 1, 2, 3, 4]) == [([0, 1, 2], [0, 4]), ([3, 4], [12, 16])]


def test_records_are_served_in_the_order_given() -> None:
    """With a lookahead of all frames but one, one record after another: the next two are on hold meanwhile."""
    core = make(3, lookahead_frames=2, group_order=_native.GroupOrder.GIVEN)
    groups, bounds = core.begin_access(1, 0, *units([3, 0, 2]))
    assert (groups, bounds.tolist()) == (3, [0, 1, 2, 3])
    fetched = []
    for unit in range(3):
        found, demanded, ahead = core.next_group()
        assert found.tolist() == [unit]
        fetched.append([entry // 4 for entry in (*demanded[1].tolist(), *ahead[1].tolist())])
        core.end_group()
    assert fetched == [[3, 0, 2], [0], [2]]  # what is on hold is a hit
    with pytest.raises(ValueError, match="distinct"):
        core.begin_access(1, 0, *units([1, 1]))


@pytest.mark.parametrize(
    ("phase", "flags", "bounds"),
    [
        (FORWARD, NEED_W, [0, 5]),
        (BACKWARD, NEED_W, [0, 5]),
        (BACKWARD, CHANGE_W, [0, 2, 4, 5]),
        (FORWARD, CHANGE_W, [0, 2, 4, 5]),  # steps of pending gradients
        (OPTIMIZER, CHANGE_W, [0, 5]),  # no pass, and a user's update must be whole
        (USER, CHANGE_W, [0, 5]),  # may pin them all
    ],
)
def test_a_pass_that_changes_records_takes_a_part_of_the_cache_at_a_time(phase, flags, bounds) -> None:
    core = make(6, parts=3)
    assert core.begin_access(phase, 0, *units([0, 1, 2, 4, 5], flags))[1].tolist() == bounds


def test_a_part_is_at_least_a_record() -> None:
    core = make(6, frames=(3, 0, 0), parts=3)
    assert core.begin_access(BACKWARD, 0, *units([0, 1], CHANGE_W))[1].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="parts"):
        make(6, parts=0)


def test_what_is_resident_in_part_comes_between():
    core = make(4, frames=(1, 1, 1))
    access(core, [2], 0b11)
    access(core, [1, 3])
    # Record 2 is whole, of 1 and 3 the weights are there, of 0 nothing.
    assert served(core, [0, 1, 2, 3], 0b11) == [([2, 1], [5]), ([3, 0], [12, 13, 0, 1])]


def test_an_access_that_fits_keeps_record_order():
    core = make(3)
    access(core, [2])
    assert served(core, [0, 1, 2]) == [([0, 1, 2], [0, 4])]


def test_units_keep_their_numbers():
    core = make(2)
    access(core, [2, 3])
    groups, _ = core.begin_access(0, 0, *units([0, 2, 3], 1 | 1 << 3))
    assert groups == 2
    assert core.next_group()[0].tolist() == [1, 2]
    with pytest.raises(ValueError, match="unit 0 is not of the open group"):
        core.end_unit(0)
    core.end_unit(2)
    assert core.dirty_entries().tolist() == [12]
    with pytest.raises(RuntimeError, match="unit 2 has ended already"):
        core.end_unit(2)
    core.end_group()
    assert core.next_group()[0].tolist() == [0]
    core.end_unit(0)
    core.end_group()
    assert not core.access_open


def test_the_lookahead_is_kept_free_for_the_next_group():
    core = make(3, lookahead_frames=1)
    decided = access(core, [0, 1, 2, 3])
    # Groups of two; 2 comes while 0 and 1 are in use, 3 only when 2 is demanded.
    assert [demanded for demanded, _, _ in decided] == [
        [(D.FETCH, 0), (D.FETCH, 4)],
        [(D.EVICT, 0), (D.HIT, 8), (D.FETCH, 12)],
    ]
    assert [ahead for _, ahead, _ in decided] == [[(D.FETCH, 8)], []]
    stats = core.stats()
    assert (stats.prefetch_read_bytes, stats.useful_prefetch_bytes) == (4096, 4096)


def test_one_unit_may_use_everything_and_no_more():
    core = make(7, frames=(1, 2, 4), lookahead_frames=3)
    assert access(core, [0], NEED_ALL) == [([(D.FETCH, 0), (D.FETCH, 1), (D.FETCH, 2)], [], [])]
    core = make(6, frames=(1, 2, 4))
    with pytest.raises(_native.CapacityError, match="7 frames") as caught:
        core.begin_access(0, 0, *units([0], NEED_ALL))
    assert caught.value.needed_frames == 7
    assert not core.access_open


def test_the_papers_empty_frame_counts_in_the_minimum():
    core = make(3, frames=(3, 0, 0), policy="lfu-decay", policy_options={"variant": "paper"})
    with pytest.raises(_native.CapacityError) as caught:
        core.begin_access(0, 0, *units([0]))
    assert caught.value.needed_frames == 4


def test_dirty_entries_are_written_when_they_go_and_gradients_are_dropped():
    core = make(3, frames=(1, 1, 1), stored=3)
    step = 7 | 3 << 3 | 4 << 6  # weights and moments change, the gradient is used up
    assert access(core, [0], step) == [([(D.FETCH, 0), (D.FETCH, 1), (D.CREATE, 2)], [], [(D.DROP, 2)])]
    assert core.dirty_entries().tolist() == [0, 1]
    assert access(core, [1], step)[0][0] == [
        (D.EVICT_WRITE, 0),
        (D.EVICT_WRITE, 1),
        (D.FETCH, 4),
        (D.FETCH, 5),
        (D.CREATE, 6),
    ]
    assert core.stats().written_bytes == 2 * 4096


def test_a_spilled_gradient_is_read_again():
    core = make(1, frames=(1, 0, 1), stored=1)
    accumulate = 4 | 4 << 3
    access(core, [0], accumulate)
    assert access(core, [1], accumulate)[0][0] == [(D.EVICT_WRITE, 2), (D.CREATE, 6)]
    assert access(core, [0], 4 | 4 << 6) == [([(D.EVICT_WRITE, 6), (D.FETCH, 2)], [], [(D.DROP, 2)])]
    assert not core.state(2).stored


def test_clean_writes_weights_and_moments_once():
    core = make(6, frames=(1, 1, 1))
    access(core, [0, 1], 7 | 7 << 3)
    assert pairs(core.clean(np.array([1], np.uint32))) == [(D.WRITE_BACK, 4), (D.WRITE_BACK, 5)]
    assert pairs(core.clean()) == [(D.WRITE_BACK, 0), (D.WRITE_BACK, 1)]
    assert pairs(core.clean()) == []
    assert core.dirty_entries().tolist() == [2, 6]
    assert core.resident_entries().tolist() == [0, 1, 2, 4, 5, 6]


def test_prefetch_within_its_frames_and_in_order():
    core = make(4, lookahead_frames=2)
    access(core, [0])
    taken, decided = core.prefetch(0, 0, *units([0, 3, 2, 1]))
    assert taken == 3  # 0 is there already, 3 and 2 fill the two frames, 1 does not fit
    assert pairs(decided) == [(D.FETCH, 12), (D.FETCH, 8)]
    assert core.state(0).held
    assert access(core, [2, 3])[0][0] == [(D.HIT, 8), (D.HIT, 12)]
    stats = core.stats()
    assert stats.useful_prefetch_bytes == 2 * 4096
    assert (stats.hits, stats.misses) == (2, 1)


def test_demand_takes_the_newest_holds_and_counts_them_wasted():
    core = make(3, lookahead_frames=2)
    core.prefetch(0, 0, *units([4, 5]))
    core.begin_access(0, 0, *units([0]))
    core.next_group()
    core.end_group()
    core.prefetch(0, 0, *units([0]))  # 0 is kept, too: the newest hold
    assert access(core, [1])[0][0] == [(D.EVICT, 0), (D.FETCH, 4)]
    core.prefetch(0, 0, *units([1]))
    assert access(core, [2, 3])[0][0][0] == (D.EVICT, 4)
    core = make(2, lookahead_frames=1)
    core.prefetch(0, 0, *units([5]))
    groups, _ = core.begin_access(0, 0, *units([0, 1]))
    assert groups == 2
    core.next_group()
    core.end_group()
    core.next_group()
    core.end_group()
    core = make(1, lookahead_frames=1)
    core.prefetch(0, 0, *units([5]))
    assert access(core, [0])[0][0] == [(D.EVICT, 20), (D.FETCH, 0)]
    assert core.stats().wasted_prefetch_bytes == 4096


def test_holds_end_with_the_step():
    core = make(2, lookahead_frames=2)
    core.prefetch(0, 0, *units([4, 5]))
    assert core.state(16).held
    core.end_step()
    assert not core.state(16).held
    assert access(core, [4])[0][0] == [(D.HIT, 16)]
    assert access(core, [0])[0][0] == [(D.EVICT, 20), (D.FETCH, 0)]
    stats = core.stats()
    assert (stats.useful_prefetch_bytes, stats.wasted_prefetch_bytes) == (4096, 4096)


def test_nothing_is_ahead_of_what_has_no_backing_copy():
    core = make(2, stored=0, lookahead_frames=2)
    taken, decided = core.prefetch(0, 0, *units([0, 1]))
    assert (taken, pairs(decided), core.used_frames) == (2, [], 0)


def test_an_ended_unit_makes_room_at_once():
    core = make(2, lookahead_frames=1)
    core.begin_access(0, 0, *units([0]))
    core.next_group()
    access_ended = core.end_unit(0)
    assert pairs(access_ended) == []
    assert core.state(0).pins == 0
    assert core.group_open
    core.end_group()
    assert not core.access_open


def test_pins_across_accesses():
    core = make(2)
    core.begin_access(0, 0, *units([0]))
    core.next_group()
    core.pin(*units([0]))
    core.end_group()
    assert access(core, [1])[0][0] == [(D.FETCH, 4)]
    assert access(core, [2])[0][0] == [(D.EVICT, 4), (D.FETCH, 8)]
    # Only one frame is left, so accesses are split to it.
    assert core.begin_access(0, 0, *units([2, 3]))[0] == 2
    for _ in range(2):
        core.next_group()
        core.end_group()
    assert pairs(core.clean()) == []
    assert pairs(core.unpin(*units([0], 1 | 1 << 3))) == []
    assert core.dirty_entries().tolist() == [0]
    assert access(core, [1])[0][0] == [(D.EVICT_WRITE, 0), (D.FETCH, 4)]


def test_what_is_kept_stays_until_it_is_released():
    """Three frames with records 0, 1 and 2: of those, two are kept, because one frame is left for others. 3 is not there."""
    core = make(3)
    access(core, [0])
    access(core, [1, 2])
    assert core.keep(*units([0, 1, 2, 3])).tolist() == [1, 1, 0, 0]
    assert core.keep(*units([0, 1])).tolist() == [1, 1]  # once is enough
    assert [core.state(4 * record).pins for record in range(4)] == [1, 1, 0, 0]
    assert access(core, [3])[0][0] == [(D.EVICT, 8), (D.FETCH, 12)]
    core.release(*units([0, 2, 3]))
    assert [core.state(4 * record).pins for record in range(4)] == [0, 1, 0, 0]
    assert access(core, [2])[0][0] == [(D.EVICT, 0), (D.FETCH, 8)]
    with pytest.raises(ValueError, match="no record 99"):
        core.keep(*units([99]))


def test_layers_do_not_take_each_others_frames():
    core = make(4, records=8, layers=2, scope=Scope.LAYER, layer_quotas=[1, 3])
    access(core, [0])
    access(core, [4, 5, 6], layer=1)
    assert access(core, [1])[0][0] == [(D.EVICT, 0), (D.FETCH, 4)]
    assert core.begin_access(0, 0, *units([0, 1]))[0] == 2
    assert core.used_frames == 4


def test_bad_arguments_and_calls_out_of_order_change_nothing():
    core = make(4, records=8, layers=2, scope=Scope.LAYER, layer_quotas=[2, 2])
    bad = [
        (0, [1, 0], NEED_W, "ascending"),
        (0, [0, 0], NEED_W, "ascending"),
        (0, [9], NEED_W, "no record 9"),
        (0, [4], NEED_W, "not of layer 0"),
        (2, [0], NEED_W, "no layer 2"),
        (0, [0], 0, "must need a group"),
        (0, [0], 1 | 2 << 3, "dirty or drop only what they need"),
    ]
    for layer, records, flags, message in bad:
        with pytest.raises(ValueError, match=message):
            core.begin_access(0, layer, *units(records, flags))
    with pytest.raises(ValueError, match="length"):
        core.prefetch(0, 0, np.array([0], np.uint32), np.zeros(0, np.uint16))
    with pytest.raises(ValueError, match="no entry 3"):
        core.drop(np.array([3], np.uint32))
    with pytest.raises(TypeError):
        core.begin_access(0, 0, np.array([0], np.int64), np.array([1], np.uint16))
    with pytest.raises(RuntimeError, match="no access"):
        core.next_group()
    with pytest.raises(RuntimeError, match="no group"):
        core.end_group()
    core.begin_access(0, 0, *units([0]))
    for call in (lambda: core.begin_access(0, 0, *units([0])), lambda: core.end_step()):
        with pytest.raises(RuntimeError, match="access is open"):
            call()
    core.next_group()
    with pytest.raises(RuntimeError, match="pinned"):
        core.drop(np.array([0], np.uint32))
    with pytest.raises(RuntimeError, match="not resident"):
        core.pin(*units([1]))
    core.end_unit(0)
    with pytest.raises(RuntimeError, match="ended already"):
        core.end_unit(0)
    core.end_group()
    assert core.stats().misses == 1


def test_a_core_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="quotas are 5 frames"):
        make(4, scope=Scope.LAYER, layer_quotas=[2, 3], records=0)
    with pytest.raises(ValueError, match="layer scope"):
        make(4, layer_quotas=[2, 2], records=0)
    with pytest.raises(ValueError, match="lookahead of 5 frames"):
        make(4, lookahead_frames=5, records=0)
    with pytest.raises(ValueError, match="no quota"):
        make(4, scope=Scope.LAYER, layer_quotas=[4], records=0).add_record(1, [1, 0, 0], [1, 0, 0], 7)


def test_an_access_to_nothing():
    core = make(4)
    groups, bounds = core.begin_access(0, 0, NO_ONE, np.zeros(0, np.uint16))
    assert (groups, bounds.tolist()) == (0, [0])
    assert not core.access_open
