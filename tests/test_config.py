"""tierstore.config: reading, overriding, refusing, and writing back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.config import as_dict, dotted_fields, dump, from_dict, load
from tierstore.errors import ConfigError


class Policy(Enum):
    LFU = "lfu-decay"
    LRU = "lru"


class Level(Enum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int = 1
    level: Level = Level.LOW


@dataclass(frozen=True, kw_only=True)
class Model:
    d_model: int = field(default=256, metadata={"help": "width"})
    heads: int = 4
    dropout: float = 0.0
    tied: bool = False
    inner: Inner = Inner(depth=7)

    def __post_init__(self) -> None:
        if self.d_model % self.heads:
            raise ConfigError(f"d_model {self.d_model} is not a multiple of heads {self.heads}")


@dataclass(frozen=True, kw_only=True)
class Cache:
    policy: Policy = Policy.LFU
    budget: int = field(default=2**28, metadata={"size": True})
    share: str = field(default="25%", metadata={"size": True})
    directory: Path | None = None
    depth: int | None = 2
    ahead: int = field(default=0, metadata={"words": {"auto": 0, "all": -1}, "help": "passes"})


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str = "run"
    data: tuple[str, ...] = ()
    files: tuple[Path, ...] | None = None
    model: Model = field(default_factory=Model)
    cache: Cache = field(default_factory=Cache)


@dataclass(frozen=True, kw_only=True)
class Demanding:
    width: int
    height: int = 1


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def test_nothing_given_is_the_defaults() -> None:
    assert load(Run, None, {}) == Run()
    assert load(Run, None) == Run()


def test_a_table_keeps_the_defaults_of_an_instance_that_it_does_not_name() -> None:
    # Model's default inner table has depth 7, and Inner's own default is 1.
    assert load(Run, None, {"model.inner.level": "2"}).model.inner == Inner(depth=7, level=Level.HIGH)


def test_file_by_hand(write) -> None:
    path = write(
        """
        name = "first"
        data = ["a.txt", "b.txt"]
        files = ["x"]
        [model]
        d_model = 512
        dropout = 0          # an integer is also a number
        tied = true
        [model.inner]
        level = 2
        [cache]
        policy = "lru"
        budget = "1.5GiB"
        share = "0.5"
        directory = "/data"
        depth = "none"
        """
    )
    expected = Run(
        name="first",
        data=("a.txt", "b.txt"),
        files=(Path("x"),),
        model=Model(d_model=512, dropout=0.0, tied=True, inner=Inner(depth=7, level=Level.HIGH)),
        cache=Cache(policy=Policy.LRU, budget=3 * 2**29, share="0.5", directory=Path("/data"), depth=None),
    )
    loaded = load(Run, path, {})
    assert loaded == expected
    assert isinstance(loaded.model.dropout, float)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("name", "none", "none"),
        ("data", "a, b,c", ("a", "b", "c")),
        ("data", "", ()),
        ("data", '["a, b", "c"]', ("a, b", "c")),
        ("files", "[]", ()),
        ("data", "none", ("none",)),
        ("files", "none", None),
        ("files", "x,y", (Path("x"), Path("y"))),
        ("model.d_model", "1_024", 1024),
        ("model.dropout", "1e-1", 0.1),
        ("model.tied", "ON", True),
        ("model.tied", "no", False),
        ("model.inner.level", "2", Level.HIGH),
        ("cache.policy", "lru", Policy.LRU),
        ("cache.budget", "4GB", 4 * 10**9),
        ("cache.budget", 4096, 4096),
        ("cache.share", "10%", "10%"),
        ("cache.directory", "some/where", Path("some/where")),
        ("cache.directory", "none", None),
        ("cache.depth", "none", None),
        ("cache.depth", 3, 3),
        ("data", ["a,b"], ("a,b",)),
    ],
)
def test_override_is_converted_and_wins(write, key: str, text: object, value: object) -> None:
    path = write('name = "file"\n[model]\ntied = false\n[cache]\nbudget = 1\n')
    loaded: object = load(Run, path, {key: text})
    for part in key.split("."):
        loaded = getattr(loaded, part)
    assert loaded == value
    assert type(loaded) is type(value)


def test_an_override_of_none_was_not_given(write) -> None:
    assert load(Run, write("[cache]\ndepth = 5"), {"cache.depth": None}).cache.depth == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[model]\nd_modle = 3", "model.d_modle: unknown configuration key; did you mean model.d_model"),
        ("colour = 3", "colour: unknown configuration key; known here: name, data, files, model, cache"),
        ("model = 3", "model: expected a table, got 3"),
        ('[model]\nd_model = "512"', "model.d_model: expected an integer, got '512'"),
        ("[model]\nd_model = true", "model.d_model: expected an integer, got True"),
        ("[model]\nd_model = 1.0", "model.d_model: expected an integer, got 1.0"),
        ("[model]\ntied = 1", "model.tied: expected true or false, got 1"),
        ("[model]\ndropout = nan", "model.dropout: expected a number, got nan"),
        ("[model]\nd_model = {a = 1}", "model.d_model: expected an integer, got a table"),
        ("name = 3", "name: expected text, got 3"),
        ('name = "x"\ndata = "y"', "data: expected a list, each text, got 'y'"),
        ("data = [1]", "data: expected a list, each text, got [1]"),
        ('[cache]\npolicy = "mru"', "cache.policy: expected one of lfu-decay, lru, got 'mru'"),
        ("[model.inner]\nlevel = true", "model.inner.level: expected one of 1, 2, got True"),
        ('[cache]\nbudget = "12 parsecs"', "cache.budget: unknown unit 'parsecs'"),
        ('[cache]\nbudget = "25%"', "cache.budget: expected a size such as 512MiB, 4GB, got '25%'"),
        ('[cache]\nshare = "125%"', "cache.share: expected a size"),
        ("[cache]\nbudget = -1", "cache.budget: expected a size of at least 0 bytes"),
        ("[cache]\nbudget = 1.5", "cache.budget: expected a size such as 512MiB, 4GB, got 1.5"),
        ("[cache]\ndepth = 1.5", "cache.depth: expected an integer, or none, got 1.5"),
        ("[cache]\nahead = 0", "cache.ahead: expected auto or all or an integer, got 0"),
        ('[cache]\nahead = "most"', "cache.ahead: expected auto or all or an integer, got 'most'"),
        ('[cache]\ndirectory = ""', "cache.directory: expected a path, or none, got ''"),
        ("[model]\nheads = 3", "[model] d_model 256 is not a multiple of heads 3"),
        ("name = ", "not valid TOML"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(write, text: str, said: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load(Run, path, {})
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("modle.d_model", "3", "modle.d_model: unknown configuration key; did you mean model.d_model"),
        ("model.d_modl", "3", "did you mean model.d_model"),
        ("model", "3", "model: a table has no value of its own; set one of model.d_model, model.heads"),
        ("model.d_model.x", "3", "model.d_model.x: unknown configuration key"),
        ("model.d_model", "wide", "model.d_model: expected an integer, got 'wide'"),
        ("model.d_model", "1.5", "model.d_model: expected an integer, got '1.5'"),
        ("model.d_model", 1.5, "model.d_model: expected an integer, got 1.5"),
        ("model.dropout", "inf", "model.dropout: expected a number, got 'inf'"),
        ("model.tied", "maybe", "model.tied: expected true or false, got 'maybe'"),
        ("cache.budget", "lots", "cache.budget: expected a size"),
        ("cache.ahead", "0", "cache.ahead: expected auto or all or an integer, got '0'"),
        ("cache.ahead", "Auto", "cache.ahead: expected auto or all or an integer, got 'Auto'"),
        ("cache.policy", "LRU", "cache.policy: expected one of lfu-decay, lru, got 'LRU'"),
        ("data", '["a", "b"', "data: expected a list, each text, separated by commas, got"),
        ("data", "[a]", "data: expected a list, each text, separated by commas, got '[a]'"),
        ("data", "[1]", "data: expected a list, each text, got [1]"),
    ],
)
def test_a_bad_override_is_one_line_that_names_the_key(key: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Run, None, {key: value})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_is_not_blamed_for_what_was_given_beside_it(write) -> None:
    path = write("[model]\nd_model = 64")
    with pytest.raises(ConfigError, match=r"^\[model\] d_model 64 is not a multiple of heads 3$"):
        load(Run, path, {"model.heads": "3"})
    path = write("[model]\nheads = 3")
    with pytest.raises(ConfigError) as caught:
        load(Run, path, {"model.dropout": "0.5"})
    assert str(caught.value).startswith(f"{path}: [model] ")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigError, match="not UTF-8 text at byte 8"):
        load(Run, path, {})


def test_a_missing_file_is_an_oserror_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        load(Run, tmp_path / "none.toml", {})
    assert caught.value.filename == str(tmp_path / "none.toml")


def test_what_has_no_default_must_be_set() -> None:
    with pytest.raises(ConfigError, match="width: not set; expected an integer"):
        load(Demanding, None, {"height": "2"})
    assert load(Demanding, None, {"width": "2"}) == Demanding(width=2)
    assert [(info.name, info.required, info.default) for info in dotted_fields(Demanding)] == [
        ("width", True, None),
        ("height", False, 1),
    ]


def test_a_declaration_that_cannot_be_read_is_ours_to_mend() -> None:
    @dataclass(frozen=True)
    class Wrong:
        table: dict[str, int] = field(default_factory=dict)

    with pytest.raises(TypeError, match=r"Wrong\.table"):
        load(Wrong, None, {})


def test_dotted_fields() -> None:
    infos = {info.name: info for info in dotted_fields(Run)}
    assert list(infos) == [
        "name",
        "data",
        "files",
        "model.d_model",
        "model.heads",
        "model.dropout",
        "model.tied",
        "model.inner.depth",
        "model.inner.level",
        "cache.policy",
        "cache.budget",
        "cache.share",
        "cache.directory",
        "cache.depth",
        "cache.ahead",
    ]
    assert infos["model.d_model"].help == "width"
    assert infos["model.inner.depth"].default == 7
    assert infos["cache.policy"].type == "one of lfu-decay, lru"
    assert infos["cache.directory"].type == "a path, or none"


def test_dump_by_hand() -> None:
    assert dump(Run(data=("a",), cache=Cache(budget=2**21 + 1, policy=Policy.LRU))) == (
        'name = "run"\ndata = [\n    "a",\n]\nfiles = "none"\n'
        "\n[model]\nd_model = 256\nheads = 4\ndropout = 0.0\ntied = false\n"
        "\n[model.inner]\ndepth = 7\nlevel = 1\n"
        '\n[cache]\npolicy = "lru"\nbudget = 2097153\nshare = "25%"\ndirectory = "none"\ndepth = 2\n'
        'ahead = "auto"\n'
    )


def test_dump_refuses_what_would_not_load_back() -> None:
    with pytest.raises(ConfigError, match=r"model\.dropout: expected a number, got inf"):
        dump(Run(model=Model(dropout=float("inf"))))
    with pytest.raises(ConfigError, match=r"name: .* UTF-8"):
        dump(Run(name="\ud800"))
    with pytest.raises(ConfigError, match="the word 'none' means None"):
        dump(Run(cache=Cache(directory=Path("none"))))


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
paths = texts.filter(lambda text: text not in ("", "none")).map(Path).filter(lambda path: str(path) != "none")
inners = st.builds(Inner, depth=st.integers(), level=st.sampled_from(Level))
models = st.builds(
    Model,
    d_model=st.integers(0, 2**40).map(lambda n: 4 * n),
    dropout=st.floats(allow_nan=False, allow_infinity=False),
    tied=st.booleans(),
    inner=inners,
)
caches = st.builds(
    Cache,
    policy=st.sampled_from(Policy),
    budget=st.integers(0, 2**62) | st.integers(0, 2**22).map(lambda n: n * 2**20),
    share=st.sampled_from(["0.25", "25%", "1GiB"]),
    directory=st.none() | paths,
    depth=st.none() | st.integers(-(2**63), 2**63 - 1),
    ahead=st.integers(-(2**63), 2**63 - 1),
)
runs = st.builds(
    Run,
    name=texts,
    data=st.lists(texts, max_size=3).map(tuple),
    files=st.none() | st.lists(paths, max_size=3).map(tuple),
    model=models,
    cache=caches,
)


def test_integers_that_have_names(write) -> None:
    assert load(Run, write('[cache]\nahead = "all"'), {}).cache.ahead == -1
    assert load(Run, write("[cache]\nahead = 3"), {}).cache.ahead == 3
    assert [load(Run, None, {"cache.ahead": given}).cache.ahead for given in ("auto", "7", 7)] == [0, 7, 7]
    for value, shown in ((0, "auto"), (-1, "all"), (3, 3)):
        assert as_dict(Cache(ahead=value))["ahead"] == shown
    assert 'ahead = "auto"' in dump(Run())
    info = next(info for info in dotted_fields(Run) if info.name == "cache.ahead")
    assert (info.type, info.default, info.in_words(info.default)) == ("auto or all or an integer", 0, "auto")


@settings(max_examples=share(60))
@given(run=runs)
def test_dump_loads_back(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("dump") / "run.toml"
    path.write_bytes(dump(run).encode())
    assert load(Run, path, {}) == run


@settings(max_examples=share(60))
@given(run=runs)
def test_as_dict_comes_back(run: Run) -> None:
    assert from_dict(Run, as_dict(run)) == run


def test_from_dict_names_its_origin() -> None:
    with pytest.raises(ConfigError, match=r"^store: model: expected a table"):
        from_dict(Run, {"model": 3}, origin="store")


# Open tables ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plugin:
    kind: str = "plain"
    options: Mapping[str, float | str] = field(default_factory=dict, metadata={"help": "its own"})


@dataclass(frozen=True, kw_only=True)
class Host:
    plugin: Plugin = field(default_factory=Plugin)


def test_an_open_table_takes_any_number_or_text(write) -> None:
    path = write('[plugin]\nkind = "a"\n[plugin.options]\nsize = 3\nshare = 0.5\nname = "x"\n')
    assert load(Host, path, {}).plugin.options == {"size": 3, "share": 0.5, "name": "x"}
    typed = {"plugin.options.size": "4", "plugin.options.rate": "1e-3", "plugin.options.word": "on"}
    merged = {"size": 4, "share": 0.5, "name": "x", "rate": 1e-3, "word": "on"}
    assert load(Host, path, typed).plugin.options == merged
    assert load(Host, path, {"plugin.options": {"size": 1}}).plugin.options == {"size": 1}
    assert load(Host, None, {}).plugin.options == {}
    (info,) = [info for info in dotted_fields(Host) if info.name == "plugin.options"]
    assert (info.type, info.default, info.help) == ("a table of numbers and text", {}, "its own")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("options = 3", r"run\.toml: plugin\.options: expected a table, got 3"),
        ("options.on = true", r"plugin\.options\.on: expected a number or text, got True"),
        ("options.many = [1]", r"plugin\.options\.many: expected a number or text"),
        ("options.much = inf", r"plugin\.options\.much: expected a number or text, got inf"),
    ],
)
def test_what_an_open_table_cannot_hold(write, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(Host, write(f"[plugin]\n{text}\n"), {})
    with pytest.raises(ConfigError, match=r"plugin\.options: expected a table, got 'all'"):
        load(Host, None, {"plugin.options": "all"})


items = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | texts


@settings(max_examples=share(60))
@given(options=st.dictionaries(texts, items, max_size=4))
def test_open_tables_come_back(
    options: dict[str, float | str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    host = Host(plugin=Plugin(options=options))
    path = tmp_path_factory.mktemp("dump") / "run.toml"
    path.write_bytes(dump(host).encode())
    assert load(Host, path, {}) == host
    assert from_dict(Host, as_dict(host)) == host
