"""learned-use written for reading: its model in dictionaries, worth computed at every choice.

The model is in float32 and adds in the core's order, with the C library's functions: Adagrad divides by what it has
seen, so that the first rounding of a mean that ought to be zero would become a step of its own.
"""

import ctypes

import numpy as np
from naive_next_use import NaiveNextUse

F = np.float32
RANK = 32
FAST, SLOW = F(2 ** (-1 / 6)), F(2 ** (-1 / 40))
FADE = np.repeat([FAST, SLOW], RANK)
SHARE = np.repeat([F(1), F(0.3)], RANK)
ALONE = 7
C = ctypes.CDLL(None)
for function in (C.expf, C.logf):
    function.argtypes, function.restype = [ctypes.c_float], ctypes.c_float


def log_odds(chance):
    chance = np.clip(chance, F(1e-3), F(1) - F(1e-3))
    return np.array([C.logf(each) for each in chance / (1 - chance)], F)


def logistic(logits):
    return 1 / (1 + np.array([C.expf(-each) for each in logits], F))


def added_up(rows):
    """The sum of rows, one after another."""
    total = np.zeros_like(rows[0])
    for row in rows:
        total += row
    return total


def scattered(number):
    mask = (1 << 64) - 1
    bits = (number + 1) * 0x9E3779B97F4A7C15 & mask
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & mask
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & mask
    return (((bits ^ bits >> 31) >> 40) - (1 << 23)) / (1 << 23)


class NaiveModel:
    """P(a sequence uses a place in the next pass of its layer). ``sizes`` maps layers to how many places they have."""

    def __init__(self, sizes, half_life=24.0, rate=0.02):
        self.sizes, self.decay, self.rate = sizes, F(2 ** (-1 / half_life)), F(rate)
        self.vectors, self.outputs, self.prior, self.pairs, self.firsts = {}, {}, {}, {}, {}
        for layer, size in sizes.items():
            first = [[scattered(((layer << 32) | e) * RANK + i) for i in range(RANK)] for e in range(size)]
            self.vectors[layer] = F(0.17) * np.array(first, F)
            self.outputs[layer] = np.zeros((size, 2 * RANK), F)
            self.prior[layer], self.firsts[layer] = np.full(size, 0.1, F), np.zeros(size, F)
            self.pairs[layer] = np.zeros((size, size), F)
        self.weights, self.squares = np.array([0, 0.6, 0.3, 0, 0.5], F), np.zeros(5, F)
        self.state, self.known = {}, {}

    def forget(self, sequence):
        self.state.pop(sequence, None)
        self.known = {key: value for key, value in self.known.items() if key[0] != sequence}

    def logits(self, layer, known):
        return added_up([*(known["x"] * self.weights).T, *(self.outputs[layer] * known["state"]).T])

    def pass_(self, sequence, layer, used):
        """The chances of the next pass, by place, and the sequence's decayed frequencies."""
        size, before = self.sizes[layer], self.known.get((sequence, layer))
        now = np.zeros(size, F)
        now[used] = 1.0
        uses, passes, last = np.zeros(size, F), F(0), []
        if before is not None:
            self.learn(sequence, layer, before, now)
            for first in before["used"]:
                self.firsts[layer][first] += 1
                self.pairs[layer][first] += now
            uses, passes, last = before["uses"], before["passes"], before["used"]
        prior = self.prior[layer]
        prior -= F(5e-4) * prior
        prior[used] += F(5e-4)
        uses, passes = uses * self.decay + now, self.decay * passes + 1
        faded = self.state.get(sequence, np.zeros(2 * RANK, F)) * FADE
        self.state[sequence] = added_up([faded, *(np.tile(self.vectors[layer][used], 2) * SHARE)])
        own = (uses + 2 * prior) / (passes + 2)
        following = added_up(
            [(self.pairs[layer][e] + 10 * prior) * (1 / (self.firsts[layer][e] + 10)) for e in used]
        )
        x = np.stack(
            (
                np.ones(size, F),
                log_odds(own),
                log_odds(prior),
                now,
                log_odds(following / F(len(used))) - log_odds(prior),
            ),
            axis=1,
        )
        known = {"x": x, "state": self.state[sequence], "uses": uses, "passes": passes, "used": used}
        self.known[sequence, layer] = {**known, "before": last}
        return logistic(self.logits(layer, known)), own

    def learn(self, sequence, layer, before, now):
        error = now - logistic(self.logits(layer, before))
        state = before["state"]
        gradient = added_up(error[:, None] * self.outputs[layer])
        step = self.rate / np.sqrt(added_up([F(1), *(state * state)]))
        self.outputs[layer] += np.outer(error, step * state)
        mean = added_up(error[:, None] * before["x"]) / F(len(now))
        self.squares += mean * mean
        self.weights = self.weights + F(0.2) * mean / (np.sqrt(self.squares) + F(1e-6))
        fast = slow = F(1)
        for at in sorted((other for other in self.sizes if other <= layer), reverse=True):
            known = self.known.get((sequence, at))
            change = F(0.1) * self.rate * (fast * gradient[:RANK] + slow * gradient[RANK:])
            for place in known["used" if at == layer else "before"] if known else []:
                self.vectors[at][place] += change
            fast, slow = fast * FAST, slow * SLOW


class NaiveLearnedUse(NaiveNextUse):
    """``requesters`` maps the next access's entries to the sequences that ask, a bit each. The walk is next-use's."""

    def __init__(self, capacity, frames, price=0.012, later=0.4, **model):
        super().__init__(capacity, frames)
        self.price, self.later, self.options, self.model = price, later, model, None
        self.turns, self.before, self.heard, self.told = 1, 0, {}, False
        self.value, self.requesters = {}, {}

    def access(self, phase, layer, entries):
        kind = self.enter(phase, layer)
        self.pending = {e for e in entries if e in self.layers}
        if kind != "forward":
            return
        if self.now() <= self.before:
            self.turns, self.told = self.turns + self.told, False
        self.before = self.now()
        mine = self.entries(layer)
        if not mine:
            return
        if self.model is None:
            sizes = {of: len(self.entries(of)) for of in set(self.layers.values()) if self.entries(of)}
            self.model = NaiveModel(sizes, **self.options)
        used = {}
        said = any(self.requesters.values())
        asked = {place: self.requesters.get(e, 0) for place, e in enumerate(mine) if e in self.pending}
        self.told = self.told or (said and all(asked.values()))
        for place, who in asked.items():
            for sequence in [s for s in range(7) if who >> s & 1] if said else [ALONE]:
                used.setdefault(sequence, []).append(place)
        none, never = np.ones(len(mine)), np.ones(len(mine))
        for sequence in sorted(used):
            if self.heard.get(sequence, 0) + 1 < self.turns:
                self.model.forget(sequence)
            self.heard[sequence] = self.turns
            chances, frequencies = self.model.pass_(sequence, layer, used[sequence])
            none = none * (1 - chances.astype(float))
            never = never * (1 - frequencies.astype(float))
        self.value.update(zip(mine, 1 - none + self.later * none * (1 - never), strict=True))

    def worth(self, e):
        if e in self.pending:
            return 1e9 + self.value.get(e, 0.0)
        return self.value.get(e, 0.0) - self.price * self.until(self.rank(self.layers[e]))

    def victims(self, free, need):
        known = [e for e in self.resident if e in free]
        return [min(known, key=lambda e: (self.worth(e), e))] if known else []
