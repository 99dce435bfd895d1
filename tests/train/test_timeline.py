"""The timeline of a real run: what every queue does is on it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from launcher import Ranks
from rank_cases import TINY, Make, Settings

from tierstore.config import load
from tierstore.parallel import Mesh
from tierstore.timeline import Timeline, Track
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening, rank_file
from tierstore.train.session import open_session


def draw(mesh: Mesh, settings: Settings, path: Path) -> dict[str, int]:
    """Three steps that are drawn to ``path`` (of this rank); what the dense parameters sent in them."""
    config = load(TrainConfig, None, {**TINY, "weights_in_place": "off", **settings})
    own = rank_file(path, mesh.world.rank)
    assert own is not None
    with Timeline(own) as sink, open_session(config, Opening.CREATE, mesh=mesh, timeline=sink) as trainer:
        for _ in range(3):
            trainer.step()
        trainer.commit()
        return asdict(trainer.dense.traffic)


def spans(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The spans of each track, by its title; its further lanes are its own."""
    events = json.loads(path.read_text())
    titles = {
        event["tid"]: event["args"]["name"].rstrip("0123456789 ")
        for event in events
        if event["name"] == "thread_name"
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault(titles[event["tid"]], []).append(event)
    return found


@pytest.mark.parametrize("mode", [{}, {"clip_norm": 0.5, "data.micro_batches": 2}], ids=["immediate", "clip"])
def test_all_queues_of_two_ranks_are_drawn(
    ranks: Ranks, settings: Make, tmp_path: Path, mode: Settings
) -> None:
    path = tmp_path / "timeline.json"
    made = settings({"host_budget": 60_000, **mode})
    sent = ranks.run(2, draw, made, path)
    for rank in range(2):
        own = rank_file(path, rank)
        assert own is not None
        tracks = spans(own)
        for track in (Track.GATHERS, Track.REDUCTIONS, Track.DEVICE_COPIES, Track.DISK_READS, Track.COMPUTE):
            assert tracks.get(track.value), f"{track.value} of rank {rank}"
        gathers, reductions = tracks[Track.GATHERS.value], tracks[Track.REDUCTIONS.value]
        # Every reduction has been waited for; of the gathers all but those ahead of a fourth step.
        assert len(reductions) == sent[rank]["reductions"]
        assert sum(span["args"]["sent_bytes"] for span in reductions) == sent[rank]["reduction_bytes"]
        assert 0 < sent[rank]["gathers"] - len(gathers) <= 3
        backward = [
            (span["ts"], span["ts"] + span["dur"])
            for span in tracks[Track.COMPUTE.value]
            if span["name"].startswith("backward")
        ]
        # Drawn from where they are issued, which is in a backward pass.
        assert all(any(begin <= span["ts"] <= end for begin, end in backward) for span in reductions)
        assert {span["name"].split()[0] for span in gathers} == {"gather"}
        assert {span["name"].split(" ", 1)[1] for span in gathers} == {
            span["name"].split(" ", 1)[1] for span in reductions
        }


def test_one_rank_has_no_messages_to_draw(settings: Make, tmp_path: Path) -> None:
    path = tmp_path / "alone.json"
    config = load(TrainConfig, None, {**TINY, **settings()})
    with Timeline(path) as sink, open_session(config, Opening.CREATE, timeline=sink) as trainer:
        trainer.step()
    tracks = spans(path)
    assert tracks[Track.COMPUTE.value]
    assert Track.GATHERS.value not in tracks
    assert Track.REDUCTIONS.value not in tracks
