"""The model that a configuration describes: all parameters, found by building it in transformers on the meta device, and
the longest text that it takes. The package transformers is imported on first use; if it is missing, one error says so.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.capabilities import require_package
from tierstore.dense.config import Fusion
from tierstore.errors import CapabilityError, ConfigError
from tierstore.hf.checkpoint import read_object
from tierstore.hf.families import family_of
from tierstore.hf.manifest import (
    ExpertEntry,
    Manifest,
    ParameterEntry,
    Quantization,
    TiedEntry,
    UnitEntry,
    Weights,
)
from tierstore.model.config import ComputeDtype

if TYPE_CHECKING:
    import torch
    from torch import nn


#: The releases of transformers that this package is tested with: from the first, below the second.
TRANSFORMERS = ((5, 7), (6, 0))


def transformers() -> Any:
    """The package transformers. Raises CapabilityError if it is missing or its release is not supported."""
    purpose = "a model of Hugging Face"
    module = require_package("transformers", purpose)
    found = tuple(int(part) for part in module.__version__.split(".")[:2] if part.isdigit())
    low, high = TRANSFORMERS
    if not low <= found < high:
        raise CapabilityError(
            f"{purpose} needs transformers >= {low[0]}.{low[1]}, < {high[0]}, and {module.__version__} is installed: "
            'pip install "tierstore[hf]"'
        )
    return module


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hides transformers' log messages below the level of errors."""
    logging = transformers().utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


CONFIG_NAME = "config.json"
#: Keys of a config.json about files: how weights are stored, and where code is.
_FILE_KEYS = ("quantization_config", "auto_map")
#: Keys that choose what a forward pass returns. Passes here request their outputs themselves, so these keys are dropped.
_OUTPUT_KEYS = (
    "output_attentions",
    "output_cross_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "torchscript",
    "use_cache",
    "use_return_dict",
)
#: Counts in a configuration, and the upper bound of each (the lower is 1); loops run over all layers and experts.
_COUNTS = {
    "num_hidden_layers": 10_000,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1 << 16),
    **dict.fromkeys(
        (
            "vocab_size",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        ),
        1 << 31,
    ),
}
#: The exceptions that transformers raises for a configuration that describes no model.
_UNBUILDABLE = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError),
    *(RuntimeError, TypeError, ValueError),
)
_QUANTIZED = {None: Quantization.NONE, "fp8": Quantization.FP8_BLOCKS, "mxfp4": Quantization.MXFP4}


def read_config(path: Path) -> dict[str, Any]:
    """config.json, or that of a model directory. Raises ConfigError and DataError (a git-lfs pointer) naming it, OSError."""
    file = path / CONFIG_NAME if path.is_dir() else path
    try:
        return read_object(file, ConfigError)
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: missing; expected a model directory or its {CONFIG_NAME}") from error


def describe_config(
    config: Mapping[str, Any], compute: ComputeDtype | None = None, *, where: str = CONFIG_NAME
) -> Manifest:
    """The model of a configuration's values; its weights are not looked at, so source dtypes are empty.

    ``compute`` None: bf16, unless the configuration says fp32. Raises ConfigError, CapabilityError.
    """
    family = family_of(config.get("model_type"), where=where)
    quantization = quantization_of(config, where=where)
    if compute is None:
        said = str(config.get("dtype") or config.get("torch_dtype"))
        full = said in ("float32", "None") and quantization is Quantization.NONE
        compute = ComputeDtype.FP32 if full else ComputeDtype.BF16
    with quiet_transformers():
        model, parsed = _build(config, compute, where)
    from tierstore.hf.experts import found_experts  # with torch

    modules, shape, count = found_experts(model, where=where)
    top_k = parsed.num_experts_per_tok
    if not isinstance(top_k, int) or not 1 <= top_k <= count:
        raise ConfigError(f"{where}: num_experts_per_tok: expected 1 to {count}, got {top_k}")
    layers = int(parsed.num_hidden_layers)
    owned = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    #: The parameters that transformers keeps in fp32 when it loads the model in bf16.
    wide: tuple[str, ...] = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())

    def entry(name: str, value: torch.Tensor) -> ParameterEntry:
        kept_wide = any(part in name for part in wide)
        dtype = "float32" if kept_wide else str(value.dtype).removeprefix("torch.")
        return ParameterEntry(name, tuple(value.shape), dtype, family.source_of(name), "")

    blocks = [f"block.{layer}" for layer in range(layers)]
    units: dict[str, list[ParameterEntry]] = {name: [] for name in ("embedding", *blocks, "head")}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    tied = []
    for name, parameter in parameters.items():
        if id(parameter) in owned:
            continue
        of = first.setdefault(id(parameter), name)
        if of == name:
            units[unit_of(name)].append(entry(name, parameter))
        else:
            tied.append(TiedEntry(name, of, family.source_of(name), stored=False))
    return Manifest(
        model_type=family.model_type,
        architecture=type(model).__name__,
        compute=compute,
        weights=Weights.TRAINABLE,
        fusion=Fusion.UNIT,
        quantization=quantization,
        vocab_size=int(parsed.vocab_size),
        d_model=int(parsed.hidden_size),
        layers=layers,
        experts=ExpertEntry(
            layers=tuple(modules),
            count=count,
            top_k=top_k,
            d_model=shape.d_model,
            d_ff=shape.d_ff,
            layout=family.layout,
            activation=str(parsed.hidden_act),
            source_dtype="",
        ),
        units=tuple(UnitEntry(name, tuple(entries)) for name, entries in units.items()),
        buffers=tuple(
            entry(name, value) for name, value in model.state_dict().items() if name not in parameters
        ),
        tied=tuple(tied),
    )


def quantization_of(config: Mapping[str, Any], *, where: str) -> Quantization:
    """How the checkpoint of this configuration stores weights. Raises ConfigError for an unknown quantisation."""
    settings = config.get("quantization_config")
    method = settings.get("quant_method", "unnamed") if isinstance(settings, Mapping) else None
    if method not in _QUANTIZED:
        raise ConfigError(
            f"{where}: quantization_config: expected unquantised weights, fp8 by blocks or mxfp4, got "
            f"{method!r}; import the unquantised model that it was made from"
        )
    found = _QUANTIZED[method]
    if found is Quantization.FP8_BLOCKS and settings is not None:
        block = settings.get("weight_block_size")
        if block != [128, 128]:
            raise ConfigError(
                f"{where}: quantization_config.weight_block_size: expected [128, 128], got {block}"
            )
    return found


def _build(config: Mapping[str, Any], compute: ComputeDtype, where: str) -> tuple[nn.Module, Any]:
    """The model on the meta device, in the types that it has in memory, and its parsed configuration."""
    import torch

    before = torch.get_default_dtype()
    try:
        _check_counts(config, where)
        parsed = parse_config(config, where=where)
        cls, _ = model_class(parsed)
        torch.set_default_dtype(compute.torch)
        with torch.device("meta"):
            model: nn.Module = cls(parsed)
    except ConfigError:
        raise
    except Exception as error:
        # huggingface_hub checks the types of fields and raises its own errors.
        theirs = type(error).__module__.split(".")[0] in ("huggingface_hub", "transformers")
        if not (theirs or isinstance(error, _UNBUILDABLE)):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{where}: transformers cannot build this model: {text}") from error
    finally:
        torch.set_default_dtype(before)
    return model, parsed


def _check_counts(config: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for numbers at which transformers fails or loops without end."""
    for name, most in _COUNTS.items():
        value = config.get(name)
        if isinstance(value, int) and not 1 <= value <= most:
            raise ConfigError(f"{where}: {name}: expected 1 to {most}, got {value}")
    pad, size = config.get("pad_token_id"), config.get("vocab_size")
    if isinstance(pad, int) and isinstance(size, int) and pad >= size:
        raise ConfigError(f"{where}: pad_token_id: expected less than {size} (vocab_size), got {pad}")


def parse_config(values: Mapping[str, Any], *, where: str = CONFIG_NAME) -> Any:
    """transformers' configuration object for the values of a config.json. Raises ConfigError."""
    plain = {key: value for key, value in values.items() if key not in (*_FILE_KEYS, *_OUTPUT_KEYS)}
    family = plain.get("model_type")
    known = transformers().CONFIG_MAPPING
    if not isinstance(family, str) or family not in known:
        raise ConfigError(f"{where}: model_type: {family!r} is unknown to transformers")
    try:
        return known[family].from_dict(plain)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from error


def model_class(parsed: Any) -> tuple[Any, str | None]:
    """The causal language model class of a configuration object; and the attention that the configuration requested and the
    class lacks here, or None. Such a request is dropped: transformers then chooses another.
    """
    cls, asked = transformers().MODEL_FOR_CAUSAL_LM_MAPPING[type(parsed)], parsed._attn_implementation
    if asked in (None, "eager") or (asked == "sdpa" and cls._supports_sdpa):
        return cls, None
    parsed._attn_implementation = None
    return cls, str(asked)


def unit_of(name: str) -> str:
    """The dense unit of parameter ``name``: embedding, a unit for each decoder layer, and head for what follows them."""
    if name.startswith("model.embed_tokens."):
        return "embedding"
    number = re.match(r"model\.layers\.(\d+)\.", name)
    return "head" if number is None else f"block.{number[1]}"


# How long its texts may be ---------------------------------------------------------------------------------


def text_positions(config: Mapping[str, Any]) -> int:
    """The most positions of a text by ``config``, the values of a config.json; 0 if it states none.

    A kind of rotary embedding that stretches positions gives its factor times the original ones, whether
    ``max_position_embeddings`` has been multiplied (DeepSeek) or not (Qwen's recipe); those that name no original positions
    mean ``max_position_embeddings``, as transformers and vLLM read them. llama3 and longrope give them as they are.
    """
    most = int(config.get("max_position_embeddings") or 0)
    found = [
        int(factor * (original or most))
        for kind, factor, original in _rotary(config)
        if kind in ("linear", "dynamic", "yarn") and factor
    ]
    return max(found, default=most)


def cached_positions(config: Mapping[str, Any]) -> int:
    """The most positions of a text that is continued from a key-value cache.

    With longrope and dynamic scaling, frequencies change once a text exceeds the original positions, and all its keys must
    be computed with the new frequencies. Cached keys have the old ones, so the original positions are the limit.
    """
    most = int(config.get("max_position_embeddings") or 0)
    original = [
        original or most for kind, _, original in _rotary(config) if kind in ("longrope", "su", "dynamic")
    ]
    return min([text_positions(config), *original])


def _rotary(config: Mapping[str, Any]) -> list[tuple[object, float, int]]:
    """Kind, factor and original positions (0: not named) of each rotary embedding: layers may have one by their kind. As in
    transformers, the older key wins, and original positions at the top.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    key = "original_max_position_embeddings"
    return [
        (
            rope.get("rope_type", rope.get("type")),
            rope.get("factor") or 0,
            int(config.get(key) or rope.get(key) or 0),
        )
        for rope in [value for value in given.values() if isinstance(value, Mapping)] or [given]
    ]
