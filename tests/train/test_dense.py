"""Dense parameters: views of flat tensors, stepped as torch does, and back from a commit bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tierstore.store import AdamWConfig, ParameterStore, RecordSchema, StoreConfig
from tierstore.train.dense import DenseParameters, dense_schemas

CPU = torch.device("cpu")
Units = list[tuple[str, list[nn.Parameter]]]


def units() -> Units:
    generator = torch.Generator().manual_seed(3)

    def parameter(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, generator=generator))

    return [("a", [parameter(3, 5), parameter(7)]), ("b", [parameter(2, 11)]), ("ends", [parameter(4)])]


def parameters(of: Units) -> list[nn.Parameter]:
    return [parameter for _, group in of for parameter in group]


def fill_gradients(of: Units, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters(of):
        gradient = torch.randn(parameter.shape, generator=generator)
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)


def make_store(path: Path, of: Units, dense: DenseParameters) -> ParameterStore:
    schemas = [RecordSchema("expert", 64), *dense_schemas(of)]
    store = ParameterStore.create(path, schemas, StoreConfig(host_budget=1 << 20))
    dense.register(store)
    return store


def test_it_steps_as_torch_does() -> None:
    config = AdamWConfig()
    taken, plain = units(), units()
    dense = DenseParameters(taken, CPU, config)
    optimizer = torch.optim.AdamW(
        parameters(plain), betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
    )
    for step in range(5):
        dense.zero_grad()
        assert dense.sum_of_squares() == 0
        fill_gradients(taken, step)
        fill_gradients(plain, step)
        expected = sum(float((p.grad.double() ** 2).sum()) for p in parameters(plain) if p.grad is not None)
        assert dense.sum_of_squares() == pytest.approx(expected, rel=1e-12)
        dense.scale_gradients(0.5)
        for parameter in parameters(plain):
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        dense.step(0.01 * (step + 1))
        optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
        optimizer.step()
    for found, parameter in zip(parameters(taken), parameters(plain), strict=True):
        torch.testing.assert_close(found, parameter, rtol=1e-6, atol=1e-7)


def test_a_commit_brings_everything_back(tmp_path: Path) -> None:
    config = AdamWConfig()
    first = units()
    dense = DenseParameters(first, CPU, config)
    with make_store(tmp_path / "store", first, dense) as store:
        for step in range(3):
            fill_gradients(first, step)
            dense.step(0.01)
        dense.save(store, 3)
        store.commit()
        fill_gradients(first, 9)
        dense.step(0.01)
        expected = [parameter.detach().clone() for parameter in parameters(first)]
    again = units()
    resumed = DenseParameters(again, CPU, config)
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=1 << 20)) as store:
        resumed.load(store, 3)
        fill_gradients(again, 9)
        resumed.step(0.01)
    for found, wanted in zip(parameters(again), expected, strict=True):
        assert torch.equal(found, wanted)


def test_parameters_stay_where_the_model_has_them() -> None:
    taken = units()
    before = [parameter.detach().clone() for parameter in parameters(taken)]
    dense = DenseParameters(taken, CPU, AdamWConfig())
    for parameter, value in zip(parameters(taken), before, strict=True):
        assert torch.equal(parameter, value)
    sum((parameter**2).sum() for parameter in parameters(taken)).backward()  # type: ignore[union-attr]
    assert dense.sum_of_squares() == pytest.approx(sum(float((2 * v.double()).pow(2).sum()) for v in before))
    assert dense.nbytes == 16 * (15 + 7 + 22 + 4)
    assert dense.record_counts() == {"dense-22": 2, "dense-4": 1}
