"""A real tokenizer, small: byte-level BPE with a chat template, saved as transformers saves one; and files to tokenise."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: ChatML, without and with marks around the answers.
PLAIN = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{{ '\n' }}{% endfor %}"
)
#: The answer that nothing follows has its reasoning, as some families have it.
REASONING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
PAD, START, END = range(3)


def save_tokenizer(
    directory: Path, template: str | None = PLAIN, *, begin: str = "", truncate: int = 0, size: int = 280
) -> Path:
    """Saves a tokenizer of ``size`` tokens (at most 285). ``begin``: the token before each text; ``truncate``: what it cuts
    texts to.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
        from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|pad|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["one expert, two tiers, three experts in the store"] * 4, trainer)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(directory)
    if truncate:
        tokenizer.enable_truncation(truncate)
        tokenizer.enable_padding(length=truncate)
        tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def write_lines(path: Path, values: Sequence[Any]) -> Path:
    """A JSONL file; text is written as it is, anything else as JSON."""
    lines = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def conversation(*turns: str) -> dict[str, Any]:
    """Turns of user and assistant, one after the other."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}
