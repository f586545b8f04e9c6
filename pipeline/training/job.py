"""One variant's job: launch its processes, train every seed, write the result's files."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from typing import Any

from tqdm import tqdm

from pipeline import environment, results
from pipeline.distributed import World, interruption, launch
from pipeline.environment import stages
from pipeline.errors import PipelineError, count, say
from pipeline.files import file_sha256, json_sha256
from pipeline.measurement.detectors import detectors
from pipeline.measurement.sampling import SystemSampler
from pipeline.params import Config, Machine, catalogue
from pipeline.plans import Plan
from pipeline.plans import plan as plan_of
from pipeline.processes import age_seconds, malloc
from pipeline.results import HistoryRow, Result, Run, ScoreName, Unit
from pipeline.training import checkpoints
from pipeline.training.assembly import assembled, forget_last_run, planned
from pipeline.training.loop import Training
from pipeline.training.measured import conditions_of, dataset_of, device_name_of, window_of
from pipeline.training.outcomes import WorkLeftOut

FOLLOWER_PATIENCE_SECONDS = 20.0
"""How long a job that has ended waits for its live mirror (``_live_mirror``) to log the last rows to MLflow. The stage
``publish`` logs the rows that are still missing after this time."""

INTERRUPTED_PATIENCE_SECONDS = 2.0
"""The same for an interrupted job. This time is short because `docker stop` waits only ten seconds."""
FORETOLD_SECONDS = 20.0
"""After so many seconds of steps, a job says how long its seeds will take: as long as these steps show, up to half as
long again, because evaluations and other load are not foreseen."""


def run(config: Config, name: str, machine: Machine, prepared: Path) -> None:
    """Train ``variants.<name>`` on the data set in ``prepared`` with every seed, and write all its files.

    Starts the processes that the variant needs, unless a launcher has already started them.
    An interrupted job resumes from its checkpoints. Raises PipelineError.
    """
    plan = planned(config, name, machine, prepared)
    started = time.monotonic() - age_seconds()  # all processes share this clock, and nobody can set it
    # ``stages.training`` reads the current code, because environment.json may be older. The key must not depend on a
    # launcher, so its plan is made without the launcher's number of processes.
    depends_on, fingerprint = stages.training(plan), environment.read()
    key = stages.key(fingerprint | stages.described(config, {name: plan_of(config, name, machine)}), "train", name)
    launch(Job.work, (Job(config, plan, prepared, fingerprint, depends_on, key, started),), plan.processes, plan.hosts)


@dataclass
class Job:
    """All seeds of one variant, on one rank."""

    config: Config
    plan: Plan
    """The plan. In ``work`` it gets the decisions of the first seed's training, or of the job that is resumed."""
    prepared: Path
    fingerprint: dict[str, Any]
    """The environment's fingerprint."""
    depends_on: dict[str, Any]
    """The code and the settings that the training depends on (``stages.training``)."""
    key: str
    """The result's key (``stages.key``)."""
    started: float
    """When the command started, in seconds of the monotonic clock."""
    foretold: bool = False
    """Whether it is known how long the seeds will take."""

    def work(self) -> None:
        """Train with every seed in this process; the main process also writes the result."""
        malloc.keep_freed_memory()
        name, seeds = self.plan.name, self.plan.train.seeds
        self.history: list[HistoryRow] = []
        """The rows of all seeds so far; the main rank writes them to ``history_file``."""
        self.history_file = results.history_file(name)
        self.environment_hash = environment.hash_of(self.fingerprint, "variants", name)
        wanted = {checkpoints.finished(checkpoints.checkpoint_file(name, seed)) for seed in seeds}
        self.other_seeds = checkpoints.all_finished(name) != wanted
        """True if finished runs count, because the seeds are others than before. Otherwise, all is trained anew."""
        with (
            assembled(self.plan, self.prepared) as self.assembly,
            _alone(name) if self.assembly.world.is_main else nullcontext(),
        ):
            self.world = world = self.assembly.world
            self.device_name = device_name_of(world, self.fingerprint)
            if world.is_main:
                _announce(self.plan, world, self.device_name)
            live = _live_mirror(name) if world.is_main and self.config.publish.live else nullcontext()
            everywhere = world.gather((world.host, world.devices(self.plan.devices_per_process)))
            host_devices = dict.fromkeys(
                device for host, devices in everywhere if host == world.host for device in devices
            )
            self.sampler = SystemSampler(results.system_file(name), host_devices) if world.is_main else None
            max_step_skew = max((entry.max_step_skew for entry in catalogue.in_effect(self.plan.applied)), default=0)
            with live, self.sampler or nullcontext(), interruption(world, max_step_skew) as self.interruption:
                runs = [self.train(seed) for seed in seeds]
                if world.is_main:
                    self.write_result(runs)
        if self.interruption.signal:  # the signal came too late to stop this stage, but no other stage should begin
            sys.exit(self.interruption.exit_code)
        if world.is_main:  # last, because an interrupted job resumes from its checkpoints
            for seed in seeds:
                checkpoints.finish(checkpoints.checkpoint_file(name, seed))
            for of_other_seed in checkpoints.all_finished(name) - wanted:
                of_other_seed.unlink()

    def train(self, seed: int) -> Run:
        """Train with one seed, from the start or from a checkpoint; return the same record on every rank."""
        if self.sampler:
            self.sampler.seed = seed
        forget_last_run(self.world)
        checkpoint = checkpoints.checkpoint_file(self.plan.name, seed)
        taught_by = checkpoints.teacher_weights(self.config, self.plan.name, seed)
        teacher_sha256 = checkpoints.state_sha256(taught_by) if taught_by else None
        self.world.check_same(teacher_weights=teacher_sha256)
        identity = self._identity(seed, teacher_sha256)
        kept = checkpoints.load(checkpoint, identity) if self.world.is_main else None
        if kept is None and self.world.is_main and self.other_seeds:
            kept = checkpoints.load(checkpoints.finished(checkpoint), identity)
        saved, source = self.world.announced(kept) or (None, checkpoint)
        active_detectors = detectors(
            self.world.devices(self.plan.devices_per_process),
            root_pid=os.getppid() if self.world.backend else os.getpid(),
            max_foreign_load=None,
        )
        plan = Plan.model_validate(saved["plan"] | {"train": self.plan.train}) if saved else self.plan
        with (
            replace(self.assembly, plan=plan).training(seed, active_detectors, teacher=taught_by) as training,
            results.adding_to_history(self.history_file) if self.world.is_main else nullcontext() as add_to_history,
        ):
            del taught_by  # frees its memory
            self.plan = training.plan
            self.conditions = conditions_of(training, self.device_name)
            resumes, earlier = 0, list(self.history)
            if saved:
                if not saved["run"]:
                    training.restore(saved)
                resumes = saved["resumes"]
                self.history = earlier + [HistoryRow.model_validate(row) for row in saved["history"]]
            if self.world.is_main:
                results.write_history(self.history, self.history_file)
            if saved and saved["run"]:
                self._say(f"seed {seed}: complete in {source}")
                run, trained = Run.model_validate(saved["run"]), saved["model"]
            else:
                if saved:
                    resumes += 1
                    self._say(f"seed {seed}: resuming after step {training.steps} from {source}")
                training.count_later()
                startup_seconds = time.monotonic() - self.started
                for row in self._shown(training, seed):
                    between_windows = training.steps == 1 or (row and row.test_accuracy is not None)
                    if between_windows and (work := training.work()) and work.missing:
                        raise WorkLeftOut(
                            f"variants.{self.plan.name}: {work.rejection.happened}, so the variant does less work "
                            "than the others, and its numbers cannot be compared. Remove or repair the technique that "
                            "leaves samples out."
                        )
                    if row:
                        self.history.append(row)
                        if add_to_history:
                            add_to_history(row)
                    leaving = self.interruption.agreed() and training.steps < training.total_steps
                    if leaving or self._checkpoint_is_due(training):
                        with training.paused():
                            self._save(training, checkpoint, identity, resumes, None)
                    if leaving:
                        again = f"run the same command to continue from {checkpoint}"
                        self._say(f"seed {seed}: interrupted after step {training.steps}; {again}")
                        sys.exit(self.interruption.exit_code)
                run = self._run(training, resumes, None if saved or earlier else startup_seconds)
                run = run.model_copy(update={"teacher_sha256": teacher_sha256})
                self._save(training, checkpoint, identity, resumes, run)
                trained = self.world.wholes_on_main(training.weights())
        if self.world.is_main:
            checkpoints.save(trained, results.model_file(self.plan.name, seed))
        return run

    def write_result(self, runs: list[Run]) -> None:
        """Write the result, now that every seed is done."""
        config, plan = self.config, self.plan
        result = Result(
            variant=plan.name,
            environment=self.environment_hash,
            config={"train": config.train.model_dump(mode="json"), "variant": plan.requested.model_dump(mode="json")},
            **dict(self.conditions),
            dataset=dataset_of(self.assembly.task.dataset),
            key=self.key,
            history_sha256=file_sha256(self.history_file),
            score=ScoreName(name=plan.train.metric),
            unit=Unit(name=self.assembly.task.unit, per_sample=self.assembly.task.units_per_sample),
            directions=dict(self.assembly.task.directions),
            runs=tuple(runs),
        )
        results.write(result, results.result_file(plan.name))

    def _shown(self, training: Training, seed: int) -> Iterator[HistoryRow | None]:
        """Yield what ``training.run`` yields. Show a progress bar on a terminal, and print a line per epoch."""
        label = f"{self.plan.name} seed {seed}"
        tqdm.set_lock(RLock())  # tqdm's own lock is a semaphore, which would outlive a killed rank
        samples = training.batches.steps_per_epoch * training.train.batch_size
        ends = [row.train_seconds for row in self.history if row.seed == seed and row.test_accuracy is not None]
        with tqdm(
            total=training.total_steps,
            initial=training.steps,
            desc=label,
            unit="step",
            disable=None if self.world.is_main else True,  # None: shown only on a terminal
        ) as bar:
            since = None
            for row in training.run():
                bar.update()
                since = since or (training.steps, time.monotonic())  # after the first step, which may compile
                done, seconds, seeds = training.steps - since[0], time.monotonic() - since[1], training.train.seeds
                if done and seconds > FORETOLD_SECONDS and not self.foretold:
                    self.foretold = True
                    steps = (len(seeds) - seeds.index(seed)) * training.total_steps - training.steps
                    minutes = steps * seconds / done / 60
                    if self.world.is_main:
                        bar.write(f"{label}: expect {minutes:.1f} to {1.5 * minutes:.1f} more minutes for all seeds")
                if row and row.test_accuracy is not None:
                    speed = samples / (row.train_seconds - (ends[-1] if ends else 0.0))
                    ends.append(row.train_seconds)
                    assert row.test_loss is not None
                    task = training.task
                    text = (
                        f"{label}: epoch {row.epoch:.0f}/{training.train.epochs}, loss {row.train_loss:.4f}, "
                        f"test {ScoreName(name=training.train.metric).in_words} {row.test_accuracy:.2%}, "
                        f"{speed * task.units_per_sample:,.0f} {task.unit}/s"
                    )
                    for name, value in task.findings(row.test_loss).items():
                        text += f", {name.replace('_', ' ')} {value:,.{0 if value >= 1000 else 2}f}"
                    if self.world.is_main:
                        bar.write(text)
                yield row

    def _checkpoint_is_due(self, training: Training) -> bool:
        every, done = training.train.checkpoint_every_steps, training.steps
        due = done % training.batches.steps_per_epoch == 0 or (every is not None and done % every == 0)
        return due and done < training.total_steps

    def _save(self, training: Training, path: Path, identity: str, resumes: int, run: Run | None) -> None:
        self.assembly.check_followed()  # before saving: a run that this check refuses must not be resumed
        of_finished = {"model": training.weights()} if run else {}  # its state is loaded no more
        state = self.world.wholes_on_main(training.state() | of_finished)
        if self.world.is_main:
            rows = [row.model_dump() for row in self.history if row.seed == training.seed]
            facts = {"identity": identity, "resumes": resumes, "history": rows, "run": run and run.model_dump()}
            checkpoints.keep(state | facts | {"plan": self.plan.model_dump(mode="json", exclude={"train"})}, path)
        del state
        malloc.trim()  # otherwise gathered tensors, and what the evaluation left, would stay resident

    def _run(self, training: Training, resumes: int, startup_seconds: float | None) -> Run:
        """Return the record of a finished run, from the measurements of all ranks."""
        clock, score = training.clock, training.score
        assert score is not None  # the last epoch ends with an evaluation
        window = window_of(training, requested_steps=0, max_input_wait=None)
        return Run(
            **dict(window),
            seed=training.seed,
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
            model_sha256=checkpoints.state_sha256(training.weights()),
            findings=self.world.broadcast(
                {name: value for technique in training.techniques for name, value in technique.findings().items()}
                | training.task.findings(score.loss)
            ),
        )

    def _say(self, text: str) -> None:
        if self.world.is_main:
            say(f"{self.plan.name} {text}")

    def _identity(self, seed: int, teacher_sha256: str | None) -> str:
        """Return a digest of everything that a run depends on. A checkpoint of another run has another digest."""
        return json_sha256(
            {
                "seed": seed,
                "history_every_steps": self.plan.train.history_every_steps,
                "depends_on": self.depends_on,
                "dataset": self.assembly.task.dataset.sha256,
                "environment": self.environment_hash,
                "teacher": teacher_sha256,
            }
        )


@contextmanager
def _alone(variant: str) -> Iterator[None]:
    """Keep other processes from training this variant in this working directory while the block runs. Raises
    PipelineError if another process trains it already.

    The system releases a record lock when its process ends, even if the process crashes. Forked processes, such as a
    DataLoader's workers, do not inherit the lock.
    """
    path = checkpoints.CHECKPOINTS / f"{variant}.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PipelineError(
                f"another training of variants.{variant} is running in {Path.cwd()}: wait until it ends, or end it."
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


@contextmanager
def _live_mirror(variant: str) -> Iterator[None]:
    """Log the running job's files to MLflow in a separate process, whose errors cannot stop the training."""
    command = [sys.executable, "-m", "pipeline", "follow", variant]
    # The follower gets its own process group, so that Ctrl-C does not stop it and it can record how the training ended.
    follower = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)
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
            said = "MLflow does not show all of this training yet; the stage publish completes it."
            say(said, file=sys.stderr)


def _announce(plan: Plan, world: World, device_name: str) -> None:
    place = f"{world.size} processes over {world.backend}" if world.backend else "one process"
    if plan.devices_per_process > 1:
        place += f" for {plan.devices_per_process} GPUs"
    say(f"{plan.name}: {place} on {device_name}; {count(plan.micro_batches, 'micro-batch')} per step")
    for technique, reason in plan.skipped.items():
        say(f"{plan.name}: {technique} is skipped: {reason}")
