"""A checkpoint of the built-in model leaves as a Mixtral that computes the same, or the options that forbid it are named."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest_store import fingerprint, read_only
from safetensors.torch import load_file
from test_export import contents
from tiny_runs import QUIET, RUN
from transformers import AutoModelForCausalLM, AutoTokenizer

from tierstore import _native
from tierstore.config import load
from tierstore.errors import ConfigError, StoreFormatError
from tierstore.hf.exporting import export
from tierstore.hf.mixtral import _units, refusals
from tierstore.hf.writing import ExportDtype
from tierstore.model.config import ModelConfig
from tierstore.model.store_schema import EXPERT_SCHEMA
from tierstore.model.transformer import Transformer
from tierstore.moe.source import InMemoryExperts
from tierstore.parallel.config import RowPlacement
from tierstore.parallel.layout import Layout
from tierstore.store import ParameterStore, StoreConfig
from tierstore.store.parameter_store import verify_all
from tierstore.store.reading import read_summary
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.resharding import reshard
from tierstore.train.session import open_session

_TINY: dict[str, Any] = {
    **RUN,
    **QUIET,
    "host_budget": 8 << 20,
    "model.d_model": 32,
    "model.n_layers": 2,
    "model.n_heads": 4,
    "model.seq_len": 24,
    "model.d_ff": 48,
    "model.experts": 6,
    "model.top_k": 2,
    "model.rope_theta": 5000.0,
    "model.norm_eps": 1e-3,
    "data.batch_size": 2,
    "schedule.lr": 2e-2,
    "schedule.warmup_steps": 1,
    "schedule.total_steps": 40,
}
_TOKENS = torch.arange(24)[None] * 7 % 256


def trained(directory: Path, steps: int = 5, **changes: Any) -> torch.Tensor:
    """Trains a tiny model into ``directory / "s"``; returns its logits for ``_TOKENS``."""
    text = directory / "text"
    text.write_text("the store keeps experts on disk; " * 400)
    given = {**_TINY, "store": directory / "s", "steps": steps, "data.paths": (str(text),), **changes}
    with open_session(load(TrainConfig, None, given), Opening.CREATE) as trainer:
        for _ in range(steps):
            trainer.step()
        trainer.commit()
        model: Any = trainer.model.module
        model.eval()
        with torch.no_grad():
            return model(_TOKENS[:, : given["model.seq_len"]]).logits


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store ``s`` of one rank, and its export ``m``."""
    directory = tmp_path_factory.mktemp("one")
    trained(directory)
    export(directory / "s", directory / "m")
    return directory


def weights_in(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def loaded(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(_TOKENS).logits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.tie_embeddings": "tied"},
        {
            "model.top_k": 4,
            "model.router_noise": "jitter",
            "model.router_noise_std": 0.1,
            "adamw.inactive": "skip",
        },
        {"dense.fusion": "parameter"},
    ],
    ids=["plain", "tied", "top4", "unfused"],
)
def test_a_mixtral_computes_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    wanted = trained(tmp_path, **changes)
    before = contents(tmp_path / "s")
    done = export(tmp_path / "s", tmp_path / "m")
    assert contents(tmp_path / "s") == before
    assert not verify_all(tmp_path / "s").failures
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == torch.float32
    torch.testing.assert_close(logits_of(model.eval()), wanted, atol=2e-5, rtol=2e-5)
    assert (done.model_type, done.step, done.ranks, done.experts) == ("mixtral", 5, 1, 12)
    tied, noise = "model.tie_embeddings" in changes, "model.router_noise" in changes
    assert len(done.notes) == tied + noise


def test_missed_steps_are_replayed_and_forgotten(tmp_path: Path) -> None:
    """Experts that got no token in the last steps export, from a read-only volume, as a store would give them that has
    caught up. Nothing of the source is written, by an export or a reshard.
    """
    trained(tmp_path, **{"model.experts": 32})
    assert read_summary(tmp_path / "s").missed[EXPERT_SCHEMA] > 0
    with read_only(tmp_path / "s"):
        before = fingerprint(tmp_path / "s")
        assert export(tmp_path / "s", tmp_path / "m").step == 5
        reshard(tmp_path / "s", tmp_path / "r", Layout(1, 1, 1, 1))
        assert fingerprint(tmp_path / "s") == before
    tensors = load_file(tmp_path / "m/model.safetensors")
    with ParameterStore.open(tmp_path / "s", StoreConfig(host_budget=1 << 20)) as source:
        for layer, number in itertools.product(range(2), range(32)):
            key, name = (
                f"expert.{layer:04}.{number:05}",
                f"model.layers.{layer}.block_sparse_moe.experts.{number}",
            )
            with source.fetch([key]) as lease:  # caught up by a writer
                flat = torch.from_numpy(lease[key].copy("weight"))
            parts = [tensors[f"{name}.{which}.weight"].flatten() for which in ("w1", "w3", "w2")]
            assert torch.equal(torch.cat(parts), flat), key
        with ParameterStore.open(tmp_path / "r", StoreConfig(host_budget=1 << 20)) as made:
            assert made.records_crc32c() == source.records_crc32c()


def test_the_weights_are_those_of_the_store(tmp_path: Path) -> None:
    """Bit for bit, queries before keys and gate before up: a tied embedding is scaled, everything else as it was."""
    trained(tmp_path)
    export(tmp_path / "s", tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    text = str(tmp_path / "text")
    config = load(TrainConfig, None, {**_TINY, "store": tmp_path / "s", "data.paths": (text,)})
    with open_session(config, Opening.RESUME) as trainer:
        parameters = {name: value.detach().clone() for name, value in _whole(trainer).items()}
        with ParameterStore(trainer.store).fetch(["expert.0001.00003"]) as lease:
            flat = torch.from_numpy(lease["expert.0001.00003"].copy("weight"))
    d, f = 32, 48
    layer = "model.layers.1"
    expert = f"{layer}.block_sparse_moe.experts.3"
    assert torch.equal(tensors[f"{expert}.w1.weight"], flat[: f * d].view(f, d))
    assert torch.equal(tensors[f"{expert}.w3.weight"], flat[f * d : 2 * f * d].view(f, d))
    assert torch.equal(tensors[f"{expert}.w2.weight"], flat[2 * f * d :].view(d, f))
    qkv = parameters["blocks.1.attention.qkv"]
    for number, which in enumerate("qkv"):
        assert torch.equal(
            tensors[f"{layer}.self_attn.{which}_proj.weight"], qkv[number * d : (number + 1) * d]
        )
    for ours, theirs in {
        "embedding": "model.embed_tokens.weight",
        "head": "lm_head.weight",
        "norm.weight": "model.norm.weight",
        "blocks.1.attention_norm.weight": f"{layer}.input_layernorm.weight",
        "blocks.1.ffn_norm.weight": f"{layer}.post_attention_layernorm.weight",
        "blocks.1.attention.out": f"{layer}.self_attn.o_proj.weight",
        "blocks.1.mixture.router.weight": f"{layer}.block_sparse_moe.gate.weight",
    }.items():
        assert torch.equal(tensors[theirs], parameters[ours]), ours


def _whole(trainer: Any) -> dict[str, torch.Tensor]:
    """The dense parameters, from their slices."""
    model = trainer.model.module
    names = {id(value): name for name, value in model.named_parameters()}
    found = {}
    for number, (_, parameters) in enumerate(trainer.model.dense_units()):
        slices = trainer.dense.slices[number]
        for region, kept in slices.layout.slices():
            for span in region.spans:
                start = kept.start + span.offset
                value = slices.weight[start : start + span.numel].view(span.shape)
                found[names[id(parameters[span.index])]] = value
    return found


def test_bf16_and_fp32(tmp_path: Path) -> None:
    """A model in bf16 leaves in bf16 unless its masters are asked for; rounding is torch's."""
    trained(tmp_path, **{"model.compute_dtype": "bf16"})
    assert export(tmp_path / "s", tmp_path / "m").dtype is ExportDtype.BF16
    export(tmp_path / "s", tmp_path / "wide", dtype=ExportDtype.FP32)
    narrow, wide = (load_file(tmp_path / name / "model.safetensors") for name in ("m", "wide"))
    assert {value.dtype for value in narrow.values()} == {torch.bfloat16}
    assert {value.dtype for value in wide.values()} == {torch.float32}
    for name, value in narrow.items():
        if ".experts." not in name:
            assert torch.equal(value, wide[name].bfloat16())
            continue
        high, low = np.empty(value.numel(), np.uint16), np.empty(value.numel(), np.int16)
        _native.split_bf16(high, low, wide[name].flatten().numpy())  # how a record keeps its master
        assert np.array_equal(value.view(torch.uint16).flatten().numpy(), high)
    assert loaded(tmp_path / "m").dtype == torch.bfloat16
    assert loaded(tmp_path / "wide").dtype == torch.float32


@pytest.mark.parametrize(
    ("layout", "tables"),
    [
        (Layout(1, 1, 2, 1), {}),
        (Layout(1, 2, 2, 1), {}),
        (Layout(1, 3, 1, 1), {}),
        (Layout(2, 2, 1, 1), {}),
        *(
            (Layout(1, 1, 3, 1), {"embedding": embedding, "head": head})
            for embedding, head in itertools.product(
                (RowPlacement.GATHERED, RowPlacement.PARTITIONED), repeat=2
            )
        ),
    ],
    ids=str,
)
def test_many_ranks_export_what_one_does(
    one: Path, layout: Layout, tables: dict[str, Any], tmp_path: Path
) -> None:
    """Data and expert ranks, pipeline stages, and tables whose rows are divided or not."""
    reshard(one / "s", tmp_path / "s", layout, **tables)
    assert export(tmp_path / "s", tmp_path / "m").ranks == layout.world
    assert weights_in(tmp_path / "m") == weights_in(one / "m")


def test_divided_layers_are_made_whole_first(one: Path, tmp_path: Path) -> None:
    store, target = tmp_path / "divided", tmp_path / "m"
    reshard(one / "s", store, Layout(1, 1, 2, 2))
    message = (
        f"{store}: made by tensor-parallel ranks; tierstore reshard {store} --to NEW --ranks 1 makes a store that can be "
        "exported"
    )
    with pytest.raises(StoreFormatError, match=f"^{re.escape(message)}$"):
        export(store, target)
    assert not target.exists()
    reshard(store, tmp_path / "new", Layout(1, 1, 1, 1))
    export(tmp_path / "new", target)
    assert weights_in(target) == weights_in(one / "m")


def test_sharded_it_is_the_same(one: Path, tmp_path: Path) -> None:
    whole: list[tuple[int, int]] = []
    single = export(one / "s", tmp_path / "m", progress=lambda done, total: whole.append((done, total)))
    many = export(one / "s", tmp_path / "shards", max_shard_bytes=20_000)
    assert (single.shards, single.nbytes) == (1, many.nbytes)
    assert many.shards > 5
    assert whole[-1] == (single.nbytes, single.nbytes)
    assert [done for done, _ in whole] == sorted({done for done, _ in whole})
    assert torch.equal(logits_of(loaded(tmp_path / "m")), logits_of(loaded(tmp_path / "shards")))


def test_bytes_are_tokens(one: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(one / "m")
    text = "Grüße,\n\tthe  store's 中 bytes \x00\x7f !"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert len(tokenizer) == 256


# Options ----------------------------------------------------------------------------------------------------


def test_every_refused_option_is_named(tmp_path: Path) -> None:
    changes = {
        "model.activation": "gelu",
        "model.moe_every": 2,
        "model.shared_expert_d_ff": 16,
        "model.capacity_factor": 1.5,
        "model.top_k": 1,
    }
    trained(tmp_path, steps=1, **changes)
    with pytest.raises(ConfigError) as caught:
        export(tmp_path / "s", tmp_path / "m")
    assert str(caught.value) == (
        "the model does not export as Mixtral: model.activation = gelu (expected swiglu); model.moe_every = 2 (expected "
        "1: experts in every block); model.shared_expert_d_ff = 16 (expected 0: no shared expert); "
        "model.capacity_factor = 1.5 (expected none: no token is dropped); model.top_k = 1 (expected weights of the "
        "chosen experts that sum to one)"
    )
    assert not (tmp_path / "m").exists()
    assert refusals(ModelConfig(normalize_topk=False)) == [
        "model.normalize_topk = false (expected weights of the chosen experts that sum to one)"
    ]


@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_the_units_are_those_of_the_model(tied: str) -> None:
    config = ModelConfig(
        d_model=16, n_layers=2, n_heads=2, d_ff=8, experts=3, vocab_size=7, tie_embeddings=tied
    )  # type: ignore[arg-type]
    model = Transformer(config, InMemoryExperts(config.expert_shape, layers=(), experts=0))
    found = [(name, [tuple(value.shape) for value in parameters]) for name, parameters in model.dense_units()]
    assert [(name, [shape for _, shape in parameters]) for name, parameters in _units(config)] == found
