"""A training script of anybody's is measured unchanged: its steps, its memory, its samples, and what goes wrong."""

from __future__ import annotations

import html
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import psutil
import pytest
import torch

from pipeline.benchmark.server import BenchError
from pipeline.benchmark.stage import begin_session
from pipeline.cli import main
from pipeline.errors import ConfigError
from pipeline.params import Command, Config
from pipeline.results import Window
from pipeline.results.figures import OUTSIDE
from pipeline.script import command, hook, jobs
from pipeline.script.arms import OpenArm, Scripts, same_jobs
from pipeline.script.command import config_of
from pipeline.script.jobs import Job, scratch_copy
from tests.commands import printed
from tests.factories import make_arm, make_window
from tests.hooked import Bed, hooked

MIB = 2**20
SCRIPT = """
import argparse, sys, time
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--sleep", type=float, default=0.04)
parser.add_argument("--hold", type=int, default=0)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--nothing", action="store_true")
options = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
held = torch.ones(64 + options.hold, 2**18)
for step in range(options.steps):
    inputs = torch.randn(64, 512)[: options.batch]
    optimizer.zero_grad()
    (model(inputs) - inputs).square().mean().backward()
    time.sleep(options.sleep)
    try:
        optimizer.step()
    except SystemExit:
        print("caught")
print("the end")
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a directory that has nothing but a training script."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return folder


def made_of(base: str, arms: Any, settings: Any, **script: Any) -> Config:
    return config_of(base, arms, settings, minutes=10.0, **script)


def server(timeout: float = 120.0) -> Scripts:
    settings = ["bench.max_foreign_load=1.0", f"script.timeout_seconds={timeout}"]
    return Scripts(made_of("python train.py", [], settings))


def plan(*arguments: str) -> dict[str, Any]:
    """The plan of an arm that runs Python with these arguments."""
    return Command((sys.executable, *arguments))._asdict()


# What an arm runs


def test_an_arm_is_arguments_variables_or_another_command() -> None:
    arms = [
        ("bf16", "arguments", "--bf16 --name 'a b' --separator ';' --escaped \\|"),
        ("tf32", "arguments", "NVIDIA_TF32_OVERRIDE=1"),
        ("hydra", "arguments", "trainer.precision=16"),
        ("two", "command", "A=2 torchrun --nproc-per-node 2 train.py"),
    ]
    config = made_of("LIMIT=1 python train.py --epochs 3", arms, [])
    commands = {name: config.command_of(name) for name in config.variants}
    base = ("python", "train.py", "--epochs", "3")
    assert commands["base"] == Command(base, {"LIMIT": "1"}, "LIMIT=1 python train.py --epochs 3")
    quoted = ("--name", "a b", "--separator", ";", "--escaped", "|")
    assert commands["bf16"][:2] == ((*base, "--bf16", *quoted), {"LIMIT": "1"})
    assert commands["tf32"] == Command(base, {"LIMIT": "1", "NVIDIA_TF32_OVERRIDE": "1"}, "NVIDIA_TF32_OVERRIDE=1")
    assert commands["hydra"].words == (*base, "trainer.precision=16")
    assert commands["two"][:2] == (("torchrun", "--nproc-per-node", "2", "train.py"), {"LIMIT": "1", "A": "2"})


@pytest.mark.parametrize(
    ("base", "arm", "told"),
    [
        ("", ("a", "arguments", "--b"), "script.command: found ''; expected a command"),
        ("python 'train.py", ("a", "arguments", "--b"), "No closing quotation"),
        ("python a.py && python b.py", ("a", "arguments", "--b"), "script.command: found '&' .*no shell runs the comm"),
        ("python train.py", ("a", "arguments", "--b 2>&1"), "variants.a.arguments: found '>'"),
        (
            "python train.py",
            ("compiled", "arguments", ""),
            "--arm compiled: found nothing that it changes; expected NAME=",
        ),
        ("python train.py", ("base", "arguments", "--b"), "--arm base: found the name twice; allowed: a new name"),
        ("python train.py", ("A b", "arguments", "--b"), "variants.A b"),
        ("python train.py", ("a", "command", "X=1"), "variants.a.command: found 'X=1'; expected a command"),
    ],
)
def test_what_is_no_arm_is_refused(base: str, arm: tuple[str, str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        made_of(base, [arm], [])


def test_a_script_s_settings_are_those_of_params() -> None:
    settings = ["bench.max_rounds=6", "compare.margins.throughput=2e-2"]  # a number for YAML 1.2 alone
    config = made_of("python train.py", [], settings)
    assert (config.bench.max_rounds, config.compare.margins.throughput, config.compare.baseline) == (6, 0.02, "base")
    for setting, told in (
        ("bench.max_round=6", "the command line: bench.max_round: unknown key. Did you mean max_rounds"),
        ("bench.max_rounds=[", "--set: found 'bench.max_rounds=['; expected KEY=VALUE"),
        ("compare.baseline.x=6", "--set: found 'compare.baseline.x=6'; expected KEY=VALUE"),
        ("compare.baseline.x.y=6", "--set: found 'compare.baseline.x.y=6'; expected KEY=VALUE"),
        ("bench.max_rounds", "--set: found 'bench.max_rounds'; expected KEY=VALUE, with a key of bench, compare or"),
        ("train.epochs=6", "--set: found 'train.epochs=6'; expected KEY=VALUE, with a key of bench, compare or"),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)):
            made_of("python train.py", [], [setting])


# What goes wrong


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (
            "print('hello'); raise SystemExit(3)",
            ["before its first optimizer step, the command ended with exit code 3", "  | hello"],
        ),
        ("open('../data')", ["in a copy of this directory (with --in-place: in itself).", "  | FileNotFoundError"]),
        ("print('done')", ["before its first optimizer step, the command ended; it must train for longer", "  | done"]),
        ("input('name? ')", ["It ran without input and terminal", "  | EOFError"]),
        ("open('/dev/tty')", ["No such device or address: '/dev/tty'"]),
        ("import os; os.kill(os.getpid(), 9)", ["was killed by SIGKILL"]),
        ("print('x' * 5_000_000 + '\\nlast words'); raise SystemExit(1)", ["  | last words"]),
    ],
)
@pytest.mark.usefixtures("work")
def test_a_command_s_early_end_shows_its_last_lines(program: str, told: list[str]) -> None:
    with server() as scripts, pytest.raises(BenchError, match=r"^early cannot be measured: ") as raised:
        scripts.open("early", plan("-c", program), 10)
    assert [text for text in told if text not in str(raised.value)] == []
    assert len(str(raised.value)) < 20_000


def test_every_arm_runs_the_code_of_the_start(work: Path) -> None:
    with server() as scripts:
        (work / "train.py").write_text("raise SystemExit(5)", encoding="utf-8")
        scripts.open("old", plan("train.py"), 10)
        scripts.turn("old", 4)
        scripts.turn("old", 6)
        answer = scripts.close("old")
    assert (answer["samples_per_step"], answer["samples_seen"], answer["batch_differs"]) == (64, 64, False)
    assert answer["window"]["measured_steps"] == 10
    assert answer["window"]["step_p50_ms"] is None or answer["window"]["step_p50_ms"] > 40, "a step sleeps 40 ms"


def test_a_launcher_of_another_python_is_named(work: Path) -> None:
    """As a torchrun of another environment, which lacks the script's packages."""
    environment = work.parent / "environment"
    (environment / "bin").mkdir(parents=True)
    (environment / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).parent}\n", encoding="utf-8")
    (environment / "bin" / "python").symlink_to(sys.executable)
    (launcher := environment / "bin" / "torchrun").write_text(
        f"#!{environment}/bin/python\nraise SystemExit('no such package')\n", encoding="utf-8"
    )
    launcher.chmod(0o755)
    with (
        server() as scripts,
        pytest.raises(BenchError, match=rf"of {environment}, not of {sys.prefix}.\n  \| no such package"),
    ):
        scripts.open("launched", Command((str(launcher),))._asdict(), 10)


@pytest.mark.usefixtures("work")
def test_a_command_that_does_not_exist_is_named() -> None:
    with server() as scripts, pytest.raises(BenchError, match=r"'pyhton train.py' cannot be started: .*No such file"):
        scripts.open("typo", Command(("pyhton", "train.py"))._asdict(), 10)


@pytest.mark.parametrize("how", ["[], start_new_session=True", "['env', '-i']"])
@pytest.mark.usefixtures("work")
def test_a_command_that_hangs_is_ended_with_children(how: str) -> None:
    program = (
        "import subprocess, sys, time\n"
        "def started(before, **options):\n"
        "    words = [*before, sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "    return subprocess.Popen(words, **options)\n"
        f"child = started({how})\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    for timeout in (1.5, 6.0, 24.0):  # on a busy machine, a process needs longer to start
        with server(timeout) as scripts, pytest.raises(BenchError, match=f"was silent for {timeout:.0f} s") as raised:
            scripts.open("hung", plan("-c", program), 10)
        if started := str(raised.value).partition("| child ")[2]:
            break
    child = int(started)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


# The hook, in this process


@pytest.fixture
def bed() -> Iterator[Bed]:
    with hooked() as bed:
        yield bed


def net() -> torch.nn.Linear:
    return torch.nn.Linear(4, 2)


def net_and_optimizer() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = net()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def step(model: torch.nn.Module, *optimizers_: torch.optim.Optimizer, samples: int = 8) -> None:
    model(torch.ones(samples, 4)).sum().backward()
    for optimizer in optimizers_:
        optimizer.step()


def test_a_rank_takes_the_steps_it_is_asked_for(bed: Bed) -> None:
    serving = bed.requests(2, 3)
    model, optimizer = net_and_optimizer()
    for _ in range(6):
        step(model, optimizer)
    serving.join()
    about, first, second = bed.answers
    conditions = {"world_size": 1, "backend": None, "learning_rate": 0.5, "parameter_count": 10}
    assert about["rank"] == 0
    assert about["conditions"] | conditions == about["conditions"]
    clock = second["clock"]
    assert (first["steps"], len(first["clock"]["step_seconds"])) == (2, 2)
    assert (second["steps"], len(clock["step_seconds"])) == (5, 3)
    assert sum(clock["step_seconds"]) <= clock["measured_seconds"]


def test_turns_add_up_until_a_request_anew(bed: Bed) -> None:
    serving = bed.requests(2, 3, anew=False, first={"anew": True})
    model, optimizer = net_and_optimizer()
    for _ in range(6):
        step(model, optimizer)
    serving.join()
    *_, second = bed.answers
    assert len(second["clock"]["step_seconds"]) == 5
    aside, waited = second["waits"]
    assert 0 <= aside <= waited + 1


def test_samples_are_counted_at_the_first_trained_module(bed: Bed) -> None:
    """Not at a transform that runs in the training's own process: a module that gets the samples one by one."""
    serving = bed.requests(4, examine=True)
    transform, model = torch.nn.Dropout(), torch.nn.Sequential(net(), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for samples in (5, 6, 7, 8, 9):
        transform(torch.ones(3, 4))
        model.eval()(torch.ones(100, 4))
        with torch.no_grad():
            model.train()(torch.ones(100, 4))
        step(model, samples=samples)  # a micro-batch
        step(model, optimizer, samples=samples)
    serving.join()
    assert bed.answers[1]["samples"] == [12, 14, 16]


def test_a_step_may_evaluate_its_samples_in_a_closure(bed: Bed) -> None:
    """As Lightning's, with a first micro-batch outside of the step."""
    serving = bed.requests(4, examine=True)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def closure(samples: int) -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(samples, 4)).square().sum()
        loss.backward()
        return loss

    for samples in (5, 6, 7, 8, 9):
        closure(2)
        optimizer.step(lambda samples=samples: closure(samples))
    serving.join()
    assert (bed.answers[1]["steps"], bed.answers[1]["samples"]) == (4, [8, 9, 10])


def test_reading_memory_is_no_part_of_a_window(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    serving = bed.requests(2)
    model, optimizer = net_and_optimizer()
    for method in ("open", "close"):
        for name in ("Clock", "Memory"):
            call = getattr(bed.rank.windows[name], method)

            def noted(self: Any, call: Any = call, what: str = f"{name} {method}", **measured: bool) -> None:
                order.append(what)
                call(self, **measured)

            monkeypatch.setattr(bed.rank.windows[name], method, noted)
    for _ in range(3):
        step(model, optimizer)
    serving.join()
    assert order[:4] == ["Memory open", "Clock open", "Clock close", "Memory close"]


def test_a_step_that_a_scaler_skips_did_not_happen(bed: Bed) -> None:
    serving = bed.requests(2)
    model, optimizer = net_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, float("inf"), 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale(factor * model(torch.ones(8, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    serving.join()
    assert bed.answers[1]["steps"] == 2


@pytest.mark.parametrize(("named", "rate"), [("0", 0.1), ("2", 0.2)])
def test_the_steps_of_one_optimizer_count(bed: Bed, monkeypatch: pytest.MonkeyPatch, named: str, rate: float) -> None:
    monkeypatch.setenv(hook.OPTIMIZER, named)
    serving = bed.requests(4, examine=True)
    model = net()
    first, second = (torch.optim.SGD(model.parameters(), lr=rate) for rate in (0.1, 0.2))
    for _ in range(6):
        step(model, first, second)
    serving.join()
    about, answer = bed.answers
    assert (about["conditions"]["learning_rate"], answer["steps"], answer["optimizers"]) == (rate, 4, 2)


def test_digests_and_updates_tell_equal_trainings_from_others(bed: Bed) -> None:
    serving = bed.requests(1, examine=True)
    torch.manual_seed(0)
    model = net()
    before = [value.detach().clone() for value in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step(model, optimizer)
    after = [value.detach().clone() for value in model.parameters()]
    serving.join()
    answer = bed.answers[1]
    assert answer["started"] != answer["ended"]
    updates = [torch.from_numpy(update) for update in answer["updates"].values()]
    expected = [(now - then).reshape(-1) for then, now in zip(before, after, strict=True)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(updates, expected, strict=True))


def examined_training(
    optimizer: type[torch.optim.Optimizer], *, seed: int = 0, lr: float = 1e-3, batch: int = 32, change: str = ""
) -> list[dict[str, Any]]:
    """Train convolutions with biases in front of BatchNorm for four steps, as an arm, and return its answer."""
    torch.manual_seed(seed)
    memory = torch.channels_last if change == "channels_last" else torch.contiguous_format
    layers = [torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3)]
    layers += [torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 8 * 8, 10)]
    model = torch.nn.Sequential(*layers).to(memory_format=memory)
    with hooked() as bed:
        serving = bed.requests(4, examine=True)
        steps = optimizer(model.parameters(), lr=lr)  # type: ignore[call-arg]
        for _ in range(4):
            inputs, labels = torch.randn(32, 3, 12, 12)[:batch], torch.randint(10, (32,))[:batch]
            order = range(batch)[:: -1 if change == "reversed" else 1]  # sums in another order
            steps.zero_grad()
            outputs = model(inputs[order].contiguous(memory_format=memory))
            torch.nn.functional.cross_entropy(outputs, labels[order]).backward()
            if change == "frozen":
                model[0].weight.grad = None
            steps.step()
        serving.join()
        return [bed.answers[1]]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD], ids=["adamw", "sgd"])
def test_a_gradient_of_rounding_errors_makes_no_other_job(optimizer: type[torch.optim.Optimizer]) -> None:
    changes: dict[str, dict[str, Any]] = {"base": {}, "again": {}, "last": {"change": "channels_last"},
        "reversed": {"change": "reversed"}, "half": {"batch": 16}, "seed": {"seed": 1}, "rate": {"lr": 1.05e-3},
        "frozen": {"change": "frozen"}}  # fmt: skip
    jobs = same_jobs(
        {name: examined_training(optimizer, **change) for name, change in changes.items()}, "base", "again"
    )
    assert jobs["base"].equal_bits
    assert not jobs["reversed"].equal_bits
    judged = {name: job.difference is not None and job.difference <= job.rounding for name, job in jobs.items()}
    assert [name for name, rounding in judged.items() if rounding] == ["base", "last", "reversed"]
    assert "(most in 0.weight), more than rounding explains" in jobs["frozen"].in_words


def test_a_training_is_answered_as_its_process_exits(bed: Bed) -> None:
    serving = bed.requests(4, None, first={"examine": True})
    model, optimizer = net_and_optimizer()
    for _ in range(9):
        step(model, optimizer)
    bed.rank.end()
    serving.join()
    _, first, answer = bed.answers
    assert (first["samples"], answer["steps"], len(answer["clock"]["step_seconds"])) == ([8] * 3, 9, 5)
    assert answer["ended"] not in (first["started"], first["ended"])
    assert torch.nn.modules.module._global_forward_pre_hooks == {}, "later steps are not counted"


def test_a_forked_worker_is_not_taken_for_a_rank(bed: Bed) -> None:
    serving = bed.requests(2)
    model, optimizer = net_and_optimizer()
    step(model, optimizer)
    if not (child := os.fork()):
        step(model, optimizer)  # it neither speaks nor waits
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    step(model, optimizer)
    serving.join()
    assert bed.answers[1]["steps"] == 2


def test_a_user_s_own_sitecustomize_keeps_running(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    shutil.copy(hook.__file__, ours / "sitecustomize.py")
    (theirs / "sitecustomize.py").write_text("print('their own')", encoding="utf-8")
    variables: dict[str, Any] = {"PYTHONPATH": f"{ours}:{theirs}", hook.FOLDER: str(ours)}
    program = "import sys; print([path for path in sys.path if path.endswith('ours')])"
    assert printed(program, **variables).splitlines() == ["their own", "[]"]


# The figures of an arm


def turn_of(*seconds: float, wall: float = 0.0, compiling: float = 0.0, **memory: Any) -> dict[str, Any]:
    """What a rank answers after its turns."""
    clock = {"step_seconds": [*seconds], "measured_seconds": wall or sum(seconds)}
    return {"clock": clock, "memory": memory, "waits": [0.0, 0.0], "compile_seconds": compiling}


def measured(*ranks: dict[str, Any], gpu: str | None = None, memory: Any = (), samples: int | None = 64) -> Window:
    """The window of an arm whose ranks answered so; ``memory``: their answers in the memory window."""
    conditions = {"backend": None, "threads_per_process": 1, "parameter_count": 10, "learning_rate": 0.1}
    about = {"gpu": gpu, "conditions": conditions | {"world_size": len(ranks)}}
    job = cast(Job, SimpleNamespace(ranks=[about] * len(ranks), command=Command(())))
    return OpenArm(job, samples, [*ranks], [*memory]).measured().window


def test_an_evaluation_between_two_steps_is_no_step() -> None:
    window = measured(turn_of(0.1, 0.1, 0.1, 2.1))
    assert window.samples_per_second == pytest.approx(64 / 0.1)
    assert window.step_p99_ms == pytest.approx(100)
    assert OUTSIDE.of(window) == pytest.approx(2 / 2.4)
    assert window.input_wait_fraction is None


def test_the_slowest_rank_counts_and_unknown_samples_make_steps() -> None:
    window = measured(turn_of(*[0.1] * 4), turn_of(*[0.2] * 4), samples=None)
    assert window.measured_steps == 4
    assert window.samples_per_second == pytest.approx(5.0)
    assert window.rejections == ()


def test_memory_is_summed_on_cpus_alone() -> None:
    steps = [0.1] * 4
    before = [turn_of(*steps, peak_bytes=5), turn_of(*steps, peak_bytes=7)]
    assert measured(*[turn_of(*steps, peak_bytes=90)] * 2, memory=before).peak_memory_bytes == 12
    on_gpus = [turn_of(*steps, peak_bytes=peak, reserved_bytes=9, retries=0) for peak in (5, 7)]
    window = measured(*on_gpus, gpu="H100")
    assert (window.peak_memory_bytes, window.peak_reserved_bytes, window.allocator_retries) == (7, 9, 0)


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({"compiling": 0.5}, "recompiled"),
        ({"peak_bytes": 5, "reserved_bytes": 9, "retries": 1}, "allocator_retried"),
        ({"wall": 0.5}, "clocks_disagree"),
    ],
)
def test_a_disturbed_window_is_rejected(facts: dict[str, Any], code: str) -> None:
    window = measured(turn_of(*[0.1] * 4, **facts))
    assert [rejection.code for rejection in window.rejections] == [code]
    assert window.samples_per_second is None


@pytest.mark.usefixtures("work")
def test_too_large_a_directory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "LARGEST_COPY", 100)
    with (
        pytest.raises(BenchError, match=r"GiB, too much to copy for each arm; run with --in-place"),
        server(),
    ):
        pass


def test_a_scratch_copy_has_only_the_script_s_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    for name in (".git/config", "runs/1/last.pt", "data/x.csv", "report/old.html", "env/pyvenv.cfg", "env/lib.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name, encoding="utf-8")
    monkeypatch.chdir(source)
    for name, place in (
        ("link", "data"),
        ("runs/latest", "1"),
        ("annexed", ".git/config"),
        ("far", "/dev/null"),
        ("loop", "loop"),
        ("runs/of_env", "../env/lib.py"),
    ):
        (source / name).symlink_to(place)
    for name in ("out", "best.pt"):  # of an earlier run, on another disk
        (source / name).symlink_to("data")
    left_out = [source / name for name in ("report", "out", "best.pt", "runs/1")]
    size = scratch_copy(source, copy := tmp_path / "copy", left_out)
    assert size == len("data/x.csv")
    assert sorted(path.name for path in copy.iterdir()) == ["annexed", "data", "env", "far", "link", "loop", "runs"]
    assert (copy / "data/x.csv").read_text("utf-8") == "data/x.csv"
    assert not (copy / "data").is_symlink()
    assert (copy / "env").readlink() == source / "env"
    links = {name: str((copy / name).readlink()) for name in ("link", "runs/latest", "annexed", "far", "loop")}
    far = {"annexed": str(source / ".git/config"), "far": "/dev/null", "loop": "loop"}
    assert links == {"link": "data", "runs/latest": "1"} | far
    assert (copy / "runs/of_env").read_text("utf-8") == "env/lib.py"
    assert not (copy / "runs/latest").exists(), "the script could resume from it"


def test_a_scratch_copy_has_no_copy_of_itself(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(work / "tmp"))
    with jobs.one_source(server()._config) as source:
        assert source is not None
        assert sorted(path.name for path in source.rglob("*")) == ["tmp", "train.py"]


# The command, with arms whose figures are known


class Played(Scripts):
    """A server of arms whose speeds, memories and samples are known; with noise of 1%, the same in each session."""

    known: ClassVar[dict[str, tuple[float, float, int, float]]] = {}
    """What an arm changes -> its speed and memory relative to the base's, its samples a step, and its update."""
    interrupted_after, seed = 10**9, 0

    def __init__(self, config: Config, content: dict[str, Any]) -> None:
        super().__init__(config, content)
        self.opened, self.closed, self.draw = dict[str, dict[str, Any]](), 0, random.Random(self.seed)

    def open(self, name: str, plan: dict[str, Any], steps: int, **_: Any) -> None:
        self.opened[name] = plan | {"steps": steps}

    def turn(self, name: str, steps: int) -> None:
        assert steps <= self.opened[name]["steps"]

    def close(self, name: str) -> dict[str, Any]:
        self.closed += 1
        if self.closed > self.interrupted_after:
            raise KeyboardInterrupt
        plan = self.opened.pop(name)
        speed, memory, samples, update = self.known.get(plan["changed"], (1.0, 1.0, 64, 1.0))
        outside: dict[str, Any] = {"input_wait_fraction": None, OUTSIDE.field: 0.1}
        window = make_window(
            samples_per_second=1e8 * speed * samples * math.exp(self.draw.gauss(0, 0.01)),
            peak_memory_bytes=round(200 * MIB * memory * math.exp(self.draw.gauss(0, 0.001))),
            measured_steps=plan["steps"], step_p50_ms=1e-5 / speed, step_p90_ms=1e-5 / speed, step_p99_ms=1e-5 / speed,
            **outside,
        )  # fmt: skip
        conditions = make_arm("base", changed=plan["changed"], placement=None, batch_size=samples, rounds=1).conditions
        trained = {"names": {0: "layer.weight"}, "gradients": {0: (1.0, 8)}, "updates": {0: np.full(8, update)}}
        examined = {"started": "s", "ended": str(update), "samples": [samples] * 3, "optimizers": 2}
        self.examined[name] = [examined | trained]
        about = {"ledgers": None, "flops": None, "samples_per_step": samples, "samples_seen": samples}
        about["batch_differs"] = self._script.batch_differs
        return conditions.model_dump(mode="json") | about | {"window": window.model_dump(mode="json")}


@pytest.fixture
def play(work: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:  # noqa: ARG001
    """Run the command with a ``Played`` server; the arguments are further ones of the command line."""
    monkeypatch.setattr(command, "Scripts", Played)
    seen = {"commands": [], "files": {"train.py": "0"}, "alone": False}
    monkeypatch.setattr(command, "examined", lambda _: seen)
    arms = ["--arm", "slower=--sleep 0.044", "--arm", "nothing=--nothing"]
    Played.known = {"--sleep 0.044": (1 / 1.1, 1.5, 64, 1.4), "--nothing": (1.0, 1.0, 64, 2.1)}
    Played.known |= {"--batch 32": (2.0, 0.5, 32, 2.0)}
    few = ["--set", "bench.max_rounds=8", "--set", "bench.window_seconds=1.0e-6", "--set", "bench.turns=1"]
    return lambda *further: main(["script", "--base", "python train.py", *arms, *few, *further])


def compared_now() -> Any:
    return json.loads(Path("script-report/comparison.json").read_text("utf-8"))


def test_the_command_adds_sessions_of_the_same_code(
    play: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert play() == 0
    said = capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ")
    assert "base: 2 optimizers take steps; only the steps of one count" in said
    assert "script: round 1: slower" in said
    assert re.search(r"^slower: costs: throughput 0\.9\d. \(0\.\d+ to 0\.9\d+\), peak memory 1\.5", said, re.MULTILINE)
    assert "\nnothing: neutral: throughput 1.0" in said
    slower = compared_now()["variants"][1]["throughput"]
    assert slower["low"] < 1 / 1.1 < slower["high"]
    later = begin_session()().model_copy(
        update={"start_utc": "2099-01-01T00:00:00+00:00", "boot_id": "b", "uptime_seconds": 9.0, "end_utc": None}
    )
    monkeypatch.setattr(command, "begin_session", lambda: lambda: later)
    monkeypatch.setattr(Played, "seed", 1)  # other noise
    assert play() == 0
    assert len(compared_now()["sessions"]) == 2


def test_the_report_has_what_is_known_of_a_script(play: Callable[..., int]) -> None:
    assert play() == 0
    assert [variant["accuracy"] for variant in compared_now()["variants"]] == [None] * 3
    for name in ("comparison.md", "comparison.html"):
        text = html.unescape(Path("script-report", name).read_text("utf-8"))
        shown = re.sub("<style>.*</style>", "", text, flags=re.DOTALL)
        assert not re.search(r"\bNone\b|Time to 85|Every training run", shown)
        assert not re.search("Input wait|Cold start|Memory and arithmetic|Achieved", shown)
        assert "python train.py: 3 variants compared" in shown
        differs = "by 36% of their update (most in layer.weight), more than rounding explains: a lower precision"
        for said in (differs, "differ from the baseline's by 100% of their update (most", "Outside of steps"):
            assert said in shown
        assert "Accuracy: unknown" in shown


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (("--set", "script.timeout_seconds=.nan"), "the command line: script.timeout_seconds: found nan"),
        (("--set", "script.optimizer=-1"), "the command line: script.optimizer: found -1"),
        (("--output", "train.py"), "--output: found the file train.py; expected a directory"),
        (
            ("--set", "bench.max_rounds=0"),
            "the command line: bench.max_rounds: found 0; input should be greater than 0",
        ),
    ],
)
def test_an_impossible_option_is_refused_first(
    play: Callable[..., int], capsys: pytest.CaptureFixture[str], option: tuple[str, str], told: str
) -> None:
    assert play(*option) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert "first sample" not in said.out


def test_an_interrupt_keeps_whole_rounds(play: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Played, "interrupted_after", 4 + 4 * 3 + 2)
    assert play() == 130
    bench = compared_now()["bench"]
    assert (bench["interrupted"], [len(arm["samples"]) for arm in bench["arms"]]) == (True, [3] * 4)


def test_other_batches_that_are_meant_compare_by_samples(
    play: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    half = ["--arm", "half=--batch 32"]
    assert play(*half) == 2
    assert "half: a step of the baseline has 64 samples, and a step of this variant has 32" in capsys.readouterr().err
    assert not Path("script-report").exists()
    assert play(*half, "--batch-differs") == 0
    half_batch = compared_now()["variants"][3]
    assert half_batch["throughput"]["estimate"] == pytest.approx(1.0, rel=0.02)  # twice the steps of half the samples
    assert half_batch["conditions"]["batch_size"] == 32
    assert compared_now()["bench"]["same_job"]["half"]["equal_bits"] is False


# Whole measurements


@pytest.mark.slow
def test_known_answers_of_a_script_alone(work: Path) -> None:
    """An arm that sleeps 10% longer and holds 100 MiB more, and a flag that does nothing."""
    settings = ["--set", "bench.hard_limit=true", "--set", "bench.window_seconds=0.3"]
    given = ["--arm", "slower=--sleep 0.044 --hold 100", "--arm", "nothing=--nothing", "--minutes", "0.01"]
    assert main(["script", "--base", f"{sys.executable} train.py", *given, *settings]) == 0
    assert sorted(path.name for path in work.iterdir()) == ["script-report", "train.py"]
    assert (work / "script-report" / "comparison.html").exists()
    comparison = json.loads((work / "script-report" / "comparison.json").read_text("utf-8"))
    bench = comparison["bench"]
    assert {name: (job["equal_bits"], job["samples_per_step"]) for name, job in bench["same_job"].items()} == {
        "base": (True, 64), "slower": (True, 64), "nothing": (True, 64),
    }  # fmt: skip
    base, slower, nothing, again = (arm["samples"][0]["peak_memory_bytes"] / MIB for arm in bench["arms"])
    assert (slower - base, nothing - base, again - base) == tuple(pytest.approx(held, abs=2) for held in (100, 0, 0))


@pytest.mark.slow
@pytest.mark.usefixtures("work")
def test_a_script_that_ends_before_its_window_is_named() -> None:
    with server() as scripts:
        scripts.open("short", plan("train.py", "--steps", "100", "--sleep", "0"), 100)
        with pytest.raises(BenchError, match=r"after \d+ steps, the command ended; it must train for longer"):
            scripts.turn("short", 100)


RANKS = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(6400, 64)), 32, num_workers=1)
for step, (inputs,) in enumerate(inputs for _ in range(1000) for inputs in data):
    model(inputs).square().mean().backward()
    optimizer.step()
    if dist.get_rank() and step == int(sys.argv[1]):
        raise ValueError("rank 1 has failed")
"""


@pytest.mark.slow
def test_ranks_with_data_loaders_are_measured_until_one_dies(work: Path) -> None:
    (work / "ranks.py").write_text(RANKS, encoding="utf-8")
    launched = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ranks.py")
    with server() as scripts:
        scripts.open("whole", plan(*launched, "-1"), 4)
        scripts.turn("whole", 4)
        alone = scripts._open["whole"].job.needs_all()
        whole = scripts.close("whole")
        assert (whole["world_size"], whole["backend"], alone) == (2, "gloo", True)
        assert [rank["samples"] for rank in scripts.examined["whole"]] == [[32, 32, 32]] * 2
        assert whole["window"]["measured_steps"] == 4
        with pytest.raises(BenchError, match=r"(?s)after 7 steps, the command ended .*rank 1 has failed") as raised:
            scripts.open("dies", plan(*launched, "8"), 4)
    assert "dies cannot be measured" in str(raised.value)
    running = (process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"]))  # None: a zombie
    assert not [words for words in running if "ranks.py" in words]
