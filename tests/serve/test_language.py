"""What a model's directory says of its texts: tokenizer, template, ends, sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from served_stores import store_of

from tierstore.errors import ConfigError, DataError
from tierstore.hf.exports.mixtral import byte_tokenizer
from tierstore.hf.stored import stored_spec
from tierstore.model.config import ModelConfig
from tierstore.serve.text.language import Language, open_language, sampling_defaults
from tierstore.serve.text.sampling import SamplingOptions
from tierstore.train.config import FinetuneConfig

_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"


def _language(directory: Path, files: dict[str, Any]) -> Language:
    _, store = store_of(directory, "mixtral", vocab_size=300)
    model = store / "model"
    for name, content in files.items():
        (model / name).write_text(content if isinstance(content, str) else json.dumps(content))
    manifest = json.loads((model / "manifest.json").read_text())
    manifest["files"] = sorted({*manifest["files"], *files})
    (model / "manifest.json").write_text(json.dumps(manifest))
    spec = stored_spec(store, FinetuneConfig())
    assert spec is not None
    return open_language(spec)


_TOKENIZER = {
    "tokenizer.json": byte_tokenizer(),
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE},
}


def test_bytes_without_a_tokenizer() -> None:
    language = open_language(ModelConfig())
    assert language.encode("é") == [0xC3, 0xA9]
    assert language.end_tokens == frozenset()
    assert language.defaults == SamplingOptions()
    with pytest.raises(DataError, match="no tokens"):
        language.encode("")
    with pytest.raises(DataError, match="no chat template"):
        language.encode_chat([{"role": "user", "content": "a"}])


def test_a_tokenizer_and_its_template(tmp_path: Path) -> None:
    ends = {"eos_token_id": [2, 7], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    language = _language(tmp_path, {**_TOKENIZER, "generation_config.json": ends})
    text = language.text()
    said = language.encode_chat([{"role": "user", "content": "hé"}])
    assert "".join(map(text.push, said)) + text.finish() == "[user]hé[a]"
    assert language.end_tokens == {2, 7}
    assert language.defaults == SamplingOptions(temperature=0.6, top_k=20, top_p=0.95)
    assert language.vocabulary == 300
    with pytest.raises(DataError, match="chat template fails"):
        language.encode_chat([{"content": object()}, "no message"])  # type: ignore[list-item]


def test_ends_of_the_model_s_own_configuration(tmp_path: Path) -> None:
    """transformers writes generation_config.json; without its key the model's own end holds (2 of a Mixtral)."""
    language = _language(tmp_path, {"generation_config.json": {}})
    assert language.end_tokens == {2}
    assert language.defaults.temperature == 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, SamplingOptions(temperature=0)),
        ({"temperature": 0.5}, SamplingOptions(temperature=0)),  # do_sample is off
        ({"do_sample": True}, SamplingOptions(temperature=1.0)),
        ({"do_sample": True, "top_k": None}, SamplingOptions()),
        ({"repetition_penalty": 1.05}, SamplingOptions(temperature=0, repetition_penalty=1.05)),
    ],
)
def test_sampling_defaults(values: dict[str, Any], expected: SamplingOptions) -> None:
    assert sampling_defaults(values, where="m") == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"do_sample": True, "temperature": "warm"}, "temperature: expected a number"),
        ({"do_sample": True, "top_p": 2}, "top_p: expected more than 0"),
    ],
)
def test_damaged_sampling(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"m/generation_config\.json: {message}"):
        sampling_defaults(values, where="m")


def test_a_damaged_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eos_token_id: expected a token or several"):
        _language(tmp_path, {"generation_config.json": {"eos_token_id": ["two"]}})
