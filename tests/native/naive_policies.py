"""Policies of the host cache written for reading: lists and sums, one victim at a time.

Each has ``miss``, ``insert``, ``hit``, ``remove``, ``request``, ``step`` and ``victims(free, need)``: who goes next
among the entries ``free`` when ``need`` frames are still missing (several only where the policy says so).
``frames`` maps entries to sizes; ``capacity`` is in frames.
"""

import math


class NaivePolicy:
    headroom = 0
    starved = 0

    def __init__(self, capacity, frames):
        self.capacity, self.frames = capacity, frames
        self.layers = {}

    def size(self, entries):
        return sum(self.frames[e] for e in entries)

    def miss(self, e):
        pass

    def request(self):
        pass

    def step(self):
        pass

    def hit(self, e):
        pass

    def access(self, phase, layer, entries):
        pass


def first(entries, free):
    return next((e for e in entries if e in free), None)


class NaiveFifo(NaivePolicy):
    def __init__(self, capacity, frames):
        super().__init__(capacity, frames)
        self.queue = []

    def insert(self, e):
        self.queue.append(e)

    def remove(self, e):
        self.queue.remove(e)

    def victims(self, free, need):
        return [e for e in self.queue if e in free][:1]


class NaiveLru(NaiveFifo):
    def hit(self, e):
        self.queue.remove(e)
        self.queue.append(e)


class NaiveClock(NaiveFifo):
    def __init__(self, capacity, frames, bits=1):
        super().__init__(capacity, frames)
        self.most, self.count = 2**bits - 1, {}

    def insert(self, e):
        super().insert(e)
        self.count[e] = 0

    def hit(self, e):
        self.count[e] = min(self.count[e] + 1, self.most)

    def victims(self, free, need):
        while (victim := first(self.queue, free)) is not None:
            if self.count[victim] == 0:
                return [victim]
            self.count[victim] -= 1
            self.queue.remove(victim)
            self.queue.append(victim)
        return []


class NaiveLfu(NaiveLru):
    """The queue is in the order of last requests."""

    def __init__(self, capacity, frames):
        super().__init__(capacity, frames)
        self.count = {}

    def insert(self, e):
        super().insert(e)
        self.count[e] = 1

    def hit(self, e):
        super().hit(e)
        self.count[e] += 1

    def victims(self, free, need):
        return super().victims({e for e in free if self.count.get(e) == self.least(free)}, need)

    def least(self, free):
        return min((self.count[e] for e in self.queue if e in free), default=0)


class NaiveSieve(NaiveFifo):
    """``hand`` is an entry, or None before the oldest."""

    def __init__(self, capacity, frames):
        super().__init__(capacity, frames)
        self.visited, self.hand = set(), None

    def hit(self, e):
        self.visited.add(e)

    def move_hand_past(self, e):
        at = self.queue.index(e) + 1
        self.hand = self.queue[at] if at < len(self.queue) else None

    def remove(self, e):
        if self.hand == e:
            self.move_hand_past(e)
        self.visited.discard(e)
        super().remove(e)

    def victims(self, free, need):
        if first(self.queue, free) is None:
            return []
        while True:
            at = self.queue[0] if self.hand is None else self.hand
            self.move_hand_past(at)
            if at in free:
                if at not in self.visited:
                    return [at]
                self.visited.remove(at)


class NaiveSlru(NaivePolicy):
    def __init__(self, capacity, frames, segments=4):
        super().__init__(capacity, frames)
        self.segments = [[] for _ in range(segments)]
        self.share = [capacity // segments] * segments
        self.share[0] += capacity % segments

    def where(self, e):
        return next(i for i, segment in enumerate(self.segments) if e in segment)

    def insert(self, e):
        room = [i for i, s in enumerate(self.segments) if self.size(s) + self.frames[e] <= self.share[i]]
        self.segments[min(room, default=0)].append(e)

    def remove(self, e):
        self.segments[self.where(e)].remove(e)

    def hit(self, e):
        up = min(self.where(e) + 1, len(self.segments) - 1)
        self.remove(e)
        self.segments[up].append(e)
        for i in range(up, 0, -1):
            while self.size(self.segments[i]) > self.share[i]:
                self.segments[i - 1].append(self.segments[i].pop(0))

    def victims(self, free, need):
        return [e for segment in self.segments for e in segment if e in free][:1]


class NaiveTwoQ(NaivePolicy):
    def __init__(self, capacity, frames, in_fraction=0.25, out_fraction=0.5):
        super().__init__(capacity, frames)
        self.kin, self.kout = int(capacity * in_fraction), int(capacity * out_fraction)
        self.a1in, self.a1out, self.am, self.found = [], [], [], set()

    def miss(self, e):
        if e in self.a1out:
            self.a1out.remove(e)
            self.found.add(e)

    def insert(self, e):
        # A guess that was never asked for may come without a miss of its own.
        known = e in self.found or e in self.a1out
        self.found.discard(e)
        if e in self.a1out:
            self.a1out.remove(e)
        (self.am if known else self.a1in).append(e)

    def hit(self, e):
        if e in self.am:
            self.am.remove(e)
            self.am.append(e)

    def remove(self, e):
        if e in self.am:
            self.am.remove(e)
            return
        self.a1in.remove(e)
        self.a1out.append(e)
        while self.size(self.a1out) > self.kout:
            self.a1out.pop(0)

    def victims(self, free, need):
        order = [self.a1in, self.am] if self.size(self.a1in) > self.kin else [self.am, self.a1in]
        return [e for queue in order for e in queue if e in free][:1]


class NaiveArc(NaivePolicy):
    def __init__(self, capacity, frames):
        super().__init__(capacity, frames)
        self.p = 0.0
        self.t1, self.t2, self.b1, self.b2, self.found = [], [], [], [], set()
        self.in_b2 = False

    def miss(self, e):
        self.in_b2 = e in self.b2
        if e in self.b1:
            self.p += max(1, self.size(self.b2) / self.size(self.b1)) * self.frames[e]
            self.p = min(self.p, self.capacity)
            self.b1.remove(e)
            self.found.add(e)
        elif e in self.b2:
            self.p -= max(1, self.size(self.b1) / self.size(self.b2)) * self.frames[e]
            self.p = max(self.p, 0.0)
            self.b2.remove(e)
            self.found.add(e)

    def insert(self, e):
        known = e in self.found or e in self.b1 or e in self.b2
        self.found.discard(e)
        for ghosts in (self.b1, self.b2):
            if e in ghosts:
                ghosts.remove(e)
        (self.t2 if known else self.t1).append(e)
        while self.size(self.t1) + self.size(self.b1) > self.capacity and self.b1:
            self.b1.pop(0)
        while self.size(self.t1 + self.t2 + self.b1 + self.b2) > 2 * self.capacity and self.b2:
            self.b2.pop(0)

    def hit(self, e):
        (self.t1 if e in self.t1 else self.t2).remove(e)
        self.t2.append(e)

    def remove(self, e):
        live, ghosts = (self.t1, self.b1) if e in self.t1 else (self.t2, self.b2)
        live.remove(e)
        ghosts.append(e)

    def victims(self, free, need):
        recent = self.size(self.t1)
        from_t1 = recent > 0 and (recent > self.p or (recent == self.p and self.in_b2))
        order = self.t1 + self.t2 if from_t1 else self.t2 + self.t1
        return [e for e in order if e in free][:1]


class NaiveLirs(NaivePolicy):
    """Status by entry (LIR, HIR, ghost); the stack from bottom to top, the queue from its front."""

    def __init__(self, capacity, frames, hir_fraction=0.01, stack_fraction=2.0):
        super().__init__(capacity, frames)
        self.lir_limit = capacity - min(capacity, max(1, int(capacity * hir_fraction)))
        self.stack_limit = int(capacity * stack_fraction)
        self.status, self.stack, self.queue, self.ghosts = {}, [], [], []

    def lir(self):
        return [e for e, status in self.status.items() if status == "LIR"]

    def prune(self):
        while self.stack and self.status[self.stack[0]] != "LIR":
            gone = self.stack.pop(0)
            if self.status[gone] == "ghost":
                self.ghosts.remove(gone)
                del self.status[gone]

    def limit(self):
        while self.size(self.stack) > self.stack_limit and self.ghosts:
            gone = self.ghosts.pop(0)
            self.stack.remove(gone)
            del self.status[gone]

    def to_top(self, e):
        if e in self.stack:
            self.stack.remove(e)
        self.stack.append(e)

    def becomes_lir(self, e):
        for others in (self.queue, self.ghosts):
            if e in others:
                others.remove(e)
        self.to_top(e)
        self.status[e] = "LIR"
        while self.size(self.lir()) > self.lir_limit:
            bottom = self.stack.pop(0)
            self.status[bottom] = "HIR"
            self.queue.append(bottom)
            self.prune()

    def insert(self, e):
        if self.status.get(e) == "ghost":
            self.becomes_lir(e)
        else:
            room = self.size(self.lir()) + self.frames[e] <= self.lir_limit
            self.status[e] = "LIR" if room else "HIR"
            self.to_top(e)
            if not room:
                self.queue.append(e)
            self.prune()
        self.limit()

    def hit(self, e):
        if self.status[e] == "HIR" and e in self.stack:
            self.becomes_lir(e)
        else:
            self.to_top(e)
            if self.status[e] == "HIR":
                self.queue.remove(e)
                self.queue.append(e)
            self.prune()
        self.limit()

    def remove(self, e):
        if self.status[e] == "HIR":
            self.queue.remove(e)
            if e in self.stack:
                self.status[e] = "ghost"
                self.ghosts.append(e)
                return
        if e in self.stack:
            self.stack.remove(e)
        del self.status[e]
        self.prune()

    def victims(self, free, need):
        order = self.queue + [e for e in self.stack if self.status[e] == "LIR"]
        return [e for e in order if e in free][:1]


class NaiveS3Fifo(NaivePolicy):
    def __init__(self, capacity, frames, small_fraction=0.1, ghost_fraction=0.9, move_threshold=2):
        super().__init__(capacity, frames)
        self.small_limit = max(1, int(capacity * small_fraction))
        self.ghost_limit = int(capacity * ghost_fraction)
        self.threshold = move_threshold
        self.small, self.main, self.ghosts, self.found, self.hits = [], [], [], set(), {}
        self.filling = True

    def miss(self, e):
        if e in self.ghosts:
            self.ghosts.remove(e)
            self.found.add(e)

    def insert(self, e):
        known = e in self.found or e in self.ghosts
        self.found.discard(e)
        if e in self.ghosts:
            self.ghosts.remove(e)
        if self.filling and self.size(self.small) >= self.small_limit:
            known = True
        (self.main if known else self.small).append(e)
        self.hits[e] = 0

    def hit(self, e):
        self.hits[e] += 1

    def remove(self, e):
        if e in self.main:
            self.main.remove(e)
            return
        self.small.remove(e)
        self.ghosts.append(e)
        while self.size(self.ghosts) > self.ghost_limit:
            self.ghosts.pop(0)

    def from_small(self, free):
        for e in [e for e in self.small if e in free]:
            if self.hits[e] < self.threshold:
                return [e]
            self.hits[e] = 0
            self.small.remove(e)
            self.main.append(e)
        return []

    def from_main(self, free):
        while (e := first(self.main, free)) is not None:
            if self.hits[e] == 0:
                return [e]
            self.hits[e] = min(self.hits[e], 3) - 1
            self.main.remove(e)
            self.main.append(e)
        return []

    def victims(self, free, need):
        self.filling = False
        if self.small and self.size(self.small) >= self.small_limit:
            return self.from_small(free) or self.from_main(free)
        return self.from_main(free) or self.from_small(free) or self.from_main(free)


class NaiveSketch:
    """Four rows of counters up to 15; the smallest of an entry's four are raised."""

    def __init__(self, entries, sample):
        self.width = 2 ** math.ceil(math.log2(max(16, entries)))
        self.rows = [[0] * self.width for _ in range(4)]
        self.sample, self.counted = sample, 0

    def slots(self, e):
        bits = 2**64 - 1
        for row in range(4):
            value = (e + (row + 1) * 0x9E3779B97F4A7C15) & bits
            value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & bits
            value = ((value ^ value >> 27) * 0x94D049BB133111EB) & bits
            yield row, (value ^ value >> 31) % self.width

    def estimate(self, e):
        return min(self.rows[row][slot] for row, slot in self.slots(e))

    def count(self, e, weight):
        least = self.estimate(e)
        for row, slot in self.slots(e):
            if self.rows[row][slot] == least < 15:
                self.rows[row][slot] += 1
        self.counted += weight
        if self.counted >= self.sample:
            self.counted //= 2
            self.rows = [[count // 2 for count in row] for row in self.rows]


class NaiveWTinyLfu(NaivePolicy):
    def __init__(self, capacity, frames, window_fraction=0.01, protected_fraction=0.8, sample_factor=10.0):
        super().__init__(capacity, frames)
        self.window_limit = min(capacity, max(1, int(capacity * window_fraction)))
        self.main_limit = capacity - self.window_limit
        self.protected_limit = int(self.main_limit * protected_fraction)
        self.sketch = NaiveSketch(capacity, max(1, int(capacity * sample_factor)))
        self.window, self.probation, self.protected = [], [], []

    def insert(self, e):
        self.sketch.count(e, self.frames[e])
        self.window.append(e)

    def hit(self, e):
        self.sketch.count(e, self.frames[e])
        for queue, to in (
            (self.window, self.window),
            (self.probation, self.protected),
            (self.protected, self.protected),
        ):
            if e in queue:
                queue.remove(e)
                to.append(e)
                break
        while self.size(self.protected) > self.protected_limit:
            self.probation.append(self.protected.pop(0))

    def remove(self, e):
        next(queue for queue in (self.window, self.probation, self.protected) if e in queue).remove(e)

    def victims(self, free, need):
        while True:
            candidate = first(self.window, free)
            oldest = first(self.probation + self.protected, free)
            main = self.size(self.probation + self.protected)
            if candidate is None:
                return [] if oldest is None else [oldest]
            if oldest is not None and self.size(self.window) + need <= self.window_limit:
                return [oldest]
            if main + self.frames[candidate] <= self.main_limit:
                self.window.remove(candidate)
                self.probation.append(candidate)
                continue
            if oldest is None or self.sketch.estimate(candidate) <= self.sketch.estimate(oldest):
                return [candidate]
            if main - self.frames[oldest] + self.frames[candidate] <= self.main_limit:
                self.window.remove(candidate)
                self.probation.append(candidate)
            return [oldest]


class NaiveLfuDecay(NaivePolicy):
    """Hits are score / unit, and the unit grows where the algorithm multiplies every count."""

    most_unit = 2.0**500

    def __init__(self, capacity, frames, variant="corrected", threshold=0, beta=0.5, interval=16, remember=0):
        super().__init__(capacity, frames)
        self.paper = variant == "paper"
        self.threshold, self.beta, self.interval = threshold, beta, interval
        self.headroom, self.remember = 1 if self.paper else 0, remember
        self.score, self.unit = {}, 1.0
        self.count = 0

    def insert(self, e):
        self.score[e] = self.score.get(e, 0.0) + self.unit

    def hit(self, e):
        self.score[e] += self.unit

    def remove(self, e):
        if not self.remember:
            del self.score[e]

    def _tick(self):
        self.count += 1
        if self.count == self.interval:
            self.count = 0
            self.unit /= self.beta
            if self.unit >= self.most_unit:
                self.unit /= self.most_unit
                self.score = {e: score / self.most_unit for e, score in self.score.items()}

    def request(self):
        if self.paper:
            self._tick()

    def step(self):
        if not self.paper:
            self._tick()

    def victims(self, free, need):
        known = [e for e in self.score if e in free]
        if not known:
            return []
        least = min(known, key=lambda e: (self.score[e], e))
        qualified = [e for e in known if self.score[e] >= self.threshold * self.unit]
        if self.paper:
            if least in qualified:
                return sorted(e for e in known if self.score[e] == self.score[least])
        elif qualified:
            return [min(qualified, key=lambda e: (self.score[e], e))]
        self.starved += 1
        return [least]


#: For each policy its class, and the options that a property test draws.
REFERENCES = {
    "fifo": (NaiveFifo, [{}]),
    "clock": (NaiveClock, [{}, {"bits": 2}]),
    "lru": (NaiveLru, [{}]),
    "lfu": (NaiveLfu, [{}]),
    "sieve": (NaiveSieve, [{}]),
    "lfu-decay": (
        NaiveLfuDecay,
        [
            {"variant": "corrected", "threshold": 0, "beta": 0.5, "interval": 1},
            {"variant": "corrected", "threshold": 1.5, "beta": 0.3, "interval": 2},
            {"variant": "paper", "threshold": 0, "beta": 0.7, "interval": 3},
            {"variant": "corrected", "threshold": 0.7, "beta": 1e-100, "interval": 1},
            {"variant": "paper", "threshold": 2, "beta": 0.1, "interval": 7},
            {"variant": "paper", "threshold": 0.5, "beta": 2.0**-499, "interval": 5},
            {"variant": "corrected", "threshold": 1.5, "beta": 0.3, "interval": 2, "remember": 1},
            {"variant": "corrected", "threshold": 0, "beta": 2.0**-499, "interval": 2, "remember": 1},
            {"variant": "paper", "threshold": 2, "beta": 0.7, "interval": 7, "remember": 1},
        ],
    ),
    "slru": (NaiveSlru, [{"segments": 2}, {"segments": 4}]),
    "2q": (NaiveTwoQ, [{}, {"in_fraction": 0.5, "out_fraction": 2}]),
    "arc": (NaiveArc, [{}]),
    "lirs": (NaiveLirs, [{}, {"hir_fraction": 0.3, "stack_fraction": 1.5}]),
    "s3-fifo": (NaiveS3Fifo, [{}, {"small_fraction": 0.3, "move_threshold": 1}]),
    "w-tinylfu": (
        NaiveWTinyLfu,
        [{}, {"window_fraction": 0.3, "protected_fraction": 0.5, "sample_factor": 2}],
    ),
}
