"""Models with published dimensions, and their parameter counts.

The counts are computed from the dimensions and agree with the published ones to the last printed digit, as tests check;
the one exception is ``ppmoe-143b`` (see ``Preset.note``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tierstore.errors import ConfigError
from tierstore.model.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published model: its dimensions, parameters and source.

    ``published``: the parameter count in the source, rounded to ``unit``. ``settings``: the closest configuration of the
    built-in model, from which activations are estimated. ``gpu``: the GPU of the published speeds, by whose data sheet they
    are planned unless another profile is given, and ``gpu_memory``, its bytes (None: speeds of no GPU are reproduced).
    """

    source: str
    architecture: Architecture
    published: int
    unit: int
    settings: Mapping[str, object]
    note: str = ""
    gpu: str | None = None
    gpu_memory: int | None = None


def _settings(**model: object) -> dict[str, object]:
    """The settings of the configuration table ``model``; every preset computes in bf16."""
    return {f"model.{name}": value for name, value in {**model, "compute_dtype": "bf16"}.items()}


def _gpt(
    source: str, published: int, unit: int, note: str, *, gpu: str, gpu_memory: int, **model: int
) -> Preset:
    """GPT blocks with top-1 routing. ``model``: dimensions by configuration key."""
    return Preset(
        source=source,
        architecture=Architecture.gpt(
            layers=model["n_layers"],
            d_model=model["d_model"],
            vocab=model["vocab_size"],
            positions=model["seq_len"],
            experts=model["experts"],
            moe_every=model["moe_every"],
        ),
        published=published,
        unit=unit,
        settings=_settings(
            **model, d_ff=4 * model["d_model"], top_k=1, activation="gelu", tie_embeddings="tied"
        ),
        note=note,
        gpu=gpu,
        gpu_memory=gpu_memory,
    )


def _se_moe(experts: int, published: int) -> Preset:
    """Table 1: 12 layers of width 4,096, all MoE, with GShard's top-1 gate."""
    note = "the paper gives no sequence length: 1,024 learned positions; 2,048 give the same last digit"
    shape = {
        "n_layers": 12,
        "d_model": 4096,
        "n_heads": 64,
        "vocab_size": 50304,
        "seq_len": 1024,
        "moe_every": 1,
    }
    unit, memory = 100_000_000, 80 * 10**9
    return _gpt(
        "SE-MoE, Table 1", published, unit, note, gpu="A100", gpu_memory=memory, experts=experts, **shape
    )


def _pipeline_moe(published: int, unit: int, note: str, **backbone: int) -> Preset:
    """Section 4.1: 64 experts in place of every other feed-forward network of a GPT-3 backbone."""
    shape = {"vocab_size": 50257, "seq_len": 2048, "experts": 64, "moe_every": 2}
    memory = 32 * 10**9  # the paper gives none: the larger of the two V100s
    return _gpt(
        "Pipeline MoE, Table 2", published, unit, note, gpu="V100", gpu_memory=memory, **shape, **backbone
    )


def _gated(
    source: str,
    published: int,
    note: str,
    *,
    attention: int,
    dense_layers: tuple[int, ...] = (),
    dense_d_ff: int = 0,
    **model: int,
) -> Preset:
    """SwiGLU blocks of a model with published weights. ``model``: dimensions by configuration key."""
    return Preset(
        source=f"{source}, and its published weights",
        architecture=Architecture.gated(
            layers=model["n_layers"],
            d_model=model["d_model"],
            vocab=model["vocab_size"],
            attention=attention,
            experts=model["experts"],
            d_ff=model["d_ff"],
            top_k=model["top_k"],
            shared_d_ff=model.get("shared_expert_d_ff", 0),
            dense_layers=dense_layers,
            dense_d_ff=dense_d_ff,
        ),
        published=published,
        unit=1,
        settings=_settings(**model, seq_len=4096),
        note=note,
    )


_PPMOE_NOTE = "the paper gives no vocabulary size: GPT-3's 50,257 is assumed"
_PPMOE_143_NOTE = (
    "141.97e9 by the published dimensions, not 143e9. 16 MoE layers of 64 experts (137.46e9), attention, 16 dense networks "
    "and norms make 141.77e9; the rest is embedding, of which 143e9 (rounded) needs at least 178,502 rows, "
    "while the same corpus and code at 6.7e9 (rounded) allow at most 96,822. No vocabulary size gives both"
)

#: Published models by name.
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "se-moe-13.9b": _se_moe(8, 13_900_000_000),
        "se-moe-26.8b": _se_moe(16, 26_800_000_000),
        "se-moe-52.6b": _se_moe(32, 52_600_000_000),
        "se-moe-104.1b": _se_moe(64, 104_100_000_000),
        "se-moe-207.2b": _se_moe(128, 207_200_000_000),
        "ppmoe-6.7b": _pipeline_moe(
            6_700_000_000, 100_000_000, _PPMOE_NOTE, n_layers=24, d_model=1024, n_heads=16
        ),
        "ppmoe-143b": _pipeline_moe(
            143_000_000_000, 1_000_000_000, _PPMOE_143_NOTE, n_layers=32, d_model=4096, n_heads=32
        ),
        "mixtral-8x7b": _gated(
            "Jiang et al. 2024, Mixtral of Experts",
            46_702_792_704,
            "grouped-query attention, 8 key-value heads of 128",
            d_model=4096,
            n_layers=32,
            n_heads=32,
            vocab_size=32000,
            attention=4096 * (2 * 4096 + 2 * 1024),
            d_ff=14336,
            experts=8,
            top_k=2,
        ),
        "deepseek-v2-lite": _gated(
            "DeepSeek-AI 2024, DeepSeek-V2, appendix B",
            15_706_484_224,
            "latent attention; the first layer is dense",
            d_model=2048,
            n_layers=27,
            n_heads=16,
            vocab_size=102400,
            # Latent attention: queries of 16 x (128 + 64), a latent of 512 with its norm and 64 shared
            # positions, keys and values of 16 x (128 + 128) from the latent, and the output projection.
            attention=2048 * 16 * 192 + 2048 * (512 + 64) + 512 + 512 * 16 * 256 + 16 * 128 * 2048,
            d_ff=1408,
            experts=64,
            top_k=6,
            shared_expert_d_ff=2 * 1408,
            dense_layers=(0,),
            dense_d_ff=10944,
        ),
        "qwen3-30b-a3b": _gated(
            "Qwen Team 2025, Qwen3",
            30_532_122_624,
            "grouped-query attention, 4 key-value heads of 128, norms of queries and keys",
            d_model=2048,
            n_layers=48,
            n_heads=32,
            vocab_size=151936,
            attention=2048 * (2 * 4096 + 2 * 512) + 2 * 128,
            d_ff=768,
            experts=128,
            top_k=8,
        ),
        "olmoe-1b-7b": _gated(
            "Muennighoff et al. 2024, OLMoE",
            6_919_161_856,
            "norms of queries and keys",
            d_model=2048,
            n_layers=16,
            n_heads=16,
            vocab_size=50304,
            attention=4 * 2048 * 2048 + 2 * 2048,
            d_ff=1024,
            experts=64,
            top_k=8,
        ),
    }
)


def find_preset(name: str) -> Preset:
    """The preset ``name``. Raises ConfigError that lists the names."""
    if name not in PRESETS:
        raise ConfigError(f"--preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]
