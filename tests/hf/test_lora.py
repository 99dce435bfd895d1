"""LoRA of an imported model: peft on transformers' own model is the oracle, from the first step to the exported adapter."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import imported, save, tensors_of
from launcher import Ranks
from lora_cases import ADAMW, LR, batch, configured, quiet_peft, session, take, train_ranks
from tiny_families import make_config, plain_model
from torch import Tensor

from tierstore.capabilities import Capability
from tierstore.errors import ConfigError
from tierstore.hf.adapters import export_adapter
from tierstore.hf.exporting import export
from tierstore.hf.loading import refuse_adapters, target_modules
from tierstore.hf.manifest import Weights
from tierstore.model.store_schema import pair_key
from tierstore.moe.lora import LoraConfig, LoraTargets, PairShape
from tierstore.prefetch.gradients import ExpertGradients
from tierstore.store.config import IoBackendName, IoConfig
from tierstore.store.format import MomentFormat
from tierstore.tiers.slots import DeviceKind
from tierstore.train.budgets import least_host_budget
from tierstore.train.files import DataConfig, DataFormat, MicroOrder
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session
from tierstore.train.stepping import SessionParts, Stepper

RANK, LAYERS = 3, 2
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "deepseek_v3", "qwen3_next")


class Oracle:
    """The same adapter by peft on transformers' own model, stepped by torch."""

    def __init__(self, directory: Path, lora: LoraConfig, parts: SessionParts) -> None:
        import peft
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        experts = {name.split(".", 3)[3] for name, _ in model.named_modules() if name.endswith(".experts")}
        (path,) = experts
        config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.scaled_alpha,
            target_modules=target_modules(model, lora) if lora.attention else [],
            target_parameters=[f"{path}.{name}" for name in ("gate_up_proj", "down_proj")]
            if lora.experts
            else None,
            task_type="CAUSAL_LM",
        )
        with quiet_peft():
            self.model = peft.get_peft_model(model, config)
        self.model.eval()
        self._begin_as(parts, lora)
        own = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            own, lr=LR, betas=ADAMW.betas, eps=ADAMW.eps, weight_decay=ADAMW.weight_decay
        )
        self.clip = parts.config.clip_norm
        self._own = own

    @torch.no_grad()
    def _begin_as(self, parts: SessionParts, lora: LoraConfig) -> None:
        values = dict(parts.model.module.named_parameters())
        for name, parameter in self.model.named_parameters():
            ours = name.removeprefix("base_model.model.")
            if parameter.requires_grad and ".experts." not in name:
                parameter.copy_(values[ours])
        for name, stacked in stacked_pairs(parts, lora, self.model):
            self.model.get_parameter(name).copy_(stacked)

    def step(self, number: int) -> float:
        given = batch(number)
        self.optimizer.zero_grad()
        for parameter in self._own:
            parameter.grad = torch.zeros_like(parameter)
        logits = self.logits(given.tokens_BT)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), given.targets_BT.flatten())
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self._own, self.clip)
        self.optimizer.step()
        return float(loss.detach())

    def logits(self, tokens_BT: Tensor) -> Tensor:
        return self.model(input_ids=tokens_BT, use_cache=False).logits.float()


def stacked_pairs(parts: SessionParts, lora: LoraConfig, model: Any) -> Iterator[tuple[str, Tensor]]:
    """What each parameter of experts' pairs in peft's ``model`` must be."""
    shape = PairShape.of(parts.config.model.expert_shape, lora)
    for layer in parts.config.model.moe_layers if lora.experts else ():
        stacked = stack_pairs(parts, shape, layer)
        for name, _ in model.named_parameters():
            if f"layers.{layer}." in name and ".experts." in name and ".lora_" in name:
                which = "inner" if ".base_layer." in name else "down"
                yield name, stacked[which, "a" if "lora_A" in name else "b"]


def stack_pairs(parts: SessionParts, shape: PairShape, layer: int) -> dict[tuple[str, str], Tensor]:
    """The pairs of a layer as peft stacks them: A of all experts one below another, B's columns expert by expert."""
    parts.experts.gradients.step_pending()
    every = []
    for expert in range(parts.config.model.experts):
        record = parts.store.record(pair_key(layer, expert))
        parts.store.optimizer.behind(record)
        (section,) = read_weights(parts, pair_key(layer, expert))
        every.append(shape.views(section))
    return {
        ("inner", "a"): torch.cat([views.inner_a for views in every]),
        ("inner", "b"): torch.stack([views.inner_b for views in every], dim=-1).flatten(1),
        ("down", "a"): torch.cat([views.down_a for views in every]),
        ("down", "b"): torch.stack([views.down_b for views in every], dim=-1).flatten(1),
    }


def read_weights(parts: SessionParts, key: str) -> list[Tensor]:
    from tierstore.store.fetching import begin_fetch
    from tierstore.store.format import Group

    with begin_fetch(parts.store, [key], [Group.WEIGHTS]) as lease:
        parts.store.wait(lease.tickets)
        return [torch.from_numpy(lease[key].copy("weight"))]


@pytest.fixture(scope="module")
def frozen_stores(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes stores of frozen tiny models: the directory of the model, and of a fresh store."""
    saved: dict[str, Path] = {}
    made = 0

    def make(family: str, **options: Any) -> tuple[Path, Path]:
        nonlocal made
        made += 1
        if family not in saved:
            saved[family] = tmp_path_factory.mktemp(family)
            # Its experts matter, and its logits are no larger than those of a trained one.
            plain_model(make_config(family)).save_pretrained(saved[family])
        store = tmp_path_factory.mktemp("stores") / str(made)
        imported(saved[family], store, weights=Weights.FROZEN, **options)
        return saved[family], store

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_five_steps_follow_peft(frozen_stores: Any, family: str) -> None:
    directory, store = frozen_stores(family)
    lora = LoraConfig(rank=RANK, seed=4)
    with session(store, lora) as parts:
        units = parts.model.dense_units()
        counts = [sum(parameter.numel() for parameter in parameters) for _, parameters in units]
        assert list(parts.config.spec.adapter_units) == counts
        oracle = Oracle(directory, lora, parts)
        for step in range(5):
            assert take(parts, step) == pytest.approx(oracle.step(step), rel=2e-5)
        compare(parts, oracle, lora, 2e-5)


def compare(parts: SessionParts, oracle: Oracle, lora: LoraConfig, tolerance: float) -> None:
    """Every parameter of every pair."""
    wanted = dict(oracle.model.named_parameters())
    for unit, (_, parameters) in enumerate(parts.model.dense_units()):
        for parameter, value in zip(parameters, parts.dense.whole(unit), strict=True):
            parameter.data = value
    for name, parameter in parts.model.module.named_parameters():
        if parameter.requires_grad:
            difference = (parameter - wanted[f"base_model.model.{name}"]).abs().max()
            assert difference <= tolerance, name
    for name, found in stacked_pairs(parts, lora, oracle.model):
        assert (found - wanted[name]).abs().max() <= tolerance, name


@torch.no_grad()
def logits_of(model: Any, tokens_BT: Tensor) -> Tensor:
    model.eval()
    return model(input_ids=tokens_BT, use_cache=False).logits.float()


def load_plain(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_exported_adapter_and_the_merged_model_give_the_same_logits(
    frozen_stores: Any, family: str, tmp_path: Path
) -> None:
    """Trained with gradients pending when the commit comes; no expert got a token in every step."""
    directory, store = frozen_stores(family)
    with session(store, LoraConfig(rank=RANK, seed=1), clip=0.3) as parts:
        for step in range(3):
            take(parts, step)
        Stepper(parts).commit()
        Stepper(parts).begin_forward()
        tokens = batch(9).tokens_BT
        trained = logits_of(parts.model.module, tokens)
    report = export_adapter(store, tmp_path / "adapter")
    assert report.step == 3
    import peft

    plain = load_plain(directory)
    before = logits_of(plain, tokens)
    with quiet_peft():
        adapted = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    size = before.abs().max()
    assert (trained - before).abs().max() > 1e-3 * size, "the adapter does something"
    assert (logits_of(adapted, tokens) - trained).abs().max() <= 2e-6 * size
    exported = export(store, tmp_path / "merged")
    assert any("merged" in note for note in exported.notes)
    merged = load_plain(tmp_path / "merged")
    with quiet_peft():
        wanted = dict(adapted.merge_and_unload().named_parameters())
    for name, parameter in merged.named_parameters():
        assert torch.allclose(parameter, wanted[name], rtol=1e-6, atol=1e-7), name
    # A sum W + B A is rounded once more than W x + B (A x) is.
    assert (logits_of(merged, tokens) - trained).abs().max() <= 5e-6 * size


@pytest.mark.parametrize("targets", [LoraTargets.ATTENTION, LoraTargets.EXPERTS])
def test_attention_alone_and_experts_alone(frozen_stores: Any, targets: LoraTargets, tmp_path: Path) -> None:
    """Clipped over both; in memory for the smallest that a run starts with; exported, peft loads it."""
    import peft

    directory, store = frozen_stores("qwen3_moe")
    lora = LoraConfig(rank=RANK, targets=targets)
    least = least_host_budget(configured(store, lora), DeviceKind.CPU)
    with session(store, lora, clip=0.05, budget=least) as parts:
        assert (type(parts.experts.gradients) is ExpertGradients) == (targets is LoraTargets.ATTENTION)
        oracle = Oracle(directory, lora, parts)
        for step in range(4):
            assert take(parts, step) == pytest.approx(oracle.step(step), rel=2e-5)
        compare(parts, oracle, lora, 2e-5)
        Stepper(parts).commit()
        tokens = batch(9).tokens_BT
    export_adapter(store, tmp_path / "adapter")
    with quiet_peft():
        adapted = peft.PeftModel.from_pretrained(load_plain(directory), str(tmp_path / "adapter"))
    oracle.model.eval()
    with torch.no_grad():
        assert (logits_of(adapted, tokens) - oracle.logits(tokens)).abs().max() < 1e-4


def test_chosen_layers_of_attention(frozen_stores: Any) -> None:
    _, store = frozen_stores("qwen3_moe")
    lora = LoraConfig(rank=RANK, targets=LoraTargets.ATTENTION, modules=("q_proj", "v_proj"))
    with session(store, lora) as parts:
        names = {name for name, part in parts.model.module.named_parameters() if part.requires_grad}
        assert len(names) == 2 * 2 * LAYERS
        assert all(".q_proj.lora_" in name or ".v_proj.lora_" in name for name in names)
        units = parts.model.dense_units()
        assert [len(parameters) for _, parameters in units] == [0, 4, 4, 0]


@pytest.mark.parametrize("moments", [MomentFormat.FP32, MomentFormat.INT8])
def test_bits_do_not_depend_on_memory_nor_on_where_it_was_cut(
    moments: MomentFormat, frozen_stores: Any
) -> None:
    ends = []
    mapped = IoConfig(backend=IoBackendName.PMEM, mapped_weights=Capability.ON)
    for budget, cut, io in ((4 << 20, False, None), (0, False, None), (0, True, None), (0, True, mapped)):
        _, store = frozen_stores("mixtral")
        lora = LoraConfig(rank=RANK)
        budget = budget or least_host_budget(configured(store, lora, moments=moments), DeviceKind.CPU)
        losses = []
        for steps in [range(2), range(2, 4)] if cut else [range(4)]:
            with session(store, lora, budget=budget, clip=0.2, moments=moments, io=io) as parts:
                losses += [take(parts, step) for step in steps]
                Stepper(parts).commit()
                crc = parts.store.records_crc32c()
                assert (parts.store.mapped.leases > 0) is (io is mapped)
        ends.append((losses, crc))
    assert ends[0] == ends[1] == ends[2] == ends[3]


@pytest.mark.parametrize("targets", list(LoraTargets))
@pytest.mark.parametrize("clip", [0.0, 0.2], ids=["immediate", "clip"])
def test_layer_order_has_the_bits_of_micro_order(
    frozen_stores: Any, targets: LoraTargets, clip: float, text: Path
) -> None:
    """Pairs of both kinds, beside frozen experts that one lease serves all micro-batches with."""
    found = []
    for order in MicroOrder.MICRO, MicroOrder.LAYER:
        _, store = frozen_stores("qwen3_moe")
        data = DataConfig(
            paths=(str(text),), format=DataFormat.BYTES, batch_size=2, micro_batches=3, micro_order=order
        )
        config = configured(store, LoraConfig(rank=RANK, targets=targets), clip=clip)
        config = replace(config, host_budget=2 * least_host_budget(config, DeviceKind.CPU), data=data)
        with open_session(config, Opening.RESUME) as trainer:
            losses = [trainer.step().loss for _ in range(3)]
            trainer.commit()
            found.append((losses, trainer.store.records_crc32c()))
    assert found[0] == found[1]


def test_in_bf16_the_base_is_bf16_and_is_never_written(tmp_path: Path) -> None:
    save(tmp_path / "model", "qwen3_moe", torch.bfloat16)
    imported(tmp_path / "model", tmp_path / "store", weights=Weights.FROZEN)
    lora = LoraConfig(rank=RANK)
    least = least_host_budget(configured(tmp_path / "store", lora), DeviceKind.CPU)
    extents = tmp_path / "store" / "extents"
    before = {path.name: path.read_bytes() for path in extents.iterdir()}
    with session(tmp_path / "store", lora, budget=least) as parts:
        frozen = [part for part in parts.model.module.parameters() if not part.requires_grad]
        assert {part.dtype for part in frozen} == {torch.bfloat16}
        trained = [part for part in parts.model.module.parameters() if part.requires_grad]
        assert {part.dtype for part in trained} == {torch.float32}
        losses = [take(parts, 0) for _ in range(6)]
        Stepper(parts).commit()
    assert losses[-1] < losses[0]
    assert all((extents / name).read_bytes() == content for name, content in before.items())


def test_peft_told_to_adapt_leased_experts_is_refused() -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(ConfigError, match=r"mlp\.experts\.down_proj: leased experts are no parameters"):
        refuse_adapters(SimpleNamespace(peft_config={"default": config}), ())
    refuse_adapters(
        SimpleNamespace(peft_config={"default": peft.LoraConfig(r=2, target_modules=["q_proj"])}), ()
    )


def test_so_is_an_adapter_that_was_put_on_a_leased_model(frozen_stores: Any) -> None:
    """peft itself only warns, where it adapts something else as well."""
    import peft

    _, store = frozen_stores("qwen3_moe")
    told = peft.LoraConfig(r=2, target_modules=["o_proj"], target_parameters=["mlp.experts.down_proj"])
    with session(store, LoraConfig(rank=2, targets=LoraTargets.EXPERTS)) as parts:
        Stepper(parts).begin_forward()
        with quiet_peft(), pytest.warns(match="no parameter was matched"):
            peft.inject_adapter_in_model(told, parts.model.module)
        with pytest.raises(ConfigError, match="peft would adapt nothing"), torch.no_grad():
            parts.model.run(batch(0))


def test_two_ranks_as_one_process(frozen_stores: Any, ranks: Ranks, tmp_path: Path) -> None:
    """Each has half of the experts, of their pairs and of attention's pairs, and all of the frozen dense parameters. One
    adapter comes out of both stores.
    """
    directory, store = frozen_stores("qwen3_moe")
    lora = LoraConfig(rank=RANK)
    with session(store, lora, clip=0.2) as parts:
        expected = [take(parts, step) for step in range(4)]
        Stepper(parts).commit()
    first, second = ranks.run(2, train_ranks, directory, tmp_path / "two", lora, 4, 2)
    assert first == second == pytest.approx(expected, rel=1e-5)
    for number, made in enumerate((store, tmp_path / "two")):
        export_adapter(made, tmp_path / f"adapter-{number}")
    one, two = (tensors_of(tmp_path / f"adapter-{number}") for number in (0, 1))
    assert one.keys() == two.keys()
    for name, values in one.items():
        assert (values - two[name]).abs().max() <= 2e-5, name
