"""The stage ``infer``: measure a trained model in the forms in which it can be deployed, side by side.

If a form cannot run on this machine, the result says why.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from pipeline import environment, files, results
from pipeline.distributed import World
from pipeline.errors import PipelineError, count, first_line, say, spelled
from pipeline.params import Config, Machine, Train
from pipeline.plans import plan as plan_of
from pipeline.tasks import Task
from pipeline.tools.inference.forms import FORMS, Kind, Predict, Trained, Unavailable, cause
from pipeline.tools.inference.inference_file import Agreement, Form, Inference, Measured, Noise
from pipeline.tools.inference.tables import markdown
from pipeline.tools.inference.timing import in_rounds, latency_of, noise_of, throughput_of
from pipeline.training import checkpoints
from pipeline.training.assembly import assembled
from pipeline.training.failures import is_out_of_memory
from pipeline.training.measured import dataset_of, device_name_of

__all__ = ["Inference", "forms_on", "run"]

PLAIN = "eager"
_AGAIN = "eager again"
NO_ROOM = os.strerror(errno.ENOSPC)
_NATIVE_FP16_FLAGS = {"avx512_fp16", "amx_fp16", "asimdhp"}


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
    noise: list[Noise] = []
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
                here, against_itself = forms_on(trained, kinds, world, label, config)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise PipelineError(
                    f"infer.batch_sizes: found {requested.batch_sizes}, for which {label} has too little memory "
                    f"({first_line(error)}); set smaller batch sizes."
                ) from error
            forms += here
            noise += against_itself
            about = dataset_of(task.dataset)
            threads = torch.get_num_threads()
    found = Inference(
        variant=name,
        environment=environment.hash_of(fingerprint, "forms", *requested.forms),
        config={"train": config.train.model_dump(mode="json"), "infer": requested.model_dump(mode="json")},
        dataset=about,
        seed=seed,
        model_sha256=checkpoints.state_sha256(weights),
        rounds=requested.rounds,
        threads=threads,
        forms=tuple(forms),
        noise=tuple(noise),
    )
    files.write_texts(
        {
            results.inference_file(name, "md"): spelled(markdown(found)),
            results.inference_file(name, "json"): found.to_json(),
        }
    )
    for form in found.forms:
        if form.why_not:
            say(f"{name}: {form.name} on {form.device_type} is not available: {form.why_not}")
    say(f"inference: {results.inference_file(name, 'md')}")


@torch.no_grad()
def forms_on(
    trained: Trained, kinds: Mapping[str, Kind], world: World, label: str, config: Config
) -> tuple[list[Form], list[Noise]]:
    """Make, check and measure the forms ``kinds``, which begin with the plain form, on the device of ``world``. Return
    a record of each form, and the noise.

    ``label``: the device's name. An error of the plain form is raised. An error of another form becomes the reason, in
    its record, why it is not available. Raises PipelineError if the disk is full.
    """
    device: Literal["cpu", "cuda"] = "cuda" if world.device.type == "cuda" else "cpu"
    task, requested = trained.task, config.infer
    batches = _Batches(task, max(trained.batch_sizes))
    torch.compiler.reset()  # graphs made for another device would count towards the recompile limit
    calls: dict[str, Predict] = {}
    outputs: dict[str, torch.Tensor] = {}
    figures: dict[str, dict[str, Any]] = {}
    reasons: dict[str, str] = {}
    for name, kind in kinds.items():
        say(f"infer: {label}: making {name}", file=sys.stderr)
        try:
            calls[name], outputs[name], figures[name] = _prepared(kind, trained, batches, world)
        except Exception as error:  # compilers, exporters and kernels may raise anything
            if name == PLAIN and not isinstance(error, Unavailable):
                raise
            reasons[name] = cause(error)
        if NO_ROOM in reasons.get(name, ""):  # a full disk says nothing about the form
            raise PipelineError(f"infer: {name}: {reasons[name]}. Make room there, or set TMPDIR to another directory.")
        if PLAIN in reasons:
            raise PipelineError(
                f"infer: the form {PLAIN}, with which all others are compared, fails: {reasons[PLAIN]}; train the "
                "variant with other settings."
            )
    slices = in_rounds(
        {**calls, _AGAIN: calls[PLAIN]},
        batches.first,
        trained.batch_sizes,
        rounds=requested.rounds,
        seconds=requested.window_seconds,
        synchronise=world.synchronise,
        devices=[world.device] if requested.energy else (),
        values=task.dataset.vocabulary or 256,
    )
    noise = noise_of(slices[_AGAIN], slices[PLAIN], config.compare.max_spread, device)
    measured = {
        name: Measured(
            **figures[name],
            latency=latency_of(slices[name]),
            throughput=throughput_of(slices[name], slices[PLAIN], noise),
            agreement=_agreement(outputs[name], outputs[PLAIN], task, batches.targets),
        )
        for name in calls
    }
    forms = [
        Form(
            name=name,
            device=label,
            device_type=device,
            does=kind.does,
            why_not=reasons.get(name),
            measured=measured.get(name),
        )
        for name, kind in kinds.items()
    ]
    return forms, list(noise.values())


class _Batches:
    """The test set's raw inputs, copied to the device in batches of one size.

    A compiled form is made for certain sizes only, so the last batch is filled up with the first samples.
    """

    def __init__(self, task: Task, size: int) -> None:
        self._inputs, self.targets = task.on(torch.device("cpu")).raw(
            [task.dataset.test.arrays[name] for name in task.arrays]
        )
        self._device, self._size = task.device, size
        self.first = self._batch(0)

    def _batch(self, start: int) -> torch.Tensor:
        rows = torch.arange(start, start + self._size) % len(self._inputs)
        return self._inputs[rows].to(self._device)

    def outputs(self, predict: Predict) -> torch.Tensor:
        """Return the outputs of ``predict``, float32 [N, ...] on the CPU: one for each test sample."""
        starts = range(0, len(self._inputs), self._size)
        found: Iterator[torch.Tensor] = (predict(self._batch(start)).cpu() for start in starts)
        return torch.cat(list(found))[: len(self._inputs)]


def _prepared(
    kind: Kind, trained: Trained, batches: _Batches, world: World
) -> tuple[Predict, torch.Tensor, dict[str, Any]]:
    """Make and warm up a form. Return it, its outputs over the test set, and the figures of ``Measured`` that need no
    rounds. Raises Unavailable if an output is not finite."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    counters.clear()
    started = time.perf_counter()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # otherwise the form would run uncompiled
        form = kind.make(trained)
        for size in trained.batch_sizes:
            form.predict(batches.first[:size])
    world.synchronise()
    seconds = time.perf_counter() - started
    outputs = batches.outputs(form.predict)
    if not torch.isfinite(outputs).all():
        raise Unavailable("its outputs are not finite")
    breaks = sum(counters["graph_break"].values())
    figures = {
        "prepare_seconds": seconds,
        "model_bytes": form.model_bytes,
        "file_bytes": form.file_bytes,
        "remarks": (f"torch.compile broke the graph {count(breaks, 'time')}",) if breaks else (),
    }
    return form.predict, outputs, figures


def _agreement(outputs: torch.Tensor, plain: torch.Tensor, task: Task, targets: torch.Tensor) -> Agreement:
    def total(against: torch.Tensor) -> int | float:
        found = float(task.scores(outputs, against).double().sum())
        return int(found) if found.is_integer() else found

    return Agreement(
        equal_count=total(task.predicted(plain)),
        correct_count=total(targets),
        test_count=len(targets),
        largest_logit_difference=float((outputs - plain).abs().max()),
    )


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
