"""Options of tierstore reshard that do not go together: refused before STORE is opened."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from tierstore.cli.stores import reshard


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "expected --ranks, --moments, --embedding or --head"),
        (("--moments", "bf16", "--tensor", "2"), "--expert, --tensor and --stages need --ranks"),
        (("--head", "gathered", "--expert", "2"), "--expert, --tensor and --stages need --ranks"),
        (("--ranks", "0"), "--ranks: expected at least 1, got 0"),
        (("--ranks", "2", "--stage-blocks", "2,1"), "--stage-blocks needs --stages"),
        (
            ("--ranks", "2", "--stages", "2", "--stage-blocks", "2;1"),
            "--stage-blocks: expected comma-separated integers",
        ),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    given = [str(tmp_path / "missing"), "--to", str(tmp_path / "new"), *options]
    result = CliRunner().invoke(reshard, given)
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "new").exists()
