"""The arms of a measurement. An arm is a variant in fresh processes, which train as many steps as a request says.

``python -m pipeline arms`` serves the checkout in which it is started. It reads one JSON request per line from stdin
and writes one JSON answer per line to stdout. There are six requests: describe the checkout, plan a variant, open an
arm from a plan and warm it up, open an arm that need not measure memory, let an arm take a turn, and close an arm. The
answer to "close" holds the measurement. Two checkouts, each with its own server, can be measured side by side.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline import environment
from pipeline.data.prepared import read as read_dataset
from pipeline.distributed import forked
from pipeline.errors import PipelineError
from pipeline.measurement.detectors import children_seconds, detectors, of_turns
from pipeline.measurement.energy import Energy, per_sample
from pipeline.measurement.windows import Memory
from pipeline.params import Config, Machine, Variant, catalogue
from pipeline.plans import Plan
from pipeline.plans import plan as plan_of
from pipeline.processes import terminate_with_parent
from pipeline.processes.malloc import keep_freed_memory, return_freed_memory
from pipeline.profiling.arithmetic import Unreduced
from pipeline.results import Flops, Ledgers, RunConditions, Window
from pipeline.results.figures import MEMORY
from pipeline.training.assembly import assembled, planned, preload_for
from pipeline.training.loop import Training
from pipeline.training.measured import conditions_of, dataset_of, device_name_of, window_of

MEMORY_STEPS = (2, 3)
"""Numbers of warm-up steps and measured steps of the memory window on a CPU. Its warm-up steps are taken from
``train.warmup_steps``."""
FEWEST_WARMUP_STEPS = 3
"""Fewest steps between the memory window and the speed window on a CPU. In them, the heap gets the pages that later
steps reuse."""
STEPS_PER_ARITHMETIC = 25
"""One step in so many is taken once more, without exchange, to see how long each rank computes."""
LONGER_WINDOWS = "raise bench.window_seconds (turns and the ends of epochs shorten windows)"


Commands = Mapping[str, Callable[..., dict[str, Any] | None]]
"""Request -> the function that answers it; None stands for nothing to say."""


class Measured(RunConditions):
    """The measurement of one arm in fresh processes."""

    window: Window
    ledgers: Ledgers | None = None
    """None if the request did not ask for ledgers, if no peak is known, and on all ranks except the main one."""
    flops: Flops | None = None
    """None if the request did not ask for ledgers."""


def serve(config: Config, machine: Machine, prepared: Path) -> None:
    """Answer the requests for this checkout's variants."""

    def describe() -> dict[str, Any]:
        return description(config, environment.read()) | {
            "dataset": dataset_of(read_dataset(prepared)).model_dump(mode="json"),
            "device": plan_of(config, config.compare.baseline, machine).device,
            "requests": [*commands],
        }

    def plan_(name: str, values: dict[str, Any]) -> dict[str, Any]:
        alone = config.model_copy(update={"variants": {name: Variant.model_validate(values)}})
        return planned(alone, name, machine, prepared).model_dump(mode="json")

    def open_(name: str, plan: dict[str, Any], steps: int, ledgers: bool = False, memory: bool = True) -> None:
        made = Plan.model_validate(plan)
        arguments = (config, made, prepared, environment.read(), steps, ledgers, memory)
        with ExitStack() as processes:
            ranks = forked(
                _rank_of_arm, arguments, made.processes, preload=[__name__, *preload_for(made)], on_hosts=made.hosts
            )
            ask = processes.enter_context(ranks)
            ask(None)
            arms[name] = ask, every_arm.enter_context(processes.pop_all())

    def turn(name: str, steps: int) -> None:
        ask, _ = arms[name]
        ask(steps)

    def close(name: str) -> dict[str, Any]:
        ask, processes = arms.pop(name)
        with processes:
            (measured, *_) = ask(None)
        return dict(measured.model_dump(mode="json"))

    arms: dict[str, tuple[Callable[[int | None], list[Any]], ExitStack]] = {}
    commands: Commands = {
        "describe": describe, "plan": plan_, "open": open_, "open_for_speed": partial(open_, memory=False),
        "turn": turn, "close": close,
    }  # fmt: skip
    with ExitStack() as every_arm:
        answer_requests(commands)


def description(config: Config, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the description of any checkout says. ``content``: that of environment.json."""
    values = config.model_dump(mode="json", include={"variants", "bench", "compare", "gate"})
    return values | {"train": config.job, "environment": environment.hash_of(content, "variants", *config.variants)}


def answer_requests(commands: Commands) -> None:
    """Answer requests until stdin ends, with plain values or records. The answer to a request that raises a
    PipelineError is ``{"error": message}``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client receives the signal too, and ends this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # sys.exit ends the processes forked for a request
    terminate_with_parent()  # if the parent ended before this call, stdin ends too
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a user's model may print, but stdout is only for answers
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = commands[request.pop("do")](**request) or {}
        except PipelineError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer, default=lambda record: record.model_dump(mode="json")), file=answers, flush=True)


def _rank_of_arm(
    config: Config,
    plan: Plan,
    prepared: Path,
    fingerprint: dict[str, Any],
    steps: int,
    ledgers: bool,
    memory: bool = True,
) -> Generator[Measured | None, int | None, None]:
    """Run one process of an arm. The first request (None) warms up the arm. Each later request is the number of steps
    of a turn (``steps`` in all). The last request (None) yields the record.

    On a CPU, memory and speed cannot be measured together. The allocator is fast only if it keeps freed blocks, but the
    process's resident memory shows the needed memory only if the allocator returns these blocks to the system. So the
    memory is measured first, in ``MEMORY_STEPS``, and then the speed. Without ``memory``, as many steps of the warm-up
    take the place of these steps, unless fewer suffice for ``train.warmup_steps``; a GPU's memory is measured anyway.

    After a turn drawn at random, an extra step runs outside the window, and its samples are counted. This step does
    not reveal a technique that leaves out samples only inside the window. In a training, the step that
    ``Training.count_later`` chooses can reveal it.
    """
    on_cpu = plan.device == "cpu"
    if on_cpu:
        return_freed_memory()
    with assembled(plan, prepared) as assembly:
        world, warmup = assembly.world, plan.train.warmup_steps
        memory_steps = MEMORY_STEPS if on_cpu and memory else ()
        if memory_steps:
            warmup = max(FEWEST_WARMUP_STEPS, warmup - MEMORY_STEPS[0])
        elif on_cpu:
            warmup = max(sum(MEMORY_STEPS), warmup)
        wanted = [sum(memory_steps), warmup + steps + 1]
        epochs = -(-sum(wanted) // max(1, len(assembly.task.dataset.train) // plan.train.batch_size))
        plan = plan.with_train(epochs=max(epochs, plan.train.epochs))
        seed = plan.train.seeds[0]
        devices = world.devices(plan.devices_per_process)
        active_detectors = detectors(
            devices,
            root_pid=os.getppid(),
            max_foreign_load=config.bench.max_foreign_load if world.local_rank == 0 else None,
        )
        more = () if plan.reduces else (Unreduced,)
        whole = replace(assembly, plan=plan, techniques=(*assembly.techniques, *more))
        with whole.training(seed, steady=True) as training:
            peaks = None
            if memory_steps:
                training.restart_measuring(memory_steps[0])
                training.advance(wanted[0])
                peaks = training.memory
            if on_cpu:
                keep_freed_memory()
            energy = Energy(devices if config.bench.energy else (), LONGER_WINDOWS)
            training.restart_measuring(warmup, active_detectors, energy)
            training.advance(warmup)
            peaks = peaks or training.memory
            aside = waited = 0.0
            counted_after = training.steps + world.broadcast(secrets.randbelow(steps))  # no code can foresee it
            turn = yield None
            while turn:
                training.advance(turn)
                if counted_after in range(training.steps - turn, training.steps):
                    training.advance_counted()
                children, since, own = children_seconds(os.getpid()), time.monotonic(), time.process_time()
                turn = yield None
                aside += time.process_time() - own
                waited += time.monotonic() - since
                aside += children_seconds(os.getpid()) - children
            training.losses.read()  # raises NonFiniteLoss; on a GPU, nothing else might read them in so few steps
            window = window_of(
                training,
                memory=peaks,
                arithmetic_seconds=training.arithmetic_seconds(max(1, steps // STEPS_PER_ARITHMETIC)),
                requested_steps=steps,
                max_input_wait=_allowed_wait(training, config),
                seen=of_turns(aside, waited, training.clock),
            )
            if on_cpu and not memory:
                window = window.model_copy(update={MEMORY.field: None, "peak_memory_rank_bytes": ()})
            if config.bench.energy and not window.rejections:  # equal on all ranks, so either all ranks gather or none
                samples = window.measured_steps * training.train.batch_size
                joules, why_unknown = training.energy.read()
                of_host = {f"{world.host}: {counter}": read for counter, read in joules.items()}
                window = window.model_copy(update=per_sample(world.gather((of_host, why_unknown)), samples))
            device_name = device_name_of(world, fingerprint)
            made = _ledgers(training, window, peaks) if ledgers else None
            flops = _flops(training, device_name) if ledgers else None
            for unreduced in training.techniques:
                if isinstance(unreduced, Unreduced):
                    window = window.model_copy(update={"arithmetic": unreduced.read(training.clock)})
            conditions = conditions_of(training, device_name)
        yield Measured(**dict(conditions), window=window, ledgers=made, flops=flops)


def _allowed_wait(training: Training, config: Config) -> float | None:
    """Return the share of a window that may be spent waiting for input; None if the wait is not limited.

    The wait is not limited if a technique chooses the data set's placement, because the wait is then part of what the
    bench compares. It is also not limited if a CUDA graph replays the steps on a resident data set. The graph does not
    prepare the input, and this preparation can take almost as long as a small model's step.
    """
    resident = training.batches.placement == "resident"
    chosen = any(entry.placement for entry in catalogue.in_effect(training.plan.applied))
    replayed = resident and training.setup.replays
    return None if chosen or replayed else config.bench.max_input_wait


def _ledgers(training: Training, window: Window, memory: Memory) -> Ledgers | None:
    """Return the variant's memory ledgers: measured (on the rank with the highest peak) and predicted.

    Return None if no peak is known, and on all ranks except the main one.
    """
    from pipeline.profiling import ledger, prediction  # most arms need no ledger

    own_peak = None if MEMORY.of(window) is None else memory.peak_bytes
    ranks = training.world.gather(ledger.measured(training, own_peak))
    known = [ledger for ledger in ranks if ledger is not None]
    if not known or not training.world.is_main:  # all ranks would predict the same
        return None
    predicted, why_not = None, None
    try:
        predicted = prediction.predicted(training.plan, training.task, training.batches.placement)
    except prediction.PredictionError as error:
        why_not = str(error)
    return Ledgers(
        measured=max(known, key=lambda ledger: ledger.peak_bytes), predicted=predicted, why_not_predicted=why_not
    )


def _flops(training: Training, device_name: str) -> Flops:
    from pipeline.profiling import flops

    return flops.counted(training.plan, training.task, device_name)
