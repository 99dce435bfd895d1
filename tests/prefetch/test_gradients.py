"""What becomes of gradients: by hand, and against ``torch.optim.AdamW``."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tierstore.errors import StoreError, StorePoisonedError
from tierstore.model.config import ComputeDtype
from tierstore.prefetch import StepTiming
from tierstore.prefetch.program import GradientState
from tierstore.store import Inactive
from tierstore.tiers.slots import SlotGradient

LR = 0.01
MakeRig = Callable[..., Any]


def filled(value: float) -> torch.Tensor:
    return torch.full((1024,), value)


def stepped(weight: torch.Tensor, gradients: list[torch.Tensor], adamw: Any) -> torch.Tensor:
    """``weight`` after one AdamW step for each gradient."""
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW(
        [parameter], lr=LR, betas=adamw.betas, eps=adamw.eps, weight_decay=adamw.weight_decay
    )
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("room", [8, 1.2], ids=["all in memory", "one at a time"])
def test_immediate_steps_as_soon_as_a_gradient_is_complete(make_rig: MakeRig, room: float) -> None:
    rig = make_rig(room=room)
    adamw = rig.store.adamw
    with rig.store.optimizer_step(LR):
        rig.experts.begin_micro(index=0, count=1)
        seen = rig.forward(0, 1, 3)
        assert torch.equal(seen[1], rig.initial(0, 1))
        rig.forward(2, 0)
        rig.backward(2, {0: filled(3.0)})
        rig.backward(0, {1: filled(1.0), 3: filled(-2.0)})
        # Layer 0 is stepped already, and the norm is known: 1024 * (9 + 1 + 4).
        assert rig.store.record("0.1").step == 1
        assert rig.experts.gradients.sum_of_squares() == 1024 * 14.0
    close(rig.weight(0, 1), stepped(rig.initial(0, 1), [filled(1.0)], adamw))
    close(rig.weight(0, 3), stepped(rig.initial(0, 3), [filled(-2.0)], adamw))
    # Nobody reached expert 2: it is caught up with a gradient of zero.
    close(rig.weight(0, 2), stepped(rig.initial(0, 2), [filled(0.0)], adamw))


@pytest.mark.parametrize("timing", list(StepTiming))
@pytest.mark.parametrize("room", [8, 1.2], ids=["all in memory", "one at a time"])
def test_micro_batches_add_up(make_rig: MakeRig, timing: StepTiming, room: float) -> None:
    """Expert 0 in both, 1 only in the first, 2 only in the last."""
    rig = make_rig(timing, room=room)
    adamw = rig.store.adamw
    scale = 1.0
    with rig.store.optimizer_step(LR):
        for index, gradients in enumerate(
            [{0: filled(1.0), 1: filled(5.0)}, {0: filled(2.0), 2: filled(-1.0)}]
        ):
            rig.experts.begin_micro(index=index, count=2)
            rig.forward(0, *gradients)
            rig.backward(0, gradients)
        assert rig.experts.gradients.sum_of_squares() == 1024 * (9.0 + 25.0 + 1.0)
        if timing is StepTiming.DEFERRED:
            assert [rig.store.record(f"0.{expert}").step for expert in range(3)] == [0, 0, 0]
            scale = 0.5
            rig.experts.gradients.apply(scale)
    rig.experts.gradients.step_pending()
    for expert, total in enumerate([3.0, 5.0, -1.0, 0.0]):
        close(rig.weight(0, expert), stepped(rig.initial(0, expert), [filled(total * scale)], adamw))


@pytest.mark.parametrize("timing", list(StepTiming))
@pytest.mark.parametrize("slots", [None, 2], ids=["in place", "copied"])
@pytest.mark.parametrize("count", [1, 2])
def test_products_in_bf16_have_the_bits_of_their_sums(
    make_rig: MakeRig, timing: StepTiming, slots: int | None, count: int
) -> None:
    """Also where two micro-batches add up in the host cache, which spills."""
    found, nbytes = [], []
    for gradient in SlotGradient:
        rig = make_rig(timing, room=1.2, slots=slots, compute=ComputeDtype.BF16, gradient=gradient)
        random = torch.Generator().manual_seed(0)
        with rig.store.optimizer_step(LR):
            for index in range(count):
                rig.experts.begin_micro(index=index, count=count)
                rig.forward(0, 0, 1)
                products = {expert: torch.randn(1024, generator=random).bfloat16() for expert in (0, 1)}
                rig.backward(0, products)
            squares = rig.experts.gradients.squares()
            if timing is StepTiming.DEFERRED:
                rig.experts.gradients.apply(0.3)
        rig.experts.gradients.step_pending()
        found.append((squares, rig.opened.records_crc32c()))
        nbytes.append(rig.tier.slots.gradient_content_bytes)
    assert found[0] == found[1]
    assert nbytes == [4096, 2048]


def test_deferred_steps_come_before_the_next_use(make_rig: MakeRig) -> None:
    rig = make_rig(StepTiming.DEFERRED, room=1.2)
    adamw = rig.store.adamw
    with rig.store.optimizer_step(LR):
        rig.experts.begin_micro(index=0, count=1)
        rig.forward(0, 0, 1)
        rig.backward(0, {0: filled(1.0), 1: filled(2.0)})
        assert rig.experts.gradients.sum_of_squares() == 1024 * 5.0
        rig.experts.gradients.apply(0.25)
    assert rig.store.record("0.0").step == 0
    # The next step is open when these are taken, and they are steps of the one before.
    with rig.store.optimizer_step(100.0) as step:
        rig.experts.begin_micro(index=0, count=1)
        seen = rig.forward(0, 0, 2)
        step.abandon()
    close(seen[0], stepped(rig.initial(0, 0), [filled(0.25)], adamw))
    close(seen[2], stepped(rig.initial(0, 2), [filled(0.0)], adamw))
    # Expert 1 was not asked for, and its gradient does not outlive the layer's pass.
    assert rig.store.record("0.1").step == 1
    assert rig.experts.program.gradient(0, 1) is GradientState.NONE


def test_discarded_gradients_leave_no_trace(make_rig: MakeRig) -> None:
    rig = make_rig(StepTiming.DEFERRED, room=1.2)
    adamw = rig.store.adamw
    for total in (math.inf, 1.0):
        with rig.store.optimizer_step(LR) as step:
            rig.experts.begin_micro(index=0, count=1)
            rig.forward(0, 0, 1)
            rig.backward(0, {0: filled(total), 1: filled(total)})
            squares = rig.experts.gradients.sum_of_squares()
            if math.isfinite(squares):
                rig.experts.gradients.apply(1.0)
            else:
                rig.experts.gradients.discard()
                step.abandon()
        if not math.isfinite(squares):
            assert rig.experts.program.gradient(0, 0) is GradientState.NONE
    rig.experts.gradients.step_pending()
    for expert in (0, 1):
        close(rig.weight(0, expert), stepped(rig.initial(0, expert), [filled(1.0)], adamw))


def test_several_steps_with_sleep(make_rig: MakeRig) -> None:
    rig = make_rig(room=1.2)
    adamw = rig.store.adamw
    for step in range(6):
        active = 0 if step in (0, 5) else 1
        with rig.store.optimizer_step(LR):
            rig.experts.begin_micro(index=0, count=1)
            rig.forward(0, active)
            rig.backward(0, {active: filled(1.0)})
    gradients = [filled(float(step in (0, 5))) for step in range(6)]
    close(rig.weight(0, 0), stepped(rig.initial(0, 0), gradients, adamw))
    gradients = [filled(float(0 < step < 5)) for step in range(6)]
    close(rig.weight(0, 1), stepped(rig.initial(0, 1), gradients, adamw))


@pytest.mark.parametrize("inactive", list(Inactive))
def test_deferred_steps_equal_immediate_ones_bit_for_bit(make_rig: MakeRig, inactive: Inactive) -> None:
    """Each with the learning rate of its own step, although the next step is open when it is taken."""
    bits = []
    for timing in StepTiming:
        rig = make_rig(timing, room=1.2, inactive=inactive)
        for number, active in enumerate([(0, 1), (1, 2), (0,), (0, 1, 2)]):
            with rig.store.optimizer_step(LR * (number + 1)):
                rig.experts.begin_micro(index=0, count=1)
                rig.forward(0, *active)
                rig.backward(0, {expert: filled(number + expert + 1.0) for expert in active})
                if timing is StepTiming.DEFERRED:
                    rig.experts.gradients.apply(1.0)
        rig.experts.gradients.step_pending()
        bits.append([rig.weight(0, expert) for expert in range(4)])
    assert all(torch.equal(one, other) for one, other in zip(*bits, strict=True))


def backward_of_expert_0(rig: Any, times: int = 1) -> None:
    for _ in range(times):
        rig.experts.begin_micro(index=0, count=1)
        rig.forward(0, 0)
        rig.backward(0, {0: filled(1.0)})


def in_a_step(rig: Any, call: Callable[[], None]) -> None:
    with rig.store.optimizer_step(LR):
        call()


def test_a_loop_that_opens_no_step_gets_an_error(make_rig: MakeRig) -> None:
    with pytest.raises(StoreError, match="no optimizer step is open"):
        backward_of_expert_0(make_rig())


def test_a_loop_that_applies_a_norm_outside_a_step_gets_an_error(make_rig: MakeRig) -> None:
    rig = make_rig(StepTiming.DEFERRED)
    backward_of_expert_0(rig)
    with pytest.raises(StoreError, match="no optimizer step is open"):
        rig.experts.gradients.apply(1.0)


def test_a_loop_that_does_not_take_what_waited_gets_an_error(make_rig: MakeRig) -> None:
    """The next norm is applied before the layer's next pass has taken the gradients of the last one."""
    rig = make_rig(StepTiming.DEFERRED)
    in_a_step(rig, lambda: (backward_of_expert_0(rig), rig.experts.gradients.apply(1.0)))
    with pytest.raises(StoreError, match="gradients of optimizer step 1 still wait"):
        in_a_step(rig, lambda: rig.experts.gradients.apply(1.0))


def test_a_loop_that_takes_a_step_twice_gets_an_error(make_rig: MakeRig) -> None:
    rig = make_rig()
    with pytest.raises(StoreError, match="cannot take step 1"):
        in_a_step(rig, lambda: backward_of_expert_0(rig, times=2))
    with pytest.raises(StorePoisonedError, match="optimizer step 1 was cut short"):
        rig.opened.commit()
