"""One pass of a small built-in model on each rank, over parts of one global batch."""

from typing import Any

import torch

from tierstore.model import ModelConfig, Transformer
from tierstore.moe import InMemoryExperts
from tierstore.parallel import Mesh, RankEnvironment

GLOBAL_BATCH = 4
Found = dict[str, Any]
_SMALL = {"d_model": 16, "n_layers": 3, "seq_len": 12, "d_ff": 8, "experts": 5}


def small_model(**options: Any) -> ModelConfig:
    """Three layers, with ``options``."""
    return ModelConfig(**{**_SMALL, **options})


def alone() -> Mesh:
    """One process on the CPU."""
    return Mesh.alone(RankEnvironment(), torch.device("cpu"))


def one_pass(mesh: Mesh, config: ModelConfig) -> Found:
    """Loss, objective, loads, weights and every gradient of one pass over this data rank's sequences."""
    source = InMemoryExperts(
        config.expert_shape,
        layers=config.moe_layers,
        experts=config.experts,
        depth=config.n_layers,
        compute=config.compute_dtype.torch,
        replicas=mesh.replica,
    )
    model = Transformer(config, source, mesh=mesh)
    model.set_step(3, 1)
    both = torch.randint(0, 256, (GLOBAL_BATCH, 13), generator=torch.Generator().manual_seed(2))
    own = both.chunk(mesh.data.size)[mesh.data.rank]
    output = model(own[:, :-1], own[:, 1:])
    output.objective.backward()
    return {
        "loss": output.loss.detach(),
        "objective": output.objective.detach(),
        "loads": output.loads,
        "weights": {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "experts": dict(source.grads),
    }
