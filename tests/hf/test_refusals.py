"""What imports, exports, adapters and wrapped models refuse: each error's type, and what it names."""

import errno
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import (
    change_config,
    imported,
    join_header,
    open_store,
    rewrite,
    save,
    split_header,
    tensors_of,
    write,
)
from command_line import refused
from lora_cases import quiet_peft, session
from refusals import Refusal, each_of, refuses
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from stored_runs import configuration
from test_quantized import _FP8, _fp8_checkpoint
from tiny_families import make_config, plain_model

from tierstore import capabilities
from tierstore.errors import (
    CapabilityError,
    ConfigError,
    DataError,
    StoreError,
    StoreExistsError,
    StoreFormatError,
)
from tierstore.hf import open_model
from tierstore.hf.adapters import export_adapter, load_adapter
from tierstore.hf.checkpoint import Checkpoint, TensorSpec, read_header
from tierstore.hf.describing import describe_config, parse_config
from tierstore.hf.exporting import ExportDtype, config_with
from tierstore.hf.importing import ImportOptions
from tierstore.hf.loading import build_module
from tierstore.hf.manifest import Manifest, Weights
from tierstore.hf.spec import model_of, stored_spec
from tierstore.hf.writing import Shard, write_checkpoint
from tierstore.model.store_schema import STATE_KEY, TrainState
from tierstore.moe.lora import LoraConfig, LoraTargets
from tierstore.parallel.layout import Layout
from tierstore.quant.layout import CodeFormat
from tierstore.store.disk.extents import Extent
from tierstore.store.format import MomentFormat
from tierstore.train.resharding import reshard
from tierstore.train.stages import stage_config

BF16, RANK_2 = torch.bfloat16, LoraConfig(rank=2)
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"
DOWN = EXPERT.replace("up_proj", "down_proj")
UP_3 = EXPERT.replace("5", "3")
DENSE = "model.layers.1.self_attn.q_proj.weight"
HEAD, TOKENS = "lm_head.weight", "model.embed_tokens.weight"
TIED, SHARDS = {"tie_word_embeddings": True}, {"family": "mixtral", "shard": "60KB"}
DEEP, MICRO = "deepseek_v3", "data.micro_batches"
EXPERTS_ALONE = LoraConfig(rank=2, targets=LoraTargets.EXPERTS)
Q_9 = "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"
Q_0, B_0 = Q_9.replace("9", "0"), Q_9.replace("9", "0").replace("_A", "_B")
UNKNOWN = {Q_9: torch.zeros(2, 32)}
PICKLE = "pytorch_model.bin"
INDEX, SHARD_1 = "model.safetensors.index.json", "model-00001-of-00002.safetensors"
PAIRS, SIZE = "adapter_model.safetensors", "--max-shard-size"
EXPORT, RESHARD = "export made-store --to out", "reshard made-fresh --to out --ranks 2"
SMALL = {"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.arange(5).half()}


class Told(Exception):
    """What a command says in one line as it ends with status 2."""


@dataclass(frozen=True)
class Given:
    """A directory of its own for each row, and what rows share."""

    here: Path
    patch: pytest.MonkeyPatch
    fixture: Callable[[str], Any]

    def saved(self, family: str, **options: Any) -> Path:
        save(self.here / "m", family, **options)
        return self.here / "m"

    def store(self, family: str, weights: Weights = Weights.TRAINABLE, **options: Any) -> Path:
        imported(self.saved(family, **options), self.here / "store", weights=weights)
        return self.here / "store"

    def made(self, name: str = "store") -> Path:
        """A copy of what the fixture ``made`` has under this name."""
        copy = self.here / f"made-{name}"
        return copy if copy.exists() else Path(shutil.copytree(self.fixture("made") / name, copy))


Tensors = dict[str, torch.Tensor]
Change = Callable[[Any], object]


def later(function: Callable[..., object]) -> Callable[..., Callable[[Any], object]]:
    """Takes all but the first argument now."""
    return lambda *rest, **options: lambda first: function(first, *rest, **options)


def call(function: Callable[..., object], *arguments: Any, **options: Any) -> Change:
    return lambda _: function(*arguments, **options)


@pytest.fixture
def given(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    return Given(tmp_path, monkeypatch, request.getfixturevalue)


@later
def told(given: Given, words: str) -> None:
    """What a command says where a row's directories are; those called made- are copied to it."""
    given.patch.chdir(given.here)
    for word in words.split():
        if word.startswith("made-"):
            given.made(word.removeprefix("made-"))
    (line,) = refused(*words.split()).splitlines()
    raise Told(line)


# Imports ----------------------------------------------------------------------------------------------------


@later
def importing(given: Given, change: Change, family: str = "qwen3_moe", **options: Any) -> None:
    """Imports a checkpoint that was changed."""
    source = given.saved(family, **options)
    change(source)
    imported(source, given.here / "out")


@later
def told_of(given: Given, change: Change) -> None:
    """What ``tierstore import`` says of a checkpoint that was changed."""
    change(given.saved("qwen3_moe"))
    told("import m --store out")(given)


config = later(change_config)


@later
def file(source: Path, name: str, content: str) -> None:
    (source / name).write_text(content)


@later
def tensors(source: Path, change: Change) -> None:
    found = tensors_of(source)
    change(found)
    rewrite(source, found)


@later
def infinite(tensors: Tensors, name: str, value: float, dtype: torch.dtype) -> None:
    tensors[name] = tensors[name].to(dtype)
    tensors[name][2, 3] = value


def all_at_once(tensors: Tensors) -> None:
    del tensors[EXPERT], tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.experts.0.extra.weight"] = torch.zeros(2)
    tensors["model.layers.2.input_layernorm.weight"] = torch.zeros(32)
    tensors["two\nlines"] = torch.zeros(2)
    tensors[DENSE] = tensors[DENSE].t().contiguous()[:7]
    tensors[HEAD] = torch.zeros(128, 32, dtype=torch.int32)


def exchanged(tensors: Tensors) -> None:
    """As many weights in either: only the shape tells."""
    tensors[EXPERT], tensors[DOWN] = tensors[DOWN], tensors[EXPERT]


def tied_differs(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[TOKENS] + 1


@later
def renamed(source: Path, number: int, name: str) -> None:
    sorted(source.glob("*.safetensors"))[number].rename(source / name)


@later
def index(source: Path, change: Change) -> None:
    """Changes which file has which tensor."""
    values = json.loads((source / INDEX).read_text())
    change(values["weight_map"])
    (source / INDEX).write_text(json.dumps(values))


def not_listed(table: dict[str, Any]) -> None:
    second = sorted(set(table.values()))[1]
    for key in [key for key, file in table.items() if file == second]:
        del table[key]


def listed_elsewhere(table: dict[str, Any]) -> None:
    first, second, *_ = sorted(set(table.values()))
    table[next(name for name, file in table.items() if file == first)] = second


@later
def opening(given: Given, change: Change) -> None:
    source = given.saved("mixtral", shard="60KB")
    index(change)(source)
    Checkpoint.open(source)


def without_scales(given: Given) -> None:
    _fp8_checkpoint(given.here / "m")
    tensors(lambda found: found.pop(f"{UP_3}_scale_inv"))(given.here / "m")
    imported(given.here / "m", given.here / "out")


def full_disk(given: Given) -> None:
    def full(self: Extent, slots: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device: 4096 more bytes are needed")

    given.patch.setattr(Extent, "reserve", full)
    importing(lambda source: None)(given)


def without_transformers(given: Given) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    source = given.saved("qwen3_moe")
    given.patch.setattr(capabilities.importlib, "import_module", missing)
    imported(source, given.here / "out")


@later
def release(given: Given, number: str) -> None:
    given.patch.setattr("transformers.__version__", number)
    describe_config({"model_type": "mixtral"})


def trained_since(given: Given) -> None:
    store = given.store("olmoe")
    with open_store(store) as opened:
        opened.commit({STATE_KEY: TrainState(position=3).pack()})
    imported(given.here / "m", store)


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@later
def manifest(given: Given, **changes: Any) -> None:
    store = given.store("qwen3_moe")
    change_json(store / "model/manifest.json", **changes)
    Manifest.read(store)


@later
def described(given: Given, content: str | None) -> None:
    """By the configuration of a published model, or by none."""
    if content is not None:
        (given.here / "config.json").write_text(content)
    model_of(given.here)


def wrapped(**values: Any) -> Change:
    return lambda _: build_module(parse_config(values), torch.float32)


# Headers of safetensors files -------------------------------------------------------------------------------


@later
def lie(given: Given, change: Change) -> None:
    """Which the package refuses, too."""
    path = given.here / "x.safetensors"
    write(path, SMALL)
    header, data = split_header(path)
    change(header)
    path.write_bytes(join_header(header, data))
    with pytest.raises((SafetensorError, ValueError)), safe_open(path, "np"):
        pass
    read_header(path)


def of_a(**changes: Any) -> Change:
    return lie(lambda header: header["a"].update(changes))


@later
def bare(given: Given, content: bytes) -> None:
    (given.here / "x.safetensors").write_bytes(content)
    read_header(given.here / "x.safetensors")


# Adapters ---------------------------------------------------------------------------------------------------


@later
def loading(given: Given, change: Change = lambda adapter: None, **settings: Any) -> None:
    """Loads a copy of the adapter that was changed, or has other settings."""
    change_json(given.made("adapter") / "adapter_config.json", **settings)
    change(given.made("adapter") / PAIRS)
    load_adapter(given.made("adapter"), given.made())


@later
def merging(given: Given, change: Change) -> None:
    """What ``tierstore export --merge`` says of a damaged adapter."""
    change(given.made("adapter") / PAIRS)
    told(f"{EXPORT} --merge made-adapter")(given)


@later
def pair(path: Path, change: Change) -> None:
    """Changes the tensors of an adapter."""
    found = tensors_of(path.parent)
    change(found)
    save_file(found, path)


@later
def q_0(found: Tensors, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found[Q_0] = change(found[Q_0])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@later
def on_another_base(given: Given, *, known: bool) -> None:
    """By its fingerprint; by its shapes, where an adapter does not say whose it is."""
    store = given.store("mixtral", Weights.FROZEN, dtype=torch.bfloat16, hidden_size=48)
    if not known:
        (given.made("adapter") / "tierstore_base.json").unlink()
    load_adapter(given.made("adapter"), store)


@later
def of_peft(given: Given, target: str) -> None:
    """Pairs on a layer that the model has, and that cannot be merged: as peft saves them."""
    import peft

    told = peft.LoraConfig(r=2, target_modules=["q_proj", target])
    with quiet_peft():
        model = peft.get_peft_model(plain_model(make_config("mixtral")), told)
        model.save_pretrained(given.here / "theirs", save_embedding_layers=True)
    load_adapter(given.here / "theirs", given.made())


@later
def pairs(given: Given, name: str, lora: LoraConfig = RANK_2, **options: Any) -> None:
    """Opens a store to train ``lora``."""
    with session(given.made(name), lora, **options):
        pass


@later
def adapter_of(given: Given, name: str) -> None:
    export_adapter(given.made(name), given.here / "out")


# Runs -------------------------------------------------------------------------------------------------------


@later
def staged(given: Given, family: str, changes: dict[str, Any], **options: Any) -> None:
    """Two stages of an imported model of three layers."""
    store = given.store(family, num_hidden_layers=3, **options)
    settings = {"store": store, "data.micro_batches": 3, "parallel.stages": 2}
    stage_config(configuration({**settings, **changes}), 0, 2)


def resharded_tied(given: Given) -> None:
    store = given.store("mixtral", num_hidden_layers=3, **TIED)
    reshard(store, given.here / "out", Layout(2, 1, 1, 1), model=stored_spec(store))


@later
def own_loop(given: Given, *settings: str) -> None:
    store = given.store("qwen3_moe", vocab_size=256)
    with open_model(store, host_budget="224KiB", settings=dict.fromkeys(settings, 1)):
        pass


def own_loop_of_ranks(given: Given) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        given.patch.setenv(name, "2" if name == "WORLD_SIZE" else "0")
    given.patch.setenv("MASTER_ADDR", "127.0.0.1")
    given.patch.setenv("MASTER_PORT", "29500")
    own_loop()(given)


def short_piece(given: Given) -> None:
    shards = [Shard("f", (TensorSpec("a", "F32", (1,)),))]
    write_checkpoint(given.here, shards, lambda tensor: [np.zeros(3, np.uint8)])


# The table --------------------------------------------------------------------------------------------------

#: Numbers of no model.
ODD: dict[str, Any] = {
    **dict.fromkeys(["num_attention_heads", "vocab_size", "max_position_embeddings"], 0),
    **dict.fromkeys(["num_hidden_layers", "num_experts"], 10**12),
    **{"pad_token_id": 128, "num_key_value_heads": -1, "head_dim": -8},
    **{"moe_intermediate_size": "many", "rms_norm_eps": None, "hidden_act": "none such"},
}
LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
TEXTS = ["tokenizer.json", "tokenizer.model", "chat_template.jinja"]
FINITE = [
    (name, value, dtype)
    for name in (EXPERT, DENSE, HEAD)
    for value in (float("nan"), float("inf"), float("-inf"))
    for dtype in (torch.bfloat16, torch.float32, torch.float16)
]
TOKENIZERS: list[tuple[Any, str]] = [
    ({"model": {"vocab": {"a": 128}}}, "token 128"),
    ({"model": {"vocab": {"a": 1}}, "added_tokens": [{"id": 130}]}, "token 130"),
    ({"model": {"vocab": [["a", 0.0]] * 129}}, "token 128"),
    ([], "tokenizer.json"),
    ({"model": {"vocab": {"a": "one"}}}, "tokenizer.json"),
]
EMPTY = b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
#: What a file has in place of a header, and what is named.
BARE: list[tuple[bytes, str]] = [
    (b"", "0 bytes"),
    (b"\x01\x02", "2 bytes"),
    ((1 << 60).to_bytes(8, "little") + b"{}", "1152921504606846976"),
    ((90).to_bytes(8, "little") + b"{}", "90 bytes in a file of 10"),
    (join_header(b"[1]", b""), "JSON object"),
    (join_header(b'{"a', b""), "not JSON"),
    (join_header(b'{"a": NaN}', b""), "NaN"),
    (join_header(b"\xff\xfe{}", b""), "JSON object"),
    (join_header(b'{"a\xff": 1}', b""), "not JSON"),
    (join_header(b'{"a":' * 50_000, b""), "not JSON"),
    (join_header(b'{"a": ' + b"9" * 5000 + b"}", b""), "not JSON"),
    (join_header(b"{%s,%s}" % (EMPTY, EMPTY), b""), "'a' twice"),
]
FIELDS = "dtype, shape and data_offsets"
LIES: list[tuple[Any, ...]] = [
    ("span-file", of_a(data_offsets=[0, 1 << 40]), "'a': data_offsets", "1099511627776", "F32"),
    ("span-huge", of_a(shape=[1 << 40, 1 << 40], data_offsets=[0, 1 << 62]), "data_offsets"),
    ("span-shape", of_a(shape=[3, 3]), "24 bytes", "F32 (3, 3)", "36"),
    ("shape-negative", of_a(shape=[-2, -3]), "shape: ", "32"),
    ("shape-bool", of_a(shape=[2, True, 3]), "shape: "),
    ("shape-long", of_a(shape=[1] * 33), "shape: "),
    ("dtype", of_a(dtype="F31"), "dtype 'F31'"),
    ("offsets-reversed", of_a(data_offsets=[24, 0]), "data_offsets: ", "[24, 0]"),
    ("offsets-floats", of_a(data_offsets=[0.0, 24.0]), "data_offsets: "),
    ("offsets-late", of_a(data_offsets=[10, 34]), "gap"),
    ("offsets-gap", of_a(data_offsets=[4, 28]), "gap"),
    ("no-dtype", lie(lambda header: header["a"].pop("dtype")), "tensor 'a': ", FIELDS),
    ("no-object", lie(lambda header: header.update(a=[])), FIELDS),
    ("longer", lie(lambda header: header.pop("b")), "longer"),
    ("metadata", lie(lambda header: header.update(__metadata__={"x": 1})), "__metadata__: "),
    ("same-bytes", lie(lambda header: header.update(c={**header["b"]})), "overlaps"),
]
ALL_AT_ONCE = [
    f"/m: not the model of its config.json: 2 tensors missing: {EXPERT}, model.norm.weight; ",
    "3 tensors unexpected: model.layers.0.mlp.experts.0.extra.weight, ",
    ", model.layers.2.input_layernorm.weight, 'two\\nlines'; ",
    f"1 tensor of another shape: {DENSE} (7, 32), expected (32, 32); ",
    f"1 tensor of a type that is not a weight's: {HEAD} I32, expected F32 or F16 or BF16",
]
NO_EXPERTS = {"model_type": "qwen3_moe", "mlp_only_layers": [0, 1], "num_hidden_layers": 2}
FROZEN_MOMENTS = {"weights": Weights.FROZEN, "moments": MomentFormat.BF16}
SMALL_BLOCKS = {"quantization_config": {**_FP8, "weight_block_size": [1, 32]}}
OWN_LOOP = ("clip_norm", "schedule.lr", "host_budget", "finetune.aux_loss_weight")
RELEASES = ("5.6.2", "6.0.0", "4.57.1")
CAPABILITY = [
    ("no-transformers", without_transformers, "transformers", 'pip install "tierstore[hf]"'),
    *((f"release-{n}", release(n), "transformers >= 5.7, < 6", n) for n in RELEASES),
]
CONFIG = [
    *(
        (f"family-{name}", importing(config(model_type=name)), repr(name), "mixtral, ")
        for name in ("dbrx", "llama", None, 3)
    ),
    ("wide", importing(config(hidden_size="wide")), "config.json", "hidden_size"),
    ("top-k", importing(config(num_experts_per_tok=9)), "num_experts_per_tok: ", "8", "9"),
    ("no-experts", importing(config(mlp_only_layers=[0, 1])), "layer", "experts"),
    ("no-json", importing(file("config.json", "{")), "/config.json: ", "JSON"),
    ("no-config", lambda given: imported(given.here, given.here / "out"), "/config.json: "),
    ("gptq", importing(config(quantization_config={"quant_method": "gptq"})), "'gptq'"),
    ("fp8", importing(config(**SMALL_BLOCKS)), "weight_block_size: ", "[128, 128]", "[1, 32]"),
    ("frozen-moments", call(ImportOptions, **FROZEN_MOMENTS), "moments: "),
    ("trainable-codes", call(ImportOptions, codes=CodeFormat.INT4), "codes: ", "int4"),
    ("published-missing", described(None), "/config.json: "),
    ("published-no-json", described("{"), "/config.json: ", "JSON"),
    ("published-list", described("[]"), "/config.json: ", "JSON object"),
    ("published-dbrx", described('{"model_type": "dbrx"}'), "/config.json: ", "'dbrx'"),
    ("published-none", described("{}"), "/config.json: ", "model_type None"),
    ("wrapped-unknown", wrapped(model_type="nothing_known"), "'nothing_known'"),
    ("wrapped-none", wrapped(), "None"),
    ("wrapped-gelu", wrapped(model_type="mixtral", hidden_act="gelu_new"), "hidden_act: "),
    ("wrapped-no-experts", wrapped(**NO_EXPERTS), "layer", "experts"),
    ("dora", loading(use_dora=True), "use_dora: True"),
    ("rank-pattern", loading(rank_pattern={"q_proj": 4}), "rank_pattern"),
    ("ia3", loading(peft_type="IA3"), "peft_type: 'IA3'"),
    ("rank", loading(r="many"), "r, lora_alpha"),
    ("alpha", loading(lora_alpha=0), "more than 0"),
    ("pissa", loading(init_lora_weights="pissa_niter_4"), "init_lora_weights: 'pissa_niter_4'"),
    ("alora", loading(alora_invocation_tokens=[1, 2]), "alora_invocation_tokens"),
    ("another-base", on_another_base(known=True), "MixtralForCausalLM"),
    ("no-layer", pairs("fresh", LoraConfig(rank=2, modules=("qproj",))), "k_proj, o_proj", "qproj"),
    ("no-pairs", pairs("fresh", LoraConfig()), "frozen: ", "LoRA"),
    ("other-rank", pairs("store", LoraConfig(rank=3)), "lora.rank: ", "rank 2", "3"),
    ("other-moments", pairs("store", moments=MomentFormat.BF16), "adamw.moments: ", "fp32", "bf16"),
    ("pairs-beside-codes", pairs("codes"), "int8", "LoRA"),
    ("pairs-beside-whole", pairs("whole"), "tierstore import --frozen"),
    *((f"own-loop-{name}", own_loop(name), f"{name}: ") for name in OWN_LOOP),
    ("own-loop-of-ranks", own_loop_of_ranks, "one rank"),
    ("tied", staged("mixtral", {}, **TIED), "parallel.stages: ", "embedding"),
    ("tied-resharded", resharded_tied, "parallel.stages: ", "embedding"),
    ("micro", staged(DEEP, {MICRO: 1}), f"{MICRO}: ", "parallel.stages = 2"),
    ("stage", staged(DEEP, {"parallel.stage_blocks": (1, 2)}), "stage 0", "0 to 0", "experts"),
]
DATA = [
    *(
        (f"finite-{at}", importing(tensors(infinite(*of)), dtype=BF16), repr(of[0]), "weight 67 ")
        for at, of in enumerate(FINITE)
    ),
    ("all-at-once", importing(tensors(all_at_once)), *ALL_AT_ONCE),
    ("exchanged", importing(tensors(exchanged)), "2 tensors", EXPERT, DOWN),
    ("tied-differs", importing(tensors(tied_differs), **TIED), repr(HEAD), repr(TOKENS)),
    *(
        (f"tokenizer-{at}", importing(file("tokenizer.json", json.dumps(value))), named)
        for at, (value, named) in enumerate(TOKENIZERS)
    ),
    *(
        (f"lfs-{name}", importing(file(name, LFS)), f"/{name}: ", "git-lfs")
        for name in ("config.json", "model.safetensors", *TEXTS)
    ),
    ("no-scales", without_scales, f"1 tensor missing: {UP_3}_scale_inv"),
    ("pickle", importing(renamed(0, PICKLE), "mixtral"), f"/{PICKLE}: ", "save_pretrained"),
    ("no-index", importing(renamed(0, SHARD_1), "mixtral"), "index.json"),
    ("shard-missing", importing(renamed(1, "lost"), **SHARDS), "/model-00002-of-", INDEX),
    ("not-listed", importing(index(not_listed), **SHARDS), "model-00002-of-", "index"),
    ("extra", opening(lambda table: table.update(x=min(table.values()))), "/model-00001-", "'x'"),
    *(
        (f"file-{file}", opening(lambda table, f=file: table.update({HEAD: f})), f"map.{HEAD}: ")
        for file in ("../x.safetensors", "/etc/passwd", "x.bin", 3, None)
    ),
    ("listed-elsewhere", opening(listed_elsewhere), "model-00002-of-"),
    *((name, act, "/x.safetensors: ", *named) for name, act, *named in LIES),
    *((f"bare-{named}", bare(content), "/x.safetensors: ", named) for content, named in BARE),
    ("another-shape", on_another_base(known=False), "lora_A.weight: ", "(2, 48)", "(2, 32)"),
    ("pair-missing", loading(pair(lambda found: found.pop(B_0))), B_0, "missing"),
    ("pair-unknown", loading(pair(lambda found: found.update(UNKNOWN))), "layers.9."),
    *((f"pair-{name}", of_peft(name), name, "attention") for name in ("embed_tokens", "lm_head")),
]
STORE_FORMAT = [
    ("manifest-version", manifest(version=9), "/model/manifest.json: version 9"),
    ("manifest-compute", manifest(compute="fp8"), "/model/manifest.json: ", "'fp8'"),
    ("manifest-surprise", manifest(surprise=1), "/model/manifest.json: ", "'surprise'"),
    ("manifest-units", manifest(units=3), "/model/manifest.json: "),
    ("manifest-experts", manifest(experts=[]), "/model/manifest.json: ", "experts: ", "[]"),
    ("other-alpha", pairs("store", LoraConfig(rank=2, alpha=1.0)), "another model"),
    ("other-targets", pairs("store", EXPERTS_ALONE), "another model"),
    ("pairs-of-another-model", pairs("another"), "fingerprint"),
    ("adapter-of-another-model", adapter_of("another"), "another model"),
    *(
        (f"config-{text!r}", call(config_with, text, ExportDtype.BF16), "config.json: ")
        for text in (b"[1]", b"{", b"3")
    ),
]
TOLD = [
    *((f"told-{key}", told_of(config(**{key: value})), "error: m") for key, value in ODD.items()),
    ("told-no-weights", told_of(renamed(0, "lost")), "error: m: "),
    ("told-cut", merging(cut), f"/{PAIRS}: ", "truncated"),
    ("told-nan", merging(pair(q_0(lambda value: value * math.nan))), f"/{PAIRS}: ", Q_0, "NaN"),
    ("told-int8", merging(pair(q_0(torch.Tensor.char))), Q_0, "F32 or F16 or BF16", "I8"),
    ("told-no-store", told("export nothing --to out"), "nothing: "),
    ("told-there", told("export made-store --to made-adapter"), "made-adapter"),
    ("told-size", told(f"{EXPORT} --max-shard-size many"), SIZE, "'many'"),
    ("told-fp8", told(f"{EXPORT} --dtype fp8"), "'fp8'", "'bf16', 'fp32'"),
    ("told-dtype", told(f"{EXPORT} --adapter --dtype fp32"), "--adapter ", "--dtype"),
    ("told-both", told(f"{EXPORT} --adapter {SIZE} 1GB"), "--adapter ", SIZE),
    ("told-moments", told(f"{RESHARD} --moments int8"), "moments: ", "made-fresh", "int8"),
    ("told-blocks", told(f"{RESHARD} --stages 2 --stage-blocks 2,2"), "2 numbers", "2 blocks"),
]
ROWS: dict[type[Exception], list[tuple[Any, ...]]] = {
    CapabilityError: CAPABILITY,
    ConfigError: CONFIG,
    DataError: DATA,
    OSError: [("full-disk", full_disk, "4096 more bytes")],
    StoreError: [("no-adapter", adapter_of("fresh"), "/made-fresh: ", "adapter")],
    StoreExistsError: [("trained-since", trained_since, "/store", "trained")],
    StoreFormatError: STORE_FORMAT,
    Told: TOLD,
    ValueError: [("short-piece", short_piece, "a: ", "3 bytes", "4")],
}


@each_of(ROWS)
def test_it_is_refused_by_name(given: Given, refusal: Refusal) -> None:
    """In one line, and nothing is written."""
    with refuses(refusal.error, *refusal.named) as caught:
        refusal.act(given)
    assert "\n" not in str(caught.value)
    assert not list(given.here.glob("out*"))
