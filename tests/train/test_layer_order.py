"""Layer order computes the bits of micro order, with one access of each layer's experts in a pass."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rank_cases import step_and_commit
from refusals import refuses
from slowness import mostly_slow

from tierstore.errors import ConfigError, StorePoisonedError
from tierstore.trace.replay import replay
from tierstore.train.config import TrainConfig
from tierstore.train.files import MicroOrder
from tierstore.train.ranks import Opening
from tierstore.train.session import open_parts, open_session
from tierstore.train.setup import Loop
from tierstore.train.trainer import Trainer

MICRO = MicroOrder.MICRO
Make = Callable[[Mapping[str, Any]], TrainConfig]

LAYER = {"data.micro_order": "layer"}
#: Ways to train whose bits must not depend on the order.
MODES: dict[str, dict[str, Any]] = {
    "two": {"data.micro_batches": 2},
    "four": {"data.micro_batches": 4},
    "eight": {"data.micro_batches": 8},
    "clip": {"data.micro_batches": 4, "clip_norm": 0.3},
    "bf16": {"data.micro_batches": 3, "model.compute_dtype": "bf16"},
    "bf16-clip": {"data.micro_batches": 3, "model.compute_dtype": "bf16", "clip_norm": 0.3},
    "int8": {"data.micro_batches": 3, "adamw.moments": "int8"},
    "tied": {"data.micro_batches": 3, "model.tie_embeddings": "tied"},
    "shared-gelu": {
        "data.micro_batches": 2,
        "model.activation": "gelu",
        "model.shared_expert_d_ff": 16,
        "model.top_k": 3,
    },
    "skip": {"data.micro_batches": 2, "adamw.inactive": "skip", "model.top_k": 1, "data.batch_size": 1},
    "noise-capacity": {
        "data.micro_batches": 2,
        "model.router_noise": "jitter",
        "model.router_noise_std": 0.1,
        "model.capacity_factor": 1.0,
    },
    "odd": {"data.micro_batches": 3, "model.d_model": 12, "model.d_ff": 29, "model.n_heads": 3},
    "dense-between": {"data.micro_batches": 2, "model.n_layers": 5, "model.moe_every": 2},
    "checkpoint": {"data.micro_batches": 2, "model.checkpoint_activations": "block"},
    "recompute": {"data.micro_batches": 2, "model.expert_activations": "recompute"},
    "guessed": {"data.micro_batches": 2, "prefetch.predictor": "router", "prefetch.depth": 2},
    "gathered": {"data.micro_batches": 2, "dense.optimizer_state": "nvme", "clip_norm": 0.3},
}


@pytest.mark.parametrize("mode", mostly_slow(MODES, "four", "clip", "bf16-clip", "int8", "tied", "gathered"))
def test_layer_order_has_the_bits_of_micro_order(mode: str, configure: Make, train: Any) -> None:
    changes = {"steps": 3, **MODES[mode]}
    expected = train(configure(changes))
    found = train(configure({**changes, **LAYER}))
    assert found.bits == expected.bits
    assert found.norms == expected.norms


def test_a_tied_head_whose_loss_goes_in_chunks(configure: Make, train: Any) -> None:
    """Each chunk passes a gradient to the embedding, before the embedding's own."""
    changes = {"steps": 3, **MODES["tied"]}
    with mock.patch("tierstore.model.tables.CHUNK_LOGITS", 6 * 256):
        expected = train(configure(changes))
        found = train(configure({**changes, **LAYER}))
    assert found.bits == expected.bits


#: Ways to hold it; ``budget`` is a share of the records, 0 is the minimum.
HOLDS: dict[str, dict[str, Any]] = {
    "quarter": {"budget": 0.25, "prefetch.depth": 3},
    "least": {"budget": 0.0, "prefetch.depth": 0, "io.backend": "threads"},
    "written back": {"budget": 0.15, "cache.write_back_every": 1, "prefetch.depth": 1},
}


@pytest.mark.parametrize(
    ("mode", "hold"), [("four", "quarter"), ("four", "least"), ("clip", "least"), ("clip", "written back")]
)
def test_however_it_is_held_and_cut(
    mode: str, hold: str, configure: Make, train: Any, least: Callable[[TrainConfig], int]
) -> None:
    """And resumed after two steps, in the other order."""
    changes = {"steps": 4, **MODES[mode]}
    expected = train(configure(changes))
    held = {**changes, **LAYER, **HOLDS[hold]}
    share = held.pop("budget")
    config = configure(held)
    whole = config.model.architecture.sparse * 12
    config = replace(config, host_budget=max(least(config), int(share * whole)))
    found = train(config, stops=(2,))
    assert found.bits == expected.bits
    assert found.norms == expected.norms
    assert found.stats.evictions > 0
    begun = train(replace(config, store=config.store.with_name("begun"), steps=2))
    other = replace(
        config, store=config.store.with_name("begun"), data=replace(config.data, micro_order=MICRO)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no bit depends on the order: a resume may change it
        with open_session(other, Opening.RESUME) as trainer:
            begun.losses += [trainer.step().loss for _ in range(2)]
            trainer.commit()
            assert (begun.losses, trainer.store.records_crc32c()) == expected.bits


def _accesses(trainer: Trainer, step: Callable[[], object]) -> list[tuple[str, int, int]]:
    """The accesses of the host cache that ``step`` makes: phase, layer, experts."""
    found: list[tuple[str, int, int]] = []
    begin = trainer.store.begin_access

    def watched(phase: Any, layer: int, numbers: Any, flags: Any) -> int:
        found.append((phase.name.lower(), layer, len(numbers)))
        return begin(phase, layer, numbers, flags)

    with mock.patch.object(trainer.store, "begin_access", watched):
        step()
    return found


@pytest.mark.parametrize("clip", [0.0, 0.3], ids=["immediate", "clip"])
def test_a_worked_example_of_the_order_of_accesses(clip: float, configure: Make) -> None:
    """Two layers, two micro-batches. In micro order a step walks down and up for each; in layer order it walks once, and
    asks for what both have chosen.
    """
    changes = {"data.micro_batches": 2, "model.top_k": 1, "data.batch_size": 1, "clip_norm": clip}
    changes |= {"model.experts": 40, "model.seq_len": 4}
    chosen: dict[tuple[int, int], set[int]] = {}
    with open_session(configure(changes), Opening.CREATE) as trainer:
        for micro in range(2):
            trainer.model.set_step(0, micro)
            trainer._stepper.begin_forward()
            with torch.no_grad():
                loads = trainer.model.run(trainer.data.batch(0, micro)).loads
            for layer, load in enumerate(loads):
                chosen[layer, micro] = set(torch.nonzero(load).flatten().tolist())
    counts = {key: len(experts) for key, experts in chosen.items()}
    both = [len(chosen[layer, 0] | chosen[layer, 1]) for layer in range(2)]
    assert both[0] > max(counts[0, 0], counts[0, 1])

    with open_session(configure(changes | LAYER), Opening.CREATE) as trainer:
        found = _accesses(trainer, trainer.step)
    assert found == [
        ("forward", 0, both[0]),
        ("forward", 1, both[1]),
        ("backward", 1, both[1]),
        ("backward", 0, both[0]),
    ]
    with open_session(configure(changes), Opening.CREATE) as trainer:
        found = _accesses(trainer, trainer.step)
    walks = [
        (phase, layer, counts[layer, micro])
        for micro in range(2)
        for phase, layer in (("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0))
    ]
    # Behind a layer's last backward pass come the gradients of experts that only the first micro-batch has chosen.
    rest = [(layer, both[layer] - counts[layer, 1]) for layer in (1, 0)]
    phase = "backward" if clip else "optimizer"
    walks[7:7] = [(phase, *rest[0])] if rest[0][1] else []
    walks += [(phase, *rest[1])] if rest[1][1] else []
    assert found == walks


def test_each_dense_unit_is_gathered_once_a_pass(configure: Make) -> None:
    """Whatever the number of micro-batches; in micro order it is gathered for each."""
    entered: dict[str, list[tuple[int, str]]] = {}
    for order in ("micro", "layer"):
        config = configure(
            {"data.micro_batches": 4, "data.micro_order": order, "dense.optimizer_state": "nvme"}
        )
        with open_session(config, Opening.CREATE) as trainer:
            queue = trainer._stepper.parts.queue
            enter = queue.enter
            found = entered[order] = []

            def watched(unit: int, phase: Any, to: Any = enter, into: list[tuple[int, str]] = found) -> None:
                into.append((unit, phase.name.lower()))
                to(unit, phase)

            with mock.patch.object(queue, "enter", watched):
                trainer.step()
    units = range(4)
    once = [(unit, "forward") for unit in units] + [(unit, "backward") for unit in reversed(units)]
    steps = [(unit, "optimizer") for unit in units]
    assert entered["layer"] == once + steps
    assert entered["micro"] == once * 4 + steps


@pytest.mark.parametrize("clip", [0.0, 0.3], ids=["immediate", "clip"])
def test_bytes_do_not_grow_with_micro_batches(
    clip: float, configure: Make, least: Callable[[TrainConfig], int]
) -> None:
    """Where a micro-batch reaches all experts, a step of four or eight moves what a step of one does."""
    moved: dict[tuple[str, int], tuple[int, int]] = {}
    for order, micros in (("micro", 1), ("layer", 4), ("layer", 8), ("micro", 4)):
        config = configure(
            {
                "data.micro_batches": micros,
                "data.micro_order": order,
                "data.batch_size": 8,
                "clip_norm": clip,
                "prefetch.depth": 1,
            }
        )
        config = replace(config, host_budget=3 * least(config))
        with open_session(config, Opening.CREATE) as trainer:
            trainer.step()
            before = trainer.store.cache.residency.stats()
            for _ in range(2):
                trainer.step()
            after = trainer.store.cache.residency.stats()
        moved[order, micros] = (
            after.read_bytes - before.read_bytes,
            after.written_bytes - before.written_bytes,
        )
    for micros in (4, 8):
        for one, many in zip(moved["micro", 1], moved["layer", micros], strict=True):
            assert many <= 1.05 * one, moved
    assert sum(moved["micro", 4]) > 2 * sum(moved["layer", 4])


def test_a_trace_replays_to_the_same_counts(
    configure: Make, tmp_path: Path, least: Callable[[TrainConfig], int]
) -> None:
    config = configure({"data.micro_batches": 3, "steps": 6, "prefetch.depth": 2, **LAYER})
    config = replace(config, host_budget=3 * least(config))
    with open_session(config, Opening.CREATE, trace=tmp_path / "trace") as trainer:
        for _ in range(config.steps):
            trainer.step()
        trainer.commit()
        trainer.evaluate()
        live = trainer.store.cache.residency.stats()
    assert live.misses > 0
    assert replay(tmp_path / "trace") == live


@pytest.mark.parametrize("clip", [0.0, 0.3], ids=["immediate", "clip"])
@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_a_loss_that_is_not_finite_skips_the_step(clip: float, spoilt: int, configure: Make) -> None:
    """In whichever micro-batch, before any state has moved; the run goes on as though the step had not been."""
    losses = []
    for spoils in (False, True):
        config = configure({"data.micro_batches": 3, "host_budget": "256KiB", "clip_norm": clip, **LAYER})
        with open_session(config, Opening.CREATE) as trainer:
            trainer.step()
            if spoils:
                run, done = trainer.model.run, []

                def spoil(batch: Any, to: Any = run, before: list[int] = done) -> Any:
                    output = to(batch)
                    before.append(len(before))
                    return replace(output, loss=output.loss * math.inf) if before[-1] == spoilt else output

                with mock.patch.object(trainer.model, "run", spoil):
                    assert trainer.step().skipped
            else:
                trainer.state.position += 1
            losses.append([trainer.step().loss for _ in range(3)])
            losses[-1].append(trainer.evaluate())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("breaks", ["forward", "backward_each"])
def test_what_breaks_in_a_step_is_raised_and_the_last_commit_stands(breaks: str, configure: Make) -> None:
    config = configure({"data.micro_batches": 3, **LAYER})
    before, expected = step_and_commit(config)
    with open_session(config, Opening.RESUME) as trainer:
        with (
            mock.patch.object(trainer.experts, breaks, side_effect=OSError("the disk is gone")),
            refuses(OSError, "the disk is gone"),
        ):
            trainer.step()
        with pytest.raises(StorePoisonedError):
            trainer.step()
    with open_session(config, Opening.RESUME) as trainer:
        assert trainer.store.records_crc32c() == before
        assert [trainer.step().loss for _ in range(2)] == expected


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("spilled", [{}, {"boundary_budget": 3 * 4096}], ids=["memory", "spilled"])
def test_a_micro_batch_that_breaks_ends_the_others(
    kind: type[BaseException], spilled: Mapping[str, Any], configure: Make
) -> None:
    """In the middle of a forward pass: nothing of them is left, and gradients are recorded as before."""
    config = configure({"data.micro_batches": 3, "model.n_layers": 3, **LAYER, **spilled})
    with open_session(config, Opening.CREATE) as trainer:
        trainer.step()
        order, block, lanes, calls = trainer._layers, trainer.model.blocks[1], [], []
        made, forward = order._lane_of, block.forward

        def watched(*arguments: Any) -> Any:
            lanes.append(made(*arguments))
            return lanes[-1]

        def breaks(*arguments: Any, **options: Any) -> Any:
            calls.append(torch.is_grad_enabled())
            if len(calls) == 2:
                raise kind("in the second micro-batch")
            return forward(*arguments, **options)

        with (
            mock.patch.object(order, "_lane_of", watched),
            mock.patch.object(block, "forward", breaks),
            refuses(kind, "in the second micro-batch"),
        ):
            trainer.step()
        assert calls == [False, False]
        assert [lane.run.dead for lane in lanes] == [True] * 3
        assert torch.is_grad_enabled()
        assert order._slot.barrier is None
        with pytest.raises(KeyError):
            order.boundaries.take(0, 0)
        with pytest.raises(StorePoisonedError):
            trainer.commit()


def test_one_micro_batch_has_one_order(configure: Make) -> None:
    config = configure(LAYER)
    assert not config.data.layer_major
    with open_session(config, Opening.CREATE) as trainer:
        assert trainer._stepper.parts.layers is None


def test_a_loop_of_somebody_else_is_refused(configure: Make) -> None:
    config = configure({"data.micro_batches": 2, **LAYER})
    with (
        refuses(ConfigError, "data.micro_order: expected micro or auto"),
        open_parts(config, Opening.CREATE, loop=Loop.EXTERNAL),
    ):
        pass
    assert not config.store.exists()
