"""The arms of a measurement: variants in fresh processes, which take steps on request of the process that measures.

``python -m pipeline arms`` serves the checkout that it is started in: a request a line on stdin, an answer a line on
stdout, both JSON. An arm is opened (and warmed up), takes its turns, and is closed, which tells what was measured. Two
checkouts, each with a server of its own, can so be measured side by side.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline import environment
from pipeline.data.prepared import read as read_dataset
from pipeline.distributed import forked
from pipeline.errors import PipelineError
from pipeline.interpreter import terminate_with_parent
from pipeline.measurement.detectors import children_seconds, detectors, of_turns
from pipeline.measurement.malloc import keep_freed_memory, return_freed_memory
from pipeline.params import Config, Machine, Variant
from pipeline.plans import Plan
from pipeline.plans import plan as plan_of
from pipeline.results import Flops, Ledgers, Setup, Window
from pipeline.training.assembly import assembled, planned
from pipeline.training.loop import Training
from pipeline.training.measured import dataset_of, device_name_of, setup_of, window_of

MEMORY_STEPS = (2, 4)
"""On a CPU: steps of warm-up, and measured ones, of the memory's own window. They count as warm-up of the speed's."""
FEWEST_WARMUP_STEPS = 3
"""After the allocator was told to keep what is freed: one takes the pages, the others find them."""
PRELOAD = ("pipeline.benchmark.arm", "torch._dynamo")
"""What every arm imports; torch imports the second with the first optimizer."""


class Measured(Setup):
    """What one fresh process, or its world, says of a variant."""

    window: Window
    ledgers: Ledgers | None = None
    """Only if asked for, like the next."""
    flops: Flops | None = None


def serve(config: Config, machine: Machine, prepared: Path) -> None:
    """Answer requests until stdin ends. A request that cannot be served is answered with ``{"error": message}``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks hears it, and ends this one
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # which ends the processes forked for a request
    terminate_with_parent()  # one that went before this has left the end of stdin
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a user's model prints is no answer

    def describe() -> dict[str, Any]:
        values = config.model_dump(mode="json", include={"variants", "train", "bench", "compare", "gate"})
        return values | {
            "environment": environment.hash_of(environment.read(), "variants", *config.variants),
            "dataset": dataset_of(read_dataset(prepared)).model_dump(mode="json"),
            "device": plan_of(config, config.compare.baseline, machine).device,
        }

    def open_(name: str, values: dict[str, Any], steps: int, ledgers: bool = False) -> dict[str, Any]:
        alone = config.model_copy(update={"variants": {name: Variant.model_validate(values)}})
        plan = planned(alone, name, machine, prepared)
        arguments = (config, plan, prepared, environment.read(), steps, ledgers)
        with ExitStack() as processes:
            ask = processes.enter_context(forked(_measure_in_turns, arguments, plan.processes, preload=PRELOAD))
            ask(None)
            arms[name] = ask, every_arm.enter_context(processes.pop_all())
        return {}

    def turn(name: str, steps: int) -> dict[str, Any]:
        ask, _ = arms[name]
        ask(steps)
        return {}

    def close(name: str) -> dict[str, Any]:
        ask, processes = arms.pop(name)
        with processes:
            (measured, *_) = ask(None)
        return dict(measured.model_dump(mode="json"))

    arms: dict[str, tuple[Callable[[int | None], list[Any]], ExitStack]] = {}
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "describe": describe, "open": open_, "turn": turn, "close": close,
    }  # fmt: skip
    with ExitStack() as every_arm:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = commands[request.pop("do")](**request)
            except PipelineError as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), file=answers, flush=True)


def _measure_in_turns(
    config: Config, plan: Plan, prepared: Path, fingerprint: dict[str, Any], steps: int, ledgers: bool
) -> Generator[Measured | None, int | None, None]:
    """What each process does: a warm-up, then turns of so many steps as it is sent, ``steps`` in all, then the record.

    On a CPU, memory and speed exclude each other: an allocator that keeps freed blocks is fast, one that returns them
    shows what is needed. So there the memory is measured first, in ``MEMORY_STEPS``, and then the speed.
    """
    on_cpu = plan.device == "cpu"
    if on_cpu:
        return_freed_memory()
    with assembled(plan, prepared) as assembly:
        world, warmup = assembly.world, plan.train.warmup_steps
        wanted = [warmup + steps]
        if on_cpu:
            warmup = max(FEWEST_WARMUP_STEPS, warmup - sum(MEMORY_STEPS))
            wanted = [sum(MEMORY_STEPS), warmup + steps]
        epochs = -(-sum(wanted) // max(1, len(assembly.dataset.train) // plan.train.batch_size))
        plan = plan.with_train(epochs=max(epochs, plan.train.epochs))
        seed = plan.train.seeds[0]
        watching = detectors(
            world.devices(plan.devices_per_process),
            root_pid=os.getppid(),
            max_foreign_load=config.bench.max_foreign_load if world.is_main else None,
        )
        with replace(assembly, plan=plan).training(seed) as training:
            for technique in training.techniques:
                technique.begin_after(0)
            if on_cpu:
                training.settle(MEMORY_STEPS[0])
                training.advance(wanted[0])
                memory = training.memory
                keep_freed_memory()
                training.settle(warmup)
            training.detectors = watching
            training.advance(warmup)
            aside = waited = 0.0
            turn = yield None
            while turn:
                training.advance(turn)
                children, since, own = children_seconds(os.getpid()), time.monotonic(), time.process_time()
                turn = yield None
                aside += time.process_time() - own
                waited += time.monotonic() - since
                aside += children_seconds(os.getpid()) - children
            if on_cpu:
                training.memory = memory
            window = window_of(
                training,
                asked_steps=steps,
                max_input_wait=_allowed_wait(training, config),
                seen=of_turns(aside, waited, training.clock),
            )
            device_name = device_name_of(world, fingerprint)
            found = _ledgers(training, window) if ledgers else None
            counted = _flops(training, device_name) if ledgers else None
            setup = setup_of(training, device_name)
        yield Measured(**dict(setup), window=window, ledgers=found, flops=counted)


def _allowed_wait(training: Training, config: Config) -> float | None:
    """The share of a window that may be waiting for input; None where that belongs to what is compared.

    It does where a technique chooses how the input comes. And where steps are replayed from a CUDA graph: of a small
    net's step hardly more is left than the input, which is made on the device, outside of the graph.
    """
    resident = training.batches.placement == "resident"
    if any(each.placement or (each.replays and resident) for each in training.techniques):
        return None
    return config.bench.max_input_wait


def _ledgers(training: Training, window: Window) -> Ledgers | None:
    """The variant's ledger as measured on the largest rank, and as predicted; None if the peak is unknown."""
    from pipeline.profiling import ledger  # most arms need none

    own_peak = None if window.peak_memory_bytes is None else training.memory.peak_bytes
    ranks = training.world.gather(ledger.measured(training, own_peak))
    known = [each for each in ranks if each is not None]
    if not known or not training.world.is_main:  # every rank's prediction is the same
        return None
    predicted, why_not = None, None
    try:
        predicted = ledger.predicted(training.plan, training.dataset, training.batches.placement)
    except ledger.PredictionError as error:
        why_not = str(error)
    return Ledgers(
        measured=max(known, key=lambda each: each.peak_bytes), predicted=predicted, why_not_predicted=why_not
    )


def _flops(training: Training, device_name: str) -> Flops:
    from pipeline.profiling import flops

    dataset = training.dataset
    return flops.counted(training.plan, dataset.shape, len(dataset.classes), device_name)
