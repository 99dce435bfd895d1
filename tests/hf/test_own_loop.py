"""Somebody else's loop over an imported model: the bits of ``tierstore train``, and errors instead of other results."""

import contextlib
import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stored_runs import configuration
from tiny_families import make_config, plain_model
from torch import Tensor

from tierstore.errors import ConfigError, StoreMissingError, StorePoisonedError
from tierstore.hf import Autocast, StepError, TieredModel, open_model
from tierstore.hf.experts import experts_modules
from tierstore.hf.importing import ImportOptions, import_model
from tierstore.model.config import ComputeDtype
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

STEPS = 3
TIGHT = "224KiB"


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], Path]:
    """The store of a tiny model, imported once."""
    root, made = tmp_path_factory.mktemp("imported"), dict[torch.dtype, Path]()

    def make(dtype: torch.dtype) -> Path:
        if dtype not in made:
            name = str(dtype).removeprefix("torch.")
            plain_model(make_config("qwen3_moe", vocab_size=256), dtype).save_pretrained(
                root / f"model-{name}"
            )
            made[dtype] = root / f"store-{name}"
            import_model(root / f"model-{name}", made[dtype])
        return made[dtype]

    return make


@pytest.fixture
def store(imported: Callable[[torch.dtype], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(imported(torch.float32), tmp_path / "store"))


@pytest.fixture
def tiered(store: Path) -> Iterator[TieredModel]:
    with open_model(store, host_budget=TIGHT) as opened:
        opened.model.train()
        yield opened


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(seed))


def loss_of(tiered: TieredModel, seed: int = 0) -> Any:
    return tiered.model(input_ids=tokens(seed), labels=tokens(seed)).loss


def records(tiered: TieredModel) -> int:
    tiered.commit()
    return tiered.parts.store.records_crc32c()


def take(tiered: TieredModel, count: int = 1) -> list[float]:
    losses = []
    for seed in range(count):
        with tiered.step(1e-3) as step:
            step.backward(loss_of(tiered, seed))
        losses.append(step.loss)
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("optimizer", [False, True], ids=["step", "optimizer"])
def test_the_bits_are_those_of_the_trainer(
    imported: Callable[[torch.dtype], Path], dtype: torch.dtype, clip: float, optimizer: bool, tmp_path: Path
) -> None:
    """Losses, norms and records, whatever the budget: the trainer's holds everything, the loop's next to nothing."""
    stores = [Path(shutil.copytree(imported(dtype), tmp_path / name)) for name in ("theirs", "ours")]
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 64)
    settings = {
        "store": stores[0],
        "data.paths": (str(text),),
        "data.micro_batches": 2,
        "finetune.seq_len": 16,
        "finetune.aux_loss_weight": 0.0,
        "clip_norm": clip,
        "schedule.lr": 1e-3,
        "schedule.warmup_steps": 2,
    }
    config = configuration(settings)
    with open_session(config, Opening.CREATE) as trainer:
        batches = [[trainer.data.batch(step, micro) for micro in range(2)] for step in range(STEPS)]
        expected = [trainer.step() for _ in range(STEPS)]
        trainer.commit()
        crc = trainer.store.records_crc32c()
    losses, norms = [], []
    with open_model(stores[1], host_budget=TIGHT, settings={"device": "cpu", "threads": 1}) as tiered:
        model = tiered.model.train()
        own = tiered.optimizer(1.0, max_grad_norm=clip or None) if optimizer else None
        for number, micros in enumerate(batches):
            total, lr = 0.0, config.schedule.lr_at(number)
            with contextlib.ExitStack() as stack:
                if own is None:
                    step = stack.enter_context(tiered.step(lr, max_grad_norm=clip or None))
                else:
                    own.param_groups[0]["lr"] = lr
                for batch in micros:
                    arguments = {"labels": batch.targets_BT, "shift_labels": batch.targets_BT}
                    loss = model(input_ids=batch.tokens_BT, use_cache=False, **arguments).loss
                    total += float(loss.detach()) / 2
                    if own is None:
                        step.backward(loss / 2)
                    else:
                        (loss / 2).backward()
                if own is not None:
                    own.step()
                    own.zero_grad()
            losses.append(total)
            norms.append(step.grad_norm if own is None else own.grad_norm)
        assert losses == [result.loss for result in expected]
        assert norms == [result.grad_norm for result in expected]
        assert tiered.position == STEPS
        assert records(tiered) == crc


def test_biases_that_balance_are_moved_as_by_the_trainer(tmp_path: Path) -> None:
    """DeepSeek-V3 and GLM4-MoE: after a step, by what its forward passes routed; not after one that was given up."""
    plain_model(make_config("deepseek_v3")).save_pretrained(tmp_path / "model")
    states = []
    for passes in (1, 2):
        with open_model(tmp_path / f"store-{passes}", tmp_path / "model", host_budget=TIGHT) as tiered:
            tiered.model.train()
            before = tiered.parts.model.state()
            with tiered.step(1e-3) as step:
                for _ in range(passes):
                    ids = tokens() % 128
                    step.backward(tiered.model(input_ids=ids, labels=ids).loss / passes)
                    with torch.no_grad():
                        tiered.model(input_ids=tokens(7) % 128)  # an evaluation counts for nothing
                if passes == 2:
                    step.abandon()
            moved = tiered.parts.model.state() != before
            assert moved is (passes == 1)
            tiered.commit()
            states.append(tiered.parts.model.state())
        with open_model(tmp_path / f"store-{passes}", host_budget=TIGHT) as tiered:
            assert tiered.parts.model.state() == states[-1]


def test_padding_moves_no_bias(tmp_path: Path) -> None:
    """DeepSeek-V3 with an attention mask, padded left and right: the loads of plain transformers without padding."""
    plain = plain_model(make_config("deepseek_v3"))
    plain.save_pretrained(tmp_path / "model")
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[0, :9], mask[1, 6:] = 0, 0
    ids = tokens() % 128
    ((_, experts),) = experts_modules(plain)
    chosen_TK: list[Tensor] = []
    experts.register_forward_pre_hook(lambda _, inputs: chosen_TK.append(inputs[1]))
    for row in range(2):
        plain(input_ids=ids[row][mask[row] > 0][None])
    load = torch.bincount(torch.cat(chosen_TK).flatten(), minlength=8)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    expected = dict(plain.named_buffers())[name] + 0.001 * torch.sign(load.sum() - load * 8)
    named = {"input_ids": ids, "attention_mask": mask}
    for number, (arguments, options) in enumerate([((), named), ((ids, mask), {})]):
        with open_model(tmp_path / f"store-{number}", tmp_path / "model", host_budget=TIGHT) as tiered:
            tiered.model.train()
            with tiered.step(1e-3) as step:
                labels = ids.masked_fill(mask == 0, -100)
                step.backward(tiered.model(*arguments, labels=labels, **options).loss)
            torch.testing.assert_close(dict(tiered.model.named_buffers())[name], expected, rtol=0, atol=1e-7)


def test_checkpointing_and_known_passes_change_no_bit(store: Path, tmp_path: Path) -> None:
    sums = []
    for number, (again, passes) in enumerate([(False, None), (True, None), (True, 2)]):
        path = Path(shutil.copytree(store, tmp_path / f"copy-{number}"))
        with open_model(path, host_budget=TIGHT) as tiered:
            if again:
                with (
                    pytest.warns(FutureWarning, match="deprecated")
                    if _deprecated()
                    else contextlib.nullcontext()
                ):
                    tiered.model.gradient_checkpointing_enable({"use_reentrant": False})
            tiered.model.train()
            for _ in range(2):
                with tiered.step(1e-3, max_grad_norm=0.1, backward_passes=passes) as step:
                    for seed in range(2):
                        step.backward(loss_of(tiered, seed))
            sums.append((step.loss, step.grad_norm, records(tiered)))
    assert sums[0] == sums[1] == sums[2]


def _deprecated() -> bool:
    from transformers import PreTrainedModel

    return hasattr(PreTrainedModel, "activation_checkpointing_enable")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_evaluation_and_generate_come_at_any_time(
    imported: Callable[[torch.dtype], Path], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Between steps, and inside of one between its passes and before its end."""
    sums = []
    for looks in (False, True):
        path = Path(shutil.copytree(imported(dtype), tmp_path / f"copy-{looks}"))
        with open_model(path, host_budget=TIGHT) as tiered:
            tiered.model.train()
            for _ in range(2):
                if looks:
                    assert look(tiered) == look(tiered)
                with tiered.step(1e-3) as step:
                    for seed in range(2):
                        if looks:
                            look(tiered)
                        step.backward(loss_of(tiered, seed))
                    if looks:
                        look(tiered)
            sums.append(records(tiered))
    assert sums[0] == sums[1]


def look(tiered: TieredModel) -> list[int]:
    tiered.model.eval()
    prompt = tokens()[:1, :4]
    text = tiered.model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert math.isfinite(loss_in_evaluation(tiered))
    tiered.model.train()
    return text[0].tolist()


def test_what_was_committed_is_there_again(store: Path) -> None:
    with open_model(store, host_budget=TIGHT) as tiered:
        tiered.model.train()
        take(tiered)
        tiered.commit()
        expected = take(tiered, 2)
    with open_model(store, host_budget=TIGHT) as tiered:
        tiered.model.train()
        assert tiered.position == 1
        assert take(tiered, 2) == expected


# Steps that are not taken -----------------------------------------------------------------------------------


def test_a_step_is_given_up(tiered: TieredModel) -> None:
    """By the loop, by an exception between passes, by a loss that is not finite: and nothing has moved."""
    take(tiered)
    before = records(tiered)
    with tiered.step(1.0) as step:
        step.backward(loss_of(tiered))
        step.abandon()
    assert step.skipped
    with pytest.raises(ZeroDivisionError), tiered.step(1.0) as step:  # noqa: PT012
        step.backward(loss_of(tiered))
        loss_of(tiered)
        raise ZeroDivisionError
    with tiered.step(1.0) as step:
        step.backward(loss_of(tiered))
        step.backward(loss_of(tiered) * math.nan)
        step.backward(loss_of(tiered))
    assert step.skipped
    assert records(tiered) == before
    assert tiered.parts.state.skipped == 3
    take(tiered)
    assert records(tiered) != before


def test_a_forward_pass_that_raises_outside_of_an_access_costs_its_step_only(tiered: TieredModel) -> None:
    before = records(tiered)
    for grad in (True, False):
        with pytest.raises(IndexError), torch.set_grad_enabled(grad), tiered.step(1.0) as step:
            step.backward(tiered.model(input_ids=torch.full((1, 4), 300), labels=tokens()).loss)
    assert records(tiered) == before
    assert math.isfinite(take(tiered)[0])


def test_a_backward_pass_that_raises_leaves_the_last_commit(store: Path) -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ZeroDivisionError

    with open_model(store, host_budget=TIGHT) as tiered:
        tiered.model.train()
        layer = tiered.model.model.layers[0].self_attn
        handle = layer.register_forward_hook(
            lambda module, given, found: (Raises.apply(found[0]), *found[1:])
        )
        with pytest.raises(ZeroDivisionError), tiered.step(1e-3) as step:
            step.backward(loss_of(tiered))
        handle.remove()
        with pytest.raises(StorePoisonedError):
            tiered.commit()
    with open_model(store, host_budget=TIGHT) as tiered:
        tiered.model.train()
        assert tiered.position == 0
        take(tiered)


# Loops that leave something out -----------------------------------------------------------------------------


def test_a_loop_that_leaves_something_out_gets_an_error(tiered: TieredModel) -> None:
    """And can go on, when it does it right."""
    model = tiered.model
    expected = loss_in_evaluation(tiered)
    before = records(tiered)
    with pytest.raises(StepError, match="training forward pass outside of a step"):
        loss_of(tiered)
    with pytest.raises(StepError, match="ends without a backward pass"), tiered.step(1.0):
        pass
    with pytest.raises(StepError, match="before the backward pass"), tiered.step(1.0):
        loss_of(tiered)
    with pytest.raises(StepError, match="needs its own backward pass"), tiered.step(1.0):
        print(loss_of(tiered), loss_of(tiered))
    with pytest.raises(StepError, match="no forward pass"), tiered.step(1.0) as step:
        step.backward(torch.ones((), requires_grad=True))
    with pytest.raises(StepError, match="does not depend"), tiered.step(1.0) as step:
        step.backward(torch.ones_like(loss_of(tiered), requires_grad=True))
    with pytest.raises(StepError, match="a step is open already"), tiered.step(1.0), tiered.step(1.0):
        pass
    with pytest.raises(StepError, match="commit: a step"), tiered.step(1.0):
        tiered.commit()
    with pytest.raises(StepError, match="ends after 1 of 2"), tiered.step(1.0, backward_passes=2) as step:
        step.backward(loss_of(tiered))
    with pytest.raises(StepError, match="a part of the model"), torch.no_grad():
        model.model.layers[0](torch.zeros(1, 2, 32))
    with pytest.raises(StepError, match="lr: expected"), tiered.step(math.nan):
        pass
    assert records(tiered) == before
    assert loss_in_evaluation(tiered) == expected


def loss_in_evaluation(tiered: TieredModel) -> float:
    with torch.no_grad():
        return float(loss_of(tiered))


def test_a_backward_pass_after_the_step(tiered: TieredModel) -> None:
    with tiered.step(1e-3) as step:
        loss = loss_of(tiered)
        loss.backward(retain_graph=True)
        step_of = step
    with pytest.raises(StepError, match="the step has ended"):
        step_of.backward(loss)
    with pytest.raises(RuntimeError, match="a second backward pass"):
        loss.backward()
    tiered.model.eval()
    late = loss_of(tiered)
    with pytest.raises(StepError, match="outside of a step"):
        late.backward()


def test_two_backward_passes_through_one_forward_pass(tiered: TieredModel) -> None:
    def twice() -> None:
        loss = loss_of(tiered)
        loss.backward(retain_graph=True)
        loss.backward()

    with pytest.raises(RuntimeError, match="add up the losses"), tiered.step(1e-3):
        twice()


def test_autocast_is_chosen_or_refused(store: Path) -> None:
    with (
        open_model(store, host_budget=TIGHT) as tiered,
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(StepError, match="autocast"),
        torch.no_grad(),
    ):
        loss_of(tiered)
    with open_model(store, host_budget=TIGHT, autocast=Autocast.ALLOWED) as tiered:
        tiered.model.train()
        with tiered.step(1e-3) as step:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(tiered)
            step.backward(loss)
        assert not step.skipped


# Optimizers -------------------------------------------------------------------------------------------------


def test_an_optimizer_opens_its_step_and_schedules_move_its_learning_rate(tiered: TieredModel) -> None:
    optimizer = tiered.optimizer(1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with pytest.raises(StepError, match="no training forward pass"):
        optimizer.step()
    for _ in range(2):
        loss = loss_of(tiered)
        optimizer.zero_grad()  # between forward and backward: nothing is lost
        loss.backward()
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 2.5e-4
    other = optimizer.state_dict()
    optimizer.load_state_dict(other)
    before = records(tiered)
    loss_of(tiered).backward()
    with pytest.raises(StepError, match="commit: a step with 0"):
        tiered.commit()
    optimizer.zero_grad()  # without step(): the step is given up
    assert not optimizer.is_open
    assert records(tiered) == before


def test_an_optimizer_that_is_used_otherwise(store: Path) -> None:
    with (  # noqa: PT012
        pytest.raises(StepError, match=r"end it first \(with optimizer.step"),
        open_model(store, host_budget=TIGHT) as tiered,
    ):
        tiered.model.train()
        optimizer = tiered.optimizer(1e-3)
        with pytest.raises(StepError, match="has one already"):
            tiered.optimizer(1e-3)
        loss_of(tiered).backward()
        optimizer.param_groups[0]["lr"] = 1e-2
        with pytest.raises(StepError, match=r"opened with 0.001 .* lr is 0.01 now"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["weight_decay"] = 0.5
        with pytest.raises(StepError, match=r"weight_decay: .* cannot change to 0.5"):
            loss_of(tiered)
        optimizer.param_groups[0]["weight_decay"] = tiered.parts.config.adamw.weight_decay
        loss_of(tiered).backward()


def test_what_would_leave_the_experts_out_is_refused(tiered: TieredModel, tmp_path: Path) -> None:
    theirs = torch.optim.SGD(tiered.model.parameters(), lr=1.0)
    with pytest.raises(StepError, match="SGD holds parameters of a tiered model"):
        theirs.step()
    state = tiered.state_dict()
    assert list(state) == ["tierstore"]
    tiered.model.load_state_dict(dict(state))
    with pytest.raises(StepError, match="tierstore import loads others"):
        tiered.model.load_state_dict({"lm_head.weight": torch.zeros(256, 32)})
    take(tiered)
    for load_state in (tiered.model.load_state_dict, tiered.load_state_dict):
        with pytest.raises(StepError, match=r"of step 0, but .* is at step 1"):
            load_state(dict(state))


def _saving() -> dict[str, Callable[[TieredModel, Path], object]]:
    """Ways to save a model into a directory, as plain transformers, accelerate, safetensors and torch have them."""
    from accelerate import Accelerator
    from safetensors.torch import save_file, save_model
    from transformers import Trainer, TrainingArguments

    from tierstore.hf import TieredCallback

    def trainer(tiered: TieredModel, directory: Path) -> None:
        arguments = TrainingArguments(output_dir=str(directory), report_to=[], use_cpu=True)
        optimizer = tiered.optimizer(1e-3, max_grad_norm=1.0)
        callbacks = [TieredCallback(tiered, optimizer)]
        Trainer(tiered.model, arguments, optimizers=(optimizer, None), callbacks=callbacks).save_model()

    def accelerated(tiered: TieredModel) -> Any:
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(tiered.model)
        return accelerator

    return {
        "Trainer.save_model": trainer,
        "save_pretrained": lambda tiered, directory: tiered.model.save_pretrained(directory),
        "save_pretrained of a part": lambda tiered, directory: tiered.model.model.save_pretrained(directory),
        "push_to_hub": lambda tiered, directory: tiered.model.push_to_hub("nobody/nothing"),
        "Accelerator.save_model": lambda tiered, to: accelerated(tiered).save_model(tiered.model, to),
        "Accelerator.save_state": lambda tiered, to: accelerated(tiered).save_state(str(to)),
        "torch.save": lambda tiered, to: torch.save(tiered.model.state_dict(), to / "model.safetensors"),
        "torch.save of a part": lambda tiered, to: torch.save(
            tiered.model.model.state_dict(), to / "model.safetensors"
        ),
        "save_file": lambda tiered, to: save_file(tiered.model.state_dict(), to / "model.safetensors"),
        "save_model": lambda tiered, to: save_model(tiered.model, str(to / "model.safetensors")),
    }


def test_no_way_to_save_a_model_touches_that_it_came_from(
    imported: Callable[[torch.dtype], Path], tmp_path: Path
) -> None:
    store = Path(shutil.copytree(imported(torch.float32), tmp_path / "store"))
    base = tmp_path / "base"
    plain_model(make_config("qwen3_moe", vocab_size=256)).save_pretrained(base)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    for name, save in _saving().items():
        with open_model(store, host_budget=TIGHT) as tiered, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(StepError, match=r"would leave out the experts: .*tierstore export"):
                save(tiered, base)
        assert {path.name: path.read_bytes() for path in base.iterdir()} == before, name


def test_checkpoints_of_trainer_take_no_model_from_its_place(store: Path, tmp_path: Path) -> None:
    """A model that lies where a checkpoint would come stays what it was; other checkpoints are no model."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from tierstore.hf import TieredCallback

    base = tmp_path / "out" / "checkpoint-2"
    plain_model(make_config("qwen3_moe", vocab_size=256)).save_pretrained(base)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=2,
        save_steps=1,
        per_device_train_batch_size=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens()]
    with open_model(store, host_budget=TIGHT) as tiered, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = tiered.optimizer(1e-3, max_grad_norm=1.0)
        trainer = Trainer(
            tiered.model,
            arguments,
            train_dataset=rows,
            optimizers=(optimizer, None),
            callbacks=[TieredCallback(tiered, optimizer)],
        )
        with pytest.raises(StepError, match="checkpoint-2: holds a model"):
            trainer.train()
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    with pytest.raises((ValueError, OSError)):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-1")
    with open_model(store, host_budget=TIGHT) as tiered:
        assert tiered.position == 1  # of the checkpoint before


def test_what_is_trained_may_not_change(tiered: TieredModel) -> None:
    """Frozen parameters would decay all the same, and those of an adapter would not move."""
    head = tiered.model.lm_head.weight
    head.requires_grad_(False)
    with pytest.raises(StepError, match=r"lm_head.weight: the trained parameters have changed"):
        take(tiered)
    head.requires_grad_(True)
    take(tiered)
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(tiered.model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with (
        pytest.raises(StepError, match=r"lora_A.* the trained parameters have changed"),
        tiered.step(1e-3) as step,
    ):
        step.backward(wrapped(input_ids=tokens(), labels=tokens()).loss)


def test_other_optimizers_and_models_are_left_alone(store: Path) -> None:
    with open_model(store, host_budget=TIGHT):
        weight = torch.nn.Parameter(torch.ones(()))
        weight.grad = torch.ones(())
        torch.optim.SGD([weight], lr=1.0).step()
        assert float(weight.detach()) == 0.0
    with open_model(store, host_budget=TIGHT) as tiered:
        model = tiered.model
    # It has no experts any more than before.
    for save in (model.state_dict, partial(model.save_pretrained, store.parent / "saved")):
        with pytest.raises(StepError, match="leave out the experts"):
            save()


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_a_model_that_was_cast_is_refused(tiered: TieredModel, kind: torch.dtype) -> None:
    for value in tiered.model.buffers():  # parameters would not fit each other; buffers would, and round
        value.data = value.to(kind)
    with pytest.raises(StepError, match="when the model was opened"), tiered.step(1e-3):
        loss_of(tiered)


def test_torch_computes_as_before_when_the_model_is_closed(store: Path) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        with open_model(store, host_budget=TIGHT):
            assert torch.are_deterministic_algorithms_enabled()
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)


def test_the_callback_of_trainer(tiered: TieredModel, tmp_path: Path) -> None:
    """What it refuses, and a step that a scaler has skipped."""
    from tierstore.hf import TieredCallback

    optimizer = tiered.optimizer(1e-3, max_grad_norm=0.5)
    callback = TieredCallback(tiered, optimizer)
    state, arguments = (
        SimpleNamespace(log_history=[]),
        SimpleNamespace(max_grad_norm=0.5, load_best_model_at_end=False),
    )
    callback.on_train_begin(arguments, state, None, optimizer=SimpleNamespace(optimizer=optimizer))
    with pytest.raises(StepError, match="with the optimizer of this callback"):
        callback.on_train_begin(arguments, state, None, optimizer=torch.optim.SGD([torch.ones(1)], 1.0))
    arguments.max_grad_norm = 1.0
    with pytest.raises(StepError, match=r"max_grad_norm: 1.0 in the training arguments, but 0.5"):
        callback.on_train_begin(arguments, state, None, optimizer=optimizer)
    arguments.max_grad_norm, arguments.load_best_model_at_end = 0.5, True
    with pytest.raises(StepError, match="load_best_model_at_end"):
        callback.on_train_begin(arguments, state, None, optimizer=optimizer)
    with pytest.raises(StepError, match="a substep ended with no step open"):
        callback.on_substep_end(arguments, state, None)
    before = records(tiered)
    loss_of(tiered).backward()
    callback.on_substep_end(arguments, state, None)
    loss_of(tiered).backward()
    callback.on_pre_optimizer_step(arguments, state, None)
    callback.on_optimizer_step(arguments, state, None)  # and optimizer.step() was not called
    assert not optimizer.is_open
    assert records(tiered) == before
    loss_of(tiered).backward()
    optimizer.step()
    callback.on_optimizer_step(arguments, state, None)
    logs: dict[str, Any] = {"grad_norm": 0.0}
    callback.on_log(arguments, state, None, logs=logs)
    assert logs["grad_norm"] == optimizer.grad_norm > 0
    callback.on_step_end(arguments, state, SimpleNamespace(should_save=False))
    with pytest.raises(StepError, match="save_pretrained would leave out the experts"):
        tiered.model.save_pretrained(tmp_path / "checkpoint-1", state_dict=None)
    callback.on_step_end(arguments, state, SimpleNamespace(should_save=True))
    tiered.model.save_pretrained(tmp_path / "checkpoint-1", state_dict=None)
    assert [path.name for path in (tmp_path / "checkpoint-1").iterdir()] == ["model.safetensors"]
    callback.on_save(arguments, state, None)
    assert tiered.parts.store.committer.state


# Opening ----------------------------------------------------------------------------------------------------


def test_a_model_directory_is_imported_on_the_way(tmp_path: Path) -> None:
    plain_model(make_config("mixtral")).save_pretrained(tmp_path / "model")
    with (
        pytest.raises(StoreMissingError, match="no imported model"),
        open_model(tmp_path / "store", host_budget=TIGHT),
    ):
        pass
    for position in (0, 1):
        with open_model(tmp_path / "store", tmp_path / "model", host_budget=TIGHT) as tiered:
            assert tiered.position == position
            tiered.model.train()
            with tiered.step(1e-3) as step:
                step.backward(tiered.model(input_ids=tokens() % 128, labels=tokens() % 128).loss)
            tiered.commit()
    plain_model(make_config("olmoe")).save_pretrained(tmp_path / "other")
    for source, options in (("other", None), ("model", ImportOptions(compute=ComputeDtype.BF16))):
        with (
            pytest.raises(ConfigError, match=r"import of another checkpoint|was imported to compute in fp32"),
            open_model(tmp_path / "store", tmp_path / source, host_budget=TIGHT, options=options),
        ):
            pass
