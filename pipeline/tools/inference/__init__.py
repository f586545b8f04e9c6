"""The stage ``infer``: measure a trained model in the forms in which it can be deployed, side by side.

If a form cannot run on this machine, the result says why.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch.utils._pytree import tree_map

from pipeline import environment, files, results
from pipeline.distributed import World
from pipeline.errors import PipelineError, count, first_line, say, spelled
from pipeline.pages import render
from pipeline.params import Config, Machine, Seed, Train
from pipeline.plans import plan as plan_of
from pipeline.results import Record, VariantDocument
from pipeline.step import Inputs
from pipeline.tasks import Task
from pipeline.tools.inference.forms import FORMS, Kind, Predict, Trained, Unavailable, cause
from pipeline.tools.inference.timing import Latency, Throughput, in_rounds, latency_of, noise_of, throughput_of
from pipeline.training import checkpoints
from pipeline.training.assembly import assembled
from pipeline.training.measured import dataset_of, device_name_of
from pipeline.training.outcomes import is_out_of_memory

PLAIN = "eager"
_AGAIN = "eager again"
NO_ROOM = os.strerror(errno.ENOSPC)
_NATIVE_FP16_FLAGS = {"avx512_fp16", "amx_fp16", "asimdhp"}


class Agreement(Record):
    """Agreement with the predictions of the plain float32 form on the same device, over the whole test set."""

    equal_count: int | float
    """Sum of the samples' scores against the plain form's predictions. For classes, this is the number of samples with
    the same predicted class."""
    correct_count: int | float
    """Sum of the samples' scores against the targets."""
    test_count: int
    largest_logit_difference: float

    @property
    def equal_fraction(self) -> float:
        return self.equal_count / self.test_count

    @property
    def accuracy(self) -> float:
        return self.correct_count / self.test_count


class Measured(Record):
    """The figures of one form."""

    prepare_seconds: float
    """Time to make the form (compile, export, calibrate) and to call it once with each batch size."""
    model_bytes: int
    """Size of the form's parameters, buffers and constants."""
    file_bytes: int | None
    """Size of the saved program; None if the form is not saved."""
    latency: Latency
    throughput: tuple[Throughput, ...]
    agreement: Agreement
    remarks: tuple[str, ...]


class Form(Record):
    """One form of the model on one device."""

    name: str
    device: str
    """Name of the GPU or CPU."""
    device_type: Literal["cpu", "cuda"]
    does: str
    why_not: str | None
    """Why the form could not run here; None if it ran."""
    measured: Measured | None


class Inference(VariantDocument):
    """``inference/<variant>.json``."""

    schema_: Literal[2] = Field(default=2, alias="schema")
    seed: Seed
    model_sha256: str
    rounds: int
    threads: int
    """CPU threads per operation."""
    forms: tuple[Form, ...]


def run(config: Config, name: str, machine: Machine, prepared: Path) -> None:
    """Measure inference with the trained model of ``variants.<name>`` and write ``inference/<name>.json`` and ``.md``.

    The measurement runs in one process, on the CPU, and also on a GPU if the job runs on GPUs. Raises PipelineError,
    for example if the variant is not trained or the batches do not fit into memory.
    """
    plan = plan_of(config, name, machine)
    fingerprint = environment.read()
    requested, seed = config.infer, plan.train.seeds[0]
    weights = checkpoints.weights(results.read(results.result_file(name), config), seed)
    kinds = {form: FORMS[form] for form in dict.fromkeys((PLAIN, *requested.forms))}
    forms: list[Form] = []
    devices: list[Literal["cpu", "cuda"]] = ["cpu", "cuda"] if plan.device == "cuda" else ["cpu"]
    for device in devices:
        alone = plan.model_copy(update={"device": device, "processes": 1, "model_processes": 1})
        with assembled(alone.with_train(deterministic=False), prepared) as assembly:
            world, task = assembly.world, assembly.task
            model = task.model()
            _load(model, weights, name, seed)
            native = _native(device, machine, fingerprint, plan.train)
            trained = Trained(model.to(world.device).eval(), task, sorted({1, *requested.batch_sizes}), native)
            label = device_name_of(world, fingerprint)
            try:
                forms += forms_on(trained, kinds, world, label, config)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise PipelineError(
                    f"infer.batch_sizes: found {requested.batch_sizes}, for which {label} has too little memory "
                    f"({first_line(error)}); set smaller batch sizes."
                ) from error
            about = dataset_of(task.dataset)
            threads = torch.get_num_threads()
    document = Inference(
        variant=name,
        environment=environment.hash_of(fingerprint, "forms", *requested.forms),
        config={"train": config.train.model_dump(mode="json"), "infer": requested.model_dump(mode="json")},
        dataset=about,
        seed=seed,
        model_sha256=checkpoints.state_sha256(weights),
        rounds=requested.rounds,
        threads=threads,
        forms=tuple(forms),
    )
    page = spelled(render("inference.md", inference=document))
    as_json, as_page = results.inference_file(name, "json"), results.inference_file(name, "md")
    files.write_texts({as_page: page, as_json: document.to_json()})
    for form in document.forms:
        if form.why_not:
            say(f"{name}: {form.name} on {form.device_type} is not available: {form.why_not}")
    say(f"inference: {as_page}")


@torch.no_grad()
def forms_on(trained: Trained, kinds: Mapping[str, Kind], world: World, label: str, config: Config) -> list[Form]:
    """Make, check and measure the forms ``kinds``, which begin with the plain form, on the device of ``world``. Return
    a record of each form.

    ``label``: the device's name. An error of the plain form is raised. An error of another form becomes the reason, in
    its record, why it is not available. Raises PipelineError if the disk is full.
    """
    task, settings = trained.task, config.infer
    test_set = _TestSet(task, max(trained.batch_sizes))
    torch.compiler.reset()  # graphs made for another device would count towards the recompile limit
    warm: dict[str, Predict] = {}
    figures: dict[str, dict[str, Any]] = {}
    reasons: dict[str, str] = {}
    for name, kind in kinds.items():
        say(f"infer: {label}: making {name}", file=sys.stderr)
        try:
            warm[name], figures[name] = _warmed(kind, trained, test_set, world)
        except Exception as error:  # compilers, exporters and kernels may raise anything
            reasons[name] = why = cause(error)
            if NO_ROOM in why:  # a full disk says nothing about the form
                raise PipelineError(
                    f"infer: {name}: {why}. Make room there, or set TMPDIR to another directory."
                ) from error
            if name == PLAIN and isinstance(error, Unavailable):
                raise PipelineError(
                    f"infer: the form {PLAIN}, with which all others are compared, fails: {why}; train the variant "
                    "with other settings."
                ) from error
            if name == PLAIN:
                raise
    slices = in_rounds(
        {**warm, _AGAIN: warm[PLAIN]},
        test_set.first,
        trained.batch_sizes,
        rounds=settings.rounds,
        seconds=settings.window_seconds,
        synchronise=world.synchronise,
        devices=[world.device] if settings.energy else (),
        values=task.dataset.vocabulary or 256,
    )
    noise = noise_of(slices[_AGAIN], slices[PLAIN], config.compare.max_spread)
    for name in warm:
        figures[name]["latency"] = latency_of(slices[name])
        figures[name]["throughput"] = throughput_of(slices[name], slices[PLAIN], noise)
    about = {"device": label, "device_type": world.device.type}
    rows = {name: {"does": kind.does, "why_not": reasons.get(name)} for name, kind in kinds.items()}
    return [Form.model_validate({"name": name, "measured": figures.get(name), **rows[name], **about}) for name in rows]


class _TestSet:
    """The raw inputs of the test set, in batches of ``size`` samples on the task's device, and the outputs that are
    expected for them: those of the first form, which is the plain one.

    A compiled form is made for certain sizes only, so the last batch is filled up with the first samples.
    """

    def __init__(self, task: Task, size: int) -> None:
        arrays = [task.dataset.test.arrays[name] for name in task.arrays]
        self._inputs, self._targets = task.on(torch.device("cpu")).raw(arrays)
        self._task, self._size = task, size
        self._expected: torch.Tensor | None = None
        self.first = self._batch(0)

    def _batch(self, start: int) -> Inputs:
        rows = torch.arange(start, start + self._size) % len(self._targets)
        batch: Inputs = tree_map(lambda values: values[rows].to(self._task.device), self._inputs)
        return batch

    def outputs(self, predict: Predict) -> torch.Tensor:
        """Return the outputs of ``predict``, float32 [N, ...] on the CPU: one for each test sample."""
        count = len(self._targets)
        return torch.cat([predict(self._batch(start)).cpu() for start in range(0, count, self._size)])[:count]

    def agreement(self, predict: Predict) -> Agreement:
        """Return how far ``predict`` agrees with the first form. Raises Unavailable if an output is not finite."""
        outputs = self.outputs(predict)
        if not torch.isfinite(outputs).all():
            raise Unavailable("its outputs are not finite")
        if self._expected is None:
            self._expected = outputs

        def total(targets: torch.Tensor) -> int | float:
            scores = self._task.scores(outputs, targets)
            score = float(scores.double().sum())
            score = score if len(scores) == len(targets) else score / len(scores) * len(targets)
            return int(score) if score.is_integer() else score

        return Agreement(
            equal_count=total(self._task.predicted(self._expected)),
            correct_count=total(self._targets),
            test_count=len(self._targets),
            largest_logit_difference=float((outputs - self._expected).abs().max()),
        )


def _warmed(kind: Kind, trained: Trained, test_set: _TestSet, world: World) -> tuple[Predict, dict[str, Any]]:
    """Make a form and call it with each batch size. Return it and the figures of ``Measured`` that need no rounds.
    Raises Unavailable if an output is not finite."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    counters.clear()
    started = time.perf_counter()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # otherwise the form would run uncompiled
        form = kind.make(trained)
        for size in trained.batch_sizes:
            form.predict(tree_map(lambda values: values[:size], test_set.first))  # noqa: B023
    world.synchronise()
    figures: dict[str, Any] = {"prepare_seconds": time.perf_counter() - started}
    figures["agreement"] = test_set.agreement(form.predict)
    breaks = sum(counters["graph_break"].values())
    remarks = (f"torch.compile broke the graph {count(breaks, 'time')}",) if breaks else ()
    figures |= {"model_bytes": form.model_bytes, "file_bytes": form.file_bytes, "remarks": remarks}
    return form.predict, figures


def _native(device: str, machine: Machine, fingerprint: dict[str, Any], train: Train) -> frozenset[str]:
    """Return the 16-bit types in which the device computes natively; both if ``train.without_native: run`` is set."""
    flags = set(fingerprint["hardware"]["cpu"].get("flags", ()))
    native = {"bf16": machine.cpu_native_bf16, "fp16": bool(flags & _NATIVE_FP16_FLAGS)}
    if device == "cuda":
        native = {"bf16": machine.gpu_native_bf16, "fp16": True}
    return frozenset(name for name in native if native[name] or train.without_native == "run")


def _load(model: torch.nn.Module, weights: dict[str, Any], name: str, seed: int) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise PipelineError(
            f"{results.model_file(name, seed)} does not fit its variant's model; run `dvc repro` again. ({error})"
        ) from None
