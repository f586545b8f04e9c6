"""The stage ``infer``: a trained model in the forms in which it can be deployed, measured side by side.

Each form that the machine lacks stands in the result with the reason; none is left out silently.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from pipeline import environment, files, models, results
from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.errors import PipelineError, first_line
from pipeline.params import Config, Machine
from pipeline.plans import plan as plan_of
from pipeline.tools.inference.forms import FORMS, Kind, Made, Predict, Trained, Unavailable, cause
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
CALIBRATION_SAMPLES = 256
_NATIVE_FP16_FLAGS = {"avx512_fp16", "amx_fp16", "asimdhp"}


def run(config: Config, name: str, machine: Machine, prepared: Path) -> None:
    """Measure inference with the trained model of ``variants.<name>`` and write ``inference/<name>.json`` and ``.md``.

    On the CPU, and on a GPU where the job runs on one, in one process. Raises PipelineError.
    """
    plan = plan_of(config, name, machine)
    fingerprint = environment.read()
    asked, seed = config.infer, config.train.seeds[0]
    weights = checkpoints.weights(results.read(results.result_file(name), config), seed)
    kinds = {form: FORMS[form] for form in dict.fromkeys((PLAIN, *asked.forms))}
    forms: list[Form] = []
    noise: list[Noise] = []
    devices: list[Literal["cpu", "cuda"]] = ["cpu", "cuda"] if plan.device == "cuda" else ["cpu"]
    for device in devices:
        alone = plan.model_copy(update={"device": device, "processes": 1, "model_processes": 1})
        with (
            assembled(alone.with_train(deterministic=False), prepared) as assembly,
            tempfile.TemporaryDirectory() as scratch,
        ):
            world, dataset = assembly.world, assembly.dataset
            model = models.of_job(config.train, dataset.shape, len(dataset.classes))
            _load(model, weights, name, seed)
            trained = Trained(
                model=model.to(world.device).eval(),
                mean=dataset.mean,
                std=dataset.std,
                device=world.device,
                samples=_calibration(dataset).to(world.device),
                batch_sizes=sorted({1, *asked.batch_sizes}),
                native=_native(device, machine, fingerprint, config),
                scratch=Path(scratch),
            )
            label = device_name_of(world, fingerprint)
            try:
                here, against_itself = forms_on(
                    trained,
                    kinds,
                    dataset,
                    world,
                    label,
                    rounds=asked.rounds,
                    seconds=asked.window_seconds,
                    max_spread=config.compare.max_spread,
                )
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise PipelineError(
                    f"infer.batch_sizes: found {asked.batch_sizes}, for which {label} has not the memory "
                    f"({first_line(error)}); take smaller ones."
                ) from error
            forms += here
            noise += against_itself
            about = dataset_of(dataset)
            threads = torch.get_num_threads()
    found = Inference(
        variant=name,
        environment=environment.hash_of(fingerprint, "forms", *asked.forms),
        config={"train": config.train.model_dump(mode="json"), "infer": asked.model_dump(mode="json")},
        dataset=about,
        seed=seed,
        model_sha256=checkpoints.state_sha256(weights),
        rounds=asked.rounds,
        threads=threads,
        forms=tuple(forms),
        noise=tuple(noise),
    )
    files.write_text(results.inference_file(name, "md"), markdown(found))
    files.write_text(results.inference_file(name, "json"), found.to_json())
    for form in found.forms:
        if form.why_not:
            print(f"{name}: {form.name} on {form.device_type} is not available: {form.why_not}", flush=True)
    print(f"inference: {results.inference_file(name, 'md')}")


@torch.no_grad()
def forms_on(
    trained: Trained,
    kinds: Mapping[str, Kind],
    dataset: Dataset,
    world: World,
    label: str,
    *,
    rounds: int,
    seconds: float,
    max_spread: float,
) -> tuple[list[Form], list[Noise]]:
    """Make, check and measure the forms ``kinds``, the plain one first, on the device of ``world``, named ``label``.

    Raises what the plain form raises; of another one, the reason stands in its record.
    """
    device: Literal["cpu", "cuda"] = "cuda" if world.device.type == "cuda" else "cpu"
    batches = _Batches(dataset, world.device, max(trained.batch_sizes))
    torch.compiler.reset()  # another device's graphs would count towards the limit of recompilations
    made: dict[str, tuple[Made, float, torch.Tensor, tuple[str, ...]]] = {}
    reasons: dict[str, str] = {}
    for name, kind in kinds.items():
        try:
            made[name] = _prepared(kind, trained, batches, world)
        except Unavailable as reason:
            if name == PLAIN:
                raise PipelineError(f"the trained model has no plain form to compare with: {reason}.") from None
            reasons[name] = str(reason)
        except Exception as error:  # whatever compilers, exporters and kernels raise; the reason goes into the record
            if name == PLAIN:
                raise
            reasons[name] = cause(error)
    calls: dict[str, Predict] = {name: form.predict for name, (form, *_) in made.items()}
    slices = in_rounds(
        {**calls, _AGAIN: calls[PLAIN]},
        batches.images,
        trained.batch_sizes,
        rounds=rounds,
        seconds=seconds,
        synchronise=world.synchronise,
    )
    noise = noise_of(slices[_AGAIN], slices[PLAIN], max_spread, device)
    plain, labels = made[PLAIN][2], dataset.test.labels
    forms = []
    for name, kind in kinds.items():
        measured = None
        if name in made:
            form, prepare_seconds, logits, remarks = made[name]
            measured = Measured(
                prepare_seconds=prepare_seconds,
                model_bytes=form.model_bytes,
                file_bytes=form.file_bytes,
                latency=latency_of(slices[name]),
                throughput=throughput_of(slices[name], slices[PLAIN], noise),
                agreement=_agreement(logits, plain, labels),
                remarks=remarks,
            )
        forms.append(
            Form(
                name=name,
                device=label,
                device_type=device,
                does=kind.does,
                why_not=reasons.get(name),
                measured=measured,
            )
        )
    return forms, list(noise.values())


class _Batches:
    """The test images on the device, in batches of one size, the last one filled up: a compiled form is made for it."""

    def __init__(self, dataset: Dataset, device: torch.device, size: int) -> None:
        self._images = dataset.test.images
        self._device, self._size = device, size
        self.images = self._batch(0)

    def _batch(self, start: int) -> torch.Tensor:
        rows = torch.arange(start, start + self._size) % len(self._images)
        return self._images.index_select(0, rows).to(self._device)

    def logits(self, predict: Predict) -> torch.Tensor:
        """float32 [N, classes] on the CPU, of every test image once."""
        starts = range(0, len(self._images), self._size)
        found: Iterator[torch.Tensor] = (predict(self._batch(start)).cpu() for start in starts)
        return torch.cat(list(found))[: len(self._images)]


def _prepared(
    kind: Kind, trained: Trained, batches: _Batches, world: World
) -> tuple[Made, float, torch.Tensor, tuple[str, ...]]:
    """A form, made and warm; the seconds this took; its logits over the test set; and what a person should know."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    counters.clear()
    started = time.perf_counter()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # or it would go on uncompiled
        form = kind.make(trained)
        for size in trained.batch_sizes:
            form.predict(batches.images[:size])
    world.synchronise()
    seconds = time.perf_counter() - started
    logits = batches.logits(form.predict)
    if not torch.isfinite(logits).all():
        raise Unavailable("its logits are not finite")
    breaks = sum(counters["graph_break"].values())
    return form, seconds, logits, (f"torch.compile broke the graph {breaks} time(s)",) if breaks else ()


def _agreement(logits: torch.Tensor, plain: torch.Tensor, labels: torch.Tensor) -> Agreement:
    predicted = logits.argmax(1)
    return Agreement(
        equal_count=int((predicted == plain.argmax(1)).sum()),
        correct_count=int((predicted == labels).sum()),
        test_count=len(labels),
        largest_logit_difference=float((logits - plain).abs().max()),
    )


def _calibration(dataset: Dataset) -> torch.Tensor:
    """Training images, evenly spread: a folder's lie class by class."""
    count = min(CALIBRATION_SAMPLES, len(dataset.train))
    rows = torch.linspace(0, len(dataset.train) - 1, max(count, 2)).round().long()
    return dataset.train.images.index_select(0, rows)


def _native(device: str, machine: Machine, fingerprint: dict[str, Any], config: Config) -> frozenset[str]:
    """The 16-bit types that the device computes itself; all of them where params.yaml lets it emulate."""
    if config.train.without_native == "run":
        return frozenset({"bf16", "fp16"})
    if device == "cuda":
        return frozenset({"fp16", *(["bf16"] if machine.gpu_native_bf16 else [])})
    flags = set(fingerprint["hardware"]["cpu"].get("flags", ()))
    return frozenset(
        [*(["bf16"] if machine.cpu_native_bf16 else []), *(["fp16"] if flags & _NATIVE_FP16_FLAGS else [])]
    )


def _load(model: torch.nn.Module, weights: dict[str, Any], name: str, seed: int) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise PipelineError(
            f"{results.model_file(name, seed)} does not fit train.model; run `dvc repro train@{name}` again. ({error})"
        ) from None
