"""A wrapped model that is trained from its store: the same bits however it is held, and what plain transformers with
torch's AdamW computes.
"""

import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import imported
from effort import share
from launcher import Ranks
from slowness import in_turns, mostly_slow
from stored_runs import attempt, configuration, train
from tiny_families import FAMILIES, make_config, plain_model
from token_cases import conversation, save_tokenizer, write_lines
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tierstore.errors import ConfigError
from tierstore.model.config import ComputeDtype
from tierstore.model.interface import Batch
from tierstore.moe.seeds import derive_seed
from tierstore.parallel import ExchangeMode, Mesh
from tierstore.train.config import TrainConfig
from tierstore.train.data import TextData
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

VOCABULARY = 256  # bytes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of each family, made once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def make(family: str) -> Path:
        directory = root / family
        if not directory.exists():
            plain_model(make_config(family, vocab_size=VOCABULARY)).save_pretrained(directory)
        return directory

    return make


Make = Callable[..., TrainConfig]


@pytest.fixture
def configure(checkpoint: Callable[[str], Path], text: Path, tmp_path: Path) -> Make:
    """A configuration over a fresh import of a family; imports that are alike are copies of one."""
    made = 0

    def make(family: str, dtype: ComputeDtype, changes: Mapping[str, Any] | None = None) -> TrainConfig:
        nonlocal made
        made += 1
        original, store = tmp_path / f"{family}-{dtype.value}", tmp_path / f"store{made}"
        if not original.exists():
            imported(checkpoint(family), original, compute=dtype)
        shutil.copytree(original, store)
        return configuration({"store": store, "data.paths": (str(text),), **(changes or {})})

    return make


# Beside plain transformers ----------------------------------------------------------------------------------


class _Plain:
    """transformers' own model and torch's AdamW; in bf16 with masters in fp32, as ours has them."""

    def __init__(self, directory: Path, config: TrainConfig, dtype: ComputeDtype) -> None:
        self._config = config
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype.torch)
        self.model.train()
        self._parameters = list(self.model.parameters())
        wide = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._masters = [parameter.detach().clone() for parameter in wide.parameters()]
        adamw = config.adamw
        self._optimizer = torch.optim.AdamW(
            self._masters, betas=adamw.betas, eps=adamw.eps, weight_decay=adamw.weight_decay, fused=True
        )
        self._balanced = getattr(self.model, "router_aux_loss_coef", 0.0) > 0

    def step(self, step: int, batches: list[Batch]) -> float:
        total = 0.0
        for master in self._masters:  # also of what no token reaches: dense AdamW
            master.grad = torch.zeros_like(master)
        for micro, batch in enumerate(batches):
            torch.manual_seed(derive_seed("step", step, micro, 0))  # for Phi-MoE, whose router draws noise
            extra = {"output_router_logits": True} if self._balanced else {}
            output = self.model(input_ids=batch.tokens_BT, use_cache=False, **extra)
            loss = self.model.loss_function(output.logits, None, VOCABULARY, shift_labels=batch.targets_BT)
            total += float(loss.detach()) / len(batches)
            if self._balanced:
                loss = loss + self.model.router_aux_loss_coef * output.aux_loss
            (loss / len(batches)).backward()
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                if parameter.grad is not None:  # added up in fp32, as ours are
                    master.grad += parameter.grad
                parameter.grad = None
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.schedule.lr_at(step)
        if self._config.clip_norm:
            torch.nn.utils.clip_grad_norm_(self._masters, self._config.clip_norm)
        self._optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                parameter.copy_(master)
        return total


@pytest.mark.parametrize("packing", ["separate", "documents"])
def test_padded_chats_have_the_gradient_norm_of_plain_transformers(packing: str, tmp_path: Path) -> None:
    """From chats on disk to the norm, in either order of micro-batches: padding takes no part in the balance loss."""
    model = plain_model(make_config("mixtral", vocab_size=288, router_aux_loss_coef=1.0)).train()
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    chats = [conversation(f"two {i}?", "expert " * (1 + i % 7)) for i in range(24)]
    path = write_lines(tmp_path / "chats.jsonl", chats)
    norms = []
    for order in ("micro", "layer"):
        store = tmp_path / order
        imported(tmp_path / "model", store, compute=ComputeDtype.FP32)
        options = {"data.format": "auto", "data.packing": packing, "data.micro_order": order}
        if order == "layer":
            options |= {
                "finetune.expert_activations": "recompute",
                "finetune.checkpoint_activations": "block",
            }
        config = configuration(
            {
                "store": store,
                "data.paths": (str(path),),
                "data.micro_batches": 2,
                "finetune.seq_len": 48,
                **options,
            }
        )
        with open_session(config, Opening.RESUME) as trainer:
            batches = [trainer.data.batch(0, micro) for micro in range(2)]
            norms.append(trainer.step().grad_norm)
    for batch in batches:  # documents one a row, as they were before packing
        found_BT = batch.tokens_BT != 0  # the tokenizer's padding
        assert not found_BT.all()
        begins = torch.arange(48).expand(2, 48) if batch.positions_BT is None else batch.positions_BT
        loss, logits = torch.zeros(()), []
        for row in range(2):
            starts = [
                *(begins[row][found_BT[row]] == 0).nonzero().flatten().tolist(),
                int(found_BT[row].sum()),
            ]
            for start, stop in itertools.pairwise(starts):
                part = slice(start, stop)
                output = model(batch.tokens_BT[row, part][None], use_cache=False, output_router_logits=True)
                targets = batch.targets_BT[row, part]
                loss = loss + torch.nn.functional.cross_entropy(output.logits[0], targets, reduction="sum")
                logits.append(output.router_logits)
        joined = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
        aux_loss = load_balancing_loss_func(joined, 8, 2)  # of tokens without any padding
        (loss / batch.step_targets + aux_loss / 2).backward()
    expected = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
    assert norms == pytest.approx([float(expected)] * 2, rel=1e-4)


#: How far losses in bf16 drift apart, relative to them, once one bit of a weight differs: torch's other kernels, without
#: AVX-512, let them go up to 1.6e-3.
_BF16_ANY = 1e-3 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 3e-3
#: Families that make much of that bit: the recurrence of linear attention, a router that drops experts below a threshold.
_BF16 = {"qwen3_next": 2e-2, "phimoe": 5e-3}


@pytest.mark.parametrize(
    ("family", "dtype"),
    mostly_slow(in_turns(FAMILIES, ComputeDtype), *itertools.product(("qwen3_moe", "gpt_oss"), ComputeDtype)),
)
def test_steps_beside_plain_transformers(
    family: str, dtype: ComputeDtype, checkpoint: Callable[[str], Path], configure: Make
) -> None:
    # No bias is moved: transformers' own loop has no such step, and it is tested by itself.
    steps = 20
    changes = {"steps": steps, "finetune.bias_update_speed": 0.0, "clip_norm": 1.0, "data.micro_batches": 2}
    config = _held(configure, family, dtype, changes | {"share": 0.25})
    plain = _Plain(checkpoint(family), config, dtype)
    data = TextData(config.data, seq_len=config.model.seq_len)
    ours, theirs = [], []
    with open_session(config, Opening.RESUME) as trainer:
        for step in range(config.steps):
            ours.append(trainer.step().loss)
            theirs.append(plain.step(step, [data.batch(step, micro) for micro in range(2)]))
        assert trainer.store.cache.residency.stats().evictions > 0
    fp32 = dtype is ComputeDtype.FP32
    bound = 1e-3 if fp32 else _BF16.get(family, _BF16_ANY)
    np.testing.assert_allclose(ours[:10], theirs[:10], rtol=1e-5 if fp32 else bound)
    np.testing.assert_allclose(ours, theirs, rtol=bound)
    assert min(ours[-5:]) < ours[0] - 0.006 * steps


# The same bits ----------------------------------------------------------------------------------------------

#: Ways to train: what is computed differs from one to the next.
MODES: dict[str, dict[str, Any]] = {
    "immediate": {},
    "micro-clip": {"data.micro_batches": 2, "clip_norm": 0.5},
    "checkpoint": {"finetune.checkpoint_activations": "block"},
    "recompute": {"finetune.expert_activations": "recompute"},
}
#: Ways to hold it; ``share`` is that of the experts' records.
HOLDS: dict[str, dict[str, Any]] = {
    "quarter": {"share": 0.25, "prefetch.depth": 2},
    "least": {"share": 0.0, "prefetch.depth": 0, "io.backend": "threads"},
    "lru": {"share": 0.3, "cache.policy": "lru", "prefetch.depth": 3, "prefetch.predictor": "all"},
    "lfu": {"share": 0.2, "cache.policy": "lfu-decay", "commit_every": 2},
    "paper": {"share": 0.5, "cache.policy": "lfu-decay", "cache.options.variant": "paper"},
}


def _held(make: Make, family: str, dtype: ComputeDtype, settings: Mapping[str, Any]) -> TrainConfig:
    from tierstore.tiers.slots import DeviceKind
    from tierstore.train.budgets import least_host_budget

    changes = dict(settings)
    share = changes.pop("share")
    config = make(family, dtype, changes)
    least = least_host_budget(config, DeviceKind.CPU)
    return replace(config, host_budget=max(least, int(share * config.model.architecture.sparse * 12)))


#: With each mode families compute in turns in fp32 and bf16, and are held in turns by each policy: a family meets each
#: mode, type and policy, and a mode each type and policy.
_HELD = [
    (family, mode, [*ComputeDtype][(number + place) % 2], ["lru", "lfu", "paper"][(number + place) % 3])
    for number, family in enumerate(["qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral"])
    for place, mode in enumerate(MODES)
]


@pytest.mark.parametrize(
    ("family", "mode", "dtype", "policy"),
    mostly_slow(_HELD, *(case for case in _HELD if case[:2] == ("deepseek_v3", "micro-clip"))),
)
def test_every_way_to_hold_it_gives_the_same_bits(
    family: str, mode: str, dtype: ComputeDtype, policy: str, configure: Make
) -> None:
    base = MODES[mode] | {"steps": 4}
    expected = train(configure(family, dtype, base))
    assert expected[2] == 0
    for name in ("quarter", "least", policy):
        stops = (2, 3) if name in ("least", "lfu") else ()
        losses, crc, evictions = train(_held(configure, family, dtype, base | HOLDS[name]), stops=stops)
        assert (losses, crc) == expected[:2], f"held as {name}"
        assert evictions > 0, f"held as {name}: nothing was evicted"


@pytest.mark.slow
def test_kills_at_random_moments_change_no_bit(configure: Make, text: Path) -> None:
    import torch.multiprocessing as multiprocessing

    steps = max(24, share(40))
    expected = train(configure("qwen3_moe", ComputeDtype.BF16, {"steps": steps}))
    changes = {"steps": steps, "host_budget": "200KiB", "commit_every": 2}
    config = configure("qwen3_moe", ComputeDtype.BF16, changes)
    settings = {**changes, "store": config.store, "data.paths": (str(text),)}
    context = multiprocessing.get_context("forkserver")  # which imports once what takes seconds
    context.set_forkserver_preload(["tierstore.hf.spec", "tierstore.train.session"])
    random_, kills = random.Random(3), 0
    while kills < share(10):
        ready = context.Event()
        process = context.Process(target=attempt, args=(settings, ready))
        process.start()
        assert ready.wait(120)
        time.sleep(random_.uniform(0.02, 0.6))
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        if process.exitcode == 0:  # the run got to its end: another one
            assert _checksum(configuration(settings)) == expected[1], f"after {kills} kills"
            fresh = configure("qwen3_moe", ComputeDtype.BF16, changes)
            settings["store"] = fresh.store
    assert train(configuration(settings))[1] == expected[1]


def _checksum(config: TrainConfig) -> int:
    with open_session(config, Opening.RESUME) as trainer:
        return trainer.store.records_crc32c()


# Ranks ------------------------------------------------------------------------------------------------------


def _import_and_train(
    mesh: Mesh, source: Path, settings: Mapping[str, Any], compute: ComputeDtype | None = None
) -> list[float]:
    from tierstore.hf.importing import ImportOptions, import_model

    import_model(source, settings["store"], ImportOptions(compute=compute), mesh=mesh)
    return train(configuration(settings), mesh=mesh)[0]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_two_ranks_follow_one(
    family: str, ranks: Ranks, checkpoint: Callable[[str], Path], configure: Make, text: Path, tmp_path: Path
) -> None:
    """Products of an expert are those of one process; sums of dense gradients and means are in the ranks' order."""
    changes = {"steps": 6, "clip_norm": 1.0, "data.batch_size": 4, "data.paths": (str(text),)}
    one = train(configure(family, ComputeDtype.FP32, changes))[0]
    settings = {**changes, "store": tmp_path / "two"}
    two = ranks.run(2, _import_and_train, checkpoint(family), settings)
    assert two[0] == two[1]
    np.testing.assert_allclose(two[0], one, rtol=1e-5)


@pytest.mark.slow
def test_rows_of_a_wrapped_model_go_in_two_steps(
    ranks: Ranks, checkpoint: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    """Four ranks on two nodes: the losses of the flat exchange."""
    changes = {"steps": 2, "clip_norm": 1.0, "data.batch_size": 4, "data.paths": (str(text),)}
    flat, two_steps = (
        ranks.run(
            4,
            _import_and_train,
            checkpoint("qwen3_moe"),
            {**changes, "store": tmp_path / mode},
            node_ranks=2,
            exchange=ExchangeMode(mode),
        )
        for mode in ("flat", "hierarchical")
    )
    assert two_steps == flat


@pytest.mark.parametrize("dtype", list(ComputeDtype))
def test_tensor_parallel_ranks_have_the_bits_of_one(
    dtype: ComputeDtype,
    ranks: Ranks,
    checkpoint: Callable[[str], Path],
    configure: Make,
    text: Path,
    tmp_path: Path,
) -> None:
    """Indexed experts, everything else alike on every rank, and norms whose sums do not depend on who holds what."""
    changes = {"steps": 4, "clip_norm": 0.5, "data.micro_batches": 2, "data.paths": (str(text),)}
    one = train(configure("qwen3_moe", dtype, changes))[0]
    settings = {**changes, "store": tmp_path / "two"}
    found = ranks.run(2, _import_and_train, checkpoint("qwen3_moe"), settings, dtype, tensor=2)
    assert found == [one, one]


def test_bf16_parameters_travel_in_bf16(configure: Make) -> None:
    config = configure("qwen3_moe", ComputeDtype.BF16, {"dense.gather": "fp32"})
    with pytest.raises(ConfigError, match=r"dense\.gather"), open_session(config, Opening.RESUME):
        pass


@pytest.mark.parametrize(
    ("family", "dtype"),
    mostly_slow(
        in_turns(FAMILIES, ComputeDtype), *itertools.product(("mixtral", "deepseek_v3"), ComputeDtype)
    ),
)
def test_layer_order_has_the_bits_of_micro_order(family: str, dtype: ComputeDtype, configure: Make) -> None:
    base = {"steps": max(2, share(3)), "data.micro_batches": 3}
    expected = train(configure(family, dtype, base))
    found = train(configure(family, dtype, {**base, "data.micro_order": "layer"}))
    assert found[:2] == expected[:2]


@pytest.mark.parametrize("dtype", list(ComputeDtype))
def test_layer_order_with_a_tied_head(dtype: ComputeDtype, text: Path, tmp_path: Path) -> None:
    """The embedding's gradient is added to the head's, micro-batch by micro-batch."""
    model = plain_model(make_config("mixtral", vocab_size=VOCABULARY, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "model")
    found = []
    for order in ("micro", "layer"):
        imported(tmp_path / "model", tmp_path / order, compute=dtype)
        settings = {"store": tmp_path / order, "data.paths": (str(text),), "steps": 3, "clip_norm": 0.5}
        found.append(train(configuration({**settings, "data.micro_batches": 3, "data.micro_order": order})))
    assert found[0][:2] == found[1][:2]
