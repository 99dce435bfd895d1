"""The plain reference against the model over a source: two ways to the same numbers."""

from typing import Any

import pytest
import torch
from plain_reference import PlainTrainer

from tierstore.model import Batch, ModelConfig, TieEmbeddings, Transformer
from tierstore.moe import Activation, InMemoryExperts
from tierstore.store.adamw import AdamWConfig, Inactive
from tierstore.train.config import ScheduleConfig

SMALL: dict[str, Any] = {"d_model": 32, "n_layers": 3, "n_heads": 2, "seq_len": 16, "d_ff": 24, "experts": 8}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"activation": Activation.GELU, "top_k": 1, "moe_every": 2, "tie_embeddings": TieEmbeddings.TIED},
    {"top_k": 3, "shared_expert_d_ff": 8},
]


def _batch(step: int, micro: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(10 * step + micro)
    both = torch.randint(97, 107, (2, 17), generator=generator)
    return Batch(both[:, :-1], both[:, 1:])


def _tiered(config: ModelConfig) -> tuple[Transformer, InMemoryExperts]:
    source = InMemoryExperts(
        config.expert_shape, layers=config.moe_layers, experts=config.experts, depth=config.n_layers
    )
    return Transformer(config, source), source


@pytest.mark.parametrize("options", VARIANTS)
def test_equal_losses_and_gradients(options: dict[str, Any]) -> None:
    config = ModelConfig(**{**SMALL, **options})
    model, source = _tiered(config)
    plain = PlainTrainer(config, ScheduleConfig(), AdamWConfig()).model
    for (name, ours), (other, theirs) in zip(
        model.named_parameters(),
        ((n, p) for n, p in plain.named_parameters() if ".experts." not in n),
        strict=True,
    ):
        assert name == other
        assert torch.equal(ours, theirs)
    a, b = model.run(_batch(0)), plain.run(_batch(0))
    for x, y in ((a.loss, b.loss), (a.aux_loss, b.aux_loss), (a.z_loss, b.z_loss)):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    a.objective.backward()
    b.objective.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-3, atol=1e-6)
    for layer in config.moe_layers:
        for e in range(config.experts):
            expert: Any = plain.get_submodule(f"blocks.{layer}.mixture.experts.{e}")
            assert torch.equal(expert.flat(), source.masters[layer, e])
            found, wanted = source.grads.get((layer, e)), expert.flat_grad()
            assert (found is None) == (wanted is None)
            if found is not None:
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("inactive", list(Inactive))
@pytest.mark.parametrize("clip", [None, 0.5])
def test_trains_as_the_model_over_a_source_does(inactive: Inactive, clip: float | None) -> None:
    config = ModelConfig(**{**SMALL, "top_k": 1, "experts": 12})
    schedule, adamw = ScheduleConfig(lr=3e-3, warmup_steps=3, total_steps=12), AdamWConfig(inactive=inactive)
    plain = PlainTrainer(config, schedule, adamw, clip_norm=clip)
    model, source = _tiered(config)
    parameters = [*model.parameters(), *source.masters.values()]
    optimizer = torch.optim.AdamW(parameters, lr=1.0, betas=adamw.betas, eps=adamw.eps, weight_decay=0.1)
    idle = 0
    for step in range(12):
        batches = [_batch(step, 0), _batch(step, 1)]
        report = plain.step(batches)
        loss = 0.0
        optimizer.zero_grad()
        source.zero_grad()
        for micro, batch in enumerate(batches):
            model.set_step(step, micro)
            output = model.run(batch)
            (output.objective / 2).backward()
            loss += output.loss.item() / 2
        for key, flat in source.masters.items():
            flat.grad = source.grads.get(key)
            idle += flat.grad is None
            if flat.grad is None and inactive is Inactive.EXACT:
                flat.grad = torch.zeros_like(flat)
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(parameters, clip)
            assert report.grad_norm == pytest.approx(norm.item(), rel=1e-3)
        optimizer.param_groups[0]["lr"] = schedule.lr_at(step)
        optimizer.step()
        assert report.loss == pytest.approx(loss, rel=1e-5 if step < 5 else 1e-3)
    assert idle > 20  # or the two ways to treat idle experts were not told apart
    for (layer, e), flat in source.masters.items():
        torch.testing.assert_close(plain.expert(layer, e).flat(), flat.detach(), rtol=1e-2, atol=1e-4)


def test_idle_experts() -> None:
    config = ModelConfig(**{**SMALL, "top_k": 1, "experts": 40})
    for inactive in Inactive:
        plain = PlainTrainer(config, ScheduleConfig(), AdamWConfig(inactive=inactive))
        before = plain.expert(0, 0).flat()
        loads = plain.step([_batch(0)]).loads
        idle = int((loads[0] == 0).nonzero()[0])
        before = PlainTrainer(config, ScheduleConfig(), AdamWConfig()).expert(0, idle).flat()
        moved = not torch.equal(plain.expert(0, idle).flat(), before)  # by weight decay alone
        assert moved == (inactive is Inactive.EXACT)


def test_evaluation() -> None:
    config = ModelConfig(**SMALL)
    plain = PlainTrainer(config, ScheduleConfig(), AdamWConfig())
    one, two = plain.evaluate([_batch(0)]), plain.evaluate([_batch(1)])
    assert plain.evaluate([_batch(0), _batch(1)]) == pytest.approx((one + two) / 2)
    assert plain.model.training
