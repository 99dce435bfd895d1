"""LRU as a user would write it in Python."""


class PythonLru:
    def __init__(self, fails_at=-1):
        self.order, self.fails_at = {}, fails_at

    def insert(self, entry):
        if entry == self.fails_at:
            raise ZeroDivisionError("as the test wants it")
        self.order[entry] = None

    def hit(self, entry):
        del self.order[entry]
        self.order[entry] = None

    def remove(self, entry):
        del self.order[entry]

    def tick(self, clock):
        pass

    def select(self, frames, candidates):
        victims = []
        for entry in self.order:
            if frames <= 0:
                break
            if candidates.evictable(entry):
                victims.append(entry)
                frames -= candidates.frames(entry)
        return victims


class PythonMru(PythonLru):
    """Evicts what was asked for last; offers all."""

    def select(self, frames, candidates):
        return [entry for entry in reversed(self.order) if candidates.evictable(entry)]
