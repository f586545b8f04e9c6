from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from pipeline import environment, plans, results
from pipeline.data.prepared import Dataset, read
from pipeline.distributed import World
from pipeline.environment import stages
from pipeline.errors import ConfigError, PipelineError
from pipeline.params import Machine, Train, load, parse
from pipeline.plans import plan
from pipeline.profiling import flops, prediction
from pipeline.techniques import Setup
from pipeline.techniques.distillation import Distillation
from pipeline.tools.verification import Verifier
from pipeline.training import job
from pipeline.training.checkpoints import state_sha256
from pipeline.training.loop import Training
from pipeline.training.outcomes import Work
from tests.nets import ALONE, conv_net, task_of
from tests.ranks import run_ranks
from tests.trainings import DATA, OF_TASK, ledgers, make_training, settings_of
from tests.workspaces import PREPARED, enter

CPU_ONLY = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=True)
JOB = Train(model="tests.nets:attending_net", batch_size=32, epochs=1, learning_rate=0.05, seeds=[0], warmup_steps=1)
TEACHER = {"teacher": "teacher", "model": "tests.nets:normed_net"}


def teacher_of(training: Training) -> Any:
    (model,) = training.setup.kept_models
    return model


def trained(joined: World, dataset: Dataset, asked: list[dict[str, Any]]) -> list[str]:
    """Return digests of the parameters after six steps, for each of the variants ``asked``."""
    states = []
    for applied in asked:
        training = make_training(dataset, joined, train=JOB, **applied)
        training.advance(6)
        state, names = training.model_state.read(), dict(training.model.named_parameters())
        states.append(state_sha256({name: value for name, value in state.items() if name in names}))
        assert joined.gather(states[-1]) == [states[-1]] * joined.size
    return states


def dropping(**_: int) -> nn.Module:
    """Return a teacher with dropout and BatchNorm."""
    return conv_net(norm=True, dropout=True)


class Overwriting(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.mul_(-1)


def overwriting(**_: int) -> nn.Module:
    """Return a teacher that changes its input in place."""
    return nn.Sequential(Overwriting(), *conv_net())


def test_a_teacher_leaves_the_student_s_input(digits: Dataset) -> None:
    distillation = TEACHER | {"alpha": 0.0, "model": "tests.techniques.test_distillation:overwriting"}
    alone, taught = trained(ALONE, digits, [{}, {"distillation": distillation}])
    assert taught == alone


def by_hand(logits: Tensor, taught: Tensor, temperature: float) -> float:
    """Return Hinton's loss, computed in float64."""
    p, q = ((logits_of.double() / temperature).softmax(-1) for logits_of in (taught, logits))
    return temperature**2 * float((p * (p / q).log()).sum(-1).mean())


@pytest.mark.parametrize("name", ["classification", *OF_TASK])
def test_the_distance_is_what_the_formula_says(digits: Dataset, name: str) -> None:
    task = task_of(DATA[name], settings_of(name)) if name in DATA else task_of(digits)
    ours, theirs = torch.randn(2, 7, *task.output_shape(), generator=torch.Generator().manual_seed(0))
    of_logits = name in ("classification", "language_model")
    expected = by_hand(ours, theirs, 3.0) if of_logits else float((ours - theirs).square().mean())
    assert float(task.distance(ours, theirs, 3.0)) == pytest.approx(expected, rel=1e-5)
    assert float(task.distance(ours, ours, 3.0)) == pytest.approx(0.0, abs=1e-6)


def test_alpha_weights_the_distance_and_the_loss(digits: Dataset) -> None:
    training = make_training(digits, train=JOB, distillation=TEACHER | {"alpha": 0.3, "temperature": 2.0})
    images, labels = next(training.batches.epoch(0))
    with torch.no_grad():
        loss = training.step.forward(images, labels)
        logits, taught = training.model(images), teacher_of(training)(images)
    expected = 0.3 * by_hand(logits, taught, 2.0) + 0.7 * float(F.cross_entropy(logits, labels))
    assert float(loss) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "applied",
    [
        {},
        {"precision": "bf16", "gradient_accumulation": 4, "channels_last": True},
        *({"parallelism": parallelism} for parallelism in ("ddp", "zero1", "fsdp", "tensor")),
    ],
    ids=str,
)
def test_alpha_0_trains_as_without_a_teacher(digits: Dataset, applied: dict[str, Any]) -> None:
    asked = [applied, applied | {"distillation": TEACHER | {"alpha": 0.0}}, applied | {"distillation": TEACHER}]
    plain, idle, learned = run_ranks(trained, digits, asked, size=2 if "parallelism" in applied else 1)[0]
    assert idle == plain != learned


def test_the_teacher_neither_changes_nor_draws(digits: Dataset) -> None:
    training = make_training(
        digits, train=JOB, distillation=TEACHER | {"model": "tests.techniques.test_distillation:dropping"}
    )
    teacher = teacher_of(training)
    before, random = state_sha256(teacher.state_dict()), torch.get_rng_state()
    training.advance(5)
    assert state_sha256(teacher.state_dict()) == before
    assert torch.equal(random, torch.get_rng_state())
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in teacher.parameters())
    assert training.work() == Work(32, 32, 32)  # the samples that pass through the teacher do not count


@pytest.mark.parametrize("model", ["resnet18", "mobilenet_v3_small"])
def test_the_ledger_counts_the_teacher_s_weights(digits: Dataset, model: str) -> None:
    made, predicted = [], []
    for variant in ({}, {"distillation": {"teacher": "weights.pt", "model": model}}):
        train = {"model": "small_cnn", "batch_size": 64, "device": "cpu", "seeds": [0]}
        config = parse({"train": train, "compare": {"baseline": "tried"}, "variants": {"tried": variant}})
        made.append(plan(config, "tried", CPU_ONLY))
        predicted.append(prediction.predicted(made[-1], task_of(digits, config.train)))
    training = make_training(digits, train=made[1].train, distillation=made[1].applied.distillation)
    held = [*teacher_of(training).parameters(), *teacher_of(training).buffers()]
    assert predicted[1].parameters_bytes - predicted[0].parameters_bytes == sum(tensor.nbytes for tensor in held)
    training.advance(2)
    measured, _ = ledgers(training)
    assert predicted[1].peak_bytes == pytest.approx(measured.tensors_bytes, rel=0.05)


def test_the_teacher_s_flops_count_as_executed(digits: Dataset) -> None:
    config = parse({"variants": {"baseline": {}, "taught": {"distillation": TEACHER | {"model": "small_cnn"}}}})
    alone, taught = (
        flops.counted(plan(config, name, CPU_ONLY), task_of(digits), "") for name in ("baseline", "taught")
    )
    assert taught.model_per_sample == alone.model_per_sample
    forward = taught.executed_per_sample - alone.executed_per_sample
    assert alone.executed_per_sample / 4 < forward < alone.executed_per_sample / 2  # one of about three passes


PARAMS: dict[str, Any] = {
    "fetch": {"dataset": "digits"},
    "train": {"seeds": [0, 1], "epochs": 1, "batch_size": 64, "learning_rate": 0.05, "model": "small_cnn"},
    "publish": {"live": False},
    "variants": {"baseline": {}},
    "students": {
        "taught": {
            "model": "resnet9", "model_options": {"base_width": 2}, "distillation": {"teacher": "baseline"}
        }
    },
}  # fmt: skip


def with_students(**students: Any) -> dict[str, Any]:
    return PARAMS | {"students": students}


def test_a_student_learns_from_the_same_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = enter(tmp_path, monkeypatch, PARAMS)
    with pytest.raises(PipelineError, match=r"results/baseline\.json is missing"):
        job.run(config, "taught", CPU_ONLY, PREPARED)
    job.run(config, "baseline", CPU_ONLY, PREPARED)  # possible although the student's job failed before
    change, learned = Distillation.change_model, list[str]()

    def noting(self: Distillation, setup: Setup) -> None:
        change(self, setup)
        if setup.teacher is not None:
            learned.append(state_sha256(setup.kept_models[-1].state_dict()))

    monkeypatch.setattr(Distillation, "change_model", noting)
    job.run(config, "taught", CPU_ONLY, PREPARED)
    teacher, taught = (results.read(results.result_file(name), config) for name in config.variants)
    assert learned == [run.teacher_sha256 for run in taught.runs] == [run.model_sha256 for run in teacher.runs]
    assert [run.teacher_sha256 for run in teacher.runs] == [None, None]
    assert taught.parameter_count < teacher.parameter_count / 2
    weights = torch.load(results.model_file("taught", 0), weights_only=True)
    task_of(read(PREPARED), plan(config, "taught", CPU_ONLY).train).model().load_state_dict(weights)

    weights = torch.load(results.model_file("baseline", 1), weights_only=True)
    torch.save(weights, "given.pt")
    variants = {"baseline": {}, "taught": {"distillation": {"teacher": "given.pt"}}}
    Path("params.yaml").write_text(yaml.safe_dump(PARAMS | {"variants": variants, "students": {}}))
    job.run(load(), "taught", CPU_ONLY, PREPARED)
    assert learned[2:] == [state_sha256(weights)] * 2

    torch.save({"other": torch.zeros(1)}, "given.pt")
    with pytest.raises(PipelineError, match=r"variants\.taught\..*given\.pt do not fit the model small_cnn: .* Missi"):
        job.run(load(), "taught", CPU_ONLY, PREPARED)
    Path("given.pt").write_text("no weights")
    unread = r"variants\.taught\.distillation\.teacher: given\.pt cannot be read as weights"
    with pytest.raises(PipelineError, match=unread):
        job.run(load(), "taught", CPU_ONLY, PREPARED)
    Path("given.pt").unlink()
    with pytest.raises(PipelineError, match=f"{unread}.*No such file"):
        job.run(load(), "taught", CPU_ONLY, PREPARED)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (PARAMS | {"variants": {"baseline": {}, "taught": {}}}, "students.taught: expected under students"),
        (PARAMS | {"variants": PARAMS["variants"] | PARAMS["students"], "students": {}}, "variants.taught: expected"),
        (with_students(taught={}), "students.taught: expected under"),
        (with_students(taught={"distillation": {"teacher": "given.pt"}}), "students.taught: expected under"),
        (with_students(taught={"distillation": {"teacher": "baselin"}}), "teacher: found 'baselin'; allowed: baseline"),
        (with_students(taught={"distillation": {"teacher": "Baseline"}}), "teacher: found 'Baseline'; allowed: "),
        (PARAMS | {"variants": {"baseline": {}, "other": {"distillation": {"teacher": "weights"}}}},
         "teacher: found 'weights'; allowed: baseline, taught, or the path of a file of weights outside of models"),
        (PARAMS | {"variants": {"baseline": {}, "other": {"distillation": {"teacher": "./models/baseline/seed-0.pt"}}}},
         "variants.other.distillation.teacher: found './models/baseline/seed-0.pt'; allowed: baseline, taught, or"),
        (with_students(taught={"distillation": {"teacher": "taught"}}), "teacher: found 'taught'; allowed: baseline"),
        (with_students(taught={"distillation": {"teacher": "baseline", "alpha": 2}}), "less than or equal to 1"),
        (with_students(taught={"distillation": {"teacher": "baseline", "temp": 2}}), "Allowed: teacher, temper"),
    ],
)  # fmt: skip
def test_a_misplaced_student_is_refused(tmp_path: Path, params: dict[str, Any], said: str) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump(params))
    with pytest.raises(ConfigError) as refused:
        load(file)
    assert said in str(refused.value)


def test_weights_of_this_job_are_refused_as_files(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    for path in ("~/models/a.pt", str(here / "models/a.pt"), "data/../models/a.pt"):
        by_file = {"baseline": {}, "by-file": {"distillation": {"teacher": path}}}
        Path("params.yaml").write_text(yaml.safe_dump(PARAMS | {"variants": by_file, "students": {}}))
        with pytest.raises(ConfigError, match="a file of weights outside of models"):
            load()


def test_a_teacher_may_be_called_models(tmp_path: Path) -> None:
    taught = {"taught": {"distillation": {"teacher": "models"}}}
    (tmp_path / "params.yaml").write_text(
        yaml.safe_dump(PARAMS | {"variants": {"baseline": {}, "models": {}}, "students": taught})
    )
    assert load(tmp_path / "params.yaml").teacher_of("taught") == "models"


def test_a_teacher_has_its_variant_s_model() -> None:
    chain = {"second": {"distillation": {"teacher": "taught"}}, **PARAMS["students"]}
    variants = parse(with_students(**chain)).variants
    learned = {name: variant.distillation for name, variant in variants.items() if variant.distillation}
    assert variants["taught"].model == "resnet9"
    assert learned["taught"].model == "small_cnn"
    assert (learned["second"].model, learned["second"].model_options) == ("resnet9", {"base_width": 2})


def test_a_given_teacher_is_digested_for_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "baseline").write_bytes(b"a file with the name of a variant")
    given = {"distillation": {"teacher": "~/given.pt"}}
    config = parse(PARAMS | {"variants": {"baseline": {}, "by-file": given}})
    codes = []
    for weights in (b"some", b"some", b"others"):
        (tmp_path / "given.pt").write_bytes(weights)
        content = environment.fingerprint() | stages.described(config, plans.plans(config, CPU_ONLY))
        codes.append((content["teachers"], *(stages.key(content, stage, "by-file") for stage in ("train", "bench"))))
    (digests, trained, measured), second, third = codes
    assert digests == {"baseline": None, "by-file": hashlib.sha256(b"some").hexdigest(), "taught": None}
    assert second == codes[0]
    assert third[0] != digests
    assert (third[1] != trained, third[2] == measured) == (True, True)


def test_verify_checks_distillation_without_effect(digits_folder: Path, tmp_path: Path) -> None:
    config = parse(PARAMS | {"train": {"batch_size": 32, "learning_rate": 0.05}})
    task = task_of(read(digits_folder), config.train)
    small = replace(task, dataset=replace(task.dataset, train=task.dataset.train[:96], test=task.dataset.test[:32]))
    verifier = Verifier(config, CPU_ONLY, digits_folder, small, tmp_path)
    made = plan(config, "taught", CPU_ONLY)
    claims = {claim.claim: claim.holds for claim in verifier.claims(made)}
    (idle,) = (claim for claim in claims if "if distillation has no effect: equal to those without it" in claim)
    assert claims[idle]
    assert all(claims.values())
    assert len(claims) == verifier.count(made)
