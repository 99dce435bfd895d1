"""Tiny models of the tested families of transformers, and their experts in memory: the reference and the same, wrapped."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from tierstore.hf.experts import experts_modules
from tierstore.hf.loading import LoadedModule
from tierstore.moe.source import ExpertLease

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_LATENT = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
}
_NARROW = {"intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 8}

FAMILIES: dict[str, Callable[..., Any]] = {
    "mixtral": lambda **o: hf.MixtralConfig(
        **{**COMMON, "intermediate_size": 48, "num_local_experts": 8, **o}
    ),
    "qwen2_moe": lambda **o: hf.Qwen2MoeConfig(
        **{**COMMON, **_NARROW, "shared_expert_intermediate_size": 24, **o}
    ),
    "qwen3_moe": lambda **o: hf.Qwen3MoeConfig(
        **{**COMMON, **_NARROW, "head_dim": 8, "norm_topk_prob": True, **o}
    ),
    "olmoe": lambda **o: hf.OlmoeConfig(**{**COMMON, "intermediate_size": 16, "num_experts": 8, **o}),
    "deepseek_v2": lambda **o: hf.DeepseekV2Config(
        **{
            **COMMON,
            **_LATENT,
            "n_shared_experts": 2,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            **o,
        }
    ),
    "deepseek_v3": lambda **o: hf.DeepseekV3Config(
        **{**COMMON, **_LATENT, "n_shared_experts": 1, "q_lora_rank": 24, "n_group": 2, "topk_group": 1, **o}
    ),
    "glm4_moe": lambda **o: hf.Glm4MoeConfig(
        **{
            **COMMON,
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "head_dim": 8,
            "first_k_dense_replace": 1,
            **o,
        }
    ),
    "granitemoe": lambda **o: hf.GraniteMoeConfig(
        **{**COMMON, "intermediate_size": 16, "num_local_experts": 8, **o}
    ),
    "phimoe": lambda **o: hf.PhimoeConfig(**{**COMMON, "intermediate_size": 48, "num_local_experts": 8, **o}),
    "gpt_oss": lambda **o: hf.GptOssConfig(
        **{
            **COMMON,
            "intermediate_size": 32,
            "head_dim": 8,
            "num_local_experts": 8,
            "sliding_window": 16,
            **o,
        }
    ),
    "qwen3_next": lambda **o: hf.Qwen3NextConfig(
        **{
            **COMMON,
            **_NARROW,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 24,
            "head_dim": 8,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            **o,
        }
    ),
}

#: Those with an auxiliary loss, which is one function of all layers.
BALANCED = [name for name in FAMILIES if name not in ("deepseek_v2", "deepseek_v3", "glm4_moe")]
#: Phi-MoE's sparsemixer chooses two experts and no other number.
TOP_KS = {"phimoe": (2,)}


def make_config(family: str, **options: Any) -> Any:
    """The configuration of a tiny model; ``options`` override it."""
    return FAMILIES[family](**{"num_experts_per_tok": 2, **options})


def plain_model(config: Any, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Any:
    """transformers' own model with random weights, whose experts ``grouped_mm`` computes."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, experts_implementation="grouped_mm"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and parameter.dim() > 1:
                parameter.mul_(4)  # first weights of 0.02 leave every expert next to linear
            elif name.endswith("bias") or "sinks" in name:
                parameter.normal_(0, 0.3)
    buffers = dict(model.named_buffers())
    model.to(dtype)
    for name, buffer in buffers.items():  # kept in fp32, as when it is loaded
        prefix, _, last = name.rpartition(".")
        model.get_submodule(prefix)._buffers[last] = buffer.float() if buffer.is_floating_point() else buffer
    return model


class FusedExperts:
    """Experts cut out of the fused parameters of a plain model, in memory; gradients as leases left them.

    ``order`` arranges the experts of an access; ``gradients`` None gives leases of frozen experts.
    """

    def __init__(
        self,
        plain: Any,
        *,
        order: Callable[[Sequence[int]], Sequence[int]] = tuple,
        gradients: torch.dtype | None = torch.float32,
    ) -> None:
        self.weights: dict[tuple[int, int], Tensor] = {}
        for layer, module in experts_modules(plain):
            for expert in range(module.num_experts):
                self.weights[layer, expert] = flat_expert(module, expert)
        self.grads: dict[tuple[int, int], Tensor] = {}
        self.asked: list[tuple[str, int, tuple[int, ...]]] = []
        self._order = order
        self._gradients = gradients

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        self.asked.append(("forward", layer, tuple(experts)))
        for expert in self._order(experts):
            yield ExpertLease(expert, self.weights[layer, expert])

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        self.asked.append(("backward", layer, tuple(experts)))
        for expert in self._order(experts):
            weights = self.weights[layer, expert]
            if self._gradients is None:
                yield ExpertLease(expert, weights)
                continue
            gradients = torch.full_like(weights, torch.nan, dtype=self._gradients)
            yield ExpertLease(expert, weights, gradients)
            held = self.grads.get((layer, expert))
            self.grads[layer, expert] = gradients if held is None else held + gradients


_FUSED = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def flat_expert(module: Any, expert: int, *, gradients: bool = False) -> Tensor:
    """One expert of a module with fused parameters, flat as in its record; or what they have as gradients (else 0)."""
    parts = []
    for name in _FUSED:
        parameter = getattr(module, name, None)
        if parameter is not None:
            whole = parameter.grad if gradients else parameter.detach()
            parts.append((torch.zeros_like(parameter) if whole is None else whole)[expert].reshape(-1))
    return torch.cat(parts)


def copy_dense(plain: Any, loaded: LoadedModule) -> None:
    """Gives the wrapped module the dense parameters and the buffers of ``plain``."""
    theirs = dict(plain.named_parameters())
    for name, parameter in loaded.module.named_parameters():
        assert parameter.shape == theirs[name].shape, name
        assert parameter.dtype == theirs[name].dtype, name
        parameter.data = theirs[name].detach().clone()
    buffers = dict(plain.named_buffers())
    for name, buffer in loaded.module.named_buffers():
        assert buffer.dtype == buffers[name].dtype, name
        buffer.copy_(buffers[name])
