"""The page: one file, whole, with everything marked."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from studies import small_study

from tierstore.errors import CapabilityError
from tierstore.lab.report import render_report, write_report
from tierstore.lab.results import Role

VOID = {"meta", "br", "path", "use", "rect", "image", "link"}


class Page(HTMLParser):
    """Checks that elements close in order; gathers ids, text and references."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.words, self.references = [], [], [], []
        self.tags = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        values = dict(attributes)
        if "id" in values:
            self.ids.append(values["id"])
        self.references += [values[name] for name in ("href", "src", "xlink:href") if name in values]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def text():
    return render_report(small_study())


def test_it_is_one_well_formed_file(text):
    page = Page(text)
    assert "script" not in page.tags
    assert "link" not in page.tags
    references = [reference for reference in page.references if not reference.startswith("data:image/png;")]
    assert all(reference.startswith("#") for reference in references)
    assert "url(http" not in text
    assert len(page.ids) == len(set(page.ids))
    assert {reference[1:] for reference in references} <= set(page.ids)
    assert page.tags >= {"svg", "table", "details", "footer"}
    assert text.count("<svg") == 4


def test_what_it_says(text):
    words = re.sub(r"\s+", " ", " ".join(Page(text).words))
    assert "training, <16> tokens" in words  # escaped in the source
    assert "<16>" not in text
    assert "0123456789abcdef" * 4 in words
    for said in (
        "A study of <caches>",
        "Contract: event-atomic, no lookahead; scope: global",
        "0.4500",  # LFU-decay at 40%
        "+0.1500",  # above the bound
        "belady (bound)",
        "500 ms",
        "3.5",
        "100 ns",
        "read bandwidth",
        "+0.0250 of the requests, 95% interval +0.0100 to +0.0400 (block bootstrap",
        "2.27% above the best of the finalists in hindsight",
        'policy = "lfu-decay"',
        "Made by tierstore 9.9",
    ):
        assert said in words, said
    for mark in ("measured", "simulated", "estimated"):
        assert f'<span class="mark {mark}">{mark}</span>' in text


def test_what_is_no_bound_is_not_called_one():
    study = small_study()
    *policies, belady = study.regimes[0].curves
    points = tuple(replace(point, role=Role.CLAIRVOYANT, not_admitted=7) for point in belady.points)
    regime = replace(study.regimes[0], curves=(*policies, replace(belady, points=points)))
    text = render_report(replace(study, regimes=(regime,)))
    words = re.sub(r"\s+", " ", " ".join(Page(text).words))
    for said in ("belady (clairvoyant)", "0.3000 (clairvoyant)", "above the clairvoyant", "not admitted"):
        assert said in words, said
    assert "bound" not in words
    assert "not admitted" not in render_report(study)


@pytest.mark.parametrize(
    ("objective", "said", "mark"),
    [("bytes", "+1 MiB a step", "simulated"), ("stall", "+17476 min 16 s a step", "estimated")],
)
def test_a_gain_says_its_unit_and_what_it_is(objective, said, mark):
    """In bytes it is counted, in seconds of stall it comes from a model; with few steps nothing is known."""
    whole = small_study()
    none = {"gain_low": float("-inf"), "gain_high": float("inf")}
    tuned = replace(whole.regimes[0].tuned, objective=objective, gain=2.0**20, **none)
    text = render_report(replace(whole, regimes=(replace(whole.regimes[0], tuned=tuned),)))
    (paragraph,) = re.findall(r"<p>Against the baseline:.*?;", text, re.DOTALL)
    assert f"{said}, no interval: too few independent steps" in paragraph
    assert f'<span class="mark {mark}">' in paragraph
    assert "inf" not in paragraph
    head = re.search(r"tuned, against the default<br>.*?</th>", text).group()
    assert f'<span class="mark {mark}">' in head


def test_advice_is_marked(text):
    assert re.search(r'Tuning may be worth it\. <span class="mark simulated">', text)


def test_every_column_of_numbers_is_marked(text):
    tables = re.findall(r"<table>.*?</table>", text, re.DOTALL)
    assert len(tables) == 3  # outcomes, tuned, layers
    for table in tables:
        heads = re.findall(r"<th scope=\"col\".*?</th>", table, re.DOTALL)
        assert [head for head in heads[1:] if "mark " not in head and "policy" not in head] == []


def test_a_regime_without_writes_or_more():
    whole = small_study(0)
    bare = replace(whole.regimes[0], half_lives=None, tuned=None, advice="")
    text = render_report(replace(whole, regimes=(bare, bare), assumptions={}, version=""))
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert "Nothing is written in this regime" in " ".join(page.words)
    assert text.count("<svg") == 4


def test_the_extra_is_named_when_it_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr("tierstore.reports.page.importlib.util.find_spec", lambda name: None)
    with pytest.raises(CapabilityError, match=r"matplotlib and jinja2: pip install 'tierstore\[report\]'"):
        write_report(small_study(), tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_it_is_written(tmp_path, text):
    write_report(small_study(), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == text
