"""Tiny models all the way: fused, compressed, distilled, placed, measured and deployed; killed, and stopped."""

import json
import os
import random
import re
import shutil
import signal
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import experts_of, imported, tensors_of
from click.testing import CliRunner, Result
from tiny_families import make_config
from token_cases import conversation, save_tokenizer, write_lines

from tierstore.capabilities import Capability
from tierstore.cli.deploy import deploy as command
from tierstore.deploy.compression import LayerUse, calibrate, write_student
from tierstore.deploy.distillation import learning_rate, objective, recovered_fraction
from tierstore.deploy.optimisation import convert
from tierstore.deploy.pipeline import STAGES, deploy
from tierstore.deploy.records import (
    CompressionConfig,
    DeployConfig,
    DeployInterrupted,
    DistillationConfig,
    ExpertWeights,
    Method,
    StageName,
)
from tierstore.deploy.stages import store_checks
from tierstore.deploy.teacher import open_teacher, read_windows
from tierstore.errors import ConfigError, DataError, TierstoreError
from tierstore.hf.exporting import export
from tierstore.hf.manifest import Manifest, Weights

_EXPERTS = 8


def _model(directory: Path, family: str, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(make_config(family, **options))
    model.save_pretrained(directory)
    return model


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text("".join(random.Random(1).choices("abc def\n", k=1200)))
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that could be trained, of a Mixtral with 8 experts of which 2 compute."""
    directory = tmp_path_factory.mktemp("store")
    _model(directory / "m", "mixtral")
    imported(directory / "m", directory / "s")
    return directory / "s"


def called(*words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words])


def _config(store: Path, target: Path, text: Path) -> DeployConfig:
    return DeployConfig(
        store=store,
        target=target,
        compression=CompressionConfig(experts=4),
        distillation=DistillationConfig(text=(text,), steps=4, length=32, rows=2, held_out=2, commit_s=0.0),
        host_budget=8 << 20,
        threads=1,
    )


@pytest.fixture(scope="module")
def undisturbed(store: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("undisturbed") / "d"
    assert deploy(_config(store, target, text)).complete
    return target


# What comes out ---------------------------------------------------------------------------------------------


def test_the_deployed_directory_is_a_frozen_store_of_fewer_experts(undisturbed: Path, text: Path) -> None:
    manifest = Manifest.read(undisturbed)
    assert manifest.weights is Weights.FROZEN
    assert manifest.experts.count == 4
    said = json.loads((undisturbed / "deployment.json").read_text())
    assert [stage["stage"] for stage in said["stages"]] == [name.value for name in StageName]
    found = said["stages"][1]["figures"]
    assert found["distillation_steps"] == 4
    assert found["distilled_loss"] < found["compressed_loss"]
    assert said["profile"]["decode_tokens_per_s"] > 0
    windows = read_windows([text], None, length=32, held_out=2)
    with open_teacher(undisturbed, host_budget=8 << 20) as served:
        logits = served.logits(windows.held)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows.held[:, 1:].flatten())
    assert float(loss) == pytest.approx(found["distilled_loss"], abs=1e-4)


def test_files_are_read_as_training_reads_them(tmp_path: Path) -> None:
    """Oracle: the tokenizer and its template, by transformers alone, over the documents put together by hand."""
    from transformers import AutoTokenizer

    tokenizer = save_tokenizer(tmp_path / "t")
    chat = conversation("two?", "one expert", "three?", "tiers")["messages"]
    paths = [tmp_path / "a.txt", write_lines(tmp_path / "b.jsonl", [{"text": "in"}, {"messages": chat}])]
    paths[0].write_text("two tiers\n\nof one store")
    plain = AutoTokenizer.from_pretrained(tokenizer)
    whole = f"two tiers\n\nof one store\n\nin\n\n{plain.apply_chat_template(chat, tokenize=False)}"
    expected = plain(whole, add_special_tokens=False)["input_ids"]
    windows = read_windows(paths, tokenizer, length=8, held_out=1)
    assert [*windows.train.flatten().tolist(), *windows.held.flatten().tolist()] == expected[
        : len(expected) // 8 * 8
    ]


def test_a_text_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "t")
    half = write_lines(tmp_path / "b.jsonl", [{"text": "in"}, '{"text": "\\ud83d"}'])
    with pytest.raises(DataError, match=r"b\.jsonl:2: 'text': contains half of a surrogate pair"):
        read_windows([half], tokenizer, length=8, held_out=1)
    with pytest.raises(DataError, match=r"b\.jsonl: .* this model has none"):
        read_windows([half], None, length=8, held_out=1)
    other = tmp_path / "a.txt"
    other.write_bytes(b"abc\xff" * 8)
    with pytest.raises(DataError, match=r"a\.txt: expected text in UTF-8, found another byte at 3"):
        read_windows([other], tokenizer, length=8, held_out=1)
    assert read_windows([other], None, length=4, held_out=1).train[0].tolist() == [97, 98, 99, 255]


def test_fusion_keeps_every_weight(store: Path, tmp_path: Path) -> None:
    config = DeployConfig(store=store, target=tmp_path / "d", threads=1)
    record = deploy(config, until=StageName.FUSION).records[-1]
    fused = tmp_path / "d.partial" / record.store
    before, after = experts_of(store), experts_of(fused)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    figures: Any = record.figures
    assert figures["bytes_after"] < figures["bytes_before"]  # moments and spare slots are gone


@pytest.mark.parametrize("experts", [1, 9])
def test_too_few_and_too_many_experts_are_refused_by_name(
    experts: int, store: Path, text: Path, tmp_path: Path
) -> None:
    config = replace(_config(store, tmp_path / "d", text), compression=CompressionConfig(experts=experts))
    with pytest.raises(ConfigError, match=r"--experts: expected at (least 2|most 8)"):
        deploy(config)
    assert not list(tmp_path.iterdir())  # before any stage has run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ranks", "9"), "--ranks: expected at most 8, one for each expert of a layer, got 9"),
        (("--ranks", "0"), "--ranks: expected at least 1, got 0"),
        (("--ranks", "2", "--graphs", "on"), "--graphs: on cannot be combined with --ranks 2"),
        (("--segments", "0,2"), "--segments: expected first blocks ascending from 0, below 2"),
        (
            ("--text", "TEXT", "--length", "POSITIONS"),
            "--length: expected at most {}, the positions of the model",
        ),
        (("--text", "TEXT", "--length", "601"), "expected at least 1202 tokens (two windows), found 1200"),
    ],
)
def test_what_the_model_does_not_have_is_refused_before_any_stage(
    options: tuple[str, ...], message: str, store: Path, text: Path, tmp_path: Path
) -> None:
    positions = json.loads((store / "model" / "config.json").read_text())["max_position_embeddings"]
    named = {"TEXT": str(text), "POSITIONS": str(positions + 1)}
    given = [named.get(option, option) for option in options]
    done = called(store, "--to", tmp_path / "d", *given)
    assert isinstance(done.exception, TierstoreError)
    assert message.format(positions) in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_what_distillation_recovered_worked_by_hand() -> None:
    assert recovered_fraction(1.0, 2.0, 1.25) == pytest.approx(0.75)
    assert recovered_fraction(1.0, 2.0, 2.5) == pytest.approx(-0.5)  # it can harm
    assert recovered_fraction(1.0, 1.0, 0.5) is None  # nothing was lost


def test_one_segment_is_checked(store: Path, tmp_path: Path) -> None:
    done = called(store, "--to", tmp_path / "d", "--segments=0,1", "--until=segmentation", "--json")
    assert done.exception is None, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    figures = found["stages"][3]["figures"]
    assert [(each["first"], each["last"]) for each in figures["segments"]] == [(0, 0), (1, 1)]
    # The export is announced, then the import if it will hold more; the end compares the most.
    announced = re.findall(r"^memory: (.*?): ", done.stderr, re.M)
    assert len(announced) in (1, 2)
    assert f"memory: {announced[-1]} announced" in done.stderr
    assert found["memory"]["announced_bytes"] > found["memory"]["parts"][0]["held_bytes"] > 0
    shown = called("--show", tmp_path / "d")
    assert shown.exception is None, shown.output
    assert "segmentation" in shown.stdout


def test_what_several_ranks_serve_is_measured_on_them(store: Path, tmp_path: Path) -> None:
    """Each rank has half of the experts and a sequence; dense parameters are whole on both."""

    def figures(name: str, *options: str) -> list[dict[str, Any]]:
        common = ("--weights", "int8", "--memory", "4GB", "--threads", "1", "--json")
        done = called(store, "--to", tmp_path / name, *common, *options)
        assert done.exception is None, done.output
        return [stage["figures"] for stage in json.loads(done.stdout.splitlines()[-1])["stages"]]

    *_, segmented, chosen, deployed = figures("two", "--ranks", "2")
    *_, alone = figures("one", "--until", "segmentation")
    assert segmented["dense_bytes"] == alone["dense_bytes"]
    assert segmented["host_budget"] == segmented["expert_bytes"] == alone["expert_bytes"] / 2
    assert chosen["decode_tokens_per_s"] == deployed["decode_tokens_per_s"] > 0


def test_graphs_are_compiled_and_compared_where_they_are_asked_for(store: Path, tmp_path: Path) -> None:
    """With a compiler that returns the graph as it is: every block is one, and gives the eager logits."""
    seen = []

    def as_it_is(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    stages = [*STAGES[:2], replace(STAGES[2], run=partial(convert, compile_graph=as_it_is))]
    config = DeployConfig(store=store, target=tmp_path / "d", graphs=Capability.ON, threads=1)
    figures: Any = deploy(config, until=StageName.CONVERSION, stages=stages).records[-1].figures
    assert figures["graphs"] == len(seen) > 0
    assert figures["largest_difference_of_logits"] < 1e-5


# Compression ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "granitemoe", "gpt_oss"])
def test_pruned_models_are_what_transformers_makes_of_the_kept_experts(family: str, tmp_path: Path) -> None:
    """The oracle: the same checkpoint with the rows of its tensors left out by hand."""
    _model(tmp_path / "m", family)
    imported(tmp_path / "m", tmp_path / "s", weights=Weights.FROZEN)
    kept = ((1,), (3,), (4,), (6,))
    layers = Manifest.read(tmp_path / "s").experts.layers
    uses = {layer: LayerUse((1 / _EXPERTS,) * _EXPERTS, ((1.0,) * _EXPERTS,) * _EXPERTS) for layer in layers}
    write_student(tmp_path / "s", tmp_path / "pruned", dict.fromkeys(layers, kept), uses)
    before, after = tensors_of(tmp_path / "m"), tensors_of(tmp_path / "pruned")
    rows = torch.tensor([expert for (expert,) in kept])
    for name, value in after.items():
        old = name
        if ".experts." in name and (number := name.split(".experts.")[1].split(".")[0]).isdigit():
            old = name.replace(f".experts.{number}.", f".experts.{kept[int(number)][0]}.")
        expected = before[old]
        if expected.shape != value.shape:
            expected = expected[rows]
        assert torch.equal(expected, value), name
    config = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert 4 in (config.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts"))


def test_calibration_counts_what_routers_choose(store: Path, text: Path, tmp_path: Path) -> None:
    """The oracle: transformers' own routers over the same window."""
    from transformers import AutoModelForCausalLM

    frozen = tmp_path / "f"
    imported(store.parent / "m", frozen, weights=Weights.FROZEN)
    window_T = read_windows([text], None, length=32, held_out=1).train[0]
    with open_teacher(frozen, host_budget=8 << 20) as teacher:
        found = calibrate(teacher, [window_T])
    model = AutoModelForCausalLM.from_pretrained(store.parent / "m", dtype=torch.float32)
    with torch.no_grad():
        every = model(window_T[None], output_router_logits=True).router_logits
    for layer, logits_NE in enumerate(every):
        weights, chosen = logits_NE.softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        uses = torch.zeros(_EXPERTS).index_add_(0, chosen.flatten(), weights.flatten()) / len(logits_NE)
        assert found[layer].uses == pytest.approx(uses.tolist(), abs=1e-5)
        assert [found[layer].alike[each][each] for each in range(_EXPERTS)] == pytest.approx([1.0] * _EXPERTS)


def test_the_objective_worked_by_hand() -> None:
    """Two tokens to choose from: the teacher says 3 to 1, the student 1 to 1; the text goes on with token 0."""
    teacher = torch.log(torch.tensor([[[0.75, 0.25], [0.75, 0.25]]]))
    student = torch.zeros(1, 2, 2)
    divergence = 0.75 * torch.tensor(1.5).log() + 0.25 * torch.tensor(0.5).log()
    wanted = divergence + torch.tensor(2.0).log()
    assert objective(student, teacher, torch.tensor([[1, 0]])).item() == pytest.approx(
        wanted.item(), rel=1e-6
    )


def test_the_rate_climbs_and_falls() -> None:
    by_steps = DistillationConfig(steps=100, rate=1.0)
    assert learning_rate(by_steps, 0, 0.0) == pytest.approx(1 / 8)
    assert learning_rate(by_steps, 50, 1e9) == pytest.approx(0.5)
    by_time = DistillationConfig(minutes=10, rate=1.0)
    assert learning_rate(by_time, 50, 150.0) == pytest.approx(0.75)
    assert learning_rate(by_time, 50, 600.0) == pytest.approx(0.05)


# Interruptions ----------------------------------------------------------------------------------------------


def test_stopped_at_every_durable_point_it_ends_in_the_same_bits(
    store: Path, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    config, stops = _config(store, tmp_path / "d", text), 0
    # Asked after each piece of an export, each record of an import and of a checksum; a store this small is committed once.
    for allowed in range(10, 1000, 30):
        left = allowed

        def asked() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        try:
            deploy(config, until=StageName.SEGMENTATION, asked_to_stop=asked)
            break
        except DeployInterrupted:
            stops += 1
    assert stops >= 4
    deploy(config)
    assert store_checks(tmp_path / "d") == store_checks(undisturbed)


def _killed(config: DeployConfig, marker: str, after_s: float) -> None:
    """A process that deploys, and is killed so long behind a line that begins with ``marker``."""
    pid = os.fork()
    if pid:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (0, -signal.SIGKILL)
        return

    def say(line: str) -> None:
        if line.startswith(marker):
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    status = 1
    try:
        deploy(config, say=say)
        status = 0
    finally:
        os._exit(status)


@pytest.mark.slow
def test_killed_in_every_stage_it_ends_in_the_same_bits(
    store: Path, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    config = _config(store, tmp_path / "d", text)
    random_ = random.Random(7)
    for marker in ("fusion:", "distillation: wrote", "distillation: step 2", "conversion:", "optimisation:"):
        _killed(config, marker, random_.uniform(0.0, 0.1))
    assert deploy(config).complete
    assert store_checks(tmp_path / "d") == store_checks(undisturbed)
    assert not (tmp_path / "d.partial").exists()


@pytest.mark.parametrize("weights", [ExpertWeights.INT8, ExpertWeights.INT4])
def test_quantised_weights_have_their_loss_beside_the_teachers(
    weights: ExpertWeights, store: Path, text: Path, tmp_path: Path
) -> None:
    """The oracle: transformers with the weights of the records, dequantised."""
    from transformers import AutoModelForCausalLM

    config = replace(
        _config(store, tmp_path / "d", text),
        compression=CompressionConfig(weights=weights),
        distillation=DistillationConfig(text=(text,), length=32, held_out=2),
    )
    done = deploy(config, until=StageName.SEGMENTATION)
    figures: Any = done.records[1].figures
    quantized = done.directory / done.records[1].store
    assert figures["bytes_after"] < figures["bytes_before"]
    export(quantized, tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    held = read_windows([text], None, length=32, held_out=2).held
    with torch.no_grad():
        logits = model(held).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), held[:, 1:].flatten())
    assert figures["quantized_loss"] == pytest.approx(float(loss), abs=1e-4)
    assert figures["quantized_loss"] == pytest.approx(figures["teacher_loss"], abs=0.01)


def test_a_pruned_model_without_distillation(store: Path, text: Path, tmp_path: Path) -> None:
    config = replace(
        _config(store, tmp_path / "d", text),
        compression=CompressionConfig(experts=2, method=Method.PRUNE),
        distillation=DistillationConfig(text=(text,), minutes=0, length=32, held_out=2),
    )
    done = deploy(config, until=StageName.DISTILLATION)
    figures = done.records[-1].figures
    assert figures["compressed_loss"] == figures["distilled_loss"]
    assert Manifest.read(done.directory / done.records[-1].store).experts.count == 2
    shutil.rmtree(done.directory)
