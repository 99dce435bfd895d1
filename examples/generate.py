"""Text from a store, by hand: a model opened read only, and a batch that sequences join and leave.

``python examples/generate.py STORE "a prompt" "another"`` continues each prompt by 32 tokens. ``tierstore generate`` does
this with streaming, stop strings and a table of what it cost.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tierstore.serve.config import ServeConfig
from tierstore.serve.language import open_language
from tierstore.serve.opening import open_runner, open_served
from tierstore.serve.sampling import TokenSampler

TOKENS = 32


def main(store: Path, prompts: list[str]) -> None:
    # Experts take the host budget and no more: those that are chosen, and those that are guessed to be.
    with open_served(ServeConfig(store=store, host_budget=1 << 30)) as parts:
        language, runner = open_language(parts.spec), open_runner(parts)
        tokens = [language.encode(prompt) for prompt in prompts]
        samplers = [TokenSampler(language.defaults, prompt) for prompt in tokens]
        texts = [language.text(prompt=prompt, context=prompt) for prompt in tokens]

        logits = runner.join(tokens)  # prefill: each layer once for all prompts
        place = {number: at for at, number in enumerate(logits)}
        written = [""] * len(prompts)
        for _ in range(TOKENS):
            chosen = {number: samplers[place[number]](row) for number, row in logits.items()}
            for number, token in list(chosen.items()):
                if token in language.end_tokens:
                    runner.leave(number)  # its memory is free for another
                    del chosen[number]
                else:
                    written[place[number]] += texts[place[number]].push(token)
            logits = runner.step(chosen)  # one token for each that goes on
        for prompt, text, answer in zip(prompts, texts, written, strict=True):
            print(f"{prompt}{answer}{text.finish()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
