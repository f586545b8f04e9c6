"""Inference with a trained model: forms that agree, forms that are impossible and say why, and fair rounds."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from pipeline import environment, results
from pipeline.data.prepared import Dataset, Statistics
from pipeline.distributed import ALONE
from pipeline.errors import PipelineError
from pipeline.params import Config, Machine, parse
from pipeline.tasks.base import Normalise
from pipeline.tools import inference
from pipeline.tools.inference import Form, Measured, forms, timing
from pipeline.tools.inference.forms import FORMS, Kind, Made, Trained, Unavailable, bytes_of
from pipeline.training import job
from pipeline.training.checkpoints import state_sha256
from tests.nets import conv_net, task_of
from tests.workspaces import PREPARED, enter

CPU_ONLY = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=False)
PARAMETERS = 5 * 5 * 20 + 20 + 5 * 5 * 20 * 20 + 20 + 80 * 50 + 50 + 50 * 10 + 10
"""Number of parameters of small_cnn for the digits."""


@pytest.fixture(scope="module")
def trained(digits: Dataset) -> Trained:
    """A model trained to classify the digits."""
    model = conv_net(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pixels = task_of(digits).preprocess(digits.train.inputs)
    for step in range(120):
        rows = slice(step * 64 % 1344, step * 64 % 1344 + 64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixels[rows]), digits.train.targets[rows]).backward()
        optimizer.step()
    return Trained(model.eval(), task_of(digits), [1, 8], frozenset({"bf16", "fp16"}))


def measure(trained: Trained, *names: str, **kinds: Kind) -> dict[str, Form]:
    """Measure the plain form, the forms of ``FORMS`` with these names, and other ``kinds``; return their records."""
    kinds = {"eager": FORMS["eager"], **{name: FORMS[name] for name in names}, **kinds}
    config = parse({"infer": {"rounds": 2, "window_seconds": 0.001}, "variants": {"baseline": {}}})
    forms = {form.name: form for form in inference.forms_on(trained, kinds, ALONE, "a CPU", config)}
    noise = figures(forms["eager"]).throughput
    assert [at_size.batch_size for at_size in noise] == [1, 8]
    assert all("at least 6 are needed" in (at_size.ratio.why_untrusted or "") for at_size in noise)
    return forms


def figures(form: Form) -> Measured:
    assert form.measured, form.why_not
    return form.measured


def test_forms_without_a_compiler_agree(trained: Trained, digits: Dataset) -> None:
    by_form = {name: figures(form) for name, form in measure(trained, "bf16", "fp16", "exported").items()}
    plain, exported, half = by_form["eager"], by_form["exported"], by_form["bf16"]
    assert plain.agreement.equal_count == plain.agreement.test_count == len(digits.test)
    assert plain.agreement.largest_logit_difference == 0
    assert plain.agreement.accuracy > 0.9
    assert exported.agreement.equal_count == len(digits.test)
    assert exported.agreement.largest_logit_difference < 1e-4
    assert (exported.file_bytes or 0) > exported.model_bytes == plain.model_bytes
    assert half.agreement.equal_fraction > 0.98
    assert 0 < half.agreement.largest_logit_difference < 1
    assert half.model_bytes < 0.6 * plain.model_bytes
    assert 0 < by_form["fp16"].agreement.largest_logit_difference < half.agreement.largest_logit_difference
    for form in by_form.values():
        assert form.latency.p50_low_ms <= form.latency.p50_high_ms
        assert [at_size.batch_size for at_size in form.throughput] == [1, 8]
        for at_size in form.throughput:
            assert at_size.low_samples_per_second <= at_size.samples_per_second <= at_size.high_samples_per_second


def raising(error: Exception) -> Kind:
    def make(_: Trained) -> Made:
        raise error

    return Kind("raises", make)


def with_outputs(change: Callable[[torch.Tensor], torch.Tensor]) -> Kind:
    """Return the plain form with ``change`` applied to its outputs."""
    return Kind("changes outputs", lambda trained: Made(lambda images: change(trained.deployed()(images)), 0))


NOT_FINITE = with_outputs(lambda logits: logits * torch.nan)


def test_a_full_disk_is_no_property_of_a_form(trained: Trained) -> None:
    full = raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/kernel.so"))
    with pytest.raises(PipelineError, match=r"^infer: compiled: OSError: .*No space left .*/kernel\.so.* TMPDIR"):
        measure(trained, compiled=full)


@pytest.mark.slow
def test_the_compiled_form_agrees(trained: Trained, digits: Dataset) -> None:
    form = measure(trained, "compiled")["compiled"]
    if form.why_not and "compiler" in form.why_not:
        pytest.skip(form.why_not)
    compiled = figures(form)
    assert compiled.agreement.equal_count == len(digits.test)
    assert 0 <= compiled.agreement.largest_logit_difference < 1e-4
    assert compiled.remarks == ()
    assert compiled.prepare_seconds > compiled.latency.p50_ms / 1e3


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_quantised_form_agrees_in_a_quarter_size(
    compiles: bool, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not compiled, its operations compute the same in float32."""
    if not compiles:
        monkeypatch.setattr(torch, "compile", lambda module, **_: module)
        monkeypatch.setattr(forms, "_need_compiler", lambda _: None)
    measured = measure(trained, "int8")
    missing = ["not installed", "compiler"]
    if torch.__version__.startswith("2.11."):
        missing.append("no int8 kernel")  # torchao 0.18 does not know the graphs that torch 2.11 exports
    why_not = measured["int8"].why_not
    if why_not and any(words in why_not for words in missing):
        pytest.skip(why_not)
    quantised = figures(measured["int8"])
    assert quantised.agreement.equal_fraction > 0.97
    assert quantised.agreement.largest_logit_difference > 0
    assert quantised.model_bytes < 0.5 * figures(measured["eager"]).model_bytes


def test_without_a_compiler_compiled_forms_are_refused(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    form = measure(trained, "compiled")["compiled"]
    assert form.measured is None
    assert "no compiler '/nowhere/g++'" in str(form.why_not)
    assert "apt-get install g++" in str(form.why_not)


@pytest.mark.parametrize(
    ("device", "cpu", "says"),
    [
        ("cuda", "x86_64", "no maintained int8 convolutions for GPUs"),
        ("cpu", "aarch64", "for x86 CPUs, and this CPU is aarch64"),
        ("cpu", "x86_64", "pip install torchao"),
    ],
)
def test_where_the_quantised_form_cannot_run_it_says_so(
    device: str, cpu: str, says: str, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(platform, "machine", lambda: cpu)
    with pytest.raises(Unavailable, match=says):
        FORMS["int8"].make(replace(trained, task=trained.task.on(torch.device(device))))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("Input partition has more than one output node"), "ValueError: Input partition has more than one"),
        (BackendCompilerFailed(lambda: None, AssertionError(), None), "AssertionError)"),
    ],
)
def test_a_model_that_cannot_be_quantised_says_why(
    error: Exception, said: str, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "_int8", raising(error).make)
    monkeypatch.setattr(forms, "_need_compiler", lambda _: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.18.0")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(Unavailable) as refused:
        FORMS["int8"].make(trained)
    assert str(refused.value).startswith(f"torchao 0.18.0 with torch {torch.__version__} cannot quantise this model (")
    assert said in str(refused.value)


def test_what_would_be_emulated_is_no_form(trained: Trained) -> None:
    forms = measure(replace(trained, native=frozenset()), "bf16", "fp16")
    for name in ("bf16", "fp16"):
        assert forms[name].why_not == f"this CPU has no native {name} and would emulate it, several times slower"


def test_a_broken_form_does_not_stop_the_others(trained: Trained, digits: Dataset) -> None:
    def one_alone(logits: torch.Tensor) -> torch.Tensor:
        assert len(logits) == 1, "one image at a time"
        return logits

    forms = measure(
        trained,
        "exported",
        raising=raising(RuntimeError("no kernel image\nand much more")),
        one=with_outputs(one_alone),
        nan=NOT_FINITE,
        wrong=with_outputs(torch.neg),
    )
    assert forms["raising"].why_not == "RuntimeError: no kernel image"
    assert forms["one"].why_not == "AssertionError: one image at a time"
    assert forms["nan"].why_not == "its outputs are not finite"
    assert forms["exported"].measured
    assert figures(forms["wrong"]).agreement.equal_count < 0.1 * len(digits.test)
    assert figures(forms["wrong"]).agreement.largest_logit_difference > 1


def test_a_plain_form_that_fails_is_no_result(trained: Trained) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        measure(trained, eager=raising(RuntimeError("broken")))
    with pytest.raises(PipelineError, match="eager, with which all others are compared, fails: its outputs are"):
        measure(trained, eager=NOT_FINITE)


def test_every_image_counts_once_whatever_the_batch(trained: Trained, digits: Dataset) -> None:
    whole = trained.deployed()(digits.test.inputs)
    seen: set[int] = set()

    def predict(images: torch.Tensor) -> torch.Tensor:
        seen.add(len(images))
        logits: torch.Tensor = trained.deployed()(images)
        return logits

    batches = inference._TestSet(task_of(digits), 7)
    with torch.no_grad():
        logits = batches.outputs(predict)
    assert torch.allclose(logits, whole, atol=1e-5)
    assert seen == {7}, "a compiled form is made for one size"
    assert len(inference._TestSet(task_of(digits), 1000).first) == 1000, "a batch may be larger than the test set"


def test_bytes_are_those_of_the_weights() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(3, 2, bias=False))
    model[2].weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert bytes_of(model) == 4 * (4 * 9 + 4 + 4 * 4) + 8 + 2 * 6
    tied = nn.Linear(4, 4, bias=False)
    twice = nn.Sequential(tied, nn.Linear(4, 4, bias=False))
    twice[1].weight = tied.weight
    assert bytes_of(twice) == 64
    known = Normalise(Statistics(mean=(0.5,), std=(0.5,)), torch.empty(0, 1, 1, 1, dtype=torch.uint8))
    assert bytes_of(nn.Sequential(known, tied)) == 64 + 12


# Rounds.


def test_forms_take_turns_and_drift_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now))
    order: list[str] = []
    seen: list[bytes] = []

    def form(name: str, cost: float) -> Any:
        def predict(images: torch.Tensor) -> torch.Tensor:
            nonlocal now
            if not order or order[-1] != name:
                order.append(name)
            now += cost * len(images)
            seen.extend(image.numpy().tobytes() for image in images)
            return images

        return predict

    images = torch.zeros(8, 1, 2, 2, dtype=torch.uint8)
    called = {"slow": form("slow", 1 / 64), "fast": form("fast", 1 / 128)}
    times = timing.in_rounds(called, images, [1, 8], rounds=6, seconds=0.5, synchronise=lambda: None)
    assert order[:4] == ["slow", "fast", "slow", "fast"]
    assert order.count("slow") >= 9
    assert len(set(seen)) == len(seen), "no sample is used twice"
    latency = timing.latency_of(times["slow"])
    assert latency.p50_ms == 15.625
    assert latency.calls == 6 * 32
    assert latency.p99_ms == 15.625
    assert timing.latency_of(timing.Slices(latencies=[[0.02] * 50])).p99_ms is None, (
        "50 calls are too few for a 99th percentile"
    )
    quiet = timing.noise_of(times["slow"], times["slow"], 0.15)
    assert [ratio.decision for ratio in quiet.values()] == ["same", "same"]
    single, batch = timing.throughput_of(times["fast"], times["slow"], quiet)
    assert (single.batch_size, batch.batch_size) == (1, 8)
    assert batch.samples_per_second == 128
    assert (batch.ratio.estimate, batch.ratio.high) == pytest.approx((2, 2))
    assert batch.ratio.decision == "better"
    plain = timing.throughput_of(times["slow"], times["slow"], quiet)[1]
    assert plain.ratio == quiet[8]
    noisy = timing.Slices(rates={size: [100.0, 140.0, 70.0, 130.0, 90.0, 60.0] for size in (1, 8)})
    loud = timing.noise_of(noisy, timing.Slices(rates={size: [100.0] * 6 for size in (1, 8)}), 0.15)
    assert "a spread of" in (loud[8].why_untrusted or "")
    untrusted = timing.throughput_of(times["fast"], times["slow"], loud)[1].ratio
    assert (untrusted.estimate, untrusted.why_untrusted) == (None, loud[8].why_untrusted)


# The stage.


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Make a directory with prepared data the current one, and return the job to train in it."""
    params = {
        "fetch": {"dataset": "digits"},
        "train": {"device": "cpu", "seeds": [3], "epochs": 1, "batch_size": 32, "learning_rate": 0.05},
        "infer": {"forms": ["bf16", "exported"], "batch_sizes": [1, 32], "rounds": 2, "window_seconds": 0.001},
        "publish": {"live": False},
        "variants": {"baseline": {}},
    }
    return enter(tmp_path, monkeypatch, params)


def test_the_stage_measures_what_was_trained(workspace: Config, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PipelineError, match=r"results/baseline\.json is missing; .*`dvc repro train@baseline`"):
        inference.run(workspace, "baseline", CPU_ONLY, PREPARED)
    job.run(workspace, "baseline", CPU_ONLY, PREPARED)
    environment.write(environment.fingerprint({"forms": {"exported": {"torchao"}}}))
    inference.run(workspace, "baseline", CPU_ONLY, PREPARED)
    values = json.loads(results.inference_file("baseline", "json").read_text())
    fingerprint = environment.read()
    assert values["environment"] == environment.hash_of(fingerprint, "forms", "exported") != fingerprint["hash"]
    [run] = results.read(results.result_file("baseline"), workspace).runs
    assert (values["schema"], values["variant"], values["seed"]) == (2, "baseline", 3)
    assert values["model_sha256"] == run.model_sha256
    plain, half, exported = values["forms"]
    assert [form["name"] for form in values["forms"]] == ["eager", "bf16", "exported"], "eager is always measured"
    assert plain["measured"]["agreement"]["correct_count"] == run.test_correct, "the accuracy that training saw"
    assert plain["measured"]["model_bytes"] == 4 * PARAMETERS + 4 * 3
    assert half["measured"] is None
    assert exported["measured"]["agreement"]["equal_count"] == run.test_count
    text = results.inference_file("baseline", "md").read_text()
    assert f"{run.test_correct} of {run.test_count}" in text
    assert "**bf16** is not available: this CPU has no native bf16" in text
    out = capsys.readouterr().out
    assert "bf16 on cpu is not available" in out
    assert out.endswith("inference: inference/baseline.md\n")


def test_batches_that_do_not_fit_are_named(workspace: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(logits: torch.Tensor) -> torch.Tensor:
        if len(logits) > 16:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return logits

    job.run(workspace, "baseline", CPU_ONLY, PREPARED)
    monkeypatch.setitem(FORMS, "eager", with_outputs(greedy))
    with pytest.raises(PipelineError, match=r"infer\.batch_sizes: found \[1, 32\], for which .* \(tried to allocate"):
        inference.run(workspace, "baseline", CPU_ONLY, PREPARED)


def test_weights_of_another_model_are_refused(workspace: Config) -> None:
    job.run(workspace, "baseline", CPU_ONLY, PREPARED)
    state = conv_net().state_dict()
    torch.save(state, results.model_file("baseline", 3))
    file = results.result_file("baseline")
    values = json.loads(file.read_text())
    values["runs"][0]["model_sha256"] = state_sha256(state)
    file.write_text(json.dumps(values))
    with pytest.raises(PipelineError, match=r"seed-3\.pt does not fit its variant"):
        inference.run(workspace, "baseline", CPU_ONLY, PREPARED)


@pytest.mark.gpu
def test_on_a_gpu_both_devices_are_measured(workspace: Config) -> None:
    values = workspace.model_dump(mode="json")
    values["train"]["device"] = "cuda"
    values["infer"]["forms"] = ["compiled", "bf16", "fp16", "int8", "exported"]
    config, machine = parse(values), environment.machine()
    job.run(config, "baseline", machine, PREPARED)
    inference.run(config, "baseline", machine, PREPARED)
    forms = json.loads(results.inference_file("baseline", "json").read_text())["forms"]
    on_gpu = {form["name"]: form for form in forms if form["device_type"] == "cuda"}
    assert {form["name"] for form in forms if form["device_type"] == "cpu"} == set(on_gpu)
    for name in ("eager", "compiled", "fp16", "exported"):
        assert on_gpu[name]["measured"], on_gpu[name]["why_not"]
        assert on_gpu[name]["measured"]["agreement"]["equal_count"] > 350
    assert "TensorRT" in on_gpu["int8"]["why_not"]
