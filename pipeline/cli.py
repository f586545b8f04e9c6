"""The command line: each command parses its arguments and calls one function.

Each command's function imports the code that it runs, so that ``--help`` and the light commands stay quick. For a
stage's command, DVC tracks the code of these imports and of all modules that they import (environment/imports.py).
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import say
from pipeline.files import PREPARED, RAW

if TYPE_CHECKING:
    from pipeline.params import Compare, Config, Machine
    from pipeline.results import Arm


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code: 0, or 2 for an error that the user can correct.

    The code is 130 after Ctrl-C, and 141 if the reader of the output has ended. ``gate``, ``promote``, ``verify``,
    ``evidence`` and ``doctor`` define further codes.
    """
    parsed = _parser().parse_args(arguments)
    try:
        import pydantic  # noqa: F401  (check here that it is installed: every command needs it)

        from pipeline.errors import redacted, said
    except ModuleNotFoundError as error:
        say(
            f"error: {sys.executable} has no module {error.name}: run `make repro`, which installs it into .venv, "
            "then run `source .venv/bin/activate` in this shell.",
            file=sys.stderr,
        )
        return 2

    command: Callable[[argparse.Namespace], int | None] = parsed.command
    try:
        if command in NEEDS_OUR_LOOP:
            _refuse_script(NEEDS_OUR_LOOP[command])
        code = command(parsed) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        return 128 + signal.SIGPIPE
    except SystemExit as end:
        if end.code or command is _arms:
            raise
        say("error: code that this command ran, such as the model, called sys.exit: remove this call.", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        say(f"interrupted; {str(stopped) or 'to go on, run the same command again'}", file=sys.stderr)
        return 130
    except Exception as error:
        message = said(error)
        if message is None:
            raise
        say(f"error: {redacted(message)}", file=sys.stderr)
        return 2


def _refuse_script(instead: str) -> None:
    from pipeline import errors, params

    if params.load().script:
        raise errors.ConfigError(f"this command does not know what a script trains (script in params.yaml): {instead}.")


def _reader_has_left() -> bool:
    """Return whether the reader of standard output, such as `head`, has ended. If so, discard all further output."""
    polled = select.poll()
    polled.register(sys.stdout, 0)
    left = any(event & (select.POLLERR | select.POLLHUP) for _, event in polled.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return left


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline",
        description="Run one stage of dvc.yaml, or another command. `dvc repro` runs all stages in order; "
        "params.yaml configures them.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Callable[[argparse.Namespace], int | None], about: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about, description=about)
        added.set_defaults(command=command)
        return added

    add("environment", _environment, "Check params.yaml against this machine and write environment.json.")
    add("fetch", _fetch, "Download or copy the raw files and check their SHA-256.")
    add("prepare", _prepare, "Decode the raw files once, into packed arrays.")
    train = add("train", _train, "Train one variant with every seed; write its result, history and models.")
    seeds = add("seeds", _seeds, "Add seeds one at a time, until the accuracy of every variant is decided.")
    seeds.add_argument("--most", type=int, default=12, metavar="N", help="add none to N seeds; default: 12")
    bench = add("bench", _bench, "Measure speed and memory of all variants side by side; write bench.json.")
    bench.add_argument("--again", action="store_true", help="measure one more session, into a new file under sessions/")
    profile = add("profile", _profile, "Show where a variant's step spends its time; write profiles/VARIANT/.")
    infer = add("infer", _infer, "Measure inference with a variant's trained model; write inference/VARIANT.*.")
    for stage in (train, profile, infer):
        stage.add_argument("variant", metavar="VARIANT", help="an entry under variants: or students: in params.yaml")
    add("compare", _compare, "Compare the variants' results; write reports/.")
    add("publish", _publish, "Write the results into MLflow, unless they are there already.")
    gate = add("gate", _gate, "Check whether a commit made throughput, memory or accuracy worse; write reports/gate.*.")
    gate.add_argument(
        "--against",
        required=True,
        metavar="REVISION",
        help="a git revision, which is measured together with this work tree",
    )
    add("promote", _promote, "Register the best variant's model as MLflow's champion, if this commit passed the gate.")
    plan = add(
        "plan",
        _plan,
        "Print how a variant's step is composed on this machine: techniques, their order, and what is skipped.",
    )
    plan.add_argument(
        "variant",
        nargs="?",
        metavar="VARIANT",
        help="an entry under variants: or students: in params.yaml; without a name: list all",
    )
    memory = add("predict-memory", _predict_memory, "Predict the peak memory of variants without running them.")
    memory.add_argument(
        "--memory",
        metavar="SIZE",
        help="the device's memory, such as 24GiB; also print which variants fit, and the largest batch that fits",
    )
    memory.add_argument("--device", choices=("cpu", "cuda"), help="replaces train.device; cuda works without a GPU")
    memory.add_argument("--batch-size", type=int, metavar="N", help="replaces train.batch_size")
    verify = add("verify", _verify, "Check in a few minutes the claims on which the comparison of the variants relies.")
    verify.epilog = "Exit code: 1 if a claim does not hold, or if none of a variant's claims could be decided; else 0."
    for command in (memory, verify):
        command.add_argument("variants", nargs="*", metavar="VARIANT", help="without a name: all of params.yaml")
    verify.add_argument(
        "--json", action="store_true", help="print JSON for programs: each claim's measured difference and bound"
    )
    evidence = add(
        "evidence", _evidence, "Write all data of the comparison into one file, or check the figures in such a file."
    )
    evidence.epilog = "Exit code of `check`: 1 if there is a difference, else 0. FILE is evidence.zip by default."
    evidence.add_argument("action", nargs="?", metavar="check", help="check the figures in FILE; do not write it")
    evidence.add_argument("file", nargs="?", metavar="FILE", help="a zip archive")
    doctor = add("doctor", _doctor, "Show what this machine lacks for the job of params.yaml, and how to fix it.")
    doctor.epilog = "Exit code: 1 if there is a problem, else 0, even if there are warnings."
    submit = add("submit", _submit, "Run a command, dvc repro by default, as a job of a cluster.")
    places = submit.add_subparsers(metavar="PLACE", required=True, dest="place")
    for place, about in (
        ("slurm", "submit a job, or find the active one; print what it prints; exit with its code"),
        ("kubernetes", "print a JobSet for kubectl"),
        ("here", "run the command alone in this checkout, as the jobs do"),
    ):
        added = places.add_parser(place, help=about, description=about)
        added.add_argument("words", nargs="*", metavar="WORD", help="the command, after --")
        if place != "here":
            required = place == "kubernetes"
            added.add_argument(
                "--dry-run", action="store_true", required=required, help="print the job; submit nothing"
            )
    techniques = add(
        "techniques",
        _techniques,
        "List the techniques, or show what a technique changes and excludes, and whether it runs here.",
    )
    techniques.add_argument(
        "words", nargs="*", metavar="WORD", help="a name, or a topic such as AMP or ZeRO; without a word: all names"
    )
    techniques.add_argument("--json", action="store_true", help="print JSON for programs")
    techniques.add_argument("--markdown", action="store_true", help="print docs/techniques.md; `make docs` uses this")
    variants = add("variants", _variants, "List the ready-made variants, or add a set of them to params.yaml.")
    variants.add_argument(
        "set", nargs="?", metavar="SET", help="a file under variants/; print which of its variants can run here"
    )
    variants.add_argument("--add", action="store_true", help="add the variants that can run here to params.yaml")
    init = add("init", _init, "Write dvc.yaml, params.yaml and the GPU workflow into a git repository of your own.")
    init.epilog = (
        "init overwrites no file that you wrote or changed. Before init changes an existing file, it shows the change "
        "and, without --yes, asks."
    )
    data = init.add_mutually_exclusive_group()
    data.add_argument(
        "--images", metavar="DIR", help="train on images: DIR/train/CLASS/* and, optionally, DIR/test/CLASS/*"
    )
    data.add_argument(
        "--arrays", metavar="PATH", help="train on an .npz, .safetensors or .parquet file, or a folder of .npy files"
    )
    data.add_argument("--text", metavar="DIR", help="train a language model on UTF-8 files")
    init.add_argument("--model", metavar="NAME", help="your own model as module:factory, or a model of torchvision")
    init.add_argument("--yes", action="store_true", help="change existing files without asking")
    script = add("script", _script, "Measure which arguments of your own training command pay; needs no params.yaml.")
    script.add_argument("--base", required=True, metavar="COMMAND", help="the command, such as 'python train.py'")
    for option, whole, form, about in (
        (
            "--arm",
            False,
            "NAME=ARGUMENTS",
            "the command with further arguments, after variables such as OMP_NUM_THREADS=2",
        ),
        ("--command", True, "NAME=COMMAND", "an arm with another command"),
    ):
        script.add_argument(
            option, dest="arms", metavar=form, help=about, type=partial(_arm, whole), action="append", default=[]
        )
    for option, default, about in (
        ("--minutes", 10.0, "longest time for the rounds"),
        ("--timeout", 600.0, "longest silence of an arm, in seconds"),
        ("--optimizer", 0, "the number of the optimizer whose steps count, as they are made; 0: the first to step"),
        ("--output", Path("script-report"), "the report's directory"),
    ):
        script.add_argument(option, type=type(default), default=default, metavar="X", help=f"{about} ({default})")
    script.add_argument(
        "--set", dest="settings", metavar="KEY=VALUE", action="append", default=[],
        help="a setting of params.yaml, such as bench.max_rounds=6 or compare.margins.throughput=0.02",
    )  # fmt: skip
    script.add_argument("--in-place", action="store_true", help="run in this directory instead of copies of it")
    script.add_argument("--batch-differs", action="store_true", help="batches differ on purpose: compare samples/s")
    schema = add("schema", _schema, "Write params.schema.json, which editors use to complete params.yaml.")
    schema.add_argument("--check", action="store_true", help="write nothing; fail if the file is outdated")
    # Other commands start the next two commands, so --help does not list these.
    follow = commands.add_parser("follow", description="Mirror a running training to MLflow. Started by train.")
    follow.add_argument("variant", metavar="VARIANT")
    follow.set_defaults(command=_follow)
    arms = commands.add_parser("arms", description="Measure variants on request. Started by bench and gate.")
    arms.set_defaults(command=_arms)
    return parser


def _environment(_: argparse.Namespace) -> None:
    from pipeline import processes

    with processes.importing():  # syntax trees leave no garbage either
        from pipeline import environment, params, plans
        from pipeline.environment import stages
        from pipeline.tools import alone

        alone.check()
        config, before = params.load(), environment.last_written()
        if config.script:
            _check_nothing_is_lost()
        params.check_names(config.train, config.variants)
        made = plans.plans(config, environment.machine())
        seen = _script_seen(config, before)
        described = stages.described(config, made, script=seen) | ({"script": seen} if seen else {})
    written = environment.write(relied_on=plans.relied_on(config), described=described)
    say(f"environment {written[:12]}")
    for path in environment.changed_since(before):
        say(f"environment: changed since the last time: {path}")
    for name, plan in made.items():
        for technique, reason in plan.skipped.items():
            say(f"variants.{name}: {technique} is skipped: {reason}")


def _script_seen(config: Config, before: dict[str, Any]) -> dict[str, Any] | None:
    """Return what the script was seen to read. If ``before``, the content of environment.json, does not say it, run the
    script up to its first step."""
    from pipeline.environment import stages

    known = stages.script_seen(config, before)
    if known or config.script is None:
        return known
    from pipeline.script import inputs

    return inputs.examined(config)


def _ready() -> tuple[Config, Machine]:
    """Return the configuration from params.yaml, and this machine. Write environment.json if the file is missing.

    A worker of a launcher does not write the file, because the launcher changes environment variables that the file
    records.
    """
    from pipeline import environment, params, processes

    config, machine = params.load(), environment.machine()
    if not environment.ENVIRONMENT_FILE.exists() and processes.launched_size() is None:
        _environment(argparse.Namespace())
    return config, machine


def _live() -> None:
    """If a launcher has started this process, let the other ranks know from now on that it is alive."""
    from pipeline import processes

    if processes.launched_size() is not None:
        with processes.importing():
            from pipeline.distributed import live
        live()


def _fetch(_: argparse.Namespace) -> None:
    from pipeline import params
    from pipeline.data import sources
    from pipeline.environment import code
    from pipeline.files import naming

    config = params.load()
    if config.script:
        _nothing_to_do("fetch", RAW)
        return
    fetch = config.fetch
    check_followed = code.unfollowed_by({fetch.own_module} - {""}, fetch, code.listed(fetch))
    with naming(RAW):
        sources.fetch(fetch, RAW)
    check_followed()


def _prepare(_: argparse.Namespace) -> None:
    from pipeline import params
    from pipeline.data import packing
    from pipeline.files import naming

    config = params.load()
    if config.script:
        _nothing_to_do("prepare", PREPARED)
        return
    with naming(PREPARED):
        packing.prepare(config, RAW, PREPARED)


def _check_nothing_is_lost() -> None:
    """With a script, raise ConfigError if the folders that the stages fetch and prepare empty hold files."""
    from pipeline.errors import ConfigError

    for folder in (RAW, PREPARED):
        if file := next((path for path in folder.rglob("*") if not path.is_dir()), None):
            raise ConfigError(
                f"{file}: found in {folder}, which belongs to DVC and is emptied for a script: move your data to "
                f"another folder, such as my_data; if it is of an earlier job, remove it: rm -r {folder}."
            )


def _nothing_to_do(stage: str, output: Path) -> None:
    """Leave an empty folder, on which later stages depend."""
    output.mkdir(parents=True, exist_ok=True)
    say(f"{stage}: nothing to do, because a script reads its own data")


def _train(parsed: argparse.Namespace) -> None:
    from pipeline import processes

    _live()
    config, machine = _ready()  # reports an error in params.yaml before torch is imported
    if processes.launched_size() is None:
        _seeds_outlook(config, parsed.variant)
    if config.script:
        _train_of_script(config, parsed.variant, machine)
        return
    with processes.importing():
        from pipeline.training import job

    job.run(config, parsed.variant, machine, PREPARED)


def _train_of_script(config: Config, variant: str, machine: Machine) -> None:
    from pipeline import processes

    with processes.importing():
        from pipeline.script import training

    training.run(config, variant, machine)


def _seeds_outlook(config: Config, variant: str) -> None:
    """Say how many seeds the accuracy needs. This is not in ``_train``, because a change of the statistics must not
    make DVC repeat the training."""
    from pipeline import processes
    from pipeline.files import read_json

    if variant == config.compare.baseline:
        return
    with processes.importing():
        from pipeline.comparison import advice
        from pipeline.comparison.stats import Difference
        from pipeline.results import REPORTS
    known = None
    with suppress(OSError, ValueError, KeyError, TypeError):  # without a report of this version, nothing is known
        last = {compared["variant"]: compared for compared in read_json(REPORTS / "comparison.json")["variants"]}
        known = Difference.model_validate(last[variant]["accuracy"])
    outlook = advice.seeds_outlook(len(config.train.seeds), config.compare.margins.accuracy, known)
    say(f"{variant}: {outlook}")


def _seeds(parsed: argparse.Namespace) -> None:
    from pipeline.tools import seeds

    seeds.add(parsed.most)


def _bench(parsed: argparse.Namespace) -> None:
    from pipeline.benchmark import stage

    config, machine = _ready()
    stage.run(
        config,
        machine,
        again=parsed.again,
        settled=lambda rounds: _by_verdicts("settled", rounds.arms, config.compare),
        memory_known=lambda rounds: _by_verdicts("memory_known", rounds.arms, config.compare),
    )


def _by_verdicts(rule: str, arms: Sequence[Arm], settings: Compare) -> Any:
    """Return what a function of ``verdicts`` decides between rounds. This is not in ``_bench``, because a change of the
    statistics must not make DVC repeat the bench."""
    from pipeline.comparison import verdicts

    return getattr(verdicts, rule)(arms, settings)


def _arms(_: argparse.Namespace) -> None:
    from pipeline import environment, params, processes

    config, machine = params.load(), environment.machine()
    if config.script:
        _arms_of_script(config)
        return
    with processes.importing():
        from pipeline.benchmark import arm

    arm.serve(config, machine, PREPARED)


def _arms_of_script(config: Config) -> None:
    from pipeline import processes

    with processes.importing():
        from pipeline.script import serving

    serving.serve(config)


def _profile(parsed: argparse.Namespace) -> None:
    from pipeline import processes

    _live()
    config, machine = _ready()
    with processes.importing():
        from pipeline.profiling import steps

    steps.run(config, parsed.variant, machine, PREPARED)


def _infer(parsed: argparse.Namespace) -> None:
    from pipeline import processes

    config, machine = _ready()
    with processes.importing():
        from pipeline.tools import inference

    inference.run(config, parsed.variant, machine, PREPARED)


def _compare(_: argparse.Namespace) -> None:
    from pipeline import environment, params, report, results
    from pipeline.comparison.compare import compare
    from pipeline.comparison.consistency import check_here, made_of, read_all

    config, recorded = params.load(), environment.read()
    measured, histories = read_all(config)
    check_here(config, recorded)
    sessions = [results.read_bench(), *results.read_sessions()]
    report.write(compare(measured, histories, sessions, config.compare, recorded, made_of(measured)), histories)
    say(f"report: {report.REPORTS / 'comparison.html'}")


def _publish(_: argparse.Namespace) -> None:
    from pipeline import processes

    with processes.importing():
        from pipeline import params, tracking

    tracking.publish(params.load())


def _gate(parsed: argparse.Namespace) -> int:
    from pipeline import gate, params

    return gate.run(params.load(), parsed.against)


def _promote(_: argparse.Namespace) -> int:
    from pipeline import environment, gate, params, tracking

    config = params.load()
    gate.check_current(config)
    gate.confirm(config)
    return tracking.promote(config, environment.checked_out())


def _plan(parsed: argparse.Namespace) -> None:
    from pipeline import environment, params
    from pipeline.tools import show_plan

    show_plan.show(params.load(), parsed.variant, environment.machine(), PREPARED)


def _predict_memory(parsed: argparse.Namespace) -> None:
    from pipeline import environment, params, processes

    config, machine = params.load(), environment.machine()
    with processes.importing():
        from pipeline.profiling import ledger

    ledger.show(
        config,
        machine,
        parsed.variants,
        PREPARED,
        memory=parsed.memory,
        device=parsed.device,
        batch_size=parsed.batch_size,
    )


def _verify(parsed: argparse.Namespace) -> int:
    from pipeline import environment, params, processes

    config, machine = params.load(), environment.machine()
    with processes.importing():
        from pipeline.tools import verification

    return verification.run(config, machine, parsed.variants, PREPARED, as_json=parsed.json)


def _doctor(_: argparse.Namespace) -> int:
    from pipeline.tools import doctor

    return doctor.run()


def _evidence(parsed: argparse.Namespace) -> int:
    from pipeline import errors
    from pipeline.tools import evidence

    if parsed.action == "check":
        return evidence.check(Path(parsed.file or evidence.FILE))
    if parsed.file:
        raise errors.ConfigError(f"evidence: found {parsed.action!r} before FILE; expected FILE, or check FILE.")
    evidence.write(Path(parsed.action or evidence.FILE))
    return 0


def _submit(parsed: argparse.Namespace) -> int:
    from pipeline import params
    from pipeline.tools import alone, submit

    command = parsed.words or ["dvc", "repro"]
    if parsed.place == "here":
        return alone.run(command)
    if parsed.place == "slurm":
        return submit.slurm(params.load(), command, dry_run=parsed.dry_run)
    submit.kubernetes(params.load(), command)
    return 0


def _follow(parsed: argparse.Namespace) -> None:
    from pipeline import params, tracking

    tracking.follow(params.load(), parsed.variant)


def _techniques(parsed: argparse.Namespace) -> None:
    from pipeline import environment
    from pipeline.tools import listing

    if parsed.markdown:
        say(listing.markdown(), end="")
    else:
        listing.show(environment.machine(), parsed.words, as_json=parsed.json)


def _variants(parsed: argparse.Namespace) -> None:
    from pipeline import environment
    from pipeline.tools import variant_sets

    variant_sets.show(environment.machine(), parsed.set, add=parsed.add)


def _init(parsed: argparse.Namespace) -> None:
    from pipeline import environment
    from pipeline.tools import init

    data = {"images": parsed.images, "arrays": parsed.arrays, "text": parsed.text}
    init.run(environment.machine(), model=parsed.model, yes=parsed.yes, **data)


def _arm(whole: bool, text: str) -> tuple[str, str, bool]:
    """Parse NAME=TEXT; ``whole``: the text is a whole command."""
    name, _, given = text.partition("=")
    return name, given, whole


def _script(parsed: argparse.Namespace) -> None:
    from pipeline import processes

    with processes.importing():
        from pipeline.script import command

    asked = vars(parsed)
    command.run(**{name: asked[name] for name in asked.keys() - {"command"}})


def _schema(parsed: argparse.Namespace) -> None:
    from pipeline import errors, files, params

    text = params.schema()
    if not parsed.check:
        files.write_text(params.SCHEMA_FILE, text)
    elif not params.SCHEMA_FILE.exists() or files.read_text(params.SCHEMA_FILE) != text:
        raise errors.ConfigError(f"{params.SCHEMA_FILE} is outdated: run `python -m pipeline schema`.")


NEEDS_OUR_LOOP: dict[Callable[[argparse.Namespace], int | None], str] = {
    _profile: "profile the script with torch.profiler",
    _infer: "measure the files under models/ with a program of your own",
    _plan: "`python -m pipeline environment` checks params.yaml and shows what changed",
    _predict_memory: "the bench measures the peak memory of each variant",
    _verify: "the report says whether a variant's parameters after a few steps are the baseline's",
    _promote: "register a file under models/ with MLflow's own commands",
}
"""Command that a script does not have -> what to do instead."""
