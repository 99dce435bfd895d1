"""Policies of the host cache written for reading: lists and sums, one victim at a time.

Each has ``miss``, ``insert``, ``hit``, ``remove``, ``request``, ``step`` and ``victims(free, need)``: who goes next
among the entries ``free`` when ``need`` frames are still missing (several only where the policy says so).
``frames`` maps entries to sizes; ``capacity`` is in frames.
"""

from __future__ import annotations

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
        victim = first(self.queue, free)
        return [] if victim is None else [victim]


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


class NaiveLfu(NaiveFifo):
    """The queue is in the order of last requests."""

    def __init__(self, capacity, frames):
        super().__init__(capacity, frames)
        self.count = {}

    def insert(self, e):
        super().insert(e)
        self.count[e] = 1

    def hit(self, e):
        self.count[e] += 1
        self.queue.remove(e)
        self.queue.append(e)

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
        found = first([e for segment in self.segments for e in segment], free)
        return [] if found is None else [found]


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
        found = first([e for queue in order for e in queue], free)
        return [] if found is None else [found]


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
        found = first(order, free)
        return [] if found is None else [found]


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
        found = first(self.queue + [e for e in self.stack if self.status[e] == "LIR"], free)
        return [] if found is None else [found]


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


class NaiveNextUse(NaivePolicy):
    """Every expected time from its formula, for every resident entry, at every choice.

    ``layers`` maps entries to layers. Phases: 1 forward, 2 backward, 4 the user's (forward).
    """

    def __init__(self, capacity, frames, half_life=16.0):
        super().__init__(capacity, frames)
        self.decay = 2 ** (-1 / half_life)
        self.seen, self.trains, self.last, self.position = set(), False, None, 0
        self.cycles, self.due = {}, {}
        self.use, self.late, self.backward, self.chance, self.age = {}, {}, {}, {}, {}
        self.used_forward, self.used_backward, self.active = set(), set(), set()
        self.resident, self.pending = set(), set()
        self.trials, self.uses = {}, {}  # by past

    def known(self):
        return sorted({layer for e, layer in self.layers.items() if self.frames[e]} | self.seen)

    def rank(self, layer):
        return self.known().index(layer)

    def entries(self, layer):
        return [e for e, of in self.layers.items() if of == layer and self.frames[e]]

    def enter(self, phase, layer):
        """Which pass of the cycle an access is, and where that leaves the program."""
        if phase not in (1, 2, 4):
            return None
        kind = "backward" if phase == 2 else "forward"
        if kind == "forward" and self.trains and self.last:
            before, where = self.last
            if (before in ("forward", "again") and where == layer) or (
                before == "backward" and where > layer
            ):
                kind = "again"
        self.seen.add(layer)
        if kind == "backward":
            self.trains = True
        if kind == "forward" and self.last and self.last[0] == "forward" and layer <= self.last[1]:
            self.trains = False
        self.last = kind, layer
        return kind

    def now(self):
        kind, layer = self.last or ("forward", self.known()[0])
        rank = self.rank(layer) if self.last else 0
        return rank if kind == "forward" else 2 * len(self.known()) - 1 - rank

    def cycle(self):
        return len(self.known()) * (2 if self.trains else 1)

    def until(self, place):
        return (place - self.now()) % self.cycle() or self.cycle()

    def access(self, phase, layer, entries):
        kind = self.enter(phase, layer)
        self.pending = {e for e in entries if e in self.layers}
        mine = set(self.entries(layer))
        if not mine:
            return
        if kind == "forward":
            if self.due.get(layer):
                self.close(layer)
            self.used_forward = (self.used_forward - mine) | (self.pending & mine)
            self.used_backward -= mine
            self.active -= {e // 4 for e in mine}
            self.active |= {e // 4 for e in self.pending & mine}
            self.due[layer] = True
            if not self.trains:
                self.close(layer)
        if kind == "backward":
            self.used_backward = (self.used_backward - mine) | (self.pending & mine)
            if self.due.get(layer):
                for e in mine:
                    if e // 4 in self.active:
                        value = self.backward.get(e, 0.0)
                        fresh = 1 - self.decay if e in self.backward else 1.0
                        self.backward[e] = value + fresh * ((e in self.pending) - value)
                self.close(layer)

    def past(self, e):
        age = self.age.get(e, 2**30)
        row = next((i for i, top in enumerate((0, 1, 2, 3, 7, 15, 31)) if age <= top), 7)
        return row, min(int(self.use.get(e, 0.0) * 16), 15)

    def close(self, layer):
        """The layer's cycle is over: what it used is learned."""
        self.due[layer] = False
        self.cycles[layer] = self.cycles.get(layer, 0) + 1
        fresh = max(1 - self.decay, 1 / self.cycles[layer])
        fade = 2 ** (-1 / (64 * len(self.known())))
        for counts in (self.trials, self.uses):
            for past in counts:
                counts[past] *= fade
        used = {e for e in self.entries(layer) if e in self.used_forward or e in self.used_backward}
        for e in self.entries(layer):
            past = self.past(e)
            self.trials[past] = self.trials.get(past, 0.0) + 1
            self.uses[past] = self.uses.get(past, 0.0) + (e in used)
        for e in self.entries(layer):
            if e in used:
                late = self.late.get(e, 0.0)
                rate = 1 - self.decay if e in self.age else 1.0
                self.late[e] = late + rate * ((e not in self.used_forward) - late)
            value = self.use.get(e, 0.0)
            self.use[e] = value + fresh * ((e in used) - value)
            if e in used:
                self.age[e] = 0
            elif e in self.age:
                self.age[e] += 1
            past = self.past(e)
            self.chance[e] = (self.uses.get(past, 0.0) + 4 * self.use[e]) / (self.trials.get(past, 0.0) + 4)
        self.used_forward -= set(self.entries(layer))
        self.used_backward -= set(self.entries(layer))

    def insert(self, e):
        self.resident.add(e)
        self.pending.discard(e)

    def hit(self, e):
        self.pending.discard(e)

    def remove(self, e):
        self.resident.remove(e)

    def expected(self, e):
        layer = self.layers[e]
        rank, count, cycle = self.rank(layer), len(self.known()), self.cycle()
        records = sorted({other // 4 for other in self.entries(layer)})
        place = records.index(e // 4) / len(records)
        if e in self.pending:
            return place
        chance = max(self.chance.get(e, 0.0), 1e-9)
        tail = cycle * (1.0 - chance) / chance
        if self.trains:
            tail = (2.0 * count - 1 - 2 * rank) * self.late.get(e, 0.0) + tail
        if self.trains and self.due.get(layer) and e // 4 in self.active:
            rest = (1.0 - self.backward.get(e, 1.0)) * (2.0 * rank + 1.0 + tail)
            return self.until(2 * count - 1 - rank) + (place + rest)
        return self.until(rank) + (place + tail)

    def victims(self, free, need):
        known = [e for e in self.resident if e in free]
        return [min(known, key=lambda e: (-self.expected(e), e))] if known else []


NAIVE = {
    "fifo": NaiveFifo,
    "clock": NaiveClock,
    "lfu": NaiveLfu,
    "sieve": NaiveSieve,
    "slru": NaiveSlru,
    "2q": NaiveTwoQ,
    "arc": NaiveArc,
    "lirs": NaiveLirs,
    "s3-fifo": NaiveS3Fifo,
    "w-tinylfu": NaiveWTinyLfu,
    "next-use": NaiveNextUse,
}
