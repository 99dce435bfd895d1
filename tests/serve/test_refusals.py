"""What serving refuses before a model is open: the type of each error, and the options, files and values that it names."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import Refusal, refuses

from tierstore.cache.config import CacheConfig
from tierstore.config import dotted_fields, load
from tierstore.errors import BudgetError, ConfigError, DataError
from tierstore.model import ModelConfig
from tierstore.model.spec import spec_of
from tierstore.serve.api.app import Keys
from tierstore.serve.config import BatchConfig, LimitsConfig, ServeConfig
from tierstore.serve.footprint import batch_bytes, check_memory, fitted_context
from tierstore.serve.language import BytePieces, Language, StreamedText, open_language
from tierstore.serve.sampling import SamplingOptions, TokenSampler, sampling_defaults
from tierstore.tiers.slots import DeviceKind

Act = Callable[[Path], object]
MIB = 1 << 20
#: 4 layers of width 256 in fp32: 8 sequences of 512 tokens take 32 MiB, and a layer more.
SPEC = spec_of(ModelConfig(n_layers=4, d_model=256, n_heads=4))
WHOLE = batch_bytes(SPEC, 8, 512)


def keys(text: str) -> Act:
    def act(directory: Path) -> None:
        path = directory / "keys"
        path.write_text(text)
        Keys.read(path)

    return act


def context(room: int, **batch: int) -> Act:
    config = BatchConfig(**batch)
    needed = partial(batch_bytes, SPEC, config.sequences)
    return lambda _: fitted_context(needed, config, longest=512, allowed=room)


def memory(device: DeviceKind, usable: int) -> Act:
    """8 MiB of experts and 2 of dense parameters."""
    return lambda _: check_memory(8 * MIB, 2 * MIB, device, usable=usable)


def defaults(**values: Any) -> Act:
    """What a model's generation_config.json says."""
    return lambda _: sampling_defaults(values, where="m/generation_config.json", vocabulary=90)


def options(name: str, value: float) -> Act:
    return lambda _: SamplingOptions(**{name: value})  # type: ignore[arg-type]


def limits(name: str, value: float) -> Act:
    return lambda _: LimitsConfig(**{name: value})  # type: ignore[arg-type]


def idle(key: str, value: str) -> Act:
    """A file of a server that sets ``key``, which has effect in training only."""

    def act(directory: Path) -> None:
        path = directory / "serve.toml"
        table, _, name = key.rpartition(".")
        path.write_text(f"[{table}]\n{name} = {value}\n")
        load(ServeConfig, path)

    return act


def bytes_of() -> Language:
    """The language of a model without a tokenizer."""
    return open_language(spec_of(ModelConfig()))


#: By name: what generation_config.json cannot say, what an option of sampling cannot be, what a limit cannot be.
DEFAULTS: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"do_sample": True, "temperature": "warm"}),
    ("top_p", {"do_sample": True, "top_p": 2}),
    ("no_repeat_ngram_size", {"no_repeat_ngram_size": "three"}),
    ("no_repeat_ngram_size", {"no_repeat_ngram_size": -1}),
    ("bad_words_ids", {"bad_words_ids": [3]}),
    ("bad_words_ids", {"bad_words_ids": [[300]]}),
    ("suppress_tokens", {"suppress_tokens": "a"}),
    ("begin_suppress_tokens", {"begin_suppress_tokens": "b"}),
    ("exponential_decay_length_penalty", {"exponential_decay_length_penalty": 2}),
    ("min_new_tokens", {"min_new_tokens": -2}),
    ("min_p", {"do_sample": True, "min_p": 7}),
    ("top_k", {"do_sample": True, "top_k": -1}),
]
OPTIONS = [
    ("temperature", -0.1),
    ("temperature", math.inf),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("repetition_penalty", 0.0),
]
IDLE = [
    ("cache.write_back_every", "2"),
    ("prefetch.gather_depth", "0"),
    ("links.gather.bandwidth", '"1MiB"'),
    ("links.exchange.latency", "0.5"),
    ("links.node.latency", "0.5"),
]
LIMITS = [("queue", 0), ("tokens", -1), ("request_s", 0.0), ("drain_s", math.inf), ("body", 0)]
KEYS = {"empty": "", "comment": "# none\n", "short": "short\n", "blanks": "with blanks in the key\n"}
ROWS: list[tuple[str, Act, type[Exception], tuple[str, ...]]] = [
    *(
        (f"defaults-{number}-{name}", defaults(**values), ConfigError, ("m/generation_config.json:", name))
        for number, (name, values) in enumerate(DEFAULTS)
    ),
    *((f"option-{name}-{value}", options(name, value), ConfigError, (name,)) for name, value in OPTIONS),
    *((f"limit-{name}", limits(name, value), ConfigError, (f"limits.{name}:",)) for name, value in LIMITS),
    *(
        (
            f"idle-{key}",
            idle(key, value),
            ConfigError,
            ("serve.toml: ", ".".join(key.split(".")[:2]), "training only"),
        )
        for key, value in IDLE
    ),
    *((f"keys-{name}", keys(text), ConfigError, ("--api-keys:", "keys")) for name, text in KEYS.items()),
    (
        "context",
        context(WHOLE - 1, context=512),
        BudgetError,
        ("batch.context:", "8 sequences", "512 tokens", "448 tokens", "batch.sequences"),
    ),
    ("no-context", context(WHOLE // 8), BudgetError, ("batch.context:",)),
    (
        "memory",
        memory(DeviceKind.CPU, 9 * MIB),
        BudgetError,
        ("host_budget:", "7 MiB", "2 MiB", "9 MiB", "8 MiB"),
    ),
    (
        "memory-beside-a-device",
        memory(DeviceKind.CUDA, 7 * MIB),
        BudgetError,
        ("host_budget:", "7 MiB", "8 MiB"),
    ),
    ("no-text", lambda _: bytes_of().encode(""), DataError, ("tokens",)),
    (
        "no-template",
        lambda _: bytes_of().encode_chat([{"role": "user", "content": "a"}]),
        DataError,
        ("chat template",),
    ),
    ("empty-stop", lambda _: StreamedText(BytePieces(), [""]), ConfigError, ("stop",)),
    (
        "logits",
        lambda _: TokenSampler(SamplingOptions())(torch.tensor([1.0, math.nan])),
        ValueError,
        ("not numbers",),
    ),
]


@pytest.mark.parametrize("refusal", [Refusal(*row) for row in ROWS], ids=lambda refusal: str(refusal.name))
def test_it_is_refused_by_name(tmp_path: Path, refusal: Refusal) -> None:
    with refuses(refusal.error, *refusal.named):
        refusal.act(tmp_path)


def test_what_has_effect_in_training_only_is_not_listed() -> None:
    """Nor taken from Python; its defaults change nothing."""
    listed = {info.name for info in dotted_fields(ServeConfig)}
    assert listed.isdisjoint(key for key, _ in IDLE)
    assert {"cache.policy", "prefetch.depth", "links.copy.latency", "links.disk.bandwidth"} <= listed
    assert load(ServeConfig, None, {"prefetch.gather_depth": 1, "links.node.latency": 0}) == ServeConfig()
    with refuses(ConfigError, "cache.write_back_every: has effect in training only"):
        ServeConfig(cache=CacheConfig(write_back_every=2))
