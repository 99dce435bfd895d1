"""What the lab refuses: the type of each error, and the options, records and capacities that it names."""

import math
from dataclasses import replace

import numpy as np
from cases import access, outcome, requests_of, simulate, write_events
from refusals import each_of, refuses

from tierstore.cache.config import Scope
from tierstore.errors import BudgetError, ConfigError, DataError
from tierstore.lab.bootstrap import paired_interval
from tierstore.lab.candidates import greedy_split
from tierstore.lab.costs import Machine
from tierstore.lab.generators import KeyWorkload, RoutingWorkload, Scan, Tenants, Zipf
from tierstore.lab.miss_curves import curve_capacities, lru_curve
from tierstore.lab.requests import Requests, load_requests, parse_pins, pin
from tierstore.lab.results import Curve
from tierstore.lab.simulate import PolicySpec, ReplaySetting
from tierstore.lab.tuning import TuneOptions, tune
from tierstore.trace.format import TraceKind, TraceRecord

W, M = 1, 2  # groups needed
SIZED = Requests.of_columns([0, 2], [0, 1], sizes=[4, 6], frame_bytes=4096)
PINNED = pin(requests_of([[0], [1], [2]] * 8), [(0, 1), (0, 2)])
UNEQUAL = requests_of([[0], [1]], sizes=[1, 5])
FEW = requests_of([[0], [1]] * 4)
#: Records of 3 frames, of which one is requested at a time.
WIDE = replace(FEW, table=replace(FEW.table, record_frames=np.full(2, 3, np.uint32)))
WALK = requests_of([[entry % 20] for entry in range(400)], steps=np.arange(400) // 10)
WEIGHTS = TraceRecord(0, (1, 0, 0), (4096, 0, 0), 1)
SCAN = Scan(keys=1)
ROUTING = {"layers": 1, "experts": 2, "tokens_per_step": 1, "steps": 1}


def call(function, *given, **options):
    return lambda _: function(*given, **options)


def option(function, **given):
    """The last option is refused, and named."""
    name = [*given][-1]
    return (f"{function.__name__}-{name}", call(function, **given), f"{name}: ")


def loaded(*events, **options):
    return lambda path: load_requests(write_events(path / "trace", events, **options))


def quotas(_):
    setting = ReplaySetting(PolicySpec("lru"), 4, Scope.LAYER, layer_quotas=(2, 1, 1, 1))
    setting.quotas(requests_of([[0, 1], [2], [3]], layers=[0, 2, 3]))


SIZES = [0, -1, 0.0, 1.5, "2KiB", "0.01", "1.5", "none", "", "-1f", "150%"]
PINS = ["3", "3:", ":1", "a:1", "1:2:3", "-1:0", "1:2,"]
#: Policies as they are written, and what is named of each.
POLICIES = {
    "lru:speed=3": "'speed'",
    "lfu-decay:half_life": "'half_life'",
    "lfu-decay:half_life=1,half_life=2": "option half_life",
    "belady:half_life=1": "got half_life",
    "nowhere:Mru": "'nowhere'",
}
CURVES = [(), (outcome(20, 30), outcome(10, 50)), (outcome(10, 30), outcome(10, 50))]
#: What each of two layers misses by its frames.
HULLS = [[(1, 8), (2, 5), (4, 4)], [(1, 20), (3, 10), (4, 9)]]
#: By the type of the error: a name, what is refused, and what is named.
ROWS = {
    ConfigError: [
        option(Machine, read_bytes_per_s=0),
        option(Machine, write_bytes_per_s=-1),
        option(Machine, mixed_bytes_per_s=math.nan),
        option(Machine, endurance_bytes=0),
        option(Machine, drive_bytes=0),
        option(Machine, steps_per_s=0),
        option(Machine, compute_s_per_step=-1),
        option(TuneOptions, prefix=1.0),
        option(TuneOptions, confidence=0.0),
        option(TuneOptions, scopes=()),
        option(Zipf, keys=0),
        option(Zipf, keys=1, drift=-1),
        option(Scan, keys=0),
        option(Tenants, tenants=(SCAN,), shares=(1.0, 2.0)),
        option(Tenants, tenants=(SCAN,), shares=(0.0,)),
        option(KeyWorkload, source=SCAN, requests=0),
        option(RoutingWorkload, **ROUTING, k=3),
        option(RoutingWorkload, **ROUTING, k=1, persistence=2),
        *((text, call(PolicySpec.parse, text), named) for text, named in POLICIES.items()),
        *(
            (f"capacity-{size}", call(SIZED.table.frames_of, size, name="--capacity"), "--capacity: ")
            for size in SIZES
        ),
        *(
            (f"pin-{text}", call(parse_pins, [text], name="--pin"), "--pin: ", "LAYER:EXPERT")
            for text in PINS
        ),
        ("unknown", call(simulate, SIZED, ["mru"], [1]), "'mru'"),
        ("tune-unknown", call(tune, WALK, 0.1, TuneOptions(policies=("mru",))), "'mru'"),
        ("tune-pinned", call(tune, PINNED, 0.5), "2 records of 2 frames pinned"),
        ("pin-of-no-request", call(pin, FEW, [(3, 0)]), "pins: columns", "record 3:0"),
        ("quotas", quotas, "4 of at most 4 frames", "4 of 5"),
    ],
    BudgetError: [
        ("wide", call(simulate, UNEQUAL, ["lru"], [4]), "capacity: 4 frames"),
        ("pinned", call(simulate, PINNED, ["lru"], ["1f"]), "capacity: 1 frames"),
        ("tune-wide", call(tune, requests_of([[0], [1]] * 4, sizes=[5, 5]), "4f"), "4 frames"),
        ("tune-wide-record", call(tune, WIDE, "2f"), "2 frames", "takes 3"),
        ("one-pass", call(lru_curve, requests_of([[0, 1]]), [1]), "1 frames"),
    ],
    DataError: [
        ("tune-short", call(tune, requests_of([[0], [1], [2]]), 0.5), "4 steps"),
        ("no-access", loaded((TraceKind.END_STEP, 0, 0, 0, [], [])), "accesses"),
        ("no-record", loaded(access(0, [9], [W])), "records up to 3", "9"),
        ("no-group", loaded(access(0, [2], [W | M]), record=WEIGHTS), "record 2: group 1"),
    ],
    ValueError: [
        *((f"curve-{at}", call(Curve, CURVES[at]), "ascending capacities") for at in range(3)),
        ("no-interval", call(paired_interval, [], []), "shape"),
        ("interval-lengths", call(paired_interval, [1], [1, 2]), "shape"),
        ("interval-dimensions", call(paired_interval, [[1]], [[1]]), "shape"),
        ("confidence", call(paired_interval, [1], [1], confidence=1.0), "confidence"),
        ("columns", call(Requests.of_columns, [0, 1], [0], layers=[0, 0]), "lengths"),
        ("curve-points", call(curve_capacities, FEW, 0), "points"),
        ("split", call(greedy_split, HULLS, 1), "1 frames", "2"),
    ],
}


@each_of(ROWS)
def test_it_is_refused_by_name(tmp_path, refusal):
    with refuses(refusal.error, *refusal.named):
        refusal.act(tmp_path)
