"""Steps through pipeline stages: 1F1B by ``torch.distributed.pipelining``, over layers with leased experts.

``Schedule1F1B`` sends, receives and calls; ``_Stage`` connects it to the stage's own passes. Pitfalls of torch 2.13:

* Without static ``input_args`` and ``output_args`` the first step begins with extra passes, which an expert source would
  count.
* ``scale_grads`` divides ``.grad``, so it would miss experts: the objective includes the micro-batch's share instead.
* It allocates buffers for all micro-batches. Here each is allocated when its message is due, and dropped after the
  backward pass, so that there are no more buffers than micro-batches in flight.
* It wraps a pass's exception in a RuntimeError, which is unwrapped here; any other RuntimeError is a failed message.

Each message has a small companion: its arrival time, if the link is limited, and whether the losses up to there are
finite. Backward messages carry the last stage's verdict instead. So every stage knows whether the step is taken before its
last backward pass, which may step experts. Then come values of the model itself: forward for the next stage, backward
from the last stage for all others.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tierstore.cache.access import Phase
from tierstore.errors import PeerError
from tierstore.links import wait_until
from tierstore.model.interface import Batch, ModelOutput, active_experts
from tierstore.model.stage import StageModule
from tierstore.parallel import Channel, Collective, RankGroup
from tierstore.prefetch.program import Finals
from tierstore.prefetch.schedule import MicroPass
from tierstore.stats import Cause, StallLedger, Tier
from tierstore.timeline import TimelineSink, Track
from tierstore.train.stepping import OpenStep

#: The companion of a message, int64, before the model's values: its arrival time, and whether all losses so far are
#: finite.
_BESIDE = 2


class StagePipeline:
    """Takes the micro-batches of steps through this rank's stage, until ``close``. One thread.

    ``agree`` returns the loss of the last stage's output over all data ranks, None if it is not finite; a collective of
    the stage.
    """

    def __init__(
        self,
        model: StageModule,
        group: RankGroup,
        device: torch.device,
        *,
        ledger: StallLedger,
        timeline: TimelineSink,
        agree: Callable[[ModelOutput, bool], float | None],
    ) -> None:
        self._model = model
        self._border = model.border
        self._group = group
        self._device = device
        self._ledger = ledger
        self._timeline = timeline
        self._agree = agree
        self._driver: tuple[tuple[int, ...], _Stage, Schedule1F1B] | None = None
        self._open: _OpenPasses | None = None
        #: The most micro-batches whose activations were held at a time, and the passes of the last step.
        self.most_held = 0
        self.log: list[MicroPass] = []

    def close(self) -> None:
        """Drops the communicator, whose threads end with its last reference; no step is possible afterwards."""
        if self._driver is not None:
            # torch's stage and schedule refer to each other, so that they would keep it until a garbage collection.
            self._driver[1].group = None
            self._driver = None

    def run(
        self, step: OpenStep, position: int, batches: Sequence[Batch]
    ) -> tuple[Sequence[float] | None, int]:
        """Forward and backward passes of ``batches``, the micro-batches of step ``position``. A collective of all stages.

        Returns the losses of the micro-batches, means over data ranks (None if one is not finite), and the number of
        experts that got tokens, over all layers; the same on all stages. Raises PeerError, and the exceptions of passes.
        """
        self._open = passes = _OpenPasses(step, position, batches)
        self.log = []
        stage, schedule = self._schedule(batches)
        tokens = torch.cat([batch.tokens_BT for batch in batches])
        losses: list[Tensor] | None = [] if self._border.ends else None
        try:
            with self._waiting():
                schedule.step(
                    *([tokens] if self._border.begins else []),
                    target=torch.arange(len(batches)) if self._border.ends else None,
                    losses=losses,
                    return_outputs=False,
                )
        except RuntimeError as error:
            if passes.failure is None:
                raise self._group.explained(Collective.SEND, error) from error
            raise passes.failure from None
        finally:
            self._open = None
            stage.clear()
        return self._agreed(passes)

    def _agreed(self, passes: _OpenPasses) -> tuple[Sequence[float] | None, int]:
        """Sends the last stage's losses, and each stage's number of active experts, to all stages."""
        count = len(passes.batches)
        told = torch.zeros(count + 2, dtype=torch.float64)
        if self._border.ends:
            told[:count] = torch.tensor(passes.losses, dtype=torch.float64)
            told[count] = float(passes.finite)
        told[count + 1] = active_experts(passes.loads)
        with self._ledger.stall(layer=None, tier=Tier.RANKS, cause=Cause.AGREEMENT):
            self._group.all_reduce(told).wait()
        *losses, finite, active = told.tolist()
        return losses if finite else None, int(active)

    def _schedule(self, batches: Sequence[Batch]) -> tuple[_Stage, Schedule1F1B]:
        """The schedule for micro-batches of this shape, which all share."""
        shape = (len(batches), *batches[0].tokens_BT.shape)
        if self._driver is not None and self._driver[0] == shape:
            return self._driver[1:]
        tokens = torch.empty(shape[1:], dtype=torch.long)
        stream_shape = (*shape[1:], self._border.width)
        stream = torch.empty(stream_shape, dtype=self._border.dtype, requires_grad=True)
        made = torch.empty((), requires_grad=True) if self._border.ends else stream
        stage = _Stage(
            _Compute(self),
            self._group,
            self._device,
            gives=(tokens if self._border.begins else stream,),
            makes=(made,),
            beside={
                Phase.FORWARD: _BESIDE + self._border.forward_values,
                Phase.BACKWARD: _BESIDE + self._border.backward_values,
            },
            listener=self,
        )
        schedule = Schedule1F1B(stage, len(batches), loss_fn=_objective, scale_grads=False)
        self._driver = shape, stage, schedule
        return stage, schedule

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """A step: time outside of passes is spent waiting for another stage."""
        passes = self._open
        assert passes is not None
        try:
            passes.stall = contextlib.ExitStack()
            self._wait()
            yield
        finally:
            passes.stall.close()

    def _wait(self) -> None:
        assert self._open is not None
        self._open.stall.enter_context(self._ledger.stall(layer=None, tier=Tier.RANKS, cause=Cause.PIPELINE))

    # Called by the schedule --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def during(self, phase: Phase, micro: int, beside: Tensor | None) -> Iterator[None]:
        """A pass of micro-batch ``micro``; ``beside`` is the companion of the message it starts from."""
        passes = self._open
        assert passes is not None
        if beside is not None:
            arrives_ns, finite = beside[:_BESIDE].tolist()
            wait_until(arrives_ns)
            passes.finite = passes.finite and bool(finite)
            passes.take(phase, micro, beside[_BESIDE:])
        passes.stall.close()
        self.log.append(MicroPass(phase, micro))
        name = f"{phase.name.lower()} {passes.position}.{micro}"
        try:
            with self._timeline.span(Track.COMPUTE, name):
                if phase is Phase.FORWARD:
                    passes.step.begin_pass()
                    passes.held += 1
                    self.most_held = max(self.most_held, passes.held)
                else:
                    passes.step.resume_pass(micro, Finals.LAST if passes.finite else Finals.NONE)
                yield
                if phase is Phase.BACKWARD:
                    passes.step.end_pass()
                    passes.held -= 1
        except BaseException as error:
            passes.failure = _unwrapped(error)
            raise
        self._wait()

    def beside(self, phase: Phase, micro: int, nbytes: int) -> Tensor:
        """The companion of a message of ``nbytes`` that is about to be sent, after the pass ``phase`` of ``micro``."""
        assert self._open is not None
        values = self._open.outgoing.pop((phase, micro))
        arrives_ns = self._group.sending(nbytes + (_BESIDE + values.numel()) * 8)
        return torch.cat([torch.tensor([arrives_ns, int(self._open.finite)]), values])

    def compute(self, given: Tensor) -> Tensor:
        """One forward pass: the stream for the next stage, or the objective, with a graph."""
        passes, border = self._open, self._border
        assert passes is not None
        micro = passes.step.passes_begun - 1
        batch = passes.batches[micro]
        values = passes.incoming.pop(micro, None)
        if values is None:
            values = torch.zeros(border.forward_values, dtype=torch.int64)
        entering: Any = _Entering.apply
        output = self._model.run_stage(batch, given if border.begins else entering(given), values)
        part = output.part
        assert part.objective is not None
        passes.loads.append(part.loads)
        share = part.objective / len(passes.batches)
        if output.stream is None:
            passes.outgoing[Phase.BACKWARD, micro] = output.values
            loss = self._agree(part, passes.finite)
            passes.finite = passes.finite and loss is not None
            passes.losses.append(math.nan if loss is None else loss)
            return share
        passes.outgoing[Phase.FORWARD, micro] = output.values
        passes.told[micro] = output.told
        passes.finite = passes.finite and math.isfinite(float(share.detach()))
        leaving: Any = _Leaving.apply
        stream: Tensor = leaving(output.stream, share)
        return stream


@dataclass(eq=False)
class _OpenPasses:
    """The passes of the step in progress."""

    step: OpenStep
    position: int
    batches: Sequence[Batch]
    #: Whether all losses known to this stage are finite.
    finite: bool = True
    held: int = 0
    losses: list[float] = field(default_factory=list)
    loads: list[tuple[Tensor, ...]] = field(default_factory=list)
    failure: BaseException | None = None
    stall: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    #: The model's values: those received beside streams, by micro-batch; those to send beside the message after a pass;
    #: and the tensors that await the last stage's values.
    incoming: dict[int, Tensor] = field(default_factory=dict)
    outgoing: dict[tuple[Phase, int], Tensor] = field(default_factory=dict)
    told: dict[int, Tensor] = field(default_factory=dict)

    def take(self, phase: Phase, micro: int, values: Tensor) -> None:
        """Takes the companion of the message that the pass ``phase`` of ``micro`` starts from."""
        if phase is Phase.FORWARD:
            self.incoming[micro] = values
        else:
            self.told.pop(micro).copy_(values)
            self.outgoing[phase, micro] = values


class _Compute(nn.Module):
    """The module of the schedule's stage. It has no parameters: the stage's own are gathered and released elsewhere."""

    def __init__(self, pipeline: StagePipeline) -> None:
        super().__init__()
        self._pipeline = pipeline

    def forward(self, given: Tensor) -> Tensor:
        return self._pipeline.compute(given)


class _Stage(PipelineStage):
    """The schedule's stage: reports passes to ``listener``, and adds each message's companion."""

    def __init__(
        self,
        module: nn.Module,
        group: RankGroup,
        device: torch.device,
        *,
        gives: tuple[Tensor, ...],
        makes: tuple[Tensor, ...],
        beside: Mapping[Phase, int],
        listener: StagePipeline,
    ) -> None:
        """``beside``: the number of values in a companion, for each direction."""
        super().__init__(
            module,
            group.rank,
            group.size,
            device,
            input_args=gives,
            output_args=makes,
            group=group.communicator(Channel.EXCHANGE),
        )
        self._listener = listener
        self._values = beside
        self._beside: dict[tuple[Phase, int], Tensor] = {}

    def clear(self) -> None:
        """Drops the remains of a step."""
        self.clear_runtime_states()
        self._beside.clear()

    # Messages -----------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        infos = self.args_recv_info[fwd_chunk_id]
        _make(infos, self.device)
        return self._receiving(Phase.FORWARD, fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _make(self.grad_recv_info[bwd_chunk_id], self.device)
        return self._receiving(Phase.BACKWARD, bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._sending(Phase.FORWARD, fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._sending(Phase.BACKWARD, bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def _receiving(self, phase: Phase, micro: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if not ops:
            return ops
        beside = self._beside[phase, micro] = torch.zeros(
            self._values[phase], dtype=torch.long, device=self.device
        )
        return [*ops, dist.P2POp(dist.irecv, beside, ops[0].peer, self.group)]

    def _sending(self, phase: Phase, micro: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if not ops:
            return ops
        beside = self._listener.beside(phase, micro, sum(op.tensor.nbytes for op in ops))
        # NCCL batches one list of messages, and does not send host memory.
        beside = beside.to(self.device)
        return [*ops, dist.P2POp(dist.isend, beside, ops[0].peer, self.group)]

    def _received(self, phase: Phase, micro: int) -> Tensor | None:
        """The companion of the message that a pass starts from, on the host."""
        beside = self._beside.pop((phase, micro), None)
        return None if beside is None else beside.cpu()

    # Passes -------------------------------------------------------------------------------------------------

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        with self._listener.during(Phase.FORWARD, fwd_chunk_id, self._received(Phase.FORWARD, fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._listener.during(
            Phase.BACKWARD, bwd_chunk_id, self._received(Phase.BACKWARD, bwd_chunk_id)
        ):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None


def _make(infos: Sequence[Any], device: torch.device) -> None:
    """The receive buffers."""
    for info in infos:
        if not info.is_root_arg:
            info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=device)


def _objective(output: Tensor, target: Tensor) -> Tensor:
    """The loss of the last stage: its output is the objective itself."""
    return output


def _unwrapped(error: BaseException) -> BaseException:
    """The error that a pass raised, unwrapped from torch's."""
    while (
        isinstance(error, RuntimeError) and not isinstance(error, PeerError) and error.__cause__ is not None
    ):
        error = error.__cause__
    return error


class _Entering(torch.autograd.Function):
    """The stream from another stage: its gradient is made contiguous, as messages need it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class _Leaving(torch.autograd.Function):
    """The stream for the next stage. Its backward pass also starts that of ``share``, this stage's part of the objective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Tensor) -> Tensor:
        ctx.share = share.detach()
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(ctx.share)
