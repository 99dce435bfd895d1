"""A model's tokenizer: what it puts around texts, what it must not cut, and what cannot be loaded."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refuses
from token_cases import END, PAD, START, save_tokenizer

from tierstore.capabilities import require_package
from tierstore.errors import CapabilityError, ConfigError
from tierstore.train.tokens.tokenizing import DocumentTokenizer, tokenizer_digest


def test_what_stands_around_a_text(tmp_path: Path, tokenizer: Path) -> None:
    plain = DocumentTokenizer(tokenizer)
    assert (plain.prefix, plain.suffix) == ([], [END])
    assert plain.vocabulary == 280
    assert plain.pad == PAD
    begun = DocumentTokenizer(save_tokenizer(tmp_path, begin="<|start|>"))
    assert (begun.prefix, begun.suffix) == ([START], [END])
    assert begun.encode("store") == [START, *plain.encode("store")]


def test_text_comes_back(tokenizer: Path) -> None:
    loaded = DocumentTokenizer(tokenizer)
    text = "one expert — zwei Stufen 😀\n\n"
    (tokens,) = loaded.texts([text])
    assert loaded.decode(tokens.tolist()) == text
    assert loaded.decode([END, *tokens.tolist(), 5000]) == text
    assert loaded.texts(["", "one"])[0].size == 0


def test_a_saved_truncation_does_not_cut(tmp_path: Path, tokenizer: Path) -> None:
    text = "one expert in the store " * 20
    cutting = DocumentTokenizer(save_tokenizer(tmp_path, truncate=8))
    whole = DocumentTokenizer(tokenizer).texts([text])[0]
    assert whole.size > 50
    assert cutting.texts([text, "one"])[0].tolist() == whole.tolist()
    assert cutting.texts([text, "one"])[1].size < 8


@pytest.mark.parametrize("spoil", ["none", "empty", "list"])
def test_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path: Path, tokenizer: Path, spoil: str) -> None:
    directory = tmp_path / "t"
    shutil.copytree(tokenizer, directory)
    if spoil == "none":
        for path in directory.iterdir():
            path.unlink()
        with refuses(ConfigError, f"{directory}:", "tokenizer.json"):
            tokenizer_digest(directory)
        return
    (directory / "tokenizer.json").write_text("" if spoil == "empty" else "[]")
    with refuses(ConfigError, f"{directory}:") as caught:
        DocumentTokenizer(directory)
    assert "\n" not in str(caught.value)


def test_the_digest_covers_the_template(tmp_path: Path, tokenizer: Path) -> None:
    directory = tmp_path / "t"
    shutil.copytree(tokenizer, directory)
    before = tokenizer_digest(directory)
    assert set(before) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    (directory / "README.md").write_text("not a part of it")
    assert tokenizer_digest(directory) == before
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_digest(directory) != before


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refuses(CapabilityError, "transformers", 'pip install "tierstore[hf]"'):
        require_package("transformers", "a model's tokenizer")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with refuses(CapabilityError, "reading Parquet", "pyarrow.parquet"):
        require_package("pyarrow.parquet", "reading Parquet")


def test_nothing_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, tierstore.train.tokens.data, tierstore.train.tokens.data, tierstore.train.tokens.making\n"
        "found = {'transformers', 'tokenizers', 'pyarrow'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
