"""Tables, progress and the JSON object."""

import io
import json

import pytest
from key_units import violations
from rich.console import Console

from tierstore.cli.output import Output, OutputMode, ProgressBar, ProgressUnit


def test_human_output_is_all_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(OutputMode.HUMAN)
    output.table("Tiers", ["tier", "read"], [("nvme", "3.2 GiB"), ("[host]", "12 MiB")])
    output.line("done [in brackets] :tada:")
    output.emit({"steps": 3})
    out, err = capsys.readouterr()
    assert [line.rstrip() for line in out.splitlines()] == [
        "Tiers",
        "tier       read",
        "nvme    3.2 GiB",
        "[host]   12 MiB",
        "done [in brackets] :tada:",
    ]
    assert err == ""


def test_a_title_is_not_broken_to_the_width_of_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    title = "what a narrow table is of can be said in one line all the same"
    Output(OutputMode.HUMAN).table(title, ("a", "b"), [(1, 2)])
    assert capsys.readouterr().out.splitlines() == [title, "a  b", "1  2"]


def test_json_output_is_one_line_and_the_rest_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(OutputMode.JSON)
    output.table("Tiers", ["tier"], [("nvme",)])
    output.line("hello")
    output.emit({"steps": 3, "val_loss": float("nan"), "tiers": [{"read_bytes": 5, "name": "nvme"}]})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"steps": 3, "val_loss": None, "tiers": [{"read_bytes": 5, "name": "nvme"}]}
    assert out.count("\n") == 1
    assert "nvme" in err
    assert "hello" in err


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ({"read_bytes": 1, "stall_s": 0.5, "tokens_per_s": 3, "hit_ratio": 0.5}, []),
        ({"bytes": 1, "name": "x", "ok": True, "nothing": None}, []),
        ({"speed": 1}, ["speed"]),
        ({"a": {"b": [{"speed": 1}, {"speed": 2}], "step_s": [1.0, 2.0]}}, ["a.b.speed"]),
        ({"sizes": [1, 2]}, ["sizes"]),
    ],
)
def test_numbers_say_their_unit(value: object, wrong: list[str]) -> None:
    assert list(violations(value)) == wrong


def plain_progress(clock: list[float], interval_s: float) -> tuple[ProgressBar, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, highlight=False, markup=False, width=200)
    return ProgressBar(console, label="train", interval_s=interval_s, clock=lambda: clock[0]), stream


def test_plain_progress_is_a_line_now_and_then() -> None:
    clock = [100.0]
    progress, stream = plain_progress(clock, 10.0)
    with progress:
        for step in range(1, 6):
            progress.update(step, 5, {"loss": 2.0 / 3, "read": "3 MiB"})
            clock[0] += 4
        progress.update(5, 5, {})  # said already
    assert stream.getvalue().splitlines() == [
        "train 1/5  loss 0.6667  read 3 MiB",  # the first
        "train 4/5  loss 0.6667  read 3 MiB",  # 12 s later
        "train 5/5  loss 0.6667  read 3 MiB",  # the last
    ]


def test_bytes_have_their_rate_and_the_time_left() -> None:
    """Resumed at 100 of 1,124 MiB: from there 64 MiB/s, and the last line without a time left."""
    clock = [100.0]
    stream = io.StringIO()
    console = Console(file=stream, highlight=False, markup=False, width=200)
    with ProgressBar(console, label="import", unit=ProgressUnit.BYTES, clock=lambda: clock[0]) as progress:
        progress.update(0, 0)  # nothing is known yet
        clock[0] += 60
        for done in range(100, 1125, 128):
            progress.update(done << 20, 1124 << 20)
            clock[0] += 2
        progress.update(1124 << 20, 1124 << 20)
    assert stream.getvalue().splitlines() == [
        "import ...",
        "import 100 MiB/1.1 GiB",
        "import 484 MiB/1.1 GiB  64 MiB/s  10 s left",  # 6 s later
        "import 868 MiB/1.1 GiB  64 MiB/s  4 s left",
        "import 1.1 GiB/1.1 GiB  64 MiB/s",
    ]


def test_a_terminal_gets_a_bar() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120)
    with ProgressBar(console, label="train") as progress:
        progress.update(5, 5, {"loss": 1.5})
    assert "5/5" in stream.getvalue()
    assert "loss 1.5" in stream.getvalue()
