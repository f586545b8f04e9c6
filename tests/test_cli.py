from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline import cli, environment
from pipeline.params import parse
from tests.factories import make_accuracy
from tests.workspaces import CPU_ONLY, SERVER

ROOT = Path(__file__).parent.parent


@pytest.fixture
def checkout(here: Path) -> Path:
    """Return a directory with the shipped params.yaml; it is the current directory of the commands."""
    (here / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    return here


def test_help_lists_the_stages_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    words = capsys.readouterr().out.split("COMMAND\n")[1].split()
    listed = [word for word in words if word in yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]]
    assert listed == ["environment", "fetch", "prepare", "train", "bench", "profile", "infer", "compare", "publish"]
    assert "follow" not in words, "it is internal"


def test_the_seeds_needed_are_foreseen_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the first report for all variants together; then for each whose deviation the report shows."""
    config = parse({"variants": {"baseline": {}, "a": {}, "b": {}}})

    def lines() -> list[str]:
        for name in config.variants:
            cli._seeds_outlook(config, name)
        return capsys.readouterr().out.splitlines()

    (first,) = lines()
    assert first.startswith("baseline: accuracy: 3 seeds")
    compared = {"variant": "a", "accuracy": make_accuracy([0.001, 0.002]).model_dump(mode="json")}
    (here / "reports").mkdir()
    (here / "reports/comparison.json").write_text(json.dumps({"variants": [{"variant": "baseline"}, compared]}))
    (later,) = lines()
    assert later.startswith("a: accuracy: 3 seeds")
    assert "in the last report" in later


def test_an_option_s_value_has_the_type_of_its_default() -> None:
    parsed = cli._parser().parse_args(["advise", "--only", "speed", "precision", "--minutes", "3"])
    assert (parsed.only, parsed.minutes, parsed.add, parsed.memory) == (["speed", "precision"], 3.0, False, None)
    parsed = cli._parser().parse_args(["script", "--base", "x", "--arm", "a=--b", "--command", "c=d", "--output", "o"])
    arms = [("a", "arguments", "--b"), ("c", "command", "d")]
    assert (parsed.arms, parsed.settings, parsed.output) == (arms, [], Path("o"))


def test_an_error_shows_no_secret_of_an_address(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = yaml.safe_load((checkout / "params.yaml").read_text(encoding="utf-8"))
    params["fetch"]["mirror"] = "https://t0ken@host/data?sig=t0ken"
    (checkout / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    assert cli.main(["fetch"]) == 2
    assert "fetch.mirror: found 'https://***@host/data?***'" in capsys.readouterr().err


def test_environment_writes_the_fingerprint(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "machine", lambda *_: CPU_ONLY)
    assert cli.main(["environment"]) == 0
    assert (checkout / "environment.json").exists()
    out = capsys.readouterr().out
    assert f"environment {environment.fingerprint()['hash'][:12]}" in out
    assert "variants.memory: bf16 is skipped: this CPU has no native bf16" in out


def test_environment_prints_what_changed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = "environment: changed since the last time: "
    assert cli.main(["environment"]) == 0
    assert changed not in capsys.readouterr().out, "nothing was written before"
    first = environment.read()
    params = yaml.safe_load((checkout / "params.yaml").read_text(encoding="utf-8"))
    params["variants"]["memory"]["gradient_accumulation"] = 2
    params["compare"]["target_accuracy"] = 0.7
    (checkout / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    edited = json.loads(json.dumps(first))
    edited["stages"]["bench"]["code"]["pipeline/step.py"] = "0" * 16
    environment.ENVIRONMENT_FILE.write_text(json.dumps(edited), encoding="utf-8")
    assert cli.main(["environment"]) == 0
    said = capsys.readouterr().out.splitlines()
    named = {line.removeprefix(changed) for line in said if line.startswith(changed)}
    assert {"stages.bench.code.pipeline/step.py", "stages.compare.settings.target_accuracy"} < named
    assert {path.partition(".plan.")[0] for path in named if path.startswith("variants.")} == {"variants.memory"}
    now = environment.read()["digests"]
    moved = [(part, name) for part in now for name in now[part] if now[part][name] != first["digests"][part][name]]
    assert moved == [("stages", "compare"), ("variants", "memory")]


def test_environment_notices_versions_relied_on(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = CPU_ONLY.model_copy(update={"installed": frozenset({"bitsandbytes"})})
    monkeypatch.setattr(environment, "machine", lambda *_: machine)
    params = {
        "train": {"optimizer": "adamw"},
        "infer": {"forms": ["bf16", "compiled", "int8"]},
        "variants": {"baseline": {}, "small": {"optimizer_state": "8bit"}, "fast": {"compile": "default"}},
    }
    (checkout / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    assert cli.main(["environment"]) == 0
    fingerprint = environment.read()
    assert fingerprint["hash"] == environment.fingerprint()["hash"], "the hash does not depend on these versions"
    packages = {user: set(versions) for users in fingerprint["relied_on"].values() for user, versions in users.items()}
    assert packages == {
        "baseline": set(), "small": {"bitsandbytes"}, "fast": {"compiler"},
        "bf16": set(), "compiled": {"compiler"}, "int8": {"compiler", "torchao"},
    }  # fmt: skip
    for section, users in fingerprint["relied_on"].items():
        for user in users:
            assert (environment.hash_of(fingerprint, section, user) != fingerprint["hash"]) == bool(packages[user])


def test_environment_refuses_params_that_cannot_run_here(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = (checkout / "params.yaml").read_text(encoding="utf-8")
    (checkout / "params.yaml").write_text(params.replace("batch_size: 256", "batch_size: 255"), encoding="utf-8")
    assert cli.main(["environment"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: train.batch_size: found 255, which variants.ddp cannot divide")
    assert "variants.memory cannot divide into 1 process x 4" in captured.err, "all errors must be reported at once"
    assert captured.out == ""
    assert not (checkout / "environment.json").exists()


def test_schema_writes_and_checks(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema", "--check"]) == 2
    assert "params.schema.json is outdated" in capsys.readouterr().err
    assert not (checkout / "params.schema.json").exists(), "--check writes nothing"
    assert cli.main(["schema"]) == 0
    assert cli.main(["schema", "--check"]) == 0
    (checkout / "params.schema.json").write_text("{}", encoding="utf-8")
    assert cli.main(["schema", "--check"]) == 2


def test_a_bare_python_is_told_where_packages_are(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "pipeline", "doctor"],  # -S hides the installed packages
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"error: \S+ has no module \w+: run `make repro`.* `source \.venv/bin/activate` in this shell\.\n", done.stderr
    )


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("pipeline.params.load", load)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main(["fetch"])


def test_an_interruption_is_one_line(tmp_path: Path) -> None:
    fetched = {"dataset": "arrays", "arrays": "waiting:samples"}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"fetch": fetched, "variants": {"baseline": {}}}))
    (tmp_path / "waiting.py").write_text("open('pipe').read()")  # a reader of a pipe waits for a writer
    os.mkfifo(tmp_path / "pipe")
    waiting = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "fetch"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        # If a shell runs the tests in the background, they ignore the signal, and the command would inherit this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with waiting, (tmp_path / "pipe").open("w"):  # open() returns once the command has begun to read
        waiting.send_signal(signal.SIGINT)
        assert waiting.stderr is not None
        assert waiting.stderr.read() == "interrupted; to go on, run the same command again\n"
    assert waiting.returncode == 130


def test_a_closed_pipe_ends_the_command_quietly() -> None:
    command = [sys.executable, "-m", "pipeline", "techniques"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as listing:
        assert listing.stdout
        assert listing.stderr
        listing.stdout.close()
        assert listing.stderr.read() == ""
    assert listing.returncode == 128 + signal.SIGPIPE


@pytest.mark.usefixtures("here")
def test_without_dvc_a_command_describes_the_machine_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("params.yaml").write_text("fetch: {dataset: digits}\ntrain: {device: cpu}\nvariants: {baseline: {}}\n")
    with monkeypatch.context() as launched:
        for name in ("RANK", "WORLD_SIZE"):  # a launcher also sets variables on which figures depend
            launched.setenv(name, "1")
        cli._ready()
    assert not environment.ENVIRONMENT_FILE.exists()
    config, _ = cli._ready()
    assert set(environment.read()["variants"]) == set(config.variants)
    written = environment.ENVIRONMENT_FILE.stat().st_mtime_ns
    cli._ready()
    assert environment.ENVIRONMENT_FILE.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    "words", [["bench"], ["gate", "--against=HEAD"], ["plan"], ["verify"], ["probe"], ["scale"]], ids=" ".join
)
@pytest.mark.usefixtures("checkout")
def test_what_starts_ranks_is_no_rank(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert cli.main(words) == 2
    assert "without the launcher, on the first host" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["advise", "--minutes", "0"], 2, "error: --minutes: found 0; expected a number above 0"),
        (["try", "ddp"], 2, "error: try: found 'ddp', which is no variant of params.yaml"),
        (["infer", "ddp"], 2, "error: variants.ddp: no such variant; there are: baseline"),
        (["plan", "ddp"], 2, "error: variants.ddp: no such variant; there are: baseline"),
        (["predict-memory", "--memory", "much"], 2, "error: memory: found 'much'; expected a size such as 24GiB"),
        (["scale", "--link", "string"], 2, "error: --link: found 'string'; expected one of "),
        (["probe"], 2, "error: found one GPU on one host, which has no link to another"),
        (["gate", "--against", "HEAD"], 2, "not a git repository"),
        (["promote"], 2, "error: environment.json is missing"),
        (["seeds"], 2, "error: `dvc repro train@baseline` failed in "),
        (["submit", "slurm", "--dry-run", "--", "echo", "5"], 0, "#SBATCH --"),
        (["variants", "fast"], 2, "error: variants: found 'fast'; expected the name of a set: "),
        (["techniques", "--markdown"], 0, "\n| `parallelism: ddp` | "),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_each_command_gets_its_words(
    words: list[str],
    code: int,
    says: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Most of them are refused before anything runs."""
    (here / "params.yaml").write_text("variants: {baseline: {}}\n", encoding="utf-8")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(here.parent))
    monkeypatch.setattr(environment, "machine", lambda *_: SERVER.model_copy(update={"gpus": 1}))
    assert cli.main(words) == code
    said = capfd.readouterr()
    assert says in (said.err if code else said.out)


def test_code_of_the_user_that_exits_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_techniques", lambda _: sys.exit(0))
    assert cli.main(["techniques"]) == 2
    assert "called sys.exit: remove this" in capsys.readouterr().err
