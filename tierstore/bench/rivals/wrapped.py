"""A Mixtral of transformers of the sizes of a built-in model: a checkpoint of random weights, and how rivals train it.

tierstore imports the checkpoint and wraps the model; the rivals make the same model of transformers and fill it from the
file that lies beside it, whose names are the module's.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tierstore.bench.rivals.workload import FirstWeights, check_workload
from tierstore.errors import CapabilityError
from tierstore.model.config import ModelConfig
from tierstore.moe.config import Activation
from tierstore.train.config import FinetuneConfig, TrainConfig
from tierstore.train.data import TrainingData
from tierstore.train.sources import open_data

#: In the checkpoint's directory: every parameter of the module, as ``torch.save`` writes it.
_WEIGHTS = "rivals-first-weights.pt"
_LEAST_TOP_K = (
    2  # with one expert a token its normalised weight is 1, and the router would learn nothing from the loss
)


def _transformers() -> Any:
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise CapabilityError("a Mixtral needs transformers: pip install tierstore[hf]") from error
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


def mixtral_config(model: ModelConfig) -> Any:
    """The configuration of a Mixtral with about as many parameters as ``model`` has, whose tokens are bytes."""
    gated = model.activation is not Activation.GELU
    # Three matrices an expert where an expert of GELU has two.
    width = model.d_ff if gated else -(-2 * model.d_ff // (3 * 16)) * 16
    return _transformers().MixtralConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.d_model,
        intermediate_size=width,
        num_hidden_layers=model.n_layers,
        num_attention_heads=model.n_heads,
        num_key_value_heads=model.n_heads,
        num_local_experts=model.experts,
        num_experts_per_tok=min(max(model.top_k, _LEAST_TOP_K), model.experts),
        max_position_embeddings=model.seq_len,
        router_aux_loss_coef=model.aux_loss_weight,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        dtype="float32",
    )


def count_parameters(model: ModelConfig) -> int:
    """Of the Mixtral, by building it without memory."""
    with torch.device("meta"):
        made = _transformers().MixtralForCausalLM(mixtral_config(model))
    return sum(int(parameter.numel()) for parameter in made.parameters())


def make_mixtral(config: TrainConfig, directory: Path) -> None:
    """Writes the checkpoint, and the rivals' weights beside it. Raises CapabilityError, ConfigError, OSError."""
    check_workload(config)
    assert isinstance(config.model, ModelConfig)
    library = _transformers()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.model.seed)
        model = library.MixtralForCausalLM(mixtral_config(config.model))
    model.save_pretrained(directory)
    named = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    torch.save(named, directory / _WEIGHTS)


def wrapped_config(config: TrainConfig, checkpoint: Path, store: Path) -> TrainConfig:
    """Imports ``checkpoint`` into ``store``; the configuration of a run of it."""
    from tierstore.hf.imports.importing import ImportOptions, import_model
    from tierstore.hf.stored import stored_spec
    from tierstore.parallel import launch
    from tierstore.parallel.config import ParallelConfig

    with launch(ParallelConfig(), device="cpu") as mesh:
        import_model(checkpoint, store, ImportOptions(), mesh=mesh)
    finetune = FinetuneConfig(seq_len=config.model.seq_len, aux_loss_weight=_aux_weight(config))
    spec = stored_spec(store, finetune)
    assert spec is not None
    return replace(config, store=store, model=spec, finetune=finetune)


def _aux_weight(config: TrainConfig) -> float:
    assert isinstance(config.model, ModelConfig)
    return config.model.aux_loss_weight


class _Objective(nn.Module):
    """A causal language model with its objective."""

    def __init__(self, model: nn.Module, aux_loss_weight: float) -> None:
        super().__init__()
        self.model = model
        self._weight = aux_loss_weight

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(input_ids=tokens_BT, use_cache=False, output_router_logits=self._weight > 0)
        loss = cross_entropy(output.logits.float().flatten(0, 1), targets_BT.flatten())
        return (loss + self._weight * output.aux_loss if self._weight else loss), loss


class Mixtral:
    """The Mixtral of ``checkpoint``."""

    def __init__(self, config: TrainConfig, checkpoint: Path) -> None:
        check_workload(config)
        self._config, self._checkpoint = config, checkpoint

    def module(self) -> nn.Module:
        library = _transformers()
        made = library.AutoConfig.from_pretrained(self._checkpoint)
        model = library.AutoModelForCausalLM.from_config(
            made, dtype=torch.float32, experts_implementation="grouped_mm"
        )
        return _Objective(model.train(), _aux_weight(self._config))

    def blocks(self, module: nn.Module) -> Iterable[nn.Module]:
        layers = module.get_submodule("model.model.layers")
        assert isinstance(layers, nn.ModuleList)
        return layers

    def first_weights(self) -> FirstWeights:
        weights: dict[str, Tensor] = torch.load(self._checkpoint / _WEIGHTS, mmap=True, weights_only=True)
        return weights.__getitem__

    def data(self, store: Path) -> TrainingData:
        return open_data(
            self._config.data,
            seq_len=self._config.model.seq_len,
            vocab_size=self._config.model.vocab_size,
            tokenizer=None,
            store=store,
        )
