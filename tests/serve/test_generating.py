"""Texts through a runner, replays of their decisions, what caches take, and ``tierstore generate``."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from refusals import refuses
from served_cases import built_in, drawn, wrapped
from served_stores import least_budget, served_store, store_of
from tiny_families import FAMILIES

from tierstore.cli.main import cli
from tierstore.deploy.records import Deployment
from tierstore.errors import ConfigError
from tierstore.hf.spec import stored_spec
from tierstore.model.config import ModelConfig
from tierstore.model.spec import spec_of
from tierstore.prefetch.predictor import PredictorName
from tierstore.serve.batch import BatchRunner
from tierstore.serve.config import BatchConfig
from tierstore.serve.footprint import batch_bytes, fitted_context, sequence_bytes
from tierstore.serve.generating import Ending, GeneratedText, TextGenerator
from tierstore.serve.language import BytePieces, StreamedText
from tierstore.serve.sampling import SamplingOptions, TokenSampler
from tierstore.trace.replay import replay

GREEDY = SamplingOptions(temperature=0)


def _text(
    prompt: list[int], most: int, *, options: SamplingOptions = GREEDY, stop: str = ""
) -> GeneratedText:
    stream = StreamedText(BytePieces(), [stop] if stop else [])
    return GeneratedText(prompt, most, TokenSampler(options, prompt), stream)


def test_requests_wait_for_room() -> None:
    """Five requests over a runner of two: each has its text, and what was streamed is that text."""
    _, served = built_in()
    prompts = drawn((3, 5, 2, 4, 6), vocabulary=61)
    pieces: dict[int, str] = {}
    runner = served.runner(BatchRunner, sequences=2)
    generator = TextGenerator(
        runner,
        end_tokens=frozenset(),
        added=lambda at, piece: pieces.update({at: pieces.get(at, "") + piece}),
    )
    found = [_text(prompt, 3 + at) for at, prompt in enumerate(prompts)]
    generator.run(found)
    assert [len(made.tokens) for made in found] == [3, 4, 5, 6, 7]
    assert all(made.ending is Ending.LENGTH for made in found)
    assert [pieces[at] for at in range(5)] == [made.text for made in found]
    assert runner.numbers == ()
    assert generator.totals.prefill_tokens == sum(map(len, prompts))
    assert generator.totals.decode_tokens == sum(len(made.tokens) - 1 for made in found)


def test_why_texts_end() -> None:
    _, served = built_in(context=10)
    (prompt,) = drawn((6,), vocabulary=61)

    def run(ends: frozenset[int] = frozenset(), most: int = 40, **options: Any) -> Any:
        generator = TextGenerator(served.runner(BatchRunner), end_tokens=ends, added=lambda at, piece: None)
        made = _text(prompt, most, **options)
        generator.run([made])
        return made

    whole = run()
    assert whole.ending is Ending.LENGTH
    assert len(whole.tokens) == 10 - 6 + 1  # the last one follows a full context
    ended = run(frozenset([whole.tokens[2]]))
    first = whole.tokens.index(whole.tokens[2])
    assert (ended.ending, ended.tokens) == (Ending.END, whole.tokens[:first])
    stop = chr(whole.tokens[1])
    stopped = run(stop=stop)
    assert (stopped.ending, stopped.text) == (Ending.STOP, whole.text[: whole.text.index(stop)])
    with refuses(ConfigError, "max_tokens:", "got 0"):
        run(most=0)


def test_an_interrupted_text() -> None:
    _, served = built_in()
    runner = served.runner(BatchRunner)
    asked = iter([False, False, False, True])
    generator = TextGenerator(
        runner, end_tokens=frozenset(), added=lambda at, piece: None, stopped=lambda: next(asked)
    )
    made = _text([1, 2], 20)
    generator.run([made])
    assert made.ending is Ending.INTERRUPTED
    assert len(made.tokens) == 3
    assert runner.numbers == ()


@pytest.mark.parametrize("predictor", list(PredictorName))
def test_a_replay_decides_alike(predictor: PredictorName, tmp_path: Path) -> None:
    _, store = store_of(tmp_path, "qwen3_moe", num_hidden_layers=4)
    trace = tmp_path / "decode.trace"
    with served_store(
        store, trace=trace, host_budget=3 * least_budget(store), prefetch__predictor=predictor.value
    ) as (parts, runner):
        generator = TextGenerator(runner, end_tokens=frozenset(), added=lambda at, piece: None)
        generator.run([_text(prompt, 6) for prompt in drawn((5, 3))])
        parts.store.end_trace()
        live = parts.store.cache.residency.stats()
    assert live.evictions
    assert replay(trace) == live


# Memory -----------------------------------------------------------------------------------------------------


def _nbytes(cache: Any) -> int:
    """What a cache of keys and values, or of states of linear attention, holds."""
    held: list[torch.Tensor | None] = []
    for layer in cache.layers:
        held += [getattr(layer, "keys", None), getattr(layer, "values", None)]
        for name in ("conv_states", "recurrent_states"):
            held += getattr(layer, name, {}).values()
    return sum(value.nbytes for value in held if value is not None)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_caches_take(family: str, tmp_path: Path) -> None:
    """What is announced beside what transformers' caches hold: equal, but where a window keeps fewer tokens."""
    _, store = store_of(tmp_path, family, torch.bfloat16)
    spec = stored_spec(store)
    assert spec is not None
    _, served = wrapped(family, torch.bfloat16)
    runner = served.runner(BatchRunner)
    runner.join(drawn((30, 20)))
    held = _nbytes(runner._groups[0].cache)
    bound = 2 * sequence_bytes(spec, 30)
    assert held == bound if family != "gpt_oss" else held < bound


def test_what_the_built_in_cache_takes() -> None:
    model, served = built_in()
    runner = served.runner(BatchRunner)
    runner.join(drawn((9, 4), vocabulary=61))
    assert _nbytes(runner._groups[0].cache) == 2 * sequence_bytes(model.config, 9)


def test_the_context_that_fits() -> None:
    """By hand: 4 layers of width 256 in fp32 take 8 KiB a token; 8 sequences of 512 take 32 MiB, and a layer more."""
    spec = spec_of(ModelConfig(n_layers=4, d_model=256, n_heads=4))
    assert sequence_bytes(spec, 1) == 4 * 2 * 256 * spec.compute_dtype.itemsize
    needed = partial(batch_bytes, spec, 8)
    whole = needed(512)
    assert whole == 8 * 512 * sequence_bytes(spec, 1) * 5 // 4
    assert fitted_context(needed, BatchConfig(), longest=512, allowed=whole) == 512
    assert fitted_context(needed, BatchConfig(), longest=512, allowed=whole - 1) == 448
    assert fitted_context(needed, BatchConfig(), longest=512, allowed=needed(448) - 1) == 384


# The command ------------------------------------------------------------------------------------------------


def _generate(store: Path, *arguments: str) -> Any:
    base = [
        "generate",
        str(store),
        *["--set", "io.huge_pages=off", "--set", "threads=1", "--host-budget", "4MiB"],
    ]
    return CliRunner().invoke(cli, [*base, *arguments], standalone_mode=False)


def test_the_command(tmp_path: Path) -> None:
    _, store = store_of(tmp_path, "mixtral")
    one = _generate(store, "--prompt", "ab", "--max-tokens", "5", "--record-trace", str(tmp_path / "t"))
    assert one.exception is None, one.output
    assert "at most 1 sequence of 7 tokens" in one.output
    assert "tokens/s" in one.output
    assert (tmp_path / "t").exists()
    sampled = [
        *("--prompt", "ab", "--prompt", "c"),
        *("--temperature", "1", "--seed", "4"),
        "--max-tokens=5",
        "--json",
    ]
    first, again = (json.loads(_generate(store, *sampled).stdout.splitlines()[-1]) for _ in range(2))
    assert [text["tokens"] for text in first["texts"]] == [text["tokens"] for text in again["texts"]]
    assert [text["prompt_tokens"] for text in first["texts"]] == [2, 1]
    assert first["misses"] > 0
    invariant = _generate(store, *sampled, "--batch-invariant")
    assert len(json.loads(invariant.stdout.splitlines()[-1])["texts"]) == 2


def test_memory_of_the_whole_process(tmp_path: Path) -> None:
    """Experts get what is left, here all that they take; less than the rest needs is refused before a pass."""
    _, store = store_of(tmp_path, "mixtral")
    base = ["generate", str(store), "--prompt", "ab", "--max-tokens", "5", "--set", "threads=1", "--json"]
    made = [CliRunner().invoke(cli, [*base, *more]) for more in ([], ["--memory", "8GiB"])]
    default, given = (json.loads(one.stdout.splitlines()[-1]) for one in made)
    assert default["texts"][0]["tokens"] == given["texts"][0]["tokens"]
    experts = given["memory"]["parts"][0]
    assert experts["part"] == "experts"
    assert default["memory"]["parts"][0] == experts
    assert given["memory"]["announced_bytes"] < 8 << 30
    # Every expert is read at most once.
    assert 0 < given["read_bytes"] <= experts["held_bytes"]
    small = CliRunner().invoke(cli, [*base, "--memory", "1MiB"])
    assert (small.exit_code, "memory: expected at least" in small.stderr) == (2, True), small.stderr


def test_a_deployed_store_brings_its_settings(tmp_path: Path) -> None:
    """They hold but for those that are given."""
    _, store = store_of(tmp_path, "mixtral")
    settings = {"host_budget": 8 << 20, "prefetch.predictor": "none", "batch.sequences": 3}
    Deployment(settings=settings, profile={}, stages=()).write(store)
    made = _generate(store, *["--prompt", "a"] * 4, "--max-tokens", "2")
    assert made.exception is None, made.output
    assert "deployment.json: prefetch.predictor = none, batch.sequences = 3\n" in made.output
    assert "experts 4 MiB" in made.output
    assert "at most 3 sequences of 3 tokens" in made.output
    (store / "deployment.json").write_text("{}")
    assert "not a deployment" in _generate(store, "--prompt", "a").stderr


def test_what_the_command_refuses(tmp_path: Path) -> None:
    _, store = store_of(tmp_path, "mixtral")
    for arguments, message in (
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens: expected at least 1"),
        (["--prompt", "a", "--temperature", "-1"], "temperature: expected at least 0"),
        (["--prompt", ""], "the prompt has no tokens"),
        (["--prompt", "a", "--chat"], "no chat template"),
        (["--prompt", "a" * 129], "batch.context: a prompt of 129 tokens"),
        (["--prompt", "a", "--set", "batch.context=200"], "batch.context: expected at most 128"),
    ):
        found = _generate(store, *arguments)
        assert found.exit_code == 2
        assert message in found.stderr, (arguments, found.output)


def test_limits_of_a_server_are_refused(tmp_path: Path) -> None:
    _, store = store_of(tmp_path, "mixtral")
    refused = _generate(store, "--prompt", "ab", "--set", "limits.tokens=5")
    assert refused.exit_code == 2
    assert "limits.tokens: has effect in tierstore serve only" in refused.output
