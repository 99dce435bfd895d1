"""A process's place: from torchrun's variables, and what is refused."""

import secrets
import socket
from pathlib import Path

import pytest

from tierstore.errors import ConfigError
from tierstore.parallel import RankEnvironment
from tierstore.parallel.layout import free_port, local_environments

GIVEN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}


def test_from_torchrun() -> None:
    place = RankEnvironment.from_environment(GIVEN)
    assert place == RankEnvironment(rank=3, world=4, local_rank=1, address=("node7", 29500))
    supervised = RankEnvironment.from_environment({**GIVEN, "TORCHELASTIC_RUN_ID": "x"})
    assert (supervised.supervised, supervised.job) == (True, "x")
    nameless = RankEnvironment.from_environment({**GIVEN, "TORCHELASTIC_RUN_ID": "none"})
    assert (nameless.supervised, nameless.job) == (True, "")


def test_no_variables_is_a_process_alone() -> None:
    assert RankEnvironment.from_environment({}) == RankEnvironment()
    assert RankEnvironment.from_environment({"MASTER_ADDR": "node7", "MASTER_PORT": "1"}).world == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"LOCAL_RANK": None, "MASTER_PORT": None},
            r"^LOCAL_RANK, MASTER_PORT: not set, though RANK, WORLD_SIZE is",
        ),
        ({"RANK": None, "WORLD_SIZE": None}, "^RANK, WORLD_SIZE: not set, though LOCAL_RANK is"),
        ({"MASTER_ADDR": ""}, "^MASTER_ADDR: not set"),
        ({"RANK": "4"}, r"^RANK: expected 0 to 3 \(WORLD_SIZE is 4\), got 4"),
        ({"RANK": "-1"}, "^RANK: expected an integer of at least 0, got '-1'"),
        ({"WORLD_SIZE": "0"}, "^WORLD_SIZE: expected at least 1, got 0"),
        ({"WORLD_SIZE": "two"}, "^WORLD_SIZE: expected an integer of at least 0, got 'two'"),
        ({"LOCAL_RANK": "5"}, r"^LOCAL_RANK: expected at most 3 \(RANK\), got 5"),
        ({"MASTER_PORT": "70000"}, "^MASTER_PORT: expected 1 to 65535, got 70000"),
    ],
)
def test_bad_environments_are_named(changes: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**GIVEN, **changes}.items() if value is not None}
    with pytest.raises(ConfigError, match=message) as caught:
        RankEnvironment.from_environment(environ)
    assert "\n" not in str(caught.value)


def test_a_free_port_is_none_that_the_kernel_gives_away(monkeypatch: pytest.MonkeyPatch) -> None:
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {int(place["MASTER_PORT"]) for _ in range(20) for place in local_environments(2)}
    assert len(ports) > 10  # drawn anew for each world
    assert max(ports) < min(first_given, 32_768)
    # A port that is taken in IPv4 alone is not free either: the store of a world listens on all addresses.
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        draws = iter([port - 10_000] * 3 + [(other := free_port()) - 10_000])
        monkeypatch.setattr(secrets, "randbelow", lambda _: next(draws))
        assert free_port() == other
        monkeypatch.setattr(secrets, "randbelow", lambda _: port - 10_000)
        with pytest.raises(OSError, match="none of 100 ports"):
            free_port()
