"""next-use written for reading: every expected time from its formula, at every choice."""

from naive_policies import NaivePolicy


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
        fade = 2 ** (-1 / (64 * len({of for e, of in self.layers.items() if self.frames[e]})))
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
