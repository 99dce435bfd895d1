"""``tierstore generate``: text from a store, in the memory that it is given.

SIGINT and SIGTERM end it after the pass in progress, with what has been written and its table; a second one exits at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.interrupts import Interrupts
from tierstore.cli.models import deployed_settings, describe_settings
from tierstore.cli.options import (
    EXISTING_DIRECTORY,
    config_options,
    config_overrides,
    dataclass_options,
    help_config_option,
    json_option,
    option,
    record_trace_option,
    set_option,
    timeline_option,
)
from tierstore.cli.output import Output
from tierstore.config import load
from tierstore.serve.config import ServeConfig
from tierstore.timeline import open_timeline
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:  # at run time these import torch, which listing the commands must not
    from tierstore.serve.batch import GroupedRunner
    from tierstore.serve.generating import GeneratedText, GenerationTotals, TextRequest
    from tierstore.serve.language import Language
    from tierstore.serve.opening import ServedParts

_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What is to be written. None: what the model's own generation_config.json says."""

    prompts: tuple[str, ...] = option(
        MISSING, "--prompt", help="Prompt; repeat the option for a batch.", required=True
    )
    chat: bool = option(False, help="Each prompt is a user's message, through the chat template.")
    max_tokens: int = option(256, help="Most tokens of each text.")
    temperature: float | None = option(
        None, help="0 takes the most probable token (default: the model's own)."
    )
    top_k: int | None = option(None, help="Sample from the N most probable tokens (0: from all).")
    top_p: float | None = option(None, help="Sample from the fewest tokens whose probabilities add up to P.")
    seed: int | None = option(None, help="The same seed gives the same text.")
    stop: tuple[str, ...] = option((), help="End a text before this string; repeat for several.")


@click.command()
@click.argument("store", type=EXISTING_DIRECTORY)
@dataclass_options(_Asked, "asked")
@config_options(
    ServeConfig,
    {
        "--host-budget": "host_budget",
        "--device-budget": "device_budget",
        "--batch-invariant": "batch.invariant",
        "--predictor": "prefetch.predictor",
    },
)
@timeline_option
@record_trace_option
@set_option()
@json_option
@help_config_option(lambda: ServeConfig)
@click.pass_context
def generate(
    ctx: click.Context,
    store: Path,
    asked: _Asked,
    given: dict[str, object],
    timeline: Path | None,
    record_trace: Path | None,
    settings: tuple[str, ...],
    output: Output,
) -> None:
    """Continue text with the model in STORE, trained or imported.

    Its experts stay on disk and in the memory that --host-budget gives them. A single text is written as it comes,
    several one after another as they end. A table follows; with --json it goes to stderr with the texts.
    """
    deployed, overrides = deployed_settings(store), config_overrides(settings, {"store": store, **given})
    config = load(ServeConfig, None, {**deployed, **overrides})
    if deployed:
        output.line(describe_settings(store, deployed, overrides))
    ctx.exit(_run(config, asked, output, timeline=timeline, trace=record_trace))


def _run(
    config: ServeConfig, asked: _Asked, output: Output, *, timeline: Path | None, trace: Path | None
) -> int:
    from tierstore.serve.generating import TextGenerator
    from tierstore.serve.language import open_language
    from tierstore.serve.opening import open_runner, open_served

    with (
        Interrupts.heard() as interrupts,
        open_timeline(timeline) as sink,
        open_served(config, trace=trace, timeline=sink) as parts,
    ):
        language = open_language(parts.spec)
        for line in language.lines:
            output.line(line)
        requests = _requests(asked, language)
        runner = open_runner(parts)
        _announce(parts, runner, output)
        shown = _Shown(output, len(requests))
        generator = TextGenerator(
            runner, end_tokens=language.end_tokens, added=shown.add, stopped=lambda: interrupts.asked
        )
        texts = generator.run(requests)
        shown.end(texts)
        if any(made.reasoning and not made.text for made in texts):
            output.line("a text without an answer: its tokens went into reasoning, which --json shows")
        _table(parts, generator.totals, texts, output)
        output.emit(_result(parts, generator.totals, requests, texts))
        parts.store.end_trace()
    return _INTERRUPTED if interrupts.asked else 0


def _requests(asked: _Asked, language: Language) -> list[TextRequest]:
    from tierstore.serve.generating import TextRequest
    from tierstore.serve.sampling import TokenSampler

    given = {
        name: value
        for name in ("temperature", "top_k", "top_p", "seed")
        if (value := getattr(asked, name)) is not None
    }
    sampling = replace(language.defaults, **given)
    requests = []
    for text in asked.prompts:
        prompt = (
            language.encode_chat([{"role": "user", "content": text}]) if asked.chat else language.encode(text)
        )
        requests.append(
            TextRequest(
                prompt=prompt,
                most=asked.max_tokens,
                sampler=TokenSampler(sampling, prompt),
                text=language.text(asked.stop, prompt=prompt, context=() if asked.chat else prompt),
            )
        )
    return requests


def _announce(parts: ServedParts, runner: GroupedRunner, output: Output) -> None:
    """What it takes, before the first pass."""
    from tierstore.serve.footprint import batch_bytes

    spec, batch = parts.spec, parts.config.batch
    architecture = spec.architecture
    output.line(
        f"model: {architecture.parameters / 1e6:.1f} M parameters, {architecture.records} experts in "
        f"{len(spec.moe_layers)} layers, {spec.compute_dtype.value}, on {parts.device}"
    )
    context = runner.model.context
    caches = batch_bytes(spec, sequences=batch.sequences, context=context)
    output.line(
        f"memory: host budget {format_bytes(parts.config.host_budget)} for experts; keys and values at most "
        f"{format_bytes(caches)} ({batch.sequences} sequences of {context} tokens)"
    )
    output.line(f"batch: {runner.describe()}")


class _Shown:
    """Writes a single text as it comes, and several when all have ended."""

    def __init__(self, output: Output, count: int) -> None:
        self._output = output
        self._streams = count == 1

    def add(self, index: int, piece: str) -> None:
        """A piece of text ``index``."""
        if self._streams:
            self._write(piece)

    def end(self, texts: Sequence[GeneratedText]) -> None:
        """All have ended."""
        if self._streams:
            self._output.line()
            return
        for number, made in enumerate(texts):
            self._write(f"[{number}] {made.text}\n")

    def _write(self, text: str) -> None:
        """As it is: the console would make blanks of tabs."""
        self._output.console.file.write(text)
        self._output.console.file.flush()


def _table(
    parts: ServedParts, totals: GenerationTotals, texts: Sequence[GeneratedText], output: Output
) -> None:
    from tierstore.train.footprint import peak_resident_bytes

    stats = parts.store.cache.residency.stats()
    asked = stats.hits + stats.misses
    first = [made.first_s for made in texts if made.first_s is not None]
    output.line()
    output.table(
        "",
        ("prefill", "decode", "first token", "hits", "read", "stalls", "peak memory"),
        [
            (
                _rate(totals.prefill_rate),
                _rate(totals.decode_rate),
                format_seconds(max(first)) if first else "-",
                f"{stats.hits / asked:.0%}" if asked else "-",
                format_bytes(stats.read_bytes),
                format_seconds(parts.ledger.total_s),
                format_bytes(peak_resident_bytes()),
            )
        ],
    )


def _rate(tokens_per_s: float | None) -> str:
    return "-" if tokens_per_s is None else f"{tokens_per_s:.1f} tokens/s"


def _result(
    parts: ServedParts,
    totals: GenerationTotals,
    requests: Sequence[TextRequest],
    texts: Sequence[GeneratedText],
) -> dict[str, object]:
    from tierstore.train.footprint import peak_resident_bytes

    stats, guesses = parts.store.cache.residency.stats(), parts.experts.guesses
    return {
        "store": str(parts.config.store),
        "texts": [
            {
                "text": made.text,
                "reasoning": made.reasoning,
                "tokens": made.tokens,
                "prompt_tokens": len(request.prompt),
                "ending": made.ending.value,
                "first_token_s": made.first_s,
            }
            for request, made in zip(requests, texts, strict=True)
        ],
        "prefill_tokens": totals.prefill_tokens,
        "prefill_s": totals.prefill_s,
        "decode_tokens": totals.decode_tokens,
        "decode_s": totals.decode_s,
        "steps": totals.steps,
        "hits": stats.hits,
        "misses": stats.misses,
        "read_bytes": stats.read_bytes,
        "prefetch_read_bytes": stats.prefetch_read_bytes,
        "wasted_prefetch_bytes": stats.wasted_prefetch_bytes,
        "guesses": {"used": guesses.used, "guessed": guesses.guessed, "right": guesses.right},
        "stall_s": parts.ledger.total_s,
        "peak_resident_bytes": peak_resident_bytes(),
    }
