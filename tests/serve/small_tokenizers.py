"""Tokenizers of the field's kinds, small: they decode as those of the models that they stand for."""

import warnings
from collections.abc import Sequence
from typing import Any

#: Special tokens of the harmony format, and one of ChatML's; what decoding leaves out.
MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
SPECIALS = ("<s>", "</s>", "<|im_end|>", "<|tool|>")
_WORDS = [
    "▁The",
    "▁the",
    "▁capital",
    "▁of",
    "▁France",
    "▁is",
    "▁Paris",
    "▁and",
    "▁London",
    "▁Hello",
    "▁world",
    "▁do",
    "▁n",
    "'t",
    "n't",
    "▁'",
    "'",
    "s",
    "'s",
    "'m",
    "'ve",
    "'re",
    "STO",
    "P",
    ",",
    "▁,",
    ".",
    "▁.",
    "!",
    "?",
    ":",
    "▁",
    "▁a",
    "▁b",
    "v",
    "e",
    "r",
    "x",
]


def _loaded() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tokenizers
        from transformers import PreTrainedTokenizerFast
    return tokenizers, PreTrainedTokenizerFast


def _fast(tokenizer: Any, specials: Sequence[str], **options: Any) -> Any:
    library, fast = _loaded()
    tokenizer.add_special_tokens([library.AddedToken(name, special=True) for name in specials])
    return fast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **options)


def sentencepiece(specials: Sequence[str] = SPECIALS, **options: Any) -> Any:
    """As of Llama and Mixtral: blanks are ``▁``, bytes are tokens, and the blank that begins a text is none."""
    library, _ = _loaded()
    vocabulary = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    tokenizer = library.Tokenizer(
        library.models.Unigram(
            [*vocabulary, *((word, -1.0) for word in _WORDS)], unk_id=0, byte_fallback=True
        )
    )
    of = library.normalizers
    tokenizer.normalizer = of.Sequence([of.Prepend("▁"), of.Replace(" ", "▁")])
    of = library.decoders
    tokenizer.decoder = of.Sequence([of.Replace("▁", " "), of.ByteFallback(), of.Fuse(), of.Strip(" ", 1, 0)])
    return _fast(tokenizer, specials, unk_token="<unk>", **options)


def metaspace(**options: Any) -> Any:
    """As of T5 and XLNet."""
    library, _ = _loaded()
    tokenizer = library.Tokenizer(
        library.models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in _WORDS)], 0)
    )
    tokenizer.decoder = library.decoders.Metaspace()
    return _fast(tokenizer, SPECIALS, unk_token="<unk>", **options)


def byte_level(specials: Sequence[str] = SPECIALS, **options: Any) -> Any:
    """As of GPT, Qwen and gpt-oss: each token is some bytes."""
    library, _ = _loaded()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["analysis final commentary assistant, 漢字 🚗 é"] * 4, trainer)
    return _fast(tokenizer, specials, **options)


def word_piece(**options: Any) -> Any:
    """As of BERT."""
    library, _ = _loaded()
    words = [
        "[UNK]",
        "the",
        "##s",
        "##ing",
        "do",
        "n",
        "##'t",
        "'",
        "t",
        ".",
        ",",
        "!",
        "s",
        "m",
        "##.",
        "hello",
        "x",
    ]
    tokenizer = library.Tokenizer(
        library.models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.decoder = library.decoders.WordPiece("##", True)
    return _fast(tokenizer, SPECIALS, **options)
