"""The format worked by hand, and a reader written from docs/FORMAT.md alone."""

import json
import struct
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch
from conftest_store import small_store, weights
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_crc32c import naive_crc32c

from tierstore.errors import ConfigError, StoreFormatError
from tierstore.quant.layout import CodeFormat, PartKind, QuantizedLayout, WeightPart
from tierstore.store import ParameterStore, StripeConfig
from tierstore.store.format import (
    FORMAT_VERSION,
    NARROW_MOMENTS_VERSION,
    QUANTIZED_WEIGHTS_VERSION,
    TRAINED_FORMATS,
    Group,
    MomentFormat,
    RecordSchema,
    Section,
    Training,
    WeightFormat,
    format_version,
)
from tierstore.store.index.database import pack_table, unpack_table
from tierstore.store.index.table import CommittedRecords, GroupLocation, RecordEntry, check_name


def test_entry_by_hand() -> None:
    packed = bytes.fromhex(
        "0100 0200 0100 0000 0300000000000000"  # schema, layer, groups, zero, step
        "0000 0100 05000000 0700000000000000 ddccbbaa"  # directory, sections, slot, generation, crc
    )
    schemas = [RecordSchema("x", 8), RecordSchema("y", 8, training=Training.FROZEN)]
    table = CommittedRecords.of(schemas, [(b"k", packed)], where="here")
    assert table["k"] == RecordEntry(1, 2, 3, (GroupLocation(0, 5, 7, (0xAABBCCDD,)),))
    assert list(table.packed()) == [("k", packed)]


def test_layout_by_hand() -> None:
    """1,500 parameters: 6,000 bytes of fp32 take two pages, 3,000 bytes of bf16 one."""
    schema = RecordSchema("x", 1500, WeightFormat.SPLIT_BF16)
    weights_layout, moments = schema.layout(Group.WEIGHTS), schema.layout(Group.MOMENTS)
    assert [(s.name, s.nbytes, s.padded_nbytes) for s in weights_layout.sections] == [
        ("weight_hi", 3000, 4096)
    ]
    assert [s.name for s in moments.sections] == ["weight_lo", "exp_avg", "exp_avg_sq"]
    assert (weights_layout.slot_bytes, moments.slot_bytes) == (4096, 4096 + 2 * 8192)
    assert schema.record_bytes == 12 * 1500


@settings(max_examples=share(60))
@given(st.dictionaries(st.text(max_size=8), st.binary(max_size=20), max_size=5))
def test_tables_round_trip(table: dict[str, bytes]) -> None:
    assert unpack_table(pack_table(table), where="here") == table


def test_damaged_tables() -> None:
    whole = pack_table({"k": b"value"})
    assert whole == b"\x01\x00\x05\x00\x00\x00kvalue"
    for damaged in (whole[:-1], whole[:3], whole.replace(b"k", b"\xff")):
        with pytest.raises(StoreFormatError, match="here"):
            unpack_table(damaged, where="here")


FROZEN = {"training": Training.FROZEN}
QUANTIZED = QuantizedLayout(CodeFormat.INT8, (WeightPart(PartKind.MATRIX, 1, 7),))
SCHEMAS = [
    RecordSchema("x", 7, WeightFormat.SPLIT_BF16),
    *(RecordSchema("x", 7, moments=moments) for moments in MomentFormat),
    RecordSchema("base", 7, WeightFormat.BF16, training=Training.FROZEN),
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_schema_json_round_trips(schema: RecordSchema) -> None:
    """Stores of what there has always been stay as they were: other keys are there where they say something."""
    assert RecordSchema.from_json(schema.as_json()) == schema
    assert ("moments" in schema.as_json()) == (schema.moments is not MomentFormat.FP32)
    assert ("training" in schema.as_json()) == schema.frozen


@pytest.mark.parametrize(
    "json",
    [
        {},
        {"name": "x", "numel": 1, "weight_format": "fp64", "placement": "cached"},
        {**RecordSchema("x", 7).as_json(), "moments": "fp4"},
        {**SCHEMAS[-1].as_json(), "training": "trained"},
    ],
)
def test_what_is_no_schema_is_refused(json: dict[str, object]) -> None:
    with pytest.raises(StoreFormatError, match="schema"):
        RecordSchema.from_json(json)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        *((name, {}, ["letters"]) for name in ("", "a/b", "..", "a b")),
        ("x", {"numel": 0}, ["x", "numel", "0"]),
        ("x", {"moments": MomentFormat.BF16, **FROZEN}, ["x", "moments", "bf16"]),
        ("x", {"weight_format": WeightFormat.BF16}, ["x", "trained", "bf16"]),
        ("x", {"weight_format": WeightFormat.SPLIT_BF16, **FROZEN}, ["x", "frozen", "split-bf16"]),
        ("x", {"weight_format": WeightFormat.INT8, "quantized": QUANTIZED}, ["x", "trained", "int8"]),
        ("x", {"weight_format": WeightFormat.INT8, **FROZEN}, ["x", "int8", "none"]),
        ("x", {"weight_format": WeightFormat.INT8, "quantized": QUANTIZED, "numel": 8, **FROZEN}, ["8", "7"]),
    ],
)
def test_schemas_that_cannot_be(name: str, options: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        RecordSchema(name, **{"numel": 7, **options})
    assert [part for part in named if part not in str(refused.value)] == []


def test_names_fit_the_index() -> None:
    check_name("record", "é" * 255)
    for bad in ("", "x" * 512, "é" * 256):
        with pytest.raises(ValueError, match="511"):
            check_name("record", bad)


# A reader that knows docs/FORMAT.md and nothing of the package ---------------------------------------------


def check_index(env: lmdb.Environment) -> None:
    """The checksum over all entries is what it should be."""
    total = 0
    databases = {
        name: env.open_db(name, create=False) for name in (b"meta", b"records", b"state", b"snapshots")
    }
    with env.begin() as txn:
        for name, database in databases.items():
            for key, value in txn.cursor(db=database):
                if (name, key) != (b"meta", b"checksum"):
                    total += naive_crc32c(name + b"\0" + key + b"\0" + value)
        assert struct.unpack("<Q", txn.get(b"checksum", db=databases[b"meta"])) == (total % 2**64,)


def read_record(directory: Path, key: str) -> tuple[int, dict[str, bytes]]:
    """The step and the checked sections of one record of the last commit."""
    identity = json.loads((directory / "tierstore.json").read_text())
    assert (identity["format"], identity["directory"]) == (2, 0)
    with lmdb.open(str(directory / "index"), readonly=True, lock=False, max_dbs=4) as env:
        meta_db, records_db = (env.open_db(name, create=False) for name in (b"meta", b"records"))
        check_index(env)
        with env.begin() as txn:
            meta = json.loads(txn.get(b"store", db=meta_db))
            value = txn.get(key.encode(), db=records_db)
    assert meta["uuid"] == identity["uuid"]
    stripe = [{"path": str(directory), "own": ""}, *meta.get("stripe", [])[1:]]
    for number, entry in enumerate(stripe[1:], 1):
        further = json.loads((Path(entry["path"]) / "tierstore.json").read_text())
        assert (further["uuid"], further["directory"]) == (identity["uuid"], number)
        assert further["own"] == entry["own"] != ""
    schema_number, _, group_count, _, step = struct.unpack_from("<HHHHq", value)
    schema = meta["schemas"][schema_number]
    numel = schema["numel"]
    split = schema["weight_format"] == "split-bf16"
    if schema.get("training") == "frozen":
        layout = {"weights": [("weight", numel * (2 if schema["weight_format"] == "bf16" else 4))]}
    else:
        layout = {
            "weights": [("weight_hi", 2 * numel)] if split else [("weight", 4 * numel)],
            "moments": [("weight_lo", 2 * numel)] if split else [],
        }
        assert meta["format"] == (3 if "moments" in schema else 2)
        width = {"fp32": 4, "bf16": 2, "int8": 1}[schema.get("moments", "fp32")]
        layout["moments"] += [("exp_avg", width * numel), ("exp_avg_sq", width * numel)]
        if width == 1:
            scales = 4 * -(-numel // 256)
            layout["moments"] += [("exp_avg_scale", scales), ("exp_avg_sq_scale", scales)]
    assert group_count == len(layout)
    sections: dict[str, bytes] = {}
    at = 16
    for group, parts in layout.items():
        number, count, slot, _ = struct.unpack_from("<HHIQ", value, at)
        crcs = struct.unpack_from(f"<{count}I", value, at + 16)
        at += 16 + 4 * count
        padded = [-(-nbytes // 4096) * 4096 for _, nbytes in parts]
        place = Path(stripe[number]["path"])
        raw = (place / "extents" / f"{schema['name']}.{group}").read_bytes()
        offset = slot * sum(padded)
        for (name, nbytes), size, crc in zip(parts, padded, crcs, strict=True):
            sections[name] = raw[offset : offset + nbytes]
            assert naive_crc32c(sections[name]) == crc
            assert not any(raw[offset + nbytes : offset + size])
            offset += size
    return step, sections


@pytest.mark.parametrize(
    ("further", "moments"),
    [
        ((), MomentFormat.FP32),
        (("b",), MomentFormat.FP32),
        (("b", "c"), MomentFormat.FP32),
        ((), MomentFormat.BF16),
        (("b",), MomentFormat.INT8),
    ],
)
@pytest.mark.parametrize("weight_format", TRAINED_FORMATS)
def test_an_independent_reader(
    tmp_path: Path, weight_format: WeightFormat, further: tuple[str, ...], moments: MomentFormat
) -> None:
    stripe = StripeConfig(directories=tuple(tmp_path / name for name in further))
    made = small_store(
        tmp_path / "store", numel=1100, weight_format=weight_format, moments=moments, stripe=stripe
    )
    with made as store:
        store.update({"e2": np.ones(1100, np.float32)}, lr=0.1)
        store.commit()
        with store.fetch(["e2"], [Group.WEIGHTS, Group.MOMENTS]) as lease:
            expected = {name: lease["e2"].copy(name).tobytes() for name in lease["e2"].sections}
    assert read_record(tmp_path / "store", "e2") == (1, expected)
    step, untouched = read_record(tmp_path / "store", "e1")
    assert step == 0  # it has missed the step: the history has its row
    initial = weights(4, 1100)["e1"]
    if weight_format is WeightFormat.FP32:
        assert untouched["weight"] == initial.tobytes()
    else:
        high = np.frombuffer(untouched["weight_hi"], "<u2").astype(np.uint32) << 16
        low = np.frombuffer(untouched["weight_lo"], "<i2").astype(np.int64)
        assert ((high + low).astype(np.uint32).view(np.float32) == initial).all()


@pytest.mark.parametrize("weight_format", [WeightFormat.BF16, WeightFormat.FP32])
def test_an_independent_reader_of_frozen_records(tmp_path: Path, weight_format: WeightFormat) -> None:
    schema = RecordSchema("base", 1100, weight_format, training=Training.FROZEN)
    initial = weights(1, 1100)["e0"]
    with ParameterStore.create(tmp_path / "store", [schema]) as store:
        store.register("e0", "base", weight=initial)
        store.commit()
    step, sections = read_record(tmp_path / "store", "e0")
    whole = weight_format is WeightFormat.FP32
    rounded = torch.from_numpy(initial).bfloat16().view(torch.int16).numpy()
    assert (step, sections) == (0, {"weight": initial.tobytes() if whole else rounded.tobytes()})


def test_records_of_narrow_moments_by_hand() -> None:
    """A million parameters: 12, 8 and 6.03 bytes of each; the last of 3,907 blocks of 8-bit moments is a part."""
    sizes = {moments: RecordSchema("x", 10**6, moments=moments).record_bytes for moments in MomentFormat}
    assert sizes == {
        MomentFormat.FP32: 12 * 10**6,
        MomentFormat.BF16: 8 * 10**6,
        MomentFormat.INT8: 6 * 10**6 + 2 * 4 * 3907,
    }
    schema = RecordSchema("x", 10**6, WeightFormat.SPLIT_BF16, moments=MomentFormat.INT8)
    assert [(s.name, s.dtype, s.numel) for s in schema.layout(Group.MOMENTS).sections] == [
        ("weight_lo", "<i2", 10**6),
        ("exp_avg", "|u1", 10**6),
        ("exp_avg_sq", "|u1", 10**6),
        ("exp_avg_scale", "<f4", 3907),
        ("exp_avg_sq_scale", "<f4", 3907),
    ]
    assert schema.record_bytes <= 6.05 * 10**6


def test_the_index_says_which_version_can_read_it(tmp_path: Path) -> None:
    """3 from the first commit that has narrow moments on, which versions that know 2 alone refuse."""

    def version() -> int:
        with lmdb.open(str(tmp_path / "store" / "index"), readonly=True, lock=False, max_dbs=4) as env:
            database = env.open_db(b"meta", create=False)
            with env.begin() as txn:
                return int(json.loads(txn.get(b"store", db=database))["format"])

    with small_store(tmp_path / "store"):
        pass
    assert version() == FORMAT_VERSION
    narrow = RecordSchema("narrow", 100, moments=MomentFormat.BF16)
    with ParameterStore.open(tmp_path / "store", further=[narrow]) as store:
        store.register("n", "narrow")
        store.commit()
    assert version() == NARROW_MOMENTS_VERSION
    with ParameterStore.open(tmp_path / "store") as store:
        assert store.info("n").schema == narrow


def test_records_of_quantised_weights_by_hand() -> None:
    """100 rows of 200 weights: four blocks of 64 a row. 8 bits: a byte and a scale; 4 bits: half a byte and two numbers."""
    parts = (WeightPart(PartKind.MATRIX, 100, 200), WeightPart(PartKind.PLAIN, 1, 3))
    sizes = {CodeFormat.INT8: 100 * 4 * (64 + 4), CodeFormat.INT4: 100 * 4 * (32 + 8)}
    for codes, size in sizes.items():
        layout = QuantizedLayout(codes, parts)
        kept = WeightFormat(codes.value)
        schema = RecordSchema("x", 20_003, kept, training=Training.FROZEN, quantized=layout)
        assert schema.layout(Group.WEIGHTS).sections == (Section("weight", "|u1", size + 64),)
        assert schema.record_bytes == layout.nbytes == size + 64  # three biases, and zeros to whole lines
        assert format_version([RecordSchema("y", 7), schema]) == QUANTIZED_WEIGHTS_VERSION
        assert RecordSchema.from_json(json.loads(json.dumps(schema.as_json()))) == schema
        for damage in ({"parts": []}, {"parts": [["matrix", 1, 2]]}, {"parts": "no"}):
            with pytest.raises(StoreFormatError, match="not a record schema"):
                RecordSchema.from_json({**schema.as_json(), **damage})
