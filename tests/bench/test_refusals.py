"""What benchmarks refuse before anything is measured."""

import pytest
from tiny import RefusedBench

STORE = "--store={here}/b"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["adamw", "--parameters=0"], "parameters"),
        (["adamw", "--threads=0"], "threads"),
        (["adamw", "--repeats=0"], "repeats"),
        (["cache", "--requests=0"], "--requests"),
        (["cache", "--keys=0"], "--keys"),
        (["cache", "--repeats=0"], "--repeats"),
        (["commit", STORE, "--record-bytes=8"], "record_bytes"),
        (["commit", STORE, "--records=0"], "records"),
        (["commit", "--store={here}"], "store: {here} exists"),
        (["io", "{here}", "--size=1000TiB"], "are free"),
        (["io", "{here}", "--size=1000"], "--size"),
        (["io", "{here}", "--size=9MiB"], "--size"),
        (["io", "{here}", "--minutes=0"], "--minutes"),
        (["io", "{here}", "--rounds=0"], "--rounds"),
        (["io", "{here}", "{here}/../{name}"], "directories"),
        (["io", "{here}/nowhere"], "{here}/nowhere"),
        (["io", "{here}", "--record-bytes=1000"], "records"),
        (["io", "{here}", "--backend=tape"], "tape"),
        (["machine", "{here}/nowhere/profile.json"], "PROFILE: there is no directory {here}/nowhere"),
        (["machine", "{here}/p.json", "--ranks=1"], "--ranks"),
        (["machine", "{here}/p.json", "--repeats=0"], "--repeats"),
        (["machine", "{here}/p.json", "--disk-bytes=1000"], "--disk-bytes"),
        (["machine", "{here}/p.json", "--set=links.disk.bandwidth=1MiB"], "links.exchange"),
        (["overlap", "--store={here}"], "store: {here} exists"),
        (["overlap", STORE, "--steps=0"], "steps"),
        (["overlap", STORE, "--layers=0"], "layers"),
        (["overlap", STORE, "--forward-ms=0"], "forward_ms"),
        (["overlap", STORE, "--stack=trainer", "--svg={here}/p.svg"], "svg"),
        (["overlap", STORE, "--svg={here}/nowhere/a.svg"], "--svg: there is no directory {here}/nowhere"),
        (["overlap", STORE, "--timeline={here}/nowhere/t"], "--timeline: there is no directory"),
        (["overlap", STORE, "--set=threads=2"], "--set threads"),
        (["scale", STORE, "--records=10", "--records=1000"], "records"),
        (["scale", STORE, "--records=1000"], "sizes"),
        (["scale", STORE, "--decided=5"], "decided"),
        (["scale", STORE, "--records=100", "--records=10000000000"], "the records of the largest store"),
        (["tiers", STORE, "--seconds=0"], "seconds"),
        (["tiers", STORE, "--budget=2"], "budget"),
        (["tiers", STORE, "--drive={here}/c"], "--drive"),
        (["tiers", STORE, "--minutes=0"], "minutes"),
        (["tiers", STORE, "--minutes=1", "--dirty=1"], "--dirty"),
        (["tiers", STORE, "--minutes=1", "--full"], "--full"),
        (["tiers", STORE, "--minutes=1", "--budget=0.1", "--budget=0.2"], "--budget"),
        (["train", "--store={here}"], "store: {here} exists"),
        (["train", STORE, "--steps=0"], "steps"),
        (["train", STORE, "--also=one"], "--orders"),
        (["train", STORE, "--orders", "--baseline=none"], "--baseline"),
        (["train", STORE, "--orders", "--micro-batches=1"], "data.micro_batches"),
    ],
)
def test_what_cannot_be_is_refused(refused_bench: RefusedBench, arguments: list[str], named: str) -> None:
    refused_bench(*arguments, named=named)
