"""Models that are called with their inputs by name: classifiers of sequences and of tokens, with a mask."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.data.prepared import LEFT_OUT, Dataset, read
from pipeline.distributed import World, whole
from pipeline.models import from_config
from pipeline.params import Augment, Train, parse
from pipeline.profiling import flops
from pipeline.tasks.batches import Placement, TrainBatches, draw_epoch
from pipeline.techniques import Setup
from pipeline.techniques.pipeline_parallel import Pipeline
from pipeline.tools import inference
from pipeline.tools.inference.forms import FORMS, Trained
from pipeline.tracking.served_by_name import Served
from pipeline.training.outcomes import evaluate
from tests.commands import printed
from tests.data.test_own_data import packed, saved
from tests.nets import ALONE, make_plan, task_of
from tests.ranks import run_ranks
from tests.trainings import ledgers, make_training, rows_of

LENGTH, VOCABULARY, BATCH = 12, 24, 16


@pytest.fixture
def sequences(tmp_path: Path) -> Callable[[str], tuple[Dataset, Train]]:
    """Return a function that returns a job: BERT, and sequences of random lengths with labels of a kind."""
    random = np.random.default_rng(0)
    lengths = random.integers(3, LENGTH + 1, (120, 1))
    mask = np.arange(LENGTH) < lengths
    ids = random.integers(1, VOCABULARY, (120, LENGTH)) * mask
    ids[:3, 0] = VOCABULARY - 1
    targets = {"sequence": (ids.max(1) > 20).astype(int), "token": np.where(mask, ids % 3, LEFT_OUT)}
    small = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    fixed = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": LENGTH}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 30, **small, **fixed}))

    def job(kind: str) -> tuple[Dataset, Train]:
        arrays = saved(tmp_path, "npz", attention_mask=mask.astype(np.uint8), input_ids=ids, targets=targets[kind])
        model: dict[str, Any] = {"model": "transformers", "model_options": {"config": str(tmp_path / "config.json")}}
        plain: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "warmup_fraction": 0.0}
        return packed(tmp_path, "arrays", arrays), Train(
            **model, **plain, batch_size=BATCH, epochs=1, learning_rate=0.5
        )

    return job


def test_torch_does_not_warn_of_torchao() -> None:
    """Each process that loads the library would print two lines, which nobody can act on."""
    from_config.load()
    assert not logging.getLogger("torch.utils._pytree").isEnabledFor(logging.WARNING)


def test_tokens_stay_integers_and_the_model_is_called_by_name(sequences: Callable[..., Any]) -> None:
    dataset, train = sequences("sequence")
    assert [(name, str(rows.dtype)) for name, rows in dataset.train.arrays.items()] == [
        ("input_ids", "torch.uint16"), ("attention_mask", "torch.uint8"), ("targets", "torch.int64")
    ]  # fmt: skip
    assert (dataset.vocabulary, dataset.classes, dataset.statistics) == (VOCABULARY, ("0", "1"), {})
    task = task_of(dataset, train)
    assert task.input_arguments() | task.output_arguments() == {"length": 12, "vocabulary": 24, "classes": 2}
    model: Any = task.model()
    seen: list[Any] = []
    model.net.register_forward_pre_hook(lambda _, __, named: seen.append(named), with_kwargs=True)
    inputs = task.inputs(4)
    first = model.eval()(inputs)
    assert [(name, rows.dtype, tuple(rows.shape)) for name, rows in seen[0].items()] == [
        ("input_ids", torch.int64, (4, LENGTH)), ("attention_mask", torch.int64, (4, LENGTH))
    ]  # fmt: skip
    padded = inputs["attention_mask"] == 0
    changed = {**inputs, "input_ids": torch.where(padded, 7, inputs["input_ids"])}
    torch.testing.assert_close(model(changed), first)
    assert model.net.config.vocab_size == 30
    assert flops.counted(make_plan(train=train), task, "").model_per_sample > 0


PLACEMENTS: tuple[Placement, ...] = ("resident", "streamed", "dataloader")


def test_every_placement_makes_the_same_named_batches(sequences: Callable[..., Any]) -> None:
    dataset, train = sequences("token")
    task, order = task_of(dataset, train), draw_epoch(0, 0, len(dataset.train), (1, 1), 0).order
    for placement in PLACEMENTS:
        with TrainBatches(
            task, batch_size=BATCH, micro_batches=2, rank=0, world_size=1, seed=0, augment=Augment(),
            placement=placement,
        ) as batches:  # fmt: skip
            for index, (inputs, targets) in enumerate(batches.epoch(0)):
                rows = order[index * 8 : (index + 1) * 8]
                assert torch.equal(inputs["input_ids"], dataset.train.arrays["input_ids"].long()[rows])
                assert torch.equal(inputs["attention_mask"], dataset.train.arrays["attention_mask"].long()[rows])
                assert torch.equal(targets, dataset.train.targets[rows])


VARIANTS: list[dict[str, Any]] = [
    {},
    {"gradient_accumulation": 4},
    {"activation_checkpointing": True},
    {"parallelism": "ddp", "gradient_accumulation": 2},
    {"parallelism": "fsdp"},
]


def _trained(joined: World, prepared: Path, train: Train) -> list[tuple[dict[str, Tensor], float, float]]:
    """Return by how much the first step of each variant changes the weights, and the scores at the end."""
    dataset, made = read(prepared), []
    for variant in VARIANTS:
        training = make_training(dataset, joined if "parallelism" in variant else ALONE, train=train, **variant)
        before = {name: whole(value).clone() for name, value in training.model_state.read().items()}
        steps = training.run()
        next(steps)
        moved = {name: before[name] - whole(value) for name, value in training.model_state.read().items()}
        rows_of(steps)
        work = training.work()
        assert work is not None
        assert work.missing == 0
        assert training.score is not None
        made.append((moved, training.score.accuracy, training.score.loss))
    return made


def test_every_variant_trains_a_masked_classifier_of_tokens(sequences: Callable[..., Any], tmp_path: Path) -> None:
    dataset, train = sequences("token")
    task = task_of(dataset, train)
    torch.manual_seed(0)
    model, taken = task.model(), draw_epoch(0, 0, len(dataset.train), (1, 1), 0).order[:BATCH]
    arrays = {name: dataset.train.arrays[name][taken].long() for name in ("input_ids", "attention_mask")}
    F.cross_entropy(model(arrays).flatten(0, 1), dataset.train.targets[taken].flatten()).backward()
    expected = {
        name: 0.5 * parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    made = run_ranks(_trained, tmp_path / "prepared", train)[0]
    for variant, (moved, accuracy, loss) in zip(VARIANTS, made, strict=True):
        for name, gradient in expected.items():
            torch.testing.assert_close(moved[name], gradient, rtol=1e-3, atol=1e-6, msg=f"{variant} {name}")
        assert (accuracy, loss) == pytest.approx(made[0][1:], abs=0.02)


def test_the_memory_of_a_masked_classifier_is_foreseen(sequences: Callable[..., Any]) -> None:
    dataset, train = sequences("sequence")
    for batch_size, variant in ((16, {}), (32, {"gradient_accumulation": 2}), (64, {"activation_checkpointing": 0.5})):
        training = make_training(dataset, train=train.model_copy(update={"batch_size": batch_size}), **variant)
        measured, foreseen = ledgers(training)
        assert foreseen.peak_bytes == pytest.approx(measured.tensors_bytes, rel=0.05)


def test_forms_of_inference_take_the_inputs_by_name(sequences: Callable[..., Any]) -> None:
    dataset, train = sequences("token")
    task = task_of(dataset, train)
    trained = Trained(task.model().eval(), task, [1, 4], frozenset({"bf16"}))
    kinds = {name: FORMS[name] for name in ("eager", "bf16", "exported")}
    config = parse({"infer": {"rounds": 2, "window_seconds": 0.01, "batch_sizes": [4]}, "variants": {"baseline": {}}})
    forms = {form.name: form for form in inference.forms_on(trained, kinds, ALONE, "a CPU", config)}
    agreements = {name: form.measured.agreement for name, form in forms.items() if form.measured}
    assert agreements.keys() == kinds.keys(), forms
    assert agreements["exported"].largest_logit_difference < 1e-5
    assert agreements["exported"].equal_fraction == 1
    score = evaluate(trained.model, task, ALONE, 5)
    assert agreements["eager"].accuracy == pytest.approx(score.accuracy)


def saved_for_mlflow(sequences: Callable[..., Any], folder: Path) -> tuple[dict[str, Any], Any]:
    """Save a model of several inputs as MLflow's; return seven samples, and the model's outputs for them."""
    from mlflow.models import Model

    from pipeline.tracking import logged_models

    dataset, train = sequences("token")
    task = task_of(dataset, train)
    model = task.model().eval()
    logged_models._save(task, model, folder / "model", Model())
    rows = {name: dataset.test.arrays[name][:7].long() for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return {name: values.numpy() for name, values in rows.items()}, model(rows).numpy()


@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType")  # of MLflow's own modules
def test_a_saved_program_takes_the_inputs_by_name(sequences: Callable[..., Any], tmp_path: Path) -> None:
    rows, expected = saved_for_mlflow(sequences, tmp_path)
    np.testing.assert_allclose(Served(str(tmp_path / "program.pt2")).predict(rows), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType")  # of MLflow's own modules
def test_mlflow_s_model_takes_the_inputs_by_name(
    sequences: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows, expected = saved_for_mlflow(sequences, tmp_path)
    assert "mlflow" not in capfd.readouterr().err
    np.savez(tmp_path / "inputs.npz", **rows)
    code = (
        "import sys, numpy as np, mlflow\n"
        "sys.modules['pipeline'] = None\n"  # the model needs none of this project's code
        "model = mlflow.pyfunc.load_model('model')\n"
        "np.save('outputs.npy', model.predict(dict(np.load('inputs.npz'))))\n"
        "assert model.input_example['input_ids'].shape == (2, 12)\n"
    )
    printed(code, cwd=tmp_path, MLFLOW_ALLOW_PICKLE_DESERIALIZATION="false")
    np.testing.assert_allclose(np.load(tmp_path / "outputs.npy"), expected, rtol=1e-5, atol=1e-6)


def test_a_pipeline_passes_one_input_only(sequences: Callable[..., Any]) -> None:
    dataset, train = sequences("sequence")
    task = task_of(dataset, train)
    why_not = Pipeline.why_not_held_by(Setup(task.model(), task))(2)
    assert why_not is not None
    assert str(why_not).startswith("FromConfig takes several inputs (input_ids, attention_mask), and a stage passes")
