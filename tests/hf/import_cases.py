"""What ranks run in tests of the import."""

from pathlib import Path

from tierstore.errors import StoreError
from tierstore.hf.importing import ImportOptions, import_model
from tierstore.parallel import Mesh


def import_ranks(mesh: Mesh, source: Path, store: Path, odd: Path | None = None) -> int | str:
    """Imports ``source`` on all ranks, ``odd`` on the last; how many records this rank wrote, or why it did not."""
    mine = odd if odd is not None and mesh.world.rank == mesh.world.size - 1 else source
    try:
        return import_model(mine, store, ImportOptions(commit_bytes=30_000), mesh=mesh).records
    except StoreError as error:
        return str(error)
