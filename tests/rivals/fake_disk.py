"""A disk that need not be measured."""


class FakeDisk:
    """1 MB/s: the real one's probe moves hundreds of MB."""

    def __init__(self, *_: object) -> None:
        """Nothing is measured."""

    def measured(self) -> float:
        return 1e6

    def close(self) -> None:
        """Nothing is open."""
