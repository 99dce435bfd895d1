"""``tierstore cache study``."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tierstore.cli.main import cli
from tierstore.lab.generators import RoutingWorkload
from tierstore.lab.importing import write_trace


@pytest.fixture
def source(tmp_path):
    workload = RoutingWorkload(layers=2, experts=6, k=1, tokens_per_step=3, steps=12)
    write_trace(tmp_path / "run.trace", workload.table(), workload.chunks(), origin="a test")
    return tmp_path / "run.trace"


def test_a_study_of_a_trace(source, tmp_path):
    markdown, html = tmp_path / "study.md", tmp_path / "study.html"
    options = ["--markdown", str(markdown), "--html", str(html), "--json", "--threads", "2"]
    ran = CliRunner().invoke(cli, ["cache", "study", str(source), *options])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout.splitlines()[-1])
    assert [regime["name"] for regime in found["regimes"]] == ["run"]
    assert "### Distance from the bound" in markdown.read_text()
    assert found["regimes"][0]["sha256"] in html.read_text()


def test_what_is_no_source(tmp_path):
    (tmp_path / "keys").write_text("1\n2\n")
    ran = CliRunner().invoke(cli, ["cache", "study", str(tmp_path / "keys")])
    assert ran.exit_code == 2
    assert "expected a trace or an npz with topk; import it first" in ran.output
