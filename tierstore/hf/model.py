"""A causal language model of transformers as the trainer steps it: its experts leased, its dense parameters sliced.

Shapes: B sequences, T positions, E experts of a layer.

The forward pass, the loss and ``generate`` are transformers' own. The experts are balanced by the family's own method
(``tierstore.hf.experts``).

Each of several ranks has a part of the global batch; all parts have the same shape. ``objective`` is then this rank's
share of the global objective: the shares, and their gradients, add up to the global ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tierstore.accelerator import generator_state, has_own_memory, set_generator_state
from tierstore.errors import StoreFormatError
from tierstore.hf.describing import parse_config, quiet_transformers, unit_of
from tierstore.hf.experts import (
    AuxLoss,
    BiasBalance,
    ExpertLayer,
    ExpertLoads,
    LoadedModule,
    bind,
    routers_of,
)
from tierstore.hf.loading import adapt, build_module, checkpoint_activations, cut_module, refuse_adapters
from tierstore.model.config import CheckpointActivations, ComputeDtype
from tierstore.model.interface import Batch, ModelOutput, TaskSegment, joint_loss, segment_losses
from tierstore.model.store_schema import BUFFERS_KEY, pack_arrays, unpack_arrays
from tierstore.moe.lora import LoraConfig
from tierstore.moe.router import LayerRouter
from tierstore.moe.seeds import derive_seed
from tierstore.moe.source import ExpertSource
from tierstore.parallel import Mesh, RankGroup
from tierstore.parallel.layout import Division
from tierstore.stats import StallLedger
from tierstore.train.config import FinetuneConfig

if TYPE_CHECKING:
    from tierstore.hf.spec import HfSpec


def build_model(
    spec: HfSpec, source: ExpertSource, *, mesh: Mesh | None = None, ledger: StallLedger | None = None
) -> HfModel:
    """The model, or the pipeline stage, that ``spec`` describes; its dense parameters have no memory yet.

    Raises ConfigError, CapabilityError; ValueError for a stage without a mesh.
    """
    with quiet_transformers():
        loaded = build_module(parse_config(spec.config), spec.compute_dtype.torch)
    kind: Any = HfModel
    if spec.whole is not None:
        from tierstore.hf.stage import HfStage  # which is made of what is here

        if mesh is None:
            raise ValueError("a pipeline stage needs a mesh")
        kind, loaded = HfStage, cut_module(loaded, spec.layers)
    model: HfModel = kind(
        loaded,
        source,
        compute=spec.compute_dtype,
        finetune=spec.finetune,
        lora=spec.lora,
        mesh=mesh,
        ledger=ledger,
    )
    return model


class HfModel:
    """``loaded`` over ``source`` (a ``Model``). Not thread safe; a backward pass belongs to the last forward pass."""

    def __init__(
        self,
        loaded: LoadedModule,
        source: ExpertSource,
        *,
        compute: ComputeDtype,
        finetune: FinetuneConfig | None = None,
        lora: LoraConfig | None = None,
        mesh: Mesh | None = None,
        ledger: StallLedger | None = None,
    ) -> None:
        """``lora``: if it is on, attention gets pairs, the only dense parameters that train. Waiting for other ranks is
        charged to ``ledger``.
        """
        finetune, lora = finetune or FinetuneConfig(), lora or LoraConfig()
        self._module = loaded.module
        #: The decoder layers of this stage.
        self.layers = loaded.layers
        self._experts = loaded.experts
        self._routers = dict(routers_of(loaded))
        self._compute = compute
        self.loads = ExpertLoads()
        for number, experts in loaded.experts_at.items():
            layer = ExpertLayer(
                number,
                loaded.shape,
                loaded.experts,
                source,
                loads=self.loads,
                save=finetune.expert_activations,
                mesh=mesh,
                ledger=ledger,
            )
            bind(experts, layer)
        #: Frozen dense parameters, as their records hold them.
        self._frozen: list[tuple[str, list[nn.Parameter]]] = []
        if lora.enabled:
            self._frozen = self._units()
            adapt(self._module, lora)
        self._prefix = "lora." if lora.enabled else ""
        self._module.register_forward_pre_hook(refuse_adapters)
        if finetune.checkpoint_activations is CheckpointActivations.BLOCK:
            checkpoint_activations(self._module)
        ranks = RankGroup.alone() if mesh is None else mesh.data
        self._rank, self._ranks = ranks.rank, ranks.size
        self._aux_loss = AuxLoss(loaded, finetune.aux_loss_weight, ranks)
        # A frozen router stays as it is.
        self._balance = BiasBalance(self._module, 0.0 if lora.enabled else finetune.bias_update_speed)
        self._seed: tuple[int, int] = (0, 0)

    # Its parameters -----------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self._module
        return module

    @property
    def blocks(self) -> Iterable[nn.Module]:
        layers = self._module.base_model.layers
        return [layers[number] for number in self.layers]

    def dense_units(self) -> list[tuple[str, list[nn.Parameter]]]:
        return [
            (self._prefix + name, [parameter for parameter in parameters if parameter.requires_grad])
            for name, parameters in self._units()
        ]

    def unit_divisions(self) -> list[list[Division | None]]:
        """No dense parameter is divided: tensor-parallel ranks divide only the experts, and all compute the rest."""
        return [[None] * len(parameters) for _, parameters in self.dense_units()]

    def frozen_units(self) -> list[tuple[str, list[nn.Parameter]]]:
        return self._frozen

    def _units(self) -> list[tuple[str, list[nn.Parameter]]]:
        """All dense parameters."""
        units: dict[str, list[nn.Parameter]] = {"embedding": []}
        units.update({f"block.{number}": [] for number in self.layers})
        units["head"] = []
        for name, parameter in self._module.named_parameters():
            units[unit_of(name)].append(parameter)
        return list(units.items())

    def cast_parameters(self) -> list[nn.Parameter]:
        narrow = self._compute.torch
        if narrow == torch.float32:
            return []
        return [parameter for parameter in self._module.parameters() if parameter.dtype == narrow]

    def stream(self, output: Any) -> Tensor:
        stream: Tensor = output if isinstance(output, Tensor) else output[0]
        return stream

    def made(self, output: Any) -> Tensor | None:
        logits: Tensor | None = output.logits
        return logits

    def routers(self) -> list[LayerRouter]:
        layers = self._module.base_model.layers
        return [
            LayerRouter(layer, layers[layer].post_attention_layernorm, router, _chosen, self._experts)
            for layer, router in sorted(self._routers.items())
        ]

    # Passes -------------------------------------------------------------------------------------------------

    def set_step(self, step: int, micro: int = 0) -> None:
        self._seed = (step, micro)
        if micro == 0:
            self._balance.begin_step()

    def begin_forward(self, mask_BT: Tensor | None = None) -> None:
        """The module is about to be called, by ``run`` or by the user's loop. ``mask_BT``: bool, False for padding."""
        self.loads.begin(mask_BT)

    def end_forward(self) -> None:
        """A forward pass that a backward pass will follow has returned."""
        self._balance.count(self.loads.all())

    def suspend(self) -> tuple[Any, ...]:
        drawn = generator_states(self._devices())
        return self._seed, self.loads.by_layer, self.loads.mask_T, self._aux_loss.under_way, drawn

    def resume(self, state: Any) -> None:
        self._seed, self.loads.by_layer, self.loads.mask_T, self._aux_loss.under_way, drawn = state
        set_generator_states(drawn, self._devices())

    def leaving(self, block: int, output: Any) -> list[Tensor]:
        logits = (self._aux_loss.under_way or {}).pop(block, None)
        return [self.stream(output), *([] if logits is None else [logits])]

    def replaced(self, block: int, output: Any, tensors: Sequence[Tensor]) -> Any:
        if len(tensors) > 1:
            assert self._aux_loss.under_way is not None
            self._aux_loss.under_way[block] = tensors[1]
        return tensors[0] if isinstance(output, Tensor) else (tensors[0], *output[1:])

    def run(self, batch: Batch) -> ModelOutput:
        output = self._called({"input_ids": batch.tokens_BT}, batch)
        return self._ended(
            output.logits, batch, self._aux_loss.value(batch.mask_BT) if self._is_balanced else None
        )

    @property
    def _is_training(self) -> bool:
        return self.module.training and torch.is_grad_enabled()

    @property
    def _is_balanced(self) -> bool:
        return self._is_training and self._aux_loss.weight > 0

    def _called(self, entering: Mapping[str, Tensor], batch: Batch) -> Any:
        """The output of ``module`` for ``entering``, tokens or their stream, in a pass of ``batch``."""
        self.begin_forward(batch.mask_BT)
        with self._drawing(), self._aux_loss.recording() if self._is_balanced else nullcontext():
            output = self.module(
                **entering,
                position_ids=batch.positions_BT,
                attention_mask=attention_masks(self._module.config, batch.positions_BT, self._compute.torch),
                use_cache=False,
            )
        if self._is_training:
            self.end_forward()
        return output

    def _ended(self, logits: Tensor, batch: Batch, aux_loss: Tensor | None) -> ModelOutput:
        """The losses of ``logits``; ``aux_loss``: this rank's share, if training uses it."""
        segments = segment_losses(batch, partial(self._segment_loss, logits, batch))
        nothing = logits.float().sum() * 0.0
        loss = joint_loss(batch, segments, nothing) if batch.segments else self._loss(logits, batch)
        zero = loss.new_zeros(())
        objective = loss if self._ranks == 1 else loss / self._ranks
        if aux_loss is not None:
            objective = objective + self._aux_loss.weight * aux_loss
        return ModelOutput(
            loss, zero if aux_loss is None else aux_loss, zero, objective, self.loads.all(), None, segments
        )

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Seeds the noise of routers and dropout: the numbers of a training pass depend only on its step."""
        with torch.random.fork_rng(devices=self._devices(), enabled=self._is_training):
            if self._is_training:
                self._begin_drawing()
            yield
            if self._is_training:
                self._end_drawing()

    def _begin_drawing(self) -> None:
        torch.manual_seed(derive_seed("step", *self._seed, self._rank))

    def _end_drawing(self) -> None:
        """The forward pass has drawn all its random numbers."""

    def _loss(self, logits: Tensor, batch: Batch) -> Tensor:
        if batch.counted == 0:
            return logits.float().sum() * 0.0
        loss = self._mean(logits, batch.targets_BT)
        return loss if batch.share == 1.0 else loss * batch.share

    def _segment_loss(self, logits: Tensor, batch: Batch, segment: TaskSegment) -> Tensor:
        rows = slice(segment.rows.start, segment.rows.stop)
        return self._mean(logits[rows], batch.targets_BT[rows])

    def _mean(self, logits: Tensor, targets_BT: Tensor) -> Tensor:
        loss: Tensor = self._module.loss_function(
            logits=logits,
            labels=None,
            vocab_size=self._module.config.vocab_size,
            shift_labels=targets_BT,
        )
        return loss

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self._module.parameters()).device
        return device

    def _devices(self) -> list[torch.device]:
        """The devices, beside the host, whose generators are used."""
        return [self._device] if has_own_memory(self._device) else []

    # Beside the parameters ----------------------------------------------------------------------------------

    def end_step(self) -> None:
        self._balance.update()

    def state(self) -> dict[str, bytes]:
        buffers = self._state_buffers()
        if not buffers:
            return {}
        return {BUFFERS_KEY: pack_arrays({name: value.cpu().numpy() for name, value in buffers.items()})}

    def load_state(self, state: Mapping[str, bytes]) -> None:
        buffers = self._state_buffers()
        if not buffers:
            return
        if BUFFERS_KEY not in state:
            raise StoreFormatError(f"the last commit has no {BUFFERS_KEY}, which the model needs")
        arrays = unpack_arrays(state[BUFFERS_KEY], where=BUFFERS_KEY)
        for name, value in buffers.items():
            if name not in arrays or arrays[name].shape != tuple(value.shape):
                found = arrays[name].shape if name in arrays else "nothing"
                raise StoreFormatError(
                    f"{BUFFERS_KEY}: {name}: expected shape {tuple(value.shape)}, found {found}"
                )
            value.copy_(torch.from_numpy(arrays[name]))

    def _state_buffers(self) -> dict[str, Tensor]:
        """The persistent buffers, which a checkpoint has."""
        return {
            f"{prefix}.{name}": value
            for prefix, part in self._module.named_modules()
            for name, value in part._buffers.items()
            if value is not None and name not in part._non_persistent_buffers_set
        }

    # Text ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(
        self, prompt: Sequence[int], count: int, *, temperature: float = 0.8, seed: int = 0
    ) -> list[int]:
        """At most ``count`` tokens that follow ``prompt``: the model's own end of text ends them."""
        if not prompt:
            raise ValueError("a prompt needs at least one token")
        tokens = torch.tensor([list(prompt)], device=self._device)
        options: dict[str, Any] = {"max_new_tokens": count, "do_sample": temperature > 0}
        if temperature > 0:
            options["temperature"] = temperature
        self.begin_forward()
        training = self._module.training
        self._module.eval()
        try:
            with torch.random.fork_rng(devices=self._devices()), quiet_transformers():
                torch.manual_seed(derive_seed("generate", seed))
                made = self._module.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        finally:
            self._module.train(training)
        text: list[int] = made[0, len(prompt) :].tolist()
        return text


def _chosen(router: nn.Module, x_TD: Tensor) -> Tensor:
    """The output of every family's router: logits, weights, experts."""
    chosen: Tensor = router(x_TD)[2]
    return chosen


# Packed documents -------------------------------------------------------------------------------------------


# Most families build a block-diagonal mask from positions that begin again, if they are called with ``position_ids``,
# without ``attention_mask`` and with ``use_cache=False``: with a cache, which is on by default, they silently
# ignore these positions. gpt-oss does not pass positions to its masks, so it is given finished masks.
_BY_MASKS = ("gpt_oss",)


def attention_masks(config: Any, positions_BT: Tensor | None, dtype: torch.dtype) -> dict[str, Any] | None:
    """The ``attention_mask`` that a model of ``config`` needs beside ``positions_BT``: None for all families but gpt-oss.

    ``dtype``: of the hidden states.
    """
    if positions_BT is None or config.model_type not in _BY_MASKS:
        return None
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    batch = {
        "config": config,
        "inputs_embeds": torch.empty((*positions_BT.shape, 0), dtype=dtype, device=positions_BT.device),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": positions_BT,
    }
    return {
        "full_attention": create_causal_mask(**batch),
        "sliding_attention": create_sliding_window_causal_mask(**batch),
    }


# Random generators ------------------------------------------------------------------------------------------


#: Bytes of a value.
_VALUE = 8


def generator_states(devices: Sequence[torch.device]) -> Tensor:
    """The states of the host's generator and of those of ``devices``, as int64 values on the host."""
    states = [torch.get_rng_state(), *(generator_state(device) for device in devices)]
    return torch.cat(states).view(torch.int64)


def set_generator_states(values: Tensor, devices: Sequence[torch.device]) -> None:
    """Restores states that ``generator_states`` returned."""
    states, begin = values.contiguous().view(torch.uint8), 0
    for device, size in zip([None, *devices], _sizes(devices), strict=True):
        # Copied: torch 2.13 reads a state as a struct and crashes if its memory is not aligned for one.
        state = states[begin : begin + size].clone()
        begin += size
        if device is None:
            torch.set_rng_state(state)
        else:
            set_generator_state(device, state)


def state_values(devices: Sequence[torch.device]) -> int:
    """The number of values that ``generator_states`` returns."""
    return sum(_sizes(devices)) // _VALUE


def _sizes(devices: Sequence[torch.device]) -> list[int]:
    return [
        torch.get_rng_state().numel(),
        *(generator_state(device).numel() for device in devices),
    ]
