"""The command line: each command is a function of this file, whose docstring is its help.

Each command's function imports the code that it runs, so that ``--help`` and the light commands stay quick. For a
stage's command, DVC tracks the code of these imports and of all modules that they import (environment/imports.py).
Garbage is not collected meanwhile (``processes.importing``), so a function returns what takes long or makes garbage as
a call, which ``main`` makes afterwards.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import processes
from pipeline.errors import ConfigError, redacted, said, say
from pipeline.files import PREPARED, RAW

if TYPE_CHECKING:
    from pipeline.params import Compare, Config, Machine
    from pipeline.results import Arm

Command = Callable[[argparse.Namespace], Callable[[], object] | None]
"""Returns the call that is left to make. If this call returns a number, it is the exit code."""

COMMANDS = (
    *("environment", "fetch", "prepare", "train", "seeds", "bench", "profile", "infer", "compare", "publish"),
    *("advise", "try", "gate", "promote", "plan", "predict-memory", "verify", "probe", "scale", "evidence", "doctor"),
    *("submit", "history", "techniques", "variants", "init", "script", "schema"),
)
"""The commands, in the order of ``--help``; the stages are in the order of dvc.yaml."""
STARTED_BY_OTHERS = ("follow", "arms", "host")
"""Commands that other commands start, and that ``--help`` does not list."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code: 0, or 2 for an error that the user can correct.

    The code is 130 after Ctrl-C, and 141 if the reader of the output has ended. ``gate``, ``promote``, ``verify``,
    ``evidence`` and ``doctor`` define further codes.
    """
    parsed = _parser().parse_args(arguments)
    if {"PIPELINE_ALONE", "DVC_STAGE"} <= os.environ.keys():  # a stage of a job of `submit`
        from pipeline.tools import alone

        alone.keep_dvc_out()
    try:
        import pydantic  # noqa: F401  (check here that it is installed: every command needs it)
    except ModuleNotFoundError as error:
        say(
            f"error: {sys.executable} has no module {error.name}: run `make repro`, which installs it into .venv, "
            "then run `source .venv/bin/activate` in this shell.",
            file=sys.stderr,
        )
        return 2

    command: Command = parsed.command
    try:
        if command in STARTS_RANKS and processes.launched_size() is not None:
            raise ConfigError(
                "this command starts its own processes, but a launcher has set RANK and WORLD_SIZE: run it once, "
                "without the launcher, on the first host (docs/several-hosts.md)."
            )
        if command in NEEDS_OUR_LOOP:
            _refuse_script(NEEDS_OUR_LOOP[command])
        with processes.importing():
            call = command(parsed)
        code = call() if call else 0
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
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
    from pipeline import params

    if params.load().script:
        raise ConfigError(f"this command does not know what a script trains (script in params.yaml): {instead}.")


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

    def add(name: str) -> argparse.ArgumentParser:
        command: Command = globals()[f"_{name.replace('-', '_')}"]
        about, _, epilog = (command.__doc__ or "").partition("\n\n")
        shown: dict[str, Any] = {} if name in STARTED_BY_OTHERS else {"help": about}
        added = commands.add_parser(name, description=about, epilog=epilog, **shown)
        added.set_defaults(command=command)
        return added

    parsers = {name: add(name) for name in (*COMMANDS, *STARTED_BY_OTHERS)}

    def option(command: str, usage: str, about: str, default: Any = None, **more: Any) -> None:
        """Add an argument. ``usage``: its name and, unless it is a switch, its placeholder, such as --minutes X."""
        name, _, metavar = usage.partition(" ")
        form: dict[str, Any] = {"action": "store_true"}
        if metavar or "choices" in more:
            form = {"metavar": metavar or None, "default": default, "type": str if default is None else type(default)}
        parsers[command].add_argument(name, help=about, **form | more)

    variant = "an entry under variants: or students: in params.yaml"
    for name in ("train", "profile", "infer", "follow"):
        option(name, "variant VARIANT", variant)
    option("plan", "variant VARIANT", f"{variant}; without a name: list all", nargs="?")
    for name in ("predict-memory", "verify", "try"):
        option(name, "variants VARIANT", "without a name: all of params.yaml", nargs="*")
    option("verify", "--json", "print JSON for programs: each claim's measured difference and bound")
    for name in ("probe", "techniques"):
        option(name, "--json", "print JSON for programs")
    option("seeds", "--most N", "add none to N seeds; default: 12", 12)
    option("bench", "--again", "measure one more session, into a new file under sessions/")
    against = "a git revision, which is measured together with this work tree"
    option("gate", "--against REVISION", against, required=True)
    size = "the device's memory, such as 24GiB; also print which variants fit, and the largest batch that fits"
    option("predict-memory", "--memory SIZE", size)
    device = "replaces train.device; cuda works without a GPU"
    option("predict-memory", "--device", device, choices=("cpu", "cuda"))
    quick = "end within two minutes if a training step takes a second; says what this leaves out"
    option("verify", "--quick", quick)
    option("evidence", "action check", "check the figures in FILE; do not write it", nargs="?")
    option("evidence", "file FILE", "a zip archive", nargs="?")
    option("host", "--listen ADDRESS", "be the agent that starts commands here (submit kubernetes)")
    option("host", "--on HOST", "run the words on HOST, where an agent listens")
    option("host", "words WORD", "the command", nargs=argparse.REMAINDER)
    option("techniques", "words WORD", "a name, or a topic such as AMP or ZeRO; without a word: all names", nargs="*")
    option("techniques", "--markdown", "print docs/techniques.md; `make docs` uses this")
    option("variants", "set SET", "a file under variants/; print which of its variants can run here", nargs="?")
    option("variants", "--add", "add the variants that can run here to params.yaml")
    option("advise", "--minutes X", "the time for all of it (20)", 20.0)
    option("advise", "--memory SIZE", "try nothing whose predicted step needs more than this memory, such as 16GiB")
    option("advise", "--add", "add what is advised to params.yaml")
    groups = "try only these groups of techniques, such as precision or data-loading"
    option("advise", "--only GROUP", groups, nargs="+", default=(), type=str)
    option("try", "--minutes X", "the time for all of it (5)", 5.0)
    base = "a variant whose processes share the batch, or ddp, zero1 or fsdp, with -weak for weak scaling; default: all"
    option("scale", "variants VARIANT", base, nargs="*")
    devices = "project the curves to so many devices; default: four times those that there are"
    option("scale", "--up-to N", devices, type=int)
    price = "what an hour of a GPU costs or, without GPUs, of a host; default: compare.price_per_device_hour"
    option("scale", "--price X", price, type=float)
    option("scale", "--minutes X", "longest time for the rounds (5)", 5.0)
    option("scale", "--link NAME", "what links hosts that are not here, such as ib400 or eth100")
    data = parsers["init"].add_mutually_exclusive_group()
    for flag, place, about in (
        ("--images", "DIR", "train on images: DIR/train/CLASS/* and, optionally, DIR/test/CLASS/*"),
        ("--arrays", "PATH", "train on an .npz, .safetensors or .parquet file, or a folder of .npy files"),
        ("--text", "DIR", "train a language model on UTF-8 files"),
    ):
        data.add_argument(flag, metavar=place, help=about)
    option("init", "--model NAME", "your own model as module:factory, or a model of torchvision or transformers")
    option("init", "--config FILE", "the config.json of a model of transformers", dest="configuration")
    option("init", "--minimal", "write only params.yaml, dvc.yaml and .gitignore")
    several = "variants of the new params.yaml, shipped or ready-made, such as memory,bf16; default: what can run here"
    option("init", "--variants A,B,C", several, type=lambda names: names.split(","), default=())
    option("init", "--yes", "change existing files without asking")
    option("script", "--base COMMAND", "the command, such as 'python train.py'", required=True)
    arms: dict[str, Any] = {"action": "append", "default": [], "dest": "arms"}
    arm = "the command with further arguments, after variables such as OMP_NUM_THREADS=2"
    option("script", "--arm NAME=ARGUMENTS", arm, type=partial(_arm, "arguments"), **arms)
    option("script", "--command NAME=COMMAND", "an arm with another command", type=partial(_arm, "command"), **arms)
    setting = "a setting of params.yaml, such as bench.max_rounds=6 or script.optimizer=2"
    option("script", "--set KEY=VALUE", setting, action="append", default=[], dest="settings", type=str)
    option("script", "--minutes X", "longest time for the rounds (10.0)", 10.0)
    option("script", "--output X", "the report's directory (script-report)", Path("script-report"), type=Path)
    option("script", "--in-place", "run in this directory instead of copies of it")
    option("script", "--batch-differs", "batches differ on purpose: compare samples/s")
    option("schema", "--check", "write nothing; fail if the file is outdated")
    places = parsers["submit"].add_subparsers(metavar="PLACE", required=True, dest="place")
    for place, about in (
        ("slurm", "submit a job, or find the active one; print what it prints; exit with its code"),
        ("kubernetes", "print a JobSet for kubectl"),
        ("here", "run the command alone in this checkout, as the jobs do"),
    ):
        added = places.add_parser(place, help=about, description=about)
        added.add_argument("words", nargs="*", metavar="WORD", help="the command, after --")
        if place != "here":
            only = place == "kubernetes"
            added.add_argument("--dry-run", action="store_true", required=only, help="print the job; submit nothing")
    return parser


def _environment(_: argparse.Namespace) -> None:
    """Check params.yaml against this machine and write environment.json."""
    from pipeline import environment, hosts, params, plans
    from pipeline.environment import stages
    from pipeline.results import INFERENCE, PROFILES, SESSIONS
    from pipeline.tools import alone

    alone.check()
    for folder in (SESSIONS, INFERENCE, PROFILES):  # stages depend on them
        folder.mkdir(exist_ok=True)
    config, before = params.load(), environment.last_written()
    if config.script:
        _check_nothing_is_lost()
    params.check_names(config.train, config.variants)
    planned = plans.plans(config, environment.machine(None if config.script else config.launch))
    described = stages.described(config, planned, script=_script_seen(config, before))
    links = hosts.links()  # hosts that differ are refused here, before anything runs
    written = environment.write(environment.fingerprint(plans.relied_on(config), links) | described)
    if links:
        say(f"environment: {len(links)} hosts: {', '.join(hosts.names())}")
        if len({link["machine"] for link in links}) < len(links):
            say("environment: some of these hosts are one machine, so figures of several hosts do not show a network")
    if idle := hosts.idle_nodes():
        say(f"environment: {idle}: docs/several-hosts.md")
    say(f"environment {written[:12]}")
    for path in environment.changed_since(before):
        say(f"environment: changed since the last time: {path}")
    for name, plan in planned.items():
        for technique, reason in plan.skipped.items():
            say(f"variants.{name}: {technique} is skipped: {reason}")


def _script_seen(config: Config, before: dict[str, Any]) -> dict[str, Any] | None:
    """Return what the script was seen to read. If ``before``, the content of environment.json, does not say it, run the
    script up to its first step."""
    from pipeline.environment import stages

    known = stages.script_seen(config, before)
    if known or config.script is None:
        return known
    from pipeline.script import training

    return training.examined(config)


def _configured() -> tuple[Config, Machine]:
    """Return the configuration from params.yaml, and this machine."""
    from pipeline import environment, params

    config = params.load()
    return config, environment.machine(config.launch)


def _ready() -> tuple[Config, Machine]:
    """Return the configuration from params.yaml, and this machine. Write environment.json if the file is missing, or
    describes another number of hosts.

    A worker of a launcher does not write the file, because the launcher changes environment variables that the file
    records.
    """
    from pipeline import environment

    config, machine = _configured()
    if processes.launched_size() is None:
        links = environment.last_written().get("hardware", {}).get("hosts", [])
        if not environment.ENVIRONMENT_FILE.exists() or (len(links) or 1) != machine.hosts:
            _environment(argparse.Namespace())
    return config, machine


def _live() -> None:
    """If a launcher has started this process, let the other ranks know from now on that it is alive."""
    if processes.launched_size() is not None:
        from pipeline.distributed import live

        live()


def _fetch(_: argparse.Namespace) -> None:
    """Download or copy the raw files and check their SHA-256."""
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
    """Decode the raw files once, into packed arrays."""
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


def _train(parsed: argparse.Namespace) -> Callable[[], object]:
    """Train one variant with every seed; write its result, history and models."""
    _live()
    config, machine = _ready()  # reports an error in params.yaml before torch is imported
    if processes.launched_size() is None:
        _seeds_outlook(config, parsed.variant)
    if config.script:
        return _train_of_script(config, parsed.variant, machine)
    from pipeline.training import job

    return partial(job.run, config, parsed.variant, machine, PREPARED)


def _train_of_script(config: Config, variant: str, machine: Machine) -> Callable[[], object]:
    from pipeline.script import training

    return partial(training.run, config, variant, machine)


def _seeds_outlook(config: Config, variant: str) -> None:
    """Say how many seeds the accuracy needs; before the first report once, with the baseline. This is not in
    ``_train``, because a change of the statistics must not make DVC repeat the training."""
    from pipeline.comparison import advice
    from pipeline.comparison.stats import Difference
    from pipeline.files import read_json
    from pipeline.results import REPORTS

    known, last = None, {}
    with suppress(OSError, ValueError, KeyError, TypeError):  # without a report of this version, nothing is known
        last = {compared["variant"]: compared for compared in read_json(REPORTS / "comparison.json")["variants"]}
        known = Difference.model_validate(last[variant]["accuracy"])
    if known or (variant == config.compare.baseline and not last):
        outlook = advice.seeds_outlook(len(config.train.seeds), config.compare.margins.accuracy, known)
        say(f"{variant}: {outlook}")


def _seeds(parsed: argparse.Namespace) -> Callable[[], object]:
    """Add seeds one at a time, until the accuracy of every variant is decided."""
    from pipeline.tools import seeds

    return partial(seeds.add, parsed.most)


def _bench(parsed: argparse.Namespace) -> Callable[[], object]:
    """Measure speed and memory of all variants side by side; write bench.json."""
    from pipeline.benchmark import stage

    config, machine = _ready()
    return partial(
        stage.run,
        config,
        machine,
        again=parsed.again,
        settled=lambda rounds: _by_verdicts("settled", rounds.arms, config.compare),
        memory_known=lambda rounds: _by_verdicts("memory_known", rounds.arms, config.compare),
    )


def _advise(parsed: argparse.Namespace) -> Callable[[], object]:
    """Find which of all techniques pay for the job, within minutes, by measuring them; write reports/advice.*."""
    config, machine = _ready()
    from pipeline.tools import advise

    options = {name: getattr(parsed, name) for name in ("minutes", "memory", "add", "only")}
    return partial(advise.run, config, machine, **options)


def _try(parsed: argparse.Namespace) -> Callable[[], object]:
    """Rank the variants within minutes, provisionally: clearly slower, clearly less memory, or not to be told yet."""
    config, machine = _ready()
    from pipeline.tools import first_look

    return partial(first_look.run, config, machine, parsed.variants, minutes=parsed.minutes)


def _by_verdicts(rule: str, arms: Sequence[Arm], settings: Compare) -> Any:
    """Return what a function of ``looks`` decides between rounds. This is not in ``_bench``, because a change of the
    statistics must not make DVC repeat the bench."""
    from pipeline.comparison import looks

    return getattr(looks, rule)(arms, settings)


def _arms(_: argparse.Namespace) -> Callable[[], object]:
    """Measure variants on request. Started by bench and gate."""
    from pipeline import environment, params

    config = params.load()
    machine = environment.machine(config.launch)
    if config.script:
        return _arms_of_script(config)
    from pipeline.benchmark import arm

    return partial(arm.serve, config, machine, PREPARED)


def _arms_of_script(config: Config) -> Callable[[], object]:
    from pipeline.script import arms

    return partial(arms.serve, config)


def _host(parsed: argparse.Namespace) -> Callable[[], object]:
    """Run ranks on this host. Started by a command on another host."""
    from pipeline import hosts
    from pipeline.tools import agents

    if parsed.listen:
        return partial(agents.listen, parsed.listen)
    return partial(agents.run, parsed.on, parsed.words) if parsed.on else hosts.serve


def _profile(parsed: argparse.Namespace) -> Callable[[], object]:
    """Show where a variant's step spends its time; write profiles/VARIANT/."""
    _live()
    config, machine = _ready()
    from pipeline.profiling import steps

    return partial(steps.run, config, parsed.variant, machine, PREPARED)


def _infer(parsed: argparse.Namespace) -> Callable[[], object]:
    """Measure inference with a variant's trained model; write inference/VARIANT.*."""
    config, machine = _ready()
    from pipeline.tools import inference

    return partial(inference.run, config, parsed.variant, machine, PREPARED)


def _compare(_: argparse.Namespace) -> None:
    """Compare the variants' results; write reports/."""
    from pipeline import environment, params, report, results
    from pipeline.comparison.compare import compare
    from pipeline.comparison.consistency import check_here, made_of, read_all

    config, recorded = params.load(), environment.read()
    measured, histories = read_all(config)
    check_here(config, recorded)
    sessions = [results.read_bench(), *results.read_sessions()]
    compared = compare(measured, histories, sessions, config.compare, recorded, made_of(measured))
    report.write(compared, histories)
    report.say_verdicts(compared)


def _history(_: argparse.Namespace) -> None:
    """Show each variant's ratios over sessions and commits, and where they changed; write reports/history.*."""
    from pipeline import params, report, results
    from pipeline.comparison.sessions import table_of
    from pipeline.comparison.trends import trends

    benches = [*results.read_sessions(), *results.read_sessions(results.KEPT_BENCHES)]
    benches += [results.read_bench()] if results.BENCH_FILE.exists() else []  # a clone has no kept benches
    if not benches:
        raise ConfigError(f"history: found no bench in {results.SESSIONS} or {results.KEPT_BENCHES}; run `dvc repro`.")
    benches.sort(key=lambda bench: bench.session.start_utc, reverse=True)
    settings = params.load().compare
    report.write_history(trends(table_of(benches, settings.max_spread, {}), benches, settings))


def _publish(_: argparse.Namespace) -> Callable[[], object]:
    """Write the results into MLflow, unless they are there already."""
    from pipeline import params, tracking

    return partial(tracking.publish, params.load())


def _gate(parsed: argparse.Namespace) -> Callable[[], object]:
    """Check whether a commit made throughput, memory or accuracy worse; write reports/gate.*."""
    from pipeline import gate, params

    return partial(gate.run, params.load(), parsed.against)


def _promote(_: argparse.Namespace) -> Callable[[], object]:
    """Register the best variant's model as MLflow's champion, if this commit passed the gate."""
    from pipeline import environment, gate, params, tracking

    config = params.load()
    gate.check_current(config)
    gate.confirm(config)
    return partial(tracking.promote, config, environment.checked_out())


def _scale(parsed: argparse.Namespace) -> Callable[[], object]:
    """Measure how many devices pay, project further devices, and say what they cost; write reports/scaling.*."""
    config, machine = _ready()
    from pipeline.scaling import command

    options = command.Options(parsed.up_to, parsed.price, parsed.minutes, parsed.link)
    return partial(command.run, config, machine, parsed.variants, options)


def _plan(parsed: argparse.Namespace) -> Callable[[], object]:
    """Print how a variant's step is composed on this machine: techniques, their order, and what is skipped."""
    config, machine = _configured()
    from pipeline.tools import beforehand

    return partial(beforehand.show_plan, config, parsed.variant, machine, PREPARED)


def _predict_memory(parsed: argparse.Namespace) -> Callable[[], object]:
    """Predict the peak memory of variants without running them."""
    config, machine = _configured()
    from pipeline.tools import beforehand

    asked = {"memory": parsed.memory, "device": parsed.device}
    return partial(beforehand.show_memory, config, machine, parsed.variants, PREPARED, **asked)


def _verify(parsed: argparse.Namespace) -> Callable[[], object]:
    """Check in a few minutes the claims on which the comparison of the variants relies.

    Exit code: 1 if a claim does not hold, or if none of a variant's claims could be decided; else 0.
    """
    config, machine = _configured()
    from pipeline.tools import verification

    options = {"as_json": parsed.json, "quick": parsed.quick}
    return partial(verification.run, config, machine, parsed.variants, PREPARED, **options)


def _probe(parsed: argparse.Namespace) -> Callable[[], object]:
    """Time the collectives between the devices, beside what the links state; write reports/probe.*."""
    config, machine = _configured()
    from pipeline.scaling import probe

    return partial(probe.run, config, machine, as_json=parsed.json)


def _doctor(_: argparse.Namespace) -> Callable[[], object]:
    """Show what this machine lacks for the job of params.yaml, and how to fix it.

    Exit code: 1 if there is a problem, else 0, even if there are warnings.
    """
    from pipeline.tools import doctor

    return doctor.run


def _evidence(parsed: argparse.Namespace) -> Callable[[], object]:
    """Write all data of the comparison into one file, or check the figures in such a file.

    Exit code of `check`: 1 if there is a difference, else 0. FILE is evidence.zip by default.
    """
    from pipeline.tools import evidence

    if parsed.action == "check":
        return partial(evidence.check, Path(parsed.file or evidence.FILE))
    if parsed.file:
        raise ConfigError(f"evidence: found {parsed.action!r} before FILE; expected FILE, or check FILE.")
    return partial(evidence.write, Path(parsed.action or evidence.FILE))


def _submit(parsed: argparse.Namespace) -> Callable[[], object]:
    """Run a command, dvc repro by default, as a job of a cluster."""
    from pipeline import params
    from pipeline.tools import alone, submit

    command = parsed.words or ["dvc", "repro"]
    if parsed.place == "here":
        return partial(alone.run, command)
    if parsed.place == "slurm":
        return partial(submit.slurm, params.load(), command, dry_run=parsed.dry_run)
    return partial(submit.kubernetes, params.load(), command)


def _follow(parsed: argparse.Namespace) -> Callable[[], object]:
    """Mirror a running training to MLflow. Started by train."""
    from pipeline import params, tracking

    return partial(tracking.follow, params.load(), parsed.variant)


def _techniques(parsed: argparse.Namespace) -> None:
    """List the techniques, or show what a technique changes and excludes, and whether it runs here."""
    from pipeline import environment
    from pipeline.tools import choices

    if parsed.markdown:
        say(choices.markdown(), end="")
    else:
        choices.show_techniques(environment.machine(), parsed.words, as_json=parsed.json)


def _variants(parsed: argparse.Namespace) -> None:
    """List the ready-made variants, or add a set of them to params.yaml."""
    from pipeline import environment
    from pipeline.tools import choices

    choices.show_variants(environment.machine(), parsed.set, add=parsed.add)


def _init(parsed: argparse.Namespace) -> Callable[[], object]:
    """Write dvc.yaml, params.yaml and the GPU workflow into a git repository of your own.

    init overwrites no file that you wrote or changed. Before init changes an existing file, it shows the change and,
    without --yes, asks.
    """
    from pipeline import environment
    from pipeline.tools import init

    named = ("model", "configuration", "yes", "minimal", "variants", "images", "arrays", "text")
    return partial(init.run, environment.machine(), **{name: getattr(parsed, name) for name in named})


def _arm(key: str, text: str) -> tuple[str, str, str]:
    """Parse NAME=TEXT; ``key``: what the text is of the variant NAME."""
    name, _, value = text.partition("=")
    return name, key, value


def _script(parsed: argparse.Namespace) -> Callable[[], object]:
    """Measure which arguments of your own training command pay; needs no params.yaml."""
    from pipeline.script import command

    return partial(command.run, **{name: value for name, value in vars(parsed).items() if name != "command"})


def _schema(parsed: argparse.Namespace) -> None:
    """Write params.schema.json, which editors use to complete params.yaml."""
    from pipeline import files, params

    text = params.schema()
    if not parsed.check:
        files.write_text(params.SCHEMA_FILE, text)
    elif not params.SCHEMA_FILE.exists() or files.read_text(params.SCHEMA_FILE) != text:
        raise ConfigError(f"{params.SCHEMA_FILE} is outdated: run `python -m pipeline schema`.")


NEEDS_OUR_LOOP: dict[Command, str] = {
    _advise: "`try` and the bench compare the arguments that you list as variants",
    _profile: "profile the script with torch.profiler",
    _infer: "measure the files under models/ with a program of your own",
    _scale: "measure arms with further processes, such as torchrun --nproc-per-node 2 train.py",
    _plan: "`python -m pipeline environment` checks params.yaml and shows what changed",
    _predict_memory: "the bench measures the peak memory of each variant",
    _verify: "the report says whether a variant's parameters after a few steps are the baseline's",
    _promote: "register a file under models/ with MLflow's own commands",
}
"""Command that a script does not have -> what to do instead."""
STARTS_RANKS: Collection[Command] = (_seeds, _bench, _advise, _try, _gate, _plan, _verify, _probe, _scale)
"""Commands that cannot be a rank of a launcher, as ``train`` and ``profile`` can."""
