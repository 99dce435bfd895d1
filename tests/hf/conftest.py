"""A trained adapter for several tests; transformers warns of much that is no concern of them."""

import json
import shutil
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``model``; stores of it: ``whole``, frozen as ``codes``, ``fresh``, with pairs ``store``, and ``another`` which
    says that it is of another model; ``adapter`` of the pairs, which two steps have trained.
    """
    from checkpoints import imported, write_tokenizer
    from lora_cases import session, take
    from tiny_families import make_config, plain_model

    from tierstore.hf.adapters import export_adapter
    from tierstore.hf.manifest import Weights
    from tierstore.moe.lora import LoraConfig
    from tierstore.quant.layout import CodeFormat
    from tierstore.train.stepping import Stepper

    here = tmp_path_factory.mktemp("made")
    plain_model(make_config("mixtral")).save_pretrained(here / "model")
    write_tokenizer(here / "model")
    for name, codes in (("fresh", None), ("store", None), ("codes", CodeFormat.INT8)):
        imported(here / "model", here / name, weights=Weights.FROZEN, codes=codes)
    imported(here / "model", here / "whole")
    with session(here / "store", LoraConfig(rank=2)) as parts:
        for step in range(2):
            take(parts, step)
        Stepper(parts).commit()
    export_adapter(here / "store", here / "adapter")
    shutil.copytree(here / "store", here / "another")
    path = here / "another/model/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fingerprint": "another"}))
    return here
