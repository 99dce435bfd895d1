"""Training imported models with their rows in chunks: the bits of one chunk."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from launcher import Ranks
from stored_runs import configuration
from stored_runs import train as train_stored
from tiny_families import make_config, plain_model

from tierstore.hf.importing import ImportOptions, import_model
from tierstore.parallel import Mesh

MODES: Mapping[str, Mapping[str, Any]] = {
    "kept": {},
    "computed again": {"finetune.expert_activations": "recompute"},
    "layer order": {"data.micro_batches": 2, "data.micro_order": "layer"},
}


def _train(
    mesh: Mesh, source: Path, store: Path, settings: Mapping[str, Any]
) -> tuple[list[float], int, int]:
    """Imports ``source`` on all ranks and takes three steps, resumed after the second."""
    import_model(source, store, ImportOptions(), mesh=mesh)
    return train_stored(configuration({"store": store, "steps": 3, **settings}), stops=(2,), mesh=mesh)


@pytest.mark.slow
def test_chunks_change_no_bit_of_an_imported_model(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    plain_model(make_config("qwen3_moe")).save_pretrained(source)
    for mode, options in MODES.items():
        settings = {"data.paths": (str(text),), "host_budget": 1 << 20, **options}
        found = [
            ranks.run(
                2,
                _train,
                source,
                tmp_path / f"{mode} {degree}",
                {**settings, "parallel.pipeline_degree": degree},
            )
            for degree in (1, 2)
        ]
        assert [each[:2] for each in found[1]] == [each[:2] for each in found[0]], mode
