"""The part of the built-in model that a pipeline stage has: its parameters are the whole model's."""

import torch

from tierstore.model import ModelConfig, Transformer
from tierstore.model.stage import StageTransformer
from tierstore.moe.source import InMemoryExperts
from tierstore.parallel import Mesh, RankEnvironment

CONFIG = ModelConfig(d_model=16, n_layers=3, n_heads=2, seq_len=8, d_ff=8, experts=4, vocab_size=32)


def experts() -> InMemoryExperts:
    return InMemoryExperts(CONFIG.expert_shape, layers=range(3), experts=4)


def stage(layers: range) -> StageTransformer:
    mesh = Mesh.alone(RankEnvironment(), torch.device("cpu"))
    return StageTransformer(CONFIG, experts(), layers=layers, mesh=mesh)


def test_stages_have_the_first_weights_of_the_whole_model_and_each_unit_once() -> None:
    whole = dict(Transformer(CONFIG, experts()).dense_units())
    found = {}
    for part in (stage(range(1)), stage(range(1, 3))):
        units = part.dense_units()
        assert [units[0][0], units[-1][0]] == ["embedding", "head"]
        for name, parameters in units:
            if parameters:
                assert name not in found
                found[name] = parameters
    assert found.keys() == whole.keys()
    for name, parameters in whole.items():
        assert all(torch.equal(one, other) for one, other in zip(parameters, found[name], strict=True)), name


def test_stages_one_after_another_make_the_loss_of_the_whole_model() -> None:
    """Balance losses are each stage's own; together they are the model's."""
    tokens = torch.arange(16).view(2, 8) % 32
    whole = Transformer(CONFIG, experts())(tokens, tokens)
    first, second = stage(range(1)), stage(range(1, 3))
    before = first(tokens)
    assert before.stream is not None
    assert before.part.loss is None
    after = second(before.stream, tokens)
    assert after.stream is None
    assert torch.equal(after.part.loss, whole.loss)
    torch.testing.assert_close(before.part.aux_loss + after.part.aux_loss, whole.aux_loss)
    assert [layer.layer for layer in second.routers()] == [1, 2]
    torch.testing.assert_close(before.part.objective + after.part.objective, whole.objective)
