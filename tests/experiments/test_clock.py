"""experiments/clock.py: a graph timed by hand, and what a real step's graph keeps. The graphs of cases are recorded in ranks
with simulated devices."""

from pathlib import Path

import pytest
from clock import Machine, machine, steady, timed
from launcher import Ranks
from simulated import ENGINE, HOST, MAIN, Node
from training_cases import FEW_SLOTS, WAYS, record

from tierstore.machine_profile import find_profile


def node(what: str, stream: int, *after: int, nbytes: int = 0, operations: float = 0.0) -> Node:
    return Node(what, MAIN, stream, 0, operations, nbytes, list(after), 0, 0)


def test_a_graph_by_hand() -> None:
    """Everything takes 1 s of the host. A copy of 6 s beside a kernel of 10 s, a second copy behind it on the link, and a
    kernel that needs the second::

        host   0 1 2 3 4 ...                          the kernel's wait ends at 21, the mark is reached at 22
        h2d      1------7------13
        device   ..2---------12 13------------------20
    """
    nodes = [
        node("h2d", 1, nbytes=6),  # queued at 1
        node("matmul", 0, nbytes=10),  # at 2
        node("h2d", 1, 0, nbytes=6),  # at 3: begins at 7
        node("matmul", 0, 1, 2, nbytes=7),  # at 4: begins at 13
        node("sync", HOST, 3),  # 20 to 21
        node("step", HOST),
    ]
    on = Machine(lambda index: 1.0, lambda each: ("h2d" if each.what == "h2d" else "device", each.nbytes))
    run = timed(nodes, on)
    spans = [
        (each.resource, run.begun[i], run.ended[i])
        for i, each in enumerate(run.operations)
        if each.resource != "host"
    ]
    assert spans == [("h2d", 1, 7), ("device", 2, 12), ("h2d", 7, 13), ("device", 13, 20)]
    assert run.seconds == 22
    path = [(run.operations[i].resource, run.operations[i].node) for i in run.critical_path(9)]
    assert path == [("host", 0), ("h2d", 0), ("h2d", 2), ("device", 3), ("host", 4), ("host", 5)]


def test_what_a_profile_makes_of_nodes() -> None:
    """A model of 1/4 of the width: bytes count 16 times, operations 64 times."""
    profile = find_profile(Path("H100"))
    on = machine(profile, 2e12, drives=4, scale=4)
    assert on.work(node("aten::mm.out", 0, operations=1e9)) == (
        "device",
        pytest.approx(2e-6 + 64e9 / (0.4 * 989.5e12)),
    )
    assert on.work(node("aten::add", 0, nbytes=1 << 20)) == (
        "device",
        pytest.approx(2e-6 + (16 << 20) / 2e12),
    )
    assert on.work(node("d2h", 2, nbytes=1 << 20)) == ("d2h", pytest.approx(1e-5 + (16 << 20) / (0.8 * 64e9)))
    assert on.work(node("engine read", ENGINE, nbytes=7000)) == (
        "drives",
        pytest.approx(112e3 / (4 * 0.8 * 7e9)),
    )
    assert on.work(node("engine adamw", ENGINE, nbytes=1 << 20)) == (
        "host memory",
        pytest.approx((16 << 20) / 160e9),
    )


@pytest.mark.parametrize("way", ["bf16", "evictions"])
def test_the_graph_of_a_step(simulated_ranks: Ranks, tmp_path: Path, text: Path, way: str) -> None:
    """Two runs give one graph. It needs no less than its bound, and what it moves is what its tickets say."""
    settings = {**FEW_SLOTS, **WAYS[way]}
    (nodes,), (again,) = (
        simulated_ranks.run(1, record, tmp_path / name, settings, str(text)) for name in ("one", "two")
    )
    assert nodes == again
    assert all(before < index for index, each in enumerate(nodes) for before in each.after)
    on = machine(find_profile(Path("A100")), 1e12, scale=1)
    step = steady(nodes, timed(nodes, on))
    assert step == steady(again, timed(again, on))
    assert step.step_s >= step.bound_s > 0
    assert sum(step.path_s.values()) == pytest.approx(step.step_s)
    adamw = [each for each in nodes if each.what.endswith("adamw")]
    # Half of the gradients have a spare buffer if all records are in memory.
    assert {each.what for each in adamw} == {
        "engine adamw",
        *(["engine idle adamw"] if way == "bf16" else []),
    }
    assert {nodes[before].what for each in adamw for before in each.after} >= {"d2h"}
    up = [each for each in nodes if each.what == "h2d" and each.stream != 0]
    if way == "evictions":
        assert any(nodes[before].what == "engine read" for each in up for before in each.after)
