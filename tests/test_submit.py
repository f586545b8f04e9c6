"""Jobs of a cluster, with stand-ins for Slurm's commands that run the batch script here, and the lock of a checkout.
`make slurm-check` submits to a real Slurm."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import cli, plans
from pipeline.environment import stages
from pipeline.errors import ConfigError, PipelineError
from pipeline.params import Config, parse
from pipeline.tools import alone, submit
from tests.commands import executable
from tests.conftest import ROOT
from tests.workspaces import CPU_ONLY

STAND_INS = {
    "sbatch": """#!/bin/bash
        echo >>submissions
        id=$(wc -l <submissions)
        cat >script
        export SLURM_JOB_ID=$id SLURM_JOB_NAME=$(sed -n 's/^#SBATCH --job-name=//p' script)
        (setsid bash -c 'echo $$ >shell; exec bash script' >".cache/jobs/$SLURM_JOB_NAME-$id.log" 2>&1
         rm active) &>ended &
        echo "$id|RUNNING|n1|$PWD" >active
        echo "$id;cluster"
        """,
    "squeue": """#!/bin/bash
        [ -z "$SILENT" ] || { echo "Unable to contact slurm controller" >&2; exit 1; }
        [ -z "$STATE" ] || { [ "$STATE" = ended ] || echo "7|$STATE|n9|/elsewhere"; exit; }
        cat active 2>/dev/null || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
        """,
    "scontrol": """#!/bin/bash
        echo "$*" >>asked
        kill -TERM 0
        """,
}
"""Slurm's commands. The file "active" has what squeue says of the job. scontrol ends all processes of the job."""


@pytest.fixture(autouse=True)
def _cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in STAND_INS.items():
        executable(tmp_path / "bin" / name, text.replace("\n        ", "\n"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("PIPELINE_ALONE", "SLURM_JOB_ID"):  # the tests may be a job themselves
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(submit, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(submit, "GRACE_SECONDS", 0.2)


def config(**slurm: Any) -> Config:
    return parse({"variants": {"baseline": {}}, "launch": {"slurm": slurm}})


def shell(text: str, **slurm: Any) -> int:
    return submit.slurm(config(**slurm), ["bash", "-c", text], dry_run=False)


def here(text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", "submit", "here", "--", "bash", "-c", text]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)


def waited_for(path: Path) -> str:
    until = time.monotonic() + 30
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.02)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_the_job_s_own(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    said = "a $HOME 'b' \N{GREEK SMALL LETTER ALPHA}"
    assert shell(f'echo "$SAID $FIRST"; exit {code}', environment={"SAID": said}, setup=["export FIRST=1"]) == code
    printed = capsys.readouterr()
    assert printed.out == f"{said} 1\n"
    assert "job 1: RUNNING n1" in printed.err


def test_a_job_without_a_code_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert shell("kill -KILL 0") == 1
    assert "error: job 1 has ended and left no exit code" in capsys.readouterr().err


def test_a_failed_setup_runs_no_command() -> None:
    assert shell("touch ran", setup=["(exit 4)"]) == 4
    assert not Path("ran").exists()


def test_an_active_job_is_followed_not_submitted_twice(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bash", "-c", "touch ready; sleep 1; exit 5"]
    submit.slurm(config(), command, dry_run=True)
    submit._submitted(capsys.readouterr().out)
    waited_for(Path("ready"))
    assert submit.slurm(config(), command, dry_run=False) == 5
    assert Path("submissions").read_text() == "\n"
    assert "job 1 is active for this commit and command: nothing is submitted" in capsys.readouterr().err


def test_ctrl_c_leaves_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "_printed", interrupt)
    with pytest.raises(KeyboardInterrupt, match=r"job 1 goes on; .*: scancel 1"):
        shell("sleep 0.5; touch finished")
    waited_for(Path("finished"))


def test_slurm_s_silence_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "SILENCE_SECONDS", 0.1)
    Path(".cache/jobs").mkdir(parents=True)
    monkeypatch.setenv("SILENT", "yes")
    with pytest.raises(PipelineError, match="Unable to contact"):
        shell("true")
    assert not Path("submissions").exists()
    with pytest.raises(PipelineError, match="has not answered"):
        submit._followed("1", Path("log"), Path("code"))


def warned(command: str, capsys: pytest.CaptureFixture[str], **slurm: Any) -> int:
    """Submit ``command``; when there is a file "ready", warn its batch shell, as Slurm does. Return the job's code."""
    submit.slurm(config(**slurm), ["bash", "-c", command], dry_run=True)
    submit._submitted(capsys.readouterr().out)
    waited_for(Path("ready"))
    os.kill(int(Path("shell").read_text()), signal.SIGUSR1)
    return shell(command, **slurm)


def test_a_requeued_job_waits_for_the_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    """SIGTERM ends DVC at once; the batch shell and the lock last until the stage has ended."""
    stage = f"trap 'sleep 0.5; test -e {alone.LOCK} && touch saved; exit' TERM; touch ready; sleep 9 & wait"
    assert warned(f"bash -c {shlex.quote(stage)}; exit", capsys) == 128 + signal.SIGTERM
    assert Path("saved").exists()
    assert Path("asked").read_text() == "requeue 1\n"


def test_requeues_are_limited(capsys: pytest.CaptureFixture[str]) -> None:
    assert warned("touch ready; sleep 1; exit 7", capsys, restarts=0) == 7
    assert not Path("asked").exists()


def test_the_script_asks_for_what_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    asked = config(nodes=2, gpus=4, time="04:00:00", partition="long", account="me", options=["--qos=high"])
    submit.slurm(asked, ["dvc", "repro", "train@ddp"], dry_run=True)
    script = capsys.readouterr().out
    options = re.findall("^#SBATCH (.*)$", script, re.MULTILINE)
    name = options[0].removeprefix("--job-name=")
    assert re.fullmatch(r"dvc-repro-train-ddp-no-commit-\w{4}", name)
    assert options[1:] == [
        *("--nodes=2", "--ntasks-per-node=1", "--exclusive", "--gpus-per-node=4", "--time=04:00:00"),
        *("--partition=long", "--account=me", "--qos=high", "--output=.cache/jobs/%x-%j.log", "--open-mode=append"),
        *("--requeue", "--dependency=singleton", "--signal=B:USR1@120"),
    ]
    assert not Path("submissions").exists()


@pytest.mark.parametrize(
    ("runtime", "inside"),
    [
        ("apptainer", 'apptainer exec --nv --bind="$PWD" --pwd="$PWD" \'an image.sif\' dvc repro &'),
        ("pyxis", "srun --ntasks=1 --container-image='an image.sif' --container-mounts=\"$PWD:$PWD\" "),
    ],
)
def test_a_container_runs_the_command(runtime: str, inside: str, capsys: pytest.CaptureFixture[str]) -> None:
    submit.slurm(config(container="an image.sif", runtime=runtime, gpus=1), ["dvc", "repro"], dry_run=True)
    assert f"submit here -- {inside}" in capsys.readouterr().out


def test_a_container_reaches_one_node_only() -> None:
    with pytest.raises(ConfigError, match=r"launch\.slurm\.nodes: found 2 with a container"):
        config(container="image.sif", nodes=2)


def test_no_stage_depends_on_where_it_runs() -> None:
    plain, launched = parse({"variants": {"baseline": {}}}), config(nodes=2, account="me")
    described = [stages.described(config, plans.plans(config, CPU_ONLY)) for config in (plain, launched)]
    assert described[0] == described[1]


def test_the_command_follows_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    Path("params.yaml").write_text("variants: {baseline: {}}\n")
    assert cli.main(["submit", "slurm", "--dry-run", "--", "dvc", "repro", "--force"]) == 0
    assert "submit here -- dvc repro --force &" in capsys.readouterr().out


def hold(**changes: Any) -> None:
    """Let the lock name a holder, which does not hold it."""
    alone.JOBS.mkdir(parents=True, exist_ok=True)
    alone.LOCK.write_text(json.dumps(alone._this_process() | changes))


@contextmanager
def held() -> Iterator[None]:
    hold()
    with alone.LOCK.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


ELSEWHERE = {"host": "n9", "boot": "another", "job": "7", "who": "job 7 on n9"}


@pytest.mark.parametrize(
    ("holder", "variables", "refused"),
    [
        (ELSEWHERE, {"STATE": "RUNNING"}, "job 7 on n9 works in this checkout"),
        (ELSEWHERE, {"STATE": "PENDING"}, "job 7 on n9"),
        (ELSEWHERE, {"SILENT": "yes"}, "job 7 on n9"),
        (ELSEWHERE, {"STATE": "ended"}, None),
        (ELSEWHERE, {}, None),  # Slurm knows it no longer
        (ELSEWHERE, {"SLURM_JOB_ID": "7", "SILENT": "yes"}, None),  # put back into the queue, and started here
        (ELSEWHERE | {"job": None, "who": "process 3 on n9"}, {}, "process 3 on n9"),
        ({}, {}, None),
        ({"boot": "another"}, {}, None),
        ({"host": "a container of this machine"}, {}, None),
    ],
)
def test_a_free_lock_counts_until_its_holder_has_ended(
    holder: dict[str, Any], variables: dict[str, str], refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(**holder)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if refused is None:
        alone.check()
        return
    with pytest.raises(PipelineError, match=refused):
        alone.check()


@pytest.mark.parametrize("written", ["{", "[]", '{"host": "n9"}'])
def test_a_lock_that_cannot_be_read_is_refused(written: str) -> None:
    hold()
    alone.LOCK.write_text(written)
    with pytest.raises(PipelineError, match=r"an unknown process works in this checkout: .* remove "):
        alone.check()


def test_nothing_starts_beside_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    with held():
        assert cli.main(["environment"]) == 2
        assert f"process {os.getpid()} on " in capsys.readouterr().err
        assert here("touch ran").returncode == 2
        with pytest.raises(PipelineError, match="works in this checkout"):
            shell("touch ran")
    assert not Path("ran").exists()
    assert not Path("submissions").exists()


def test_the_lock_lasts_as_long_as_the_command() -> None:
    done = here(
        f"cat {alone.LOCK}; {sys.executable} -m pipeline environment; (sleep 0.5; test -e {alone.LOCK} && touch held) &"
    )
    assert "params.yaml is missing" in done.stderr  # so the stage was not refused
    assert json.loads(done.stdout)["job"] is None
    assert Path("held").exists()
    assert not alone.LOCK.read_text()


def test_a_killed_holder_s_command_keeps_the_lock() -> None:
    text = "touch ready; until test -e go; do sleep 0.05; done"
    holder = subprocess.Popen([sys.executable, "-m", "pipeline", "submit", "here", "--", "bash", "-c", text])
    waited_for(Path("ready"))
    holder.kill()
    holder.wait()
    with pytest.raises(PipelineError, match=f"process {holder.pid} on "):
        alone.check()
    Path("go").touch()
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with suppress(PipelineError):
            alone.check()
            return
        time.sleep(0.02)
    raise AssertionError("the lock lasts")


def test_a_job_inside_a_job_leaves_the_lock() -> None:
    assert here(f"{sys.executable} -m pipeline submit here -- true && test -e {alone.LOCK}").returncode == 0


def test_a_signal_is_left_to_the_command() -> None:
    command = [sys.executable, "-m", "pipeline", "submit", "here", "--", "bash", "-c", "touch ready; sleep 1; exit 6"]
    process = subprocess.Popen(command)
    waited_for(Path("ready"))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 6


@pytest.mark.parametrize(
    ("holder", "during"), [({"boot": "another"}, "test ! -e {}"), ({}, "test -e {}"), (None, None)]
)
def test_dvc_s_lock_goes_with_a_holder_elsewhere(holder: dict[str, Any] | None, during: str | None) -> None:
    """DVC itself judges process ids of this boot. Without a holder, a process id may be any host's."""
    lock = Path(".dvc/tmp/rwlock")
    lock.parent.mkdir(parents=True)
    lock.write_text(json.dumps({"write": {"/data": {"pid": os.getpid(), "cmd": "dvc repro"}}, "read": {}}))
    if holder is not None:
        hold(**holder)
    done = here((during or "").format(lock))
    assert lock.exists() == (during != "test ! -e {}")  # the process, this one, still lives
    assert done.returncode == (0 if during else 2)
    if not during:
        assert f"process {os.getpid()} (dvc repro) works in this checkout, perhaps on another host" in done.stderr


def test_dvc_s_lock_is_read_as_dvc_writes_it() -> None:
    from dvc.fs import localfs
    from dvc.rwlock import rwlock

    Path(".dvc/tmp").mkdir(parents=True)
    with rwlock(".dvc/tmp", localfs, "dvc repro", ["/data"], ["/models"], False):
        assert alone._users_of_dvc() == 2 * [{"pid": os.getpid(), "cmd": "dvc repro"}]
    assert alone._users_of_dvc() == []


def test_dvc_s_lock_goes_with_its_processes() -> None:
    """SIGTERM ends DVC before it clears its lock, and the next start may be on another host."""
    entry = '{"write": {"/data": {"pid": %d, "cmd": "dvc"}}, "read": {}}'
    lock = Path(".dvc/tmp/rwlock")
    lock.parent.mkdir(parents=True)
    lock.write_text("{}")  # as DVC leaves it
    assert here(f"printf '{entry}' $$ >{lock}").returncode == 0
    assert not lock.exists()


AS_ELSEWHERE = "import psutil; psutil.pid_exists = lambda pid: False; from dvc.cli import main; exit(main())"
"""Python code of a command of DVC that sees this host's processes as another host does."""


def test_dvc_on_another_host_is_refused_while_a_stage_runs() -> None:
    dvc = [sys.executable, "-m", "dvc"]
    wait = "bash -c 'touch ready; until test -e go; do sleep 0.05; done; cp given made'"
    stage = f"{sys.executable} -m pipeline submit here -- {wait}"
    Path("dvc.yaml").write_text(json.dumps({"stages": {"wait": {"cmd": stage, "deps": ["given"], "outs": ["made"]}}}))
    Path("given").write_text("content")
    subprocess.run([*dvc, "init", "--quiet", "--no-scm"], check=True)
    words = [sys.executable, "-m", "pipeline", "submit", "here", "--", *dvc, "repro"]
    job = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    waited_for(Path("ready"))
    elsewhere = subprocess.run([sys.executable, "-c", AS_ELSEWHERE, "status"], capture_output=True, text=True)
    Path("go").touch()
    printed = job.communicate()[1]
    assert "Unable to acquire lock" in elsewhere.stderr
    assert (job.returncode, printed) == (0, "")


def jobset(capsys: pytest.CaptureFixture[str], **own: Any) -> Any:
    """Return what ``submit kubernetes`` prints. The models drop keys that they do not know, and refuse values of other
    types."""
    from kubeflow_trainer_api import models

    own = {"image": "pipeline", "claim": "work", "resources": {"nvidia.com/gpu": 4, "memory": "64Gi"}} | own
    content = {"variants": {"baseline": {}}, "launch": {"kubernetes": own | {"environment": {"A": "'b' \"c\""}}}}
    submit.kubernetes(parse(content), ["dvc", "repro"])
    made = yaml.safe_load(capsys.readouterr().out)
    assert models.JobsetV1alpha2JobSet.from_dict(made).to_dict() == made
    return made


def containers(made: Any) -> dict[str, Any]:
    """Return the container of each replicated job."""
    jobs = made["spec"]["replicatedJobs"]
    return {job["name"]: job["template"]["spec"]["template"]["spec"]["containers"][0] for job in jobs}


def test_a_jobset_of_one_pod_runs_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    container = containers(jobset(capsys))["first"]
    assert container["args"][-2:] == ["dvc", "repro"]
    assert {"name": "A", "value": "'b' \"c\""} in container["env"]


def test_a_jobset_of_pods_starts_the_others_first(capsys: pytest.CaptureFixture[str]) -> None:
    made = jobset(capsys, pods=3, secret="pipeline-hosts")
    others, first = made["spec"]["replicatedJobs"]
    assert (others["name"], others["template"]["spec"]["parallelism"]) == ("others", 2)
    assert first["dependsOn"] == [{"name": "others", "status": "Ready"}]
    assert made["spec"]["successPolicy"]["targetReplicatedJobs"] == ["first"]
    assert containers(made)["others"]["args"] == ["python", "-m", "pipeline", "host", "--listen", "$(POD_IP)"]
    names = {variable["name"]: variable.get("value") for variable in containers(made)["first"]["env"]}
    subdomain = made["metadata"]["name"]
    hosts = [f"{subdomain}-{pod}.{subdomain}" for pod in ("first-0-0", "others-0-0", "others-0-1")]
    assert names["PIPELINE_PODS"].split() == hosts


def test_kubernetes_needs_an_image_and_a_claim() -> None:
    with pytest.raises(ConfigError, match=r"launch\.kubernetes: found null; expected image and claim"):
        submit.kubernetes(config(), ["dvc", "repro"])
    pods = {"image": "pipeline", "claim": "work", "pods": 2}
    with pytest.raises(ConfigError, match=r"launch\.kubernetes\.secret: found null; several pods need a key"):
        submit.kubernetes(parse({"variants": {"baseline": {}}, "launch": {"kubernetes": pods}}), ["dvc", "repro"])
