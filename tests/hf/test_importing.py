"""What an import writes is what transformers has in memory, for every family; and an import that is cut short goes on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import (
    FAMILIES,
    buffers_of,
    change_config,
    dense_of,
    experts_of,
    fused_experts,
    imported,
    open_store,
    rewrite,
    save,
    tensors_of,
    write_tokenizer,
)
from command_line import done
from refusals import refuses
from stored_runs import configuration
from tiny_families import make_config, plain_model
from token_cases import conversation, save_tokenizer, write_lines
from transformers import AutoTokenizer

from tierstore.errors import BudgetError, ConfigError, DataError, StoreFormatError
from tierstore.hf import filling
from tierstore.hf.filling import READERS, UnitJob
from tierstore.hf.importing import ImportOptions, ImportPlan, import_model
from tierstore.hf.manifest import Manifest, Weights
from tierstore.machine import MemoryAccount
from tierstore.model.config import ComputeDtype
from tierstore.model.store_schema import IMPORT_KEY, STATE_KEY
from tierstore.store.format import Group, MomentFormat, RecordSchema
from tierstore.store.opening import minimum_host_budget
from tierstore.store.parameter_store import verify_store
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session


@pytest.mark.parametrize(("experts", "buffers"), [(0, 2), (3, 3), (50, READERS + 4)])
def test_an_import_holds_a_fixed_number_of_experts(
    experts: int, buffers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 32: those that fit the budget, at least two, and no more than the readers can use."""
    made: list[int] = []

    class Counted(filling._ExpertBuffers):
        def __init__(self, schema: RecordSchema) -> None:
            super().__init__(schema)
            made.append(self.nbytes(schema))

    monkeypatch.setattr(filling, "_ExpertBuffers", Counted)
    save(tmp_path / "m", "mixtral", num_local_experts=16)
    imported(tmp_path / "m", tmp_path / "s")
    assert made
    each, count = made[0], len(made)
    assert count == READERS + 4
    made.clear()
    report = imported(tmp_path / "m", tmp_path / "t", host_budget=max(experts * each, 1))
    assert report.records > 32
    assert made == [each] * buffers


def test_memory_of_an_import(tmp_path: Path) -> None:
    """A ring of two experts at least, and of eight at most; the largest slices of a dense unit, in fp32; and the store's
    own cache, of one record. ``memory`` leaves the ring what all others do not take, up to ``host_budget``.
    """
    save(tmp_path / "m", "mixtral")
    plans: list[tuple[ImportPlan, MemoryAccount]] = []

    def run(store: str, **options: int) -> MemoryAccount:
        import_model(
            tmp_path / "m",
            tmp_path / store,
            ImportOptions(**options),
            planned=lambda *seen: plans.append(seen),
        )
        return plans[-1][1]

    account = run("s")
    plan = plans[0][0]
    each = account.parts["experts"] // 8
    dense = [job.layout.slice_numel for job in plan.jobs if isinstance(job, UnitJob)]
    assert account.parts["dense parameters"] == 4 * max(dense)
    assert account.parts["host cache"] == minimum_host_budget(list(plan.schemas))
    assert plan.account(0, 1000).parts["experts"] == 2 * each
    assert plan.account(5 * each, 1000).parts["experts"] == 5 * each
    least = plan.account(0, 1000).nbytes
    for more in (0, each, 3 * each, 100 * each):
        budget = plan.budget_within(ImportOptions(memory=least + more), 1000)
        assert plan.account(budget, 1000).nbytes == least + min(more, 6 * each)
    with refuses(BudgetError, "memory:", str(least)):
        plan.budget_within(ImportOptions(memory=least - 1), 1000)
    with refuses(BudgetError, "memory:"):
        run("t", memory=1 << 20)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_store_holds_what_transformers_has_in_memory(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = save(tmp_path / "m", family, dtype)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=dtype)
    report = imported(tmp_path / "m", tmp_path / "s")
    store = tmp_path / "s"
    manifest = Manifest.read(store)
    assert manifest.compute is (ComputeDtype.FP32 if dtype == torch.float32 else ComputeDtype.BF16)
    assert manifest.total_parameters == model.num_parameters()

    wanted = fused_experts(loaded)
    found = experts_of(store)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)

    dense = dense_of(store)
    theirs = {
        name: value for name, value in loaded.named_parameters() if not name.endswith(tuple(_fused(loaded)))
    }
    assert dense.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(dense[name], value.detach().float()), name
        entry = next(entry for entry in manifest.parameters() if entry.name == name)
        assert entry.dtype == str(value.dtype).removeprefix("torch.")
    state = loaded.state_dict()
    buffers = buffers_of(store)
    assert set(buffers) == set(state) - {name for name, _ in loaded.named_parameters()}
    assert all(np.array_equal(values, state[name].numpy()) for name, values in buffers.items())
    assert report.records == len(wanted) + len(manifest.units)
    assert verify_store(store).failures == []


def _fused(model: object) -> set[str]:
    from tierstore.hf.families import FAMILIES as NAMES

    return {f".{name}" for name in NAMES[model.config.model_type].fused_names}  # type: ignore[attr-defined]


def test_names_on_disk_are_those_of_the_manifest(tmp_path: Path) -> None:
    for family in FAMILIES:
        save(tmp_path / family, family)
        imported(tmp_path / family, tmp_path / "s" / family)
        manifest = Manifest.read(tmp_path / "s" / family)
        from tierstore.hf.families import FAMILIES as NAMES

        names = {entry.source for entry in (*manifest.parameters(), *manifest.buffers)}
        experts = manifest.experts
        for layer in experts.layers:
            for expert in range(experts.count):
                parts = NAMES[family].expert_parts(layer, expert, experts)
                assert sum(part.numel for part in parts) == experts.numel
                names |= {part.source for part in parts}
        assert names == set(tensors_of(tmp_path / family))


def test_fp32_weights_computed_in_bf16_keep_their_masters(tmp_path: Path) -> None:
    model = save(tmp_path / "m", "qwen3_moe")
    imported(tmp_path / "m", tmp_path / "s", compute=ComputeDtype.BF16)
    wanted, found = fused_experts(model), experts_of(tmp_path / "s")
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_frozen_records_hold_weights_alone(tmp_path: Path) -> None:
    model = save(tmp_path / "m", "qwen3_moe", torch.bfloat16)
    report = imported(tmp_path / "m", tmp_path / "s", weights=Weights.FROZEN)
    wanted, found = fused_experts(model), experts_of(tmp_path / "s")
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert report.manifest.weights is Weights.FROZEN
    assert not (tmp_path / "s/extents/expert.moments").exists()


def test_zero_sections_are_not_written(tmp_path: Path) -> None:
    """A bf16 checkpoint: two bytes a weight are read and written; moments and remainders are blocks without content."""
    save(tmp_path / "m", "qwen3_moe", torch.bfloat16, hidden_size=64, moe_intermediate_size=64)
    report = imported(tmp_path / "m", tmp_path / "s")
    experts = report.manifest.experts
    padded = -(-experts.numel * 2 // 4096) * 4096
    dense = sum(-(-layout.slice_numel * 4 // 4096) * 4096 for layout in report.manifest.unit_layouts(1))
    assert report.written_bytes == experts.records * padded + dense


def test_moments_of_a_chosen_format_begin_as_zeros_that_are_not_written(tmp_path: Path) -> None:
    save(tmp_path / "m", "qwen3_moe", torch.bfloat16, hidden_size=64, moe_intermediate_size=64)
    wide = imported(tmp_path / "m", tmp_path / "wide")
    report = imported(tmp_path / "m", tmp_path / "s", moments=MomentFormat.INT8)
    assert report.written_bytes == wide.written_bytes
    assert report.reserved_bytes < wide.reserved_bytes
    with open_store(tmp_path / "s") as store:
        key = next(key for key in store.keys if key.startswith("expert"))
        assert store.info(key).schema.moments is MomentFormat.INT8
        with store.fetch([key], [Group.MOMENTS]) as lease:
            assert not any(lease[key].copy(name).any() for name in lease[key].sections)
        assert store.verify().failures == []
    assert imported(tmp_path / "m", tmp_path / "s", moments=MomentFormat.INT8).records == 0
    with pytest.raises(StoreFormatError, match=r"moments int8, .* moments fp32"):
        imported(tmp_path / "m", tmp_path / "s")


def test_tied_names_are_aliases(tmp_path: Path) -> None:
    save(tmp_path / "m", "qwen3_moe", tie_word_embeddings=True)
    imported(tmp_path / "m", tmp_path / "s")
    (tied,) = Manifest.read(tmp_path / "s").tied
    assert (tied.name, tied.of, tied.stored) == ("lm_head.weight", "model.embed_tokens.weight", False)

    tensors = tensors_of(tmp_path / "m")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    rewrite(tmp_path / "m", tensors)
    imported(tmp_path / "m", tmp_path / "t")
    assert Manifest.read(tmp_path / "t").tied[0].stored


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("deepseek_v3", "model.layers.2.eh_proj.weight"),
        ("glm4_moe", "model.layers.2.mlp.experts.0.gate_proj.weight"),
        ("qwen3_next", "mtp.fc.weight"),
        ("mixtral", "model.layers.0.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_ignored_tensors_are_carried_along(family: str, name: str, tmp_path: Path) -> None:
    save(tmp_path / "m", family)
    tensors = tensors_of(tmp_path / "m")
    extra = {name: torch.randn(7, 5), f"{name}.other": torch.arange(3).to(torch.bfloat16)}
    if family == "mixtral":
        del extra[f"{name}.other"]
    rewrite(tmp_path / "m", {**tensors, **extra})
    imported(tmp_path / "m", tmp_path / "s")
    manifest = Manifest.read(tmp_path / "s")
    carried = tensors_of(tmp_path / "s/model")
    assert {entry.name for entry in manifest.carried} == set(extra) == set(carried)
    assert all(torch.equal(carried[key], value) for key, value in extra.items())


def test_shards_and_files_beside_them(tmp_path: Path) -> None:
    model = save(tmp_path / "m", "mixtral", shard="40KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 3
    (tmp_path / "m/tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 127}}, "added_tokens": []}')
    (tmp_path / "m/chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "m/modeling_own.py").write_text("raise SystemExit")
    imported(tmp_path / "m", tmp_path / "s")
    wanted, found = fused_experts(model), experts_of(tmp_path / "s")
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    kept = {path.name for path in (tmp_path / "s/model").iterdir()}
    assert kept == {
        "manifest.json",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert (tmp_path / "s/model/config.json").read_bytes() == (tmp_path / "m/config.json").read_bytes()


def test_a_complete_import_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path / "m", "olmoe")
    imported(tmp_path / "m", tmp_path / "s")
    with open_store(tmp_path / "s") as store:
        before = store.last_commit.generation, store.records_crc32c()
        assert store.last_commit.state.keys() >= {IMPORT_KEY, STATE_KEY}
    report = imported(tmp_path / "m", tmp_path / "s")
    assert (report.records, report.commits) == (0, 0)
    with open_store(tmp_path / "s") as store:
        assert (store.last_commit.generation, store.records_crc32c()) == before


def test_the_manifest_reads_back(tmp_path: Path) -> None:
    save(tmp_path / "m", "deepseek_v3", torch.bfloat16)
    report = imported(tmp_path / "m", tmp_path / "s")
    assert Manifest.read(tmp_path / "s") == report.manifest
    change_config(tmp_path / "m", rms_norm_eps=1e-5)
    assert imported(tmp_path / "m", tmp_path / "t").manifest.fingerprint != report.manifest.fingerprint


@pytest.mark.parametrize("lora", [0, 2], ids=["full", "lora"])
def test_the_first_run_over_an_import_decides_its_schedule(tmp_path: Path, lora: int) -> None:
    """The import is no run: the store keeps the steps of the first one."""
    save(tmp_path / "model", "mixtral")
    imported(tmp_path / "model", tmp_path / "store", weights=Weights.FROZEN if lora else Weights.TRAINABLE)
    settings = {"store": tmp_path / "store", "data.paths": (__file__,), "lora.rank": lora}
    found = []
    for steps in (3, 5):
        config = configuration({**settings, "schedule.total_steps": None, "steps": steps})
        with open_session(config, Opening.RESUME) as trainer:
            while trainer.state.position < steps:
                trainer.step()
            trainer.commit()
            found.append(trainer.config.schedule.total_steps)
    assert found == [3, 3]


def test_sequences_are_as_long_as_the_positions_at_most(tmp_path: Path) -> None:
    save(tmp_path / "model", "mixtral", max_position_embeddings=40)
    imported(tmp_path / "model", tmp_path / "store")
    settings = {"store": tmp_path / "store", "data.paths": (__file__,)}
    assert configuration({**settings, "finetune.seq_len": None}).model.seq_len == 40
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "store").rglob("*"))
    config = configuration({**settings, "finetune.seq_len": 41})
    with (
        pytest.raises(
            ConfigError, match=r"finetune.seq_len: expected at most 40, the positions of the model, got 41"
        ),
        open_session(config, Opening.RESUME),
    ):
        pass
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "store").rglob("*")) == before


def test_documents_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    """Also for one of several tasks; bytes, said explicitly, are read."""
    save(tmp_path / "model", "mixtral")
    imported(tmp_path / "model", tmp_path / "store")
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        '{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}\n' * 40
    )
    settings = {"store": tmp_path / "store"}
    task = {"tasks.a.paths": (__file__,), "tasks.b.paths": (str(chats),), "data.format": "auto"}
    for given in ({"data.paths": (str(chats),), "data.format": "auto"}, task):
        with (
            pytest.raises(DataError, match=r"chats\.jsonl: .* this model has none \(tokenizer\.json\)"),
            open_session(configuration({**settings, **given}), Opening.RESUME),
        ):
            pass
    config = configuration({**settings, "data.paths": (str(chats),)})
    with open_session(config, Opening.RESUME) as trainer:
        text = bytes(trainer.data.batch(0).tokens_BT[0].tolist())
        assert text in chats.read_bytes()


def test_masked_answers_take_no_part_in_the_loss(tmp_path: Path) -> None:
    """Oracle: transformers' logits, and the mean over the targets of the answer that is not masked."""
    plain = plain_model(make_config("mixtral", vocab_size=280), torch.float32)
    plain.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    imported(tmp_path / "model", tmp_path / "store")
    chat = conversation("one?", "two tiers", "three?", "experts")
    chat["messages"][1]["weight"] = 0
    settings = {
        "store": tmp_path / "store",
        "data.paths": (str(write_lines(tmp_path / "a.jsonl", [chat] * 8)),),
        "data.format": "auto",
        "data.packing": "separate",
        "finetune.seq_len": 96,
        "finetune.aux_loss_weight": 0.0,
    }
    with open_session(configuration(settings), Opening.RESUME) as trainer:
        found = trainer.step().loss
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    head = "<|start|>user\none?<|end|>\n<|start|>assistant\ntwo tiers<|end|>\n<|start|>user\nthree?<|end|>\n"
    before, answer = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (f"{head}<|start|>assistant\n", "experts<|end|>")
    )
    with torch.no_grad():
        logits = plain(torch.tensor([[*before, *answer]])).logits[0, len(before) - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(answer))
    assert found == pytest.approx(float(expected), rel=1e-5)


# The command, and what is ignored ---------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save(tmp_path / "m", "qwen3_moe", torch.bfloat16)
    return tmp_path / "m"


def test_the_command(source: Path, tmp_path: Path) -> None:
    run = done("import", source, "--store", tmp_path / "s", "--json")
    result = json.loads(run.stdout)
    assert result["total_parameters"] == Manifest.read(tmp_path / "s").total_parameters
    assert result["compute"] == ComputeDtype.BF16.value
    assert result["records"] == 16 + 4
    assert "moments start at zero and are not written" in run.stderr


@pytest.mark.parametrize("asked", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn"])
def test_an_attention_that_is_not_to_be_had_is_ignored(asked: str, source: Path, tmp_path: Path) -> None:
    """The same manifest as without it, and one line."""
    plain, _ = describe_lines(source, tmp_path / "plain")
    change_config(source, _attn_implementation=asked)
    found, lines = describe_lines(source, tmp_path / "asked")
    assert found.units == plain.units
    assert [line for line in lines if asked in line] == lines
    assert len(lines) == 1


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", '{"a": ', "[1]", "version https://git-lfs.github.com/spec/v1\n"])
def test_a_damaged_companion_is_no_reason_to_refuse(
    name: str, content: str, source: Path, tmp_path: Path
) -> None:
    write_tokenizer(source)
    (source / name).write_text(content)
    _, lines = describe_lines(source, tmp_path / "s")
    assert len(lines) == 1
    assert str(source) in lines[0]


def describe_lines(source: Path, store: Path) -> tuple[Manifest, list[str]]:
    """The manifest of an import, and what it says is ignored."""
    plans: list[ImportPlan] = []
    import_model(source, store, planned=lambda plan, account: plans.append(plan))
    return plans[0].manifest, list(plans[0].notes)
