"""Documents for the tests, made by hand."""

from tierstore.bench.documents import Better, Document, MachineFacts, Measurement, counted, derived, measured

MACHINE = MachineFacts(
    processor="a <processor>",
    cores=2,
    memory_bytes=8 << 30,
    kernel="6.1",
    filesystem="ext4",
    device="nvme0n1",
    torch="2.13.0",
)


def document(measurements: list[Measurement], *, bench: str = "commit", **changes: object) -> Document:
    """One run of ``bench``."""
    given = {
        "bench": bench,
        "options": {"rounds": 5, "store": "there"},
        "machine": MACHINE,
        "started": "2030-01-02T03:04:05+00:00",
        "ended": "2030-01-02T03:05:05+00:00",
        "measurements": tuple(measurements),
        "figures": {"bench": bench, "nothing": None},
        "tool_version": "9.9",
    }
    return Document(**{**given, **changes})  # type: ignore[arg-type]


def small() -> list[Measurement]:
    """A time, a ratio with a target, a count, and a curve over block sizes."""
    return [
        measured("commit", [2.0, 1.0, 3.0, 4.0], "s", Better.LOWER),
        derived("commit to write", [1.1, 1.3, 1.15], "ratio", Better.LOWER, target=1.2),
        counted("dirty", 4096, "bytes"),
        *(
            measured(
                "read",
                [size * 10.0, size * 12.0],
                "bytes/s",
                Better.HIGHER,
                parameters={"block_bytes": size, "backend": backend},
            )
            for backend in ("threads", "io_uring")
            for size in (4096, 65536, 1 << 20)
        ),
    ]
