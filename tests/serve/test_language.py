"""What a model's directory says of its texts: tokenizer, template, ends, sampling."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from refusals import refuses
from served_stores import store_of

from tierstore.errors import ConfigError, DataError
from tierstore.hf.mixtral import byte_tokenizer
from tierstore.hf.spec import stored_spec
from tierstore.model.config import ModelConfig
from tierstore.model.spec import spec_of
from tierstore.serve.language import Language, open_language
from tierstore.serve.sampling import PROCESSED, SamplingOptions, not_applied, sampling_defaults

_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"


def _language(directory: Path, files: dict[str, Any]) -> Language:
    _, store = store_of(directory, "mixtral", vocab_size=300)
    return _language_of(store / "model", files)


def _language_of(model: Path, files: dict[str, Any], *, gone: Sequence[str] = ()) -> Language:
    for name, content in files.items():
        (model / name).write_text(content if isinstance(content, str) else json.dumps(content))
    manifest = json.loads((model / "manifest.json").read_text())
    manifest["files"] = sorted({*manifest["files"], *files}.difference(gone))
    (model / "manifest.json").write_text(json.dumps(manifest))
    spec = stored_spec(model.parent)
    assert spec is not None
    return open_language(spec)


_TOKENIZER = {
    "tokenizer.json": byte_tokenizer(),
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE},
}


def test_bytes_without_a_tokenizer() -> None:
    language = open_language(spec_of(ModelConfig()))
    assert language.encode("é") == [0xC3, 0xA9]
    assert language.end_tokens == frozenset()
    assert language.defaults == SamplingOptions()


def test_a_tokenizer_and_its_template(tmp_path: Path) -> None:
    ends = {"eos_token_id": [2, 7], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    language = _language(tmp_path, {**_TOKENIZER, "generation_config.json": ends})
    text = language.text()
    said = language.encode_chat([{"role": "user", "content": "hé"}])
    assert "".join(map(text.push, said)) + text.finish() == "[user]hé[a]"
    assert language.end_tokens == {2, 7}
    assert language.defaults == SamplingOptions(temperature=0.6, top_k=20, top_p=0.95, ends=frozenset({2, 7}))
    assert language.vocabulary == 300
    with refuses(DataError, "chat template"):
        language.encode_chat([{"content": object()}, "no message"])  # type: ignore[list-item]


def test_ends_of_the_model_s_own_configuration(tmp_path: Path) -> None:
    """transformers writes generation_config.json; without its key the model's own end holds (2 of a Mixtral)."""
    language = _language(tmp_path, {"generation_config.json": {}})
    assert language.end_tokens == {2}
    assert language.defaults.temperature == 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, SamplingOptions(temperature=0, top_k=50)),
        ({"temperature": 0.5}, SamplingOptions(temperature=0, top_k=50)),  # do_sample is off
        ({"top_k": -1, "min_p": 7}, SamplingOptions(temperature=0, top_k=50)),  # and nothing of it is read
        (
            {"top_k": 7, "top_p": 0.9},
            SamplingOptions(temperature=0, top_k=7, top_p=0.9),
        ),  # --temperature turns it on
        ({"do_sample": True}, SamplingOptions(temperature=1.0, top_k=50)),
        ({"do_sample": True, "top_k": None}, SamplingOptions(top_k=50)),
        ({"do_sample": True, "top_k": 0}, SamplingOptions()),
        ({"repetition_penalty": 1.05}, SamplingOptions(temperature=0, top_k=50, repetition_penalty=1.05)),
    ],
)
def test_sampling_defaults(values: dict[str, Any], expected: SamplingOptions) -> None:
    """As transformers 5.23 fills its own GenerationConfig: ``_prepare_generation_config``."""
    assert sampling_defaults(values, where="m") == expected


#: What changes no text here, whatever its value.
_NO_EFFECT = {
    "pad_token_id",
    "bos_token_id",
    "decoder_start_token_id",
    "use_cache",
    "return_dict_in_generate",
}
_NO_EFFECT |= {"renormalize_logits", "transformers_version", "_from_model_config"}
_NO_EFFECT |= {"output_attentions", "output_hidden_states", "output_scores", "output_logits"}
_APPLIED = {
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "eos_token_id",
    "stop_strings",
}


def test_every_key_of_transformers_is_applied_or_named(tmp_path: Path) -> None:
    """All fields of its GenerationConfig, each with a value of its own, and one that it does not know."""
    from transformers import GenerationConfig

    keys = {*GenerationConfig().to_dict(), "chat_format"}
    idle = {"diversity_penalty", "penalty_alpha", "encoder_no_repeat_ngram_size"}  # with 0
    for value in (3, 0, 2.5, [[7]], "text"):
        line = "".join(not_applied(dict.fromkeys(keys, value), where="generation_config.json"))
        assert line.startswith("generation_config.json: not applied: ")
        assert "\n" not in line
        named = {part.split(" = ")[0] for part in line.split(": ", 2)[2].split(", ")}
        assert named == keys - _NO_EFFECT - _APPLIED - set(PROCESSED) - (idle if value == 0 else set())
    assert not_applied({"use_mtp": True}, where="x") == ["x: not applied: use_mtp = true"]
    assert not not_applied({**dict.fromkeys(keys), "num_beams": 1, "token_healing": False}, where="x")
    language = _language(tmp_path, {"generation_config.json": {"num_beams": 4, "no_repeat_ngram_size": 3}})
    assert language.lines == ["generation_config.json: not applied: num_beams = 4"]
    assert language.defaults.processed == {"no_repeat_ngram_size": 3}


def test_generation_in_the_model_s_configuration(tmp_path: Path) -> None:
    """As in transformers, it holds where there is no generation_config.json."""
    language = _language(tmp_path, {})
    assert language.defaults == SamplingOptions(temperature=0, top_k=50, ends=frozenset({2}))
    model = tmp_path / "store" / "model"
    values = {"do_sample": True, "top_k": 7, "no_repeat_ngram_size": 2, "num_beams": 3, "output_scores": True}
    config = json.loads((model / "config.json").read_text()) | values
    (model / "generation_config.json").unlink()
    language = _language_of(model, {"config.json": config}, gone=["generation_config.json"])
    assert (language.defaults.temperature, language.defaults.top_k) == (1, 7)
    assert language.defaults.processed == {"no_repeat_ngram_size": 2}
    assert language.lines == ["config.json: not applied: num_beams = 3"]


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_a_generation_config_that_cannot_be_read(content: str, tmp_path: Path) -> None:
    """As in transformers, it is as if there were none; a line says so."""
    language = _language(tmp_path, {"generation_config.json": content})
    assert language.defaults == SamplingOptions(temperature=0, top_k=50, ends=frozenset({2}))
    (line,) = language.lines
    assert line.startswith(str(tmp_path))
    assert line.endswith("; ignored")
    assert "\n" not in line
    assert "generation_config.json: " in line


def test_stop_strings_of_the_model(tmp_path: Path) -> None:
    language = _language(tmp_path, {"generation_config.json": {"stop_strings": ["<e", "b"]}})
    text = language.text(["c"])
    assert [text.push(byte) for byte in b"a<e"] == ["a", "", ""]
    assert text.stopped
    for value in (5, [""], ["a", 5]):
        with refuses(ConfigError, "generation_config.json:", "stop_strings:"):
            _language_of(tmp_path / "store" / "model", {"generation_config.json": {"stop_strings": value}})


def test_a_damaged_end(tmp_path: Path) -> None:
    with refuses(ConfigError, "eos_token_id:"):
        _language(tmp_path, {"generation_config.json": {"eos_token_id": ["two"]}})
