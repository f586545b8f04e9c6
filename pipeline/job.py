"""One variant's job: launch its processes, train every seed, write the result's files."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from tqdm import tqdm

from pipeline import checkpoints, models, objectives, results
from pipeline.config import Config, Machine, PipelineError, Plan
from pipeline.config import plan as plan_of
from pipeline.data.batches import Placement, TrainBatches, choose_placement
from pipeline.data.prepared import Dataset
from pipeline.data.prepared import read as read_dataset
from pipeline.detectors import Detector, detectors, of_clock, of_memory, of_ranks, of_steps
from pipeline.distributed import Interruption, World, interruption, keep_freed_memory, launch, launched_size
from pipeline.distributed import world as joined_world
from pipeline.environment import ENVIRONMENT_FILE, cores
from pipeline.measurement import Memory, SystemSampler, percentile_ms
from pipeline.results import HistoryRow, Result, Run, Setup, Window, summarise
from pipeline.techniques import of_plan
from pipeline.training import OutOfMemory, Training

FOLLOWER_PATIENCE_SECONDS = 20.0
"""How long the end of a job waits for the live mirror; what it has not sent by then, ``publish`` sends."""

INTERRUPTED_PATIENCE_SECONDS = 2.0
"""The same for a job that is interrupted: `docker stop` gives ten seconds in all."""


def run(config: Config, name: str, machine: Machine, prepared: Path) -> None:
    """Train ``variants.<name>`` on the data set in ``prepared`` with every seed, and write all its files.

    Starts the processes that the variant needs; where a launcher started this one, it is one of them.
    An interrupted job goes on from its checkpoints. Raises PipelineError.
    """
    plan = plan_of(config, name, machine, launched_size())
    started = psutil.Process().create_time()
    launch(_work, (config, plan, prepared, environment_of(), started), plan.processes)


@contextmanager
def ready(config: Config, plan: Plan, prepared: Path) -> Iterator[tuple[World, Dataset, Placement]]:
    """This process as a rank of the variant's world, with all set up that comes before a model."""
    train = config.train
    models.load(train.model)
    objectives.load(train)
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch's compiler: no memory of the training
    techniques = of_plan(plan)
    for technique in techniques:
        technique.prepare_process()
    Memory.note_imports()
    dataset = read_dataset(prepared)
    objectives.check(config.train, len(dataset.classes))
    with joined_world(plan.device, cores()) as world:
        _make_exact(world, deterministic=train.deterministic)
        wanted = next((each.placement for each in techniques if each.placement), train.placement)
        chosen = choose_placement(dataset, world.device) if wanted == "auto" else wanted
        yield world, dataset, world.broadcast(chosen)


@contextmanager
def training_of(
    config: Config,
    plan: Plan,
    dataset: Dataset,
    world: World,
    placement: Placement,
    seed: int,
    detectors: Sequence[Detector],
    change_model: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Iterator[Training]:
    """The variant's training with one seed, ready to run; its plan says what it decided (``fitted``).

    ``change_model``: of the single-device model, on the CPU, before any technique.
    """
    plan = fitted(config, plan, dataset, world, placement)
    with _training_of(config, plan, dataset, world, placement, seed, detectors, change_model) as training:
        yield training


def fitted(config: Config, plan: Plan, dataset: Dataset, world: World, placement: Placement) -> Plan:
    """The plan with as few micro-batches as every rank has the memory for, where it is asked to find out.

    Each try is a training of its own that is thrown away, so that what follows begins as if there had been none. All
    ranks call it together. Raises OutOfMemory if a single sample is too much.
    """
    technique = "auto_micro_batch"
    if plan.applied.gradient_accumulation != "auto" or technique in plan.decided:
        return plan
    samples, count, failed = plan.micro_batches * plan.micro_batch_size, plan.micro_batches, 0
    while True:
        tried = plan.divided(count)
        with _training_of(config, tried, dataset, world, placement, config.train.seeds[0], ()) as training:
            fits = training.fits()
        del training
        forget_last_run(world)
        if fits:
            break
        if plan.applied.compile != "none":
            torch.compiler.reset()  # or it would compile for batches of any size from the second on
        failed = tried.micro_batch_size
        if failed == 1:
            raise OutOfMemory(
                f"variants.{plan.name}: a process runs out of memory with a single sample a micro-batch; take a "
                "smaller model, or a technique that saves memory, such as activation_checkpointing."
            )
        count = next(more for more in range(count + 1, samples + 1) if samples % more == 0)
    reason = f", as {failed} did not fit into a process's memory" if failed else ", which is all of its share"
    decision = f"{count} micro-batch(es) of {tried.micro_batch_size} samples a process{reason}"
    if world.is_main:
        print(f"{plan.name}: {technique}: {decision}", flush=True)
    return plan.divided(count, decided=plan.decided | {technique: decision})


@contextmanager
def _training_of(
    config: Config,
    plan: Plan,
    dataset: Dataset,
    world: World,
    placement: Placement,
    seed: int,
    detectors: Sequence[Detector],
    change_model: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Iterator[Training]:
    train = plan.job(config.train)
    torch.manual_seed(seed)
    model = change_model(models.of_job(train, dataset.shape, len(dataset.classes)))
    with TrainBatches(
        dataset,
        batch_size=train.batch_size,
        micro_batches=plan.micro_batches,
        rank=world.rank // plan.model_processes,
        world_size=plan.data_processes,
        seed=seed,
        augment=train.augment,
        placement=placement,
        device=world.device,
        workers=plan.applied.loader_workers,
    ) as batches:
        yield Training(plan, train, model, dataset, batches, world, seed, detectors)


def _work(config: Config, plan: Plan, prepared: Path, environment: dict[str, Any], started: float) -> None:
    """What each process does."""
    keep_freed_memory()
    with ready(config, plan, prepared) as (world, dataset, placement):
        device_name = device_name_of(world, environment)
        if world.is_main:
            _announce(plan, world, device_name)
        following = _followed(plan.name) if world.is_main and config.publish.live else nullcontext()
        everywhere = world.gather((platform.node(), world.devices(plan.devices_per_process)))
        here = [device for host, devices in everywhere if host == platform.node() for device in devices]
        sampler = SystemSampler(results.system_file(plan.name), here) if world.is_main else None
        with following, sampler or nullcontext(), interruption(world) as heard:
            job = Job(
                config, plan, dataset, world, placement, environment["hash"], device_name, started, sampler, heard
            )
            runs = [job.train(seed) for seed in config.train.seeds]
            if world.is_main:
                job.write_result(runs)
    if heard.signal:  # too late to stop anything, but no next stage should begin
        sys.exit(heard.exit_code)
    if world.is_main:  # the last act: up to here, an interruption finds all of it again
        for seed in config.train.seeds:
            checkpoints.checkpoint_file(plan.name, seed).unlink(missing_ok=True)


def setup_of(training: Training, device_name: str) -> Setup:
    """How the training's variant runs on this machine."""
    plan, world = training.plan, training.world
    return Setup(
        applied=plan.applied.model_dump(mode="json"),
        left_out=plan.left_out,
        decided=plan.decided,
        batch_size=training.train.batch_size,
        learning_rate=training.train.learning_rate,
        micro_batches=plan.micro_batches,
        device=device_name,
        backend=world.backend,
        world_size=world.size,
        threads_per_process=torch.get_num_threads(),
        placement=training.batches.placement,
        parameter_count=training.parameter_count,
    )


def window_of(training: Training, *, asked_steps: int, max_input_wait: float | None) -> Window:
    """What all ranks measured in the training's windows so far, as one record, the same on every rank.

    Refused figures are None: fewer measured steps than ``asked_steps``, a share of waiting for input above
    ``max_input_wait``, and whatever the training's detectors saw.
    """
    clock, memory, world = training.clock, training.memory, training.world
    seen = [refusal for detector in training.detectors for refusal in detector.refusals()]
    seen += of_clock(clock, max_input_wait) + of_memory(memory)
    ranks = world.gather((clock.state(), memory.state(), seen))
    clocks, memories, refusals = zip(*ranks, strict=True)
    steps = [len(each["step_seconds"]) for each in clocks]
    refused = of_steps(steps, asked=asked_steps, warmup=training.train.warmup_steps) + of_ranks(refusals)
    slowest = max(clocks, key=lambda each: each["measured_seconds"])
    peaks = tuple(each["peak_bytes"] for each in memories)
    unknown = None in peaks or any(refusal.voids_memory for refusal in refused)
    seconds = slowest["measured_seconds"]

    def trusted(value: float | None) -> float | None:
        return None if refused else value

    return Window(
        measured_steps=min(steps),
        samples_per_second=trusted(min(steps) * training.train.batch_size / seconds if seconds else None),
        step_p50_ms=trusted(percentile_ms(slowest["step_seconds"], 50)),
        step_p90_ms=trusted(percentile_ms(slowest["step_seconds"], 90)),
        step_p99_ms=trusted(percentile_ms(slowest["step_seconds"], 99)),
        input_wait_fraction=trusted(
            max(each["input_seconds"] / each["measured_seconds"] for each in clocks) if seconds else None
        ),
        peak_memory_bytes=None if unknown else max(peaks),
        peak_memory_rank_bytes=peaks,
        peak_reserved_bytes=(
            None if memory.reserved_bytes is None else max(each["reserved_bytes"] for each in memories)
        ),
        allocator_retries=None if memory.retries is None else sum(each["retries"] for each in memories),
        refusals=tuple(refusal.reason for refusal in refused),
    )


class Job:
    """All seeds of one variant, on one rank."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        dataset: Dataset,
        world: World,
        placement: Placement,
        environment_hash: str,
        device_name: str,
        started: float,
        sampler: SystemSampler | None,
        interruption: Interruption,
    ) -> None:
        self.config, self.plan, self.dataset, self.world = config, plan, dataset, world
        self.asked_plan = plan
        """Before anything was decided: what a checkpoint's identity stands for."""
        self.environment_hash, self.device_name, self.started = environment_hash, device_name, started
        self.sampler, self.interruption = sampler, interruption
        self.history: list[HistoryRow] = []
        """Of all seeds so far; the main rank writes it to ``history_file``."""
        self.history_file = results.history_file(plan.name)
        self.setup: Setup | None = None
        """How the variant runs here; known with the first seed's model."""
        self.placement = placement

    def train(self, seed: int) -> Run:
        """One seed, from the start or from its checkpoint; returns the same record on every rank."""
        if self.sampler:
            self.sampler.seed = seed
        forget_last_run(self.world)
        checkpoint = checkpoints.checkpoint_file(self.plan.name, seed)
        identity = self._identity(seed)
        saved = self.world.broadcast(checkpoints.load(checkpoint, identity) if self.world.is_main else None)
        watching = detectors(
            self.world.device, root_pid=os.getppid() if self.world.backend else os.getpid(), max_foreign_load=None
        )
        plan = Plan.model_validate(saved["plan"]) if saved else self.plan
        with training_of(self.config, plan, self.dataset, self.world, self.placement, seed, watching) as training:
            self.plan = training.plan
            self.setup = setup_of(training, self.device_name)
            resumes, earlier = 0, list(self.history)
            if saved:
                training.restore(saved)
                resumes = saved["resumes"]
                self.history = earlier + [HistoryRow.model_validate(row) for row in saved["history"]]
            if self.world.is_main:
                results.write_history(self.history, self.history_file)
            if saved and saved["run"]:
                self._say(f"seed {seed}: complete in {checkpoint}")
                run = Run.model_validate(saved["run"])
            else:
                if saved:
                    resumes += 1
                    self._say(f"seed {seed}: resuming after step {training.steps} from {checkpoint}")
                startup_seconds = time.time() - self.started
                for row in self._shown(training, seed):
                    if row:
                        self.history.append(row)
                        if self.world.is_main:
                            results.append_history(row, self.history_file)
                    leaving = self.interruption.agreed() and training.steps < training.total_steps
                    if leaving or self._checkpoint_is_due(training):
                        with training.paused():
                            self._save(training, checkpoint, identity, seed, resumes, None)
                    if leaving:
                        self._say(f"seed {seed}: interrupted after step {training.steps}; goes on from {checkpoint}")
                        sys.exit(self.interruption.exit_code)
                run = self._run(training, seed, resumes, None if saved or earlier else startup_seconds)
                self._save(training, checkpoint, identity, seed, resumes, run)
            trained = training.model_state.read()
        if self.world.is_main:
            checkpoints.save(trained, results.model_file(self.plan.name, seed))
        return run

    def write_result(self, runs: list[Run]) -> None:
        """Write the result, now that every seed is done."""
        config, plan = self.config, self.plan
        assert self.setup is not None
        result = Result(
            variant=plan.name,
            environment=self.environment_hash,
            config={"train": config.train.model_dump(mode="json"), "variant": plan.asked.model_dump(mode="json")},
            **dict(self.setup),
            dataset=results.Dataset(
                name=self.dataset.name,
                sha256=self.dataset.sha256,
                train_count=len(self.dataset.train),
                test_count=len(self.dataset.test),
            ),
            summary=summarise(runs),
            runs=tuple(runs),
        )
        results.write(result, results.result_file(plan.name))

    def _shown(self, training: Training, seed: int) -> Iterator[HistoryRow | None]:
        """The training's steps, with a progress bar for a person and a line an epoch for a log."""
        label = f"{self.plan.name} seed {seed}"
        bar = tqdm(
            total=training.total_steps,
            initial=training.steps,
            desc=label,
            unit="step",
            disable=None if self.world.is_main else True,  # None: shown on a terminal alone
        )
        with bar:
            for row in training.run():
                bar.update()
                if row and row.test_accuracy is not None:
                    text = (
                        f"{label}: epoch {row.epoch:.0f}/{self.config.train.epochs}, loss {row.train_loss:.4f}, "
                        f"test accuracy {row.test_accuracy:.2%}, {row.samples_per_second:,.0f} samples/s"
                    )
                    if self.world.is_main:
                        bar.write(text)
                yield row

    def _checkpoint_is_due(self, training: Training) -> bool:
        every = self.config.train.checkpoint_every_steps
        done = training.steps
        return done < training.total_steps and (
            done % training.batches.steps_per_epoch == 0 or (every is not None and done % every == 0)
        )

    def _save(self, training: Training, path: Path, identity: str, seed: int, resumes: int, run: Run | None) -> None:
        state = training.state()
        if self.world.is_main:
            rows = [row.model_dump() for row in self.history if row.seed == seed]
            facts = {"identity": identity, "resumes": resumes, "history": rows, "run": run and run.model_dump()}
            checkpoints.save(state | facts | {"plan": self.plan.model_dump(mode="json")}, path)

    def _run(self, training: Training, seed: int, resumes: int, startup_seconds: float | None) -> Run:
        """The record of a finished run, from what every rank measured."""
        clock, score = training.clock, training.score
        assert score is not None  # the last epoch ends with an evaluation
        window = window_of(training, asked_steps=0, max_input_wait=None)
        return Run(
            **dict(window),
            seed=seed,
            test_accuracy=score.accuracy,
            test_correct=score.correct,
            test_count=score.count,
            test_loss=score.loss,
            train_loss=training.epoch_loss,
            steps=training.steps,
            startup_seconds=startup_seconds,
            first_step_seconds=None if startup_seconds is None else clock.first_step_seconds,
            train_seconds=max(self.world.gather(clock.train_seconds)),
            evaluate_seconds=training.evaluate_seconds,
            resumes=resumes,
            model_sha256=checkpoints.state_sha256(training.model_state.read()),
            findings=self.world.broadcast(
                {name: value for technique in training.techniques for name, value in technique.findings().items()}
            ),
        )

    def _say(self, text: str) -> None:
        if self.world.is_main:
            print(f"{self.plan.name} {text}", flush=True)

    def _identity(self, seed: int) -> str:
        """Stands for all that a run depends on: a checkpoint with another identity is not its own."""
        content = {
            "seed": seed,
            "train": self.config.train.model_dump(mode="json", exclude={"seeds", "checkpoint_every_steps"}),
            "plan": self.asked_plan.model_dump(mode="json"),
            "dataset": self.dataset.sha256,
            "environment": self.environment_hash,
            "code": [hashlib.sha256(path.read_bytes()).hexdigest() for path in _code()],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def _followed(variant: str) -> Iterator[None]:
    """Mirror the job's files live, in a process of its own that cannot slow or stop the training."""
    follower = subprocess.Popen([sys.executable, "-m", "pipeline", "follow", variant], stdin=subprocess.PIPE)
    assert follower.stdin is not None
    last_words, patience = b"", FOLLOWER_PATIENCE_SECONDS
    try:
        yield
        last_words = b"finished\n"
    except SystemExit:
        patience = INTERRUPTED_PATIENCE_SECONDS
        raise
    finally:
        try:
            follower.communicate(last_words, timeout=patience)
        except subprocess.TimeoutExpired:
            follower.kill()
            follower.wait()
            print("The live mirror is still behind; `publish` completes it.", file=sys.stderr, flush=True)


def _announce(plan: Plan, world: World, device_name: str) -> None:
    place = f"{world.size} processes over {world.backend}" if world.backend else "one process"
    if plan.devices_per_process > 1:
        place += f" for {plan.devices_per_process} GPUs"
    print(f"{plan.name}: {place} on {device_name}; {plan.micro_batches} micro-batch(es) a step", flush=True)
    for technique, reason in plan.left_out.items():
        print(f"{plan.name}: {technique} is left out: {reason}", flush=True)


def device_name_of(world: World, environment: dict[str, Any]) -> str:
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return str(environment["hardware"]["cpu"]["model"])


def environment_of() -> dict[str, Any]:
    """The fingerprint that the environment stage wrote."""
    try:
        values: dict[str, Any] = json.loads(ENVIRONMENT_FILE.read_text(encoding="utf-8"))
        if isinstance(values["hash"], str) and isinstance(values["hardware"]["cpu"]["model"], str):
            return values
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise PipelineError(f"{ENVIRONMENT_FILE} is missing or broken; run `python -m pipeline environment` first.")


def _code() -> list[Path]:
    """The files whose code a run depends on: this package's, and those of the user's own that are loaded."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    loaded = {Path(file) for file in files if file}
    own = {path for path in loaded if path.is_relative_to(Path.cwd()) and "site-packages" not in path.parts}
    return sorted(own | set(Path(__file__).parent.rglob("*.py")))


def _make_exact(world: World, *, deterministic: bool) -> None:
    """float32 means float32: cuDNN's convolutions would use TF32 (10 bits of mantissa) unless told otherwise."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    if world.device.type == "cuda" and deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def forget_last_run(world: World) -> None:
    """Checkpointed blocks refer to themselves; without this their memory would count for the next seed's run."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
