"""A causal language model of transformers as the trainer steps it: its experts leased, its dense parameters sliced.

Shapes: B sequences, T positions, E experts of a layer.

The forward pass, the loss and ``generate`` are transformers' own. What balances the experts is what the family has: an
auxiliary loss over the routers' logits, with the weight of its configuration; or a bias on the choice of experts
(DeepSeek-V3, GLM4-MoE), which after each optimizer step goes up by a fixed amount for experts that got less than their
share of tokens and down for the others (DeepSeek-V3 technical report, section 2.1.2); or nothing (DeepSeek-V2).

On several ranks each has a part of the global batch, all parts alike in shape. ``objective`` is then this rank's share of
the global one: the shares, and their gradients, add up to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tierstore.errors import StoreFormatError
from tierstore.hf.describing import unit_of
from tierstore.hf.experts import ExpertLayer, ExpertLoads, bind
from tierstore.hf.loading import LoadedModule, build_module, parse_config
from tierstore.hf.manifest import BUFFERS_KEY, pack_arrays, unpack_arrays
from tierstore.hf.packages import quiet_transformers
from tierstore.model.config import CheckpointActivations, ComputeDtype
from tierstore.model.interface import Batch, ModelOutput
from tierstore.moe.exchange import gather_counts
from tierstore.moe.seeds import derive_seed
from tierstore.moe.source import ExpertSource
from tierstore.parallel import Mesh
from tierstore.stats import StallLedger
from tierstore.train.finetune import FinetuneConfig

if TYPE_CHECKING:
    from tierstore.hf.spec import HfSpec


def build_model(
    spec: HfSpec, source: ExpertSource, *, mesh: Mesh | None = None, ledger: StallLedger | None = None
) -> HfModel:
    """The model of ``spec``, whose dense parameters have no memory yet. Raises ConfigError, CapabilityError."""
    with quiet_transformers():
        config = parse_config(spec.config)
        loaded = build_module(config, spec.compute_dtype.torch)
    return HfModel(
        loaded, source, compute=spec.compute_dtype, finetune=spec.finetune, mesh=mesh, ledger=ledger
    )


class HfModel:
    """``loaded`` over ``source`` (a ``Model``). Not thread safe; a backward pass belongs to the last forward pass."""

    def __init__(
        self,
        loaded: LoadedModule,
        source: ExpertSource,
        *,
        compute: ComputeDtype,
        finetune: FinetuneConfig | None = None,
        mesh: Mesh | None = None,
        ledger: StallLedger | None = None,
    ) -> None:
        """Waiting for other ranks is charged to ``ledger``."""
        finetune = finetune or FinetuneConfig()
        self._module = loaded.module
        self._compute = compute
        self._mesh = mesh
        self._ranks = 1 if mesh is None else mesh.world.size
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
        if finetune.checkpoint_activations is CheckpointActivations.BLOCK:
            self._module.gradient_checkpointing_enable({"use_reentrant": False})
        own = getattr(self._module, "router_aux_loss_coef", None)
        #: None: the family has no auxiliary loss.
        self.aux_loss_weight: float | None = None
        if own is not None:
            self.aux_loss_weight = float(
                own if finetune.aux_loss_weight is None else finetune.aux_loss_weight
            )
        self._balance = BiasBalance(self._module, finetune.bias_update_speed)
        self._seed: tuple[int, int] = (0, 0)

    # Its parameters -----------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self._module
        return module

    @property
    def blocks(self) -> Iterable[nn.Module]:
        layers: nn.ModuleList = self._module.base_model.layers
        return layers

    def dense_units(self) -> list[tuple[str, list[nn.Parameter]]]:
        units: dict[str, list[nn.Parameter]] = {"embedding": []}
        units.update({f"block.{number}": [] for number, _ in enumerate(self.blocks)})
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

    # Passes -------------------------------------------------------------------------------------------------

    def set_step(self, step: int, micro: int = 0) -> None:
        self._seed = (step, micro)
        if micro == 0:
            self._balance.begin_step()

    def run(self, batch: Batch) -> ModelOutput:
        training = self._module.training and torch.is_grad_enabled()
        balanced = training and self.aux_loss_weight > 0
        self.loads.begin()
        arguments: dict[str, Any] = {"input_ids": batch.tokens_BT, "use_cache": False}
        if batch.positions_BT is not None:
            arguments["position_ids"] = batch.positions_BT
        if balanced:
            arguments["output_router_logits"] = True
        rank = 0 if self._mesh is None else self._mesh.world.rank
        with torch.random.fork_rng(devices=self._devices(), enabled=training):
            if training:  # noise of routers and dropout: what a step draws depends on nothing before it
                torch.manual_seed(derive_seed("step", *self._seed, rank))
            output = self._module(**arguments)
        loads = self.loads.all()
        loss = self._loss(output.logits, batch)
        zero = loss.new_zeros(())
        aux_loss = zero
        objective = loss if self._ranks == 1 else loss / self._ranks
        if balanced:
            aux_loss = self._aux_loss(output)
            objective = objective + self.aux_loss_weight * aux_loss
        if training:
            self._balance.count(loads)
        return ModelOutput(loss, aux_loss, zero, objective, loads, None)

    def _loss(self, logits: Tensor, batch: Batch) -> Tensor:
        if batch.counted == 0:
            return logits.float().sum() * 0.0
        loss: Tensor = self._module.loss_function(
            logits=logits,
            labels=None,
            vocab_size=self._module.config.vocab_size,
            shift_labels=batch.targets_BT,
        )
        return loss if batch.share == 1.0 else loss * batch.share

    def _aux_loss(self, output: Any) -> Tensor:
        """This rank's share of the auxiliary loss of the global batch.

        It is ``E * sum_e f_e * m_e``, with ``f_e`` the part of assignments that e got, which carries no gradient, and
        ``m_e`` its mean probability, which is linear in the tokens: so each rank's ``m_e`` with the ``f_e`` of all.
        """
        own: Tensor = output.aux_loss
        if self._ranks == 1:
            return own
        assert self._mesh is not None
        experts, top_k = self._module.num_experts, self._module.num_experts_per_tok
        probability_E = torch.zeros(experts, device=own.device)
        count_E = torch.zeros(experts, dtype=torch.int64, device=own.device)
        rows = 0
        for logits_TE in output.router_logits:
            routed_TE = logits_TE.softmax(dim=-1)
            chosen_TK = routed_TE.topk(top_k, dim=-1).indices
            count_E += torch.bincount(chosen_TK.flatten(), minlength=experts)
            probability_E = probability_E + routed_TE.float().sum(dim=0)
            rows += logits_TE.shape[0]
        all_E = gather_counts(count_E, self._mesh.world).sum(dim=0)
        global_rows = rows * self._ranks
        shared: Tensor = experts * torch.dot(all_E.float() / global_rows, probability_E / global_rows)
        return shared

    def _devices(self) -> list[torch.device]:
        device = next(self._module.parameters()).device
        return [device] if device.type == "cuda" else []

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
        """The buffers that a checkpoint has."""
        kept = self._module.state_dict(keep_vars=True)
        return {name: value for name, value in self._module.named_buffers() if name in kept}

    # Text ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(
        self, prompt: Sequence[int], count: int, *, temperature: float = 0.8, seed: int = 0
    ) -> list[int]:
        """At most ``count`` tokens that follow ``prompt``: the model's own end of text ends them."""
        if not prompt:
            raise ValueError("a prompt needs at least one token")
        device = next(self._module.parameters()).device
        tokens = torch.tensor([list(prompt)], device=device)
        options: dict[str, Any] = {"max_new_tokens": count, "do_sample": temperature > 0}
        if temperature > 0:
            options["temperature"] = temperature
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


class BiasBalance:
    """The biases on the choice of experts, by which families without an auxiliary loss balance them.

    After a step, ``bias += speed * sign(mean load - load)``; loads are those of all micro-batches and ranks.
    """

    def __init__(self, module: nn.Module, speed: float) -> None:
        self._biases = [
            value for name, value in module.named_buffers() if name.endswith("e_score_correction_bias")
        ]
        self._speed = speed
        self._loads: list[Tensor] | None = None

    def begin_step(self) -> None:
        """Forgets what was counted."""
        self._loads = None

    def count(self, loads: Sequence[Tensor]) -> None:
        """Takes the loads of a forward pass, one for each layer of experts."""
        if self._biases and self._speed:
            if len(loads) != len(self._biases):
                raise RuntimeError(f"{len(loads)} layers of experts were reached, of {len(self._biases)}")
            held = self._loads
            self._loads = list(loads) if held is None else [a + b for a, b in zip(held, loads, strict=True)]

    @torch.no_grad()
    def update(self) -> None:
        """An optimizer step has been taken."""
        if self._loads is not None:
            for bias, load in zip(self._biases, self._loads, strict=True):
                # Compared in whole numbers: mean load and load, times the number of experts.
                direction = torch.sign(load.sum() - load * load.numel())
                bias.add_(direction.to(bias), alpha=self._speed)
        self._loads = None
