"""Tokenising once: what is made, found again, made anew, refused, and left by a kill."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from child_process import run_python
from refusals import refuses
from token_cases import END, conversation, save_tokenizer, write_lines

from tierstore.errors import DataError, StoreInUseError
from tierstore.train.files import DataConfig, text_files
from tierstore.train.tokens import documents, making
from tierstore.train.tokens.making import find_tokens, tokenise, tokenising_bytes
from tierstore.train.tokens.token_files import TokenFiles, TokenWriter
from tierstore.train.tokens.tokenizing import DocumentTokenizer

pytestmark = pytest.mark.usefixtures("forked_python")

#: A time of change that nothing changes after.
_OLD_NS = 1_700_000_000_000_000_000
_CODE = Path(making.__file__).read_text() * 50


Make = Callable[..., tuple[TokenFiles, list[tuple[int, int]]]]


@pytest.fixture
def make(tmp_path: Path, tokenizer: Path) -> Make:
    """Tokenises files; returns the tokens, and the progress that was reported."""

    def made(
        *paths: Path,
        root: Path = tmp_path,
        tokenizer: Path = tokenizer,
        vocabulary: int = 300,
        **options: Any,
    ) -> tuple[TokenFiles, list[tuple[int, int]]]:
        config = DataConfig(paths=tuple(map(str, paths)), **options)
        steps: list[tuple[int, int]] = []
        directory = tokenise(
            root / "store",
            text_files(config),
            config,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            progress=lambda done, total: steps.append((done, total)),
        )
        files = TokenFiles(directory)
        files.verify()
        return files, steps

    return made


def _masked(*turns: str) -> dict[str, Any]:
    """A conversation whose last answer is not trained on."""
    chat = conversation(*turns)
    chat["messages"][-1]["weight"] = 0
    return chat


def test_memory_of_tokenising(tmp_path: Path, tokenizer: Path, make: Make) -> None:
    """Each byte of the largest file a token, up to one piece; nothing once there are tokens. A process grows by no more."""
    store, large = tmp_path / "store", _text(tmp_path / "large.txt", _CODE)
    small = _text(tmp_path / "small.txt", "one expert")
    announced = tokenising_bytes(store, [small, large])
    assert announced == len(_CODE.encode()) * 300
    assert tokenising_bytes(store, [tmp_path / "missing"]) == 0
    code = f"""
from pathlib import Path
from tierstore.machine import peak_resident_bytes, resident_bytes
from tierstore.train.tokens.tokenizing import DocumentTokenizer
tokenizer = DocumentTokenizer(Path({str(tokenizer)!r}))
tokenizer.texts(["x = y + z"])
before = max(peak_resident_bytes(), resident_bytes())
tokens = tokenizer.texts([Path({str(large)!r}).read_text()])[0]
print(len(tokens), peak_resident_bytes() - before)
"""
    tokens, grown = map(int, run_python(code).stdout.split())
    assert tokens > 0.8 * len(_CODE)
    assert announced / 2 < grown < announced
    with large.open("a") as more:
        more.truncate(3 << 20)
    assert tokenising_bytes(store, [large]) == (1 << 20) * 300
    make(small)
    assert tokenising_bytes(store, [small, large]) == 0


def _text(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    os.utime(path, ns=(_OLD_NS, _OLD_NS))
    return path


def _documents(files: TokenFiles) -> list[list[int]]:
    ends = files.documents
    return [files.tokens[ends[i] : ends[i + 1]].tolist() for i in range(files.index.documents)]


def test_mixed_files_are_what_the_tokenizer_says(tmp_path: Path, tokenizer: Path, make: Make) -> None:
    """Oracle: every document by itself, in the order of the files."""
    folder = tmp_path / "in"
    _text(folder / "a.txt", "one expert\nin the store")
    _text(folder / "b.weird", "two tiers é😀")
    chat = conversation("two?", "one", "store?", "tiers")
    write_lines(
        folder / "c.jsonl",
        [{"text": "three experts"}, chat, {"text": ""}, conversation("only asked"), _masked("two?", "one")],
    )
    pq.write_table(pa.table({"text": ["four", " ", "five"]}), folder / "d.parquet")
    files, steps = make(folder)

    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(tokenizer)
    rendered = slow.apply_chat_template(chat["messages"], tokenize=False)
    texts = ["one expert\nin the store", "two tiers é😀", "three experts", rendered, "four", "five"]
    expected = [slow(text, add_special_tokens=False)["input_ids"] for text in texts]
    for number in (0, 1, 2, 4, 5):
        expected[number].append(END)
    assert _documents(files) == expected
    assert files.index.formats == {"text": 2, "jsonl": 1, "parquet": 1}
    assert files.index.skipped == {
        "empty texts": 2,
        "chats without an answer": 1,
        "chats of masked answers": 1,
    }
    assert files.tokens.dtype == np.uint16
    answer = files.tokens[files.documents[3] : files.documents[4]][
        files.counted[files.documents[3] : files.documents[4]] == 1
    ]
    assert slow.decode(answer) == "one<|end|>tiers<|end|>"
    others = np.delete(files.counted, np.arange(files.documents[3], files.documents[4]))
    assert others.all()
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert steps[-1] == (size, size)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_without_chats_every_token_counts(tmp_path: Path, make: Make) -> None:
    files, _ = make(_text(tmp_path / "a.txt", "one\n\ntwo\n\n"), separator="\n\n")
    assert files.counted is None
    assert files.index.documents == 2
    assert sorted(path.name for path in files.directory.iterdir()) == ["documents", "index.json", "tokens"]


def test_large_vocabularies_have_wider_tokens(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "partial", vocabulary=65_537, pad=0) as writer:
        writer.add(np.array([65_536, 3], dtype=np.uint32))
        writer.end_document()
        writer.finish(tmp_path / "made", {})
    assert TokenFiles(tmp_path / "made").tokens.tolist() == [65_536, 3]


def test_long_texts_in_pieces(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document in pieces is one document, with one end; cut at lines, its tokens are those of the whole here."""
    text = "one expert\nin the store\n" * 40
    whole, _ = make(_text(tmp_path / "a.txt", text), root=tmp_path / "whole")
    monkeypatch.setattr(documents, "PIECE", 64)
    pieces, _ = make(tmp_path / "a.txt", root=tmp_path / "pieces")
    assert _documents(pieces) == _documents(whole)


def test_made_once(tmp_path: Path, tokenizer: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _text(tmp_path / "a.txt", "one expert")
    made, steps = make(first)
    assert steps
    read: list[Path] = []
    monkeypatch.setattr(making, "read_blocks", lambda path: read.append(path) or [path.read_bytes()])
    monkeypatch.setattr(making, "DocumentTokenizer", None)  # nothing may load it
    again, steps = make(first)
    assert (again.directory, steps, read) == (made.directory, [], [])
    os.utime(first)  # touched: read, and found the same
    again, _ = make(first)
    assert (again.directory, read) == (made.directory, [first])
    moved = first.rename(tmp_path / "b.txt")
    again, _ = make(moved)
    assert again.directory == made.directory
    config = DataConfig(paths=(str(moved),))
    assert find_tokens(tmp_path / "store", [moved], config, tokenizer=tokenizer) == made.directory


def test_made_anew(tmp_path: Path, tokenizer: Path, make: Make) -> None:
    """By content, tokenizer, and what decides where a document begins; not by the order of batches."""
    path = _text(tmp_path / "a.txt", "one expert")
    seen = {make(path)[0].directory}
    assert make(path, batch_size=3, seed=9)[0].directory in seen
    for change in ("content", "tokenizer", "separator", "order"):
        options: dict[str, Any] = {}
        paths = [path]
        if change == "content":
            path.write_text("two expert")  # as long, and changed now
        elif change == "tokenizer":
            options = {"tokenizer": save_tokenizer(tmp_path / "other", size=270)}
        elif change == "separator":
            options = {"separator": " "}
        else:
            paths = [path, _text(tmp_path / "0.txt", "zero")]
        made = make(*paths, **options)[0].directory
        assert made not in seen
        seen.add(made)


def test_a_file_changed_within_the_same_instant_is_seen(tmp_path: Path, make: Make) -> None:
    """What was changed just now may change again without another time: it is not taken by its time."""
    path = _text(tmp_path / "a.txt", "one expert")
    now = time.time_ns()
    os.utime(path, ns=(now, now))
    before = make(path)[0].directory
    path.write_text("two expert")
    os.utime(path, ns=(now, now))
    assert make(path)[0].directory != before


@pytest.mark.parametrize("existing", [False, True], ids=["new store", "store"])
def test_a_broken_line_leaves_nothing(tmp_path: Path, make: Make, existing: bool) -> None:
    if existing:
        make(_text(tmp_path / "a.txt", "one expert"))
    before = sorted(tmp_path.rglob("*"))
    path = write_lines(tmp_path / "b.jsonl", [{"text": "x"}] * 3 + ["{oops"])
    with refuses(DataError, f"{path}:4:", "JSON"):
        make(path)
    path.unlink()
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_to_train_on_is_named(tmp_path: Path, make: Make) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": ""}, conversation("asked"), {"text": " \n"}])
    with refuses(DataError, f"{path}:", "2 empty texts", "1 chats without"):
        make(path)
    with refuses(DataError, "b.txt:", "(1 empty texts)"):
        make(_text(tmp_path / "b.txt", ""))


def test_a_larger_vocabulary_is_refused(tmp_path: Path, make: Make) -> None:
    with refuses(DataError, 280, 279):
        make(_text(tmp_path / "a.txt", "one expert"), vocabulary=279)
    assert not (tmp_path / "store").exists()


def test_a_file_that_changes_meanwhile_is_named(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _text(tmp_path / "a.txt", "one expert")
    texts = DocumentTokenizer.texts

    def change(self: DocumentTokenizer, batch: list[str]) -> Any:
        path.write_text("another")
        return texts(self, batch)

    monkeypatch.setattr(DocumentTokenizer, "texts", change)
    with refuses(DataError, f"{path}:", "changed"):
        make(path)
    assert not (tmp_path / "store").exists()


def test_one_process_tokenises(tmp_path: Path, make: Make) -> None:
    directory = tmp_path / "store" / "tokens"
    directory.mkdir(parents=True)
    path = _text(tmp_path / "a.txt", "one expert")
    with (directory / "lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with refuses(StoreInUseError, directory):
            make(path)
    make(path)


def test_a_full_disk_leaves_nothing(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: TokenWriter) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TokenWriter, "end_document", full)
    with refuses(OSError, "No space left"):
        make(_text(tmp_path / "a.txt", "one expert"))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("spoil", ["short", "flipped", "missing", "index", "version"])
def test_damage_is_named(tmp_path: Path, make: Make, spoil: str) -> None:
    made, _ = make(_text(tmp_path / "a.txt", "one expert in the store"))
    tokens = made.directory / "tokens"
    index = made.directory / "index.json"
    content = tokens.read_bytes()
    match spoil:
        case "short":
            tokens.write_bytes(content[:-2])
        case "flipped":
            tokens.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        case "missing":
            tokens.unlink()
        case "index":
            index.write_text("{")
        case "version":
            index.write_text(index.read_text().replace('"version": 1', '"version": 2'))
    with refuses(DataError, f"{index if spoil in ('index', 'version') else tokens}:"):
        make(tmp_path / "a.txt")


_KILLED = """
import sys, time
from pathlib import Path
from tierstore.train.files import DataConfig
from tierstore.train.tokens.making import tokenise
root = Path(sys.argv[1])

def progress(done, total):
    if done > total // 2:
        print("half", flush=True)
        time.sleep(60)

tokenise(root / "store", [root / "a.jsonl"], DataConfig(paths=(str(root / "a.jsonl"),)), tokenizer=Path(sys.argv[2]),
         vocabulary=300, progress=progress)
"""


def test_a_killed_tokenisation_starts_again(tmp_path: Path, tokenizer: Path, make: Make) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"expert {i} in the store"} for i in range(3000)])
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path), str(tokenizer)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process.stdout:
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    (partial,) = (tmp_path / "store" / "tokens").glob("*.partial")
    assert (partial / "tokens").exists()
    files, steps = make(path)
    assert steps[-1][0] == path.stat().st_size
    assert not partial.exists()
    assert files.index.documents == 3000
    other, _ = make(path, root=tmp_path / "never killed")
    assert other.index == files.index
