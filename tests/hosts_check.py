"""Two network namespaces as two hosts, joined by a link that can be shaped and cut. Needs root, and `ip` and `tc`.

    python -m tests.hosts_check

Checks that a training over both gives the weights of one host, without any variable about interfaces; that the report
shows a slow link as exchange, and names the host whose core is shared; that the probe finds the speed of a link, and
says that it is slow; and that a link that is cut ends the training within a minute, with the host's name. The figures
need two cores and little other load.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from pipeline import results
from pipeline.params import Config, parse
from pipeline.scaling.probe import Probe
from tests.workspaces import furnish

ROOT = Path(__file__).parent.parent
PREFIX = "hosts-check-"
FIRST, SECOND = HOSTS = [f"{PREFIX}{os.getpid()}-{number}" for number in (1, 2)]
PARAMS: dict[str, Any] = {
    "fetch": {"dataset": "digits"},
    "train": {"device": "cpu", "seeds": [0], "epochs": 4, "batch_size": 32, "learning_rate": 0.05},
    "bench": {"max_minutes": 0.01, "window_seconds": 0.5, "max_foreign_load": 1.0},
    "compare": {"max_spread": 3.0},  # a busy machine must not hide what is planted
    "publish": {"live": False},
    "launch": {"hosts": HOSTS, "on_host": "ip netns exec {host} taskset -c 1", "address": "10.77.0.1"},
    "variants": {"baseline": {}, "ddp": {"parallelism": "ddp", "processes": 2}},
}
MOST_SECONDS = 60.0
"""How long a training may take to notice that its link is cut."""
MOST_SESSIONS = 3


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def clear(host: str) -> None:
    """End all processes of a namespace, and remove it, if there is one."""
    while pids := subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout.split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", host], stderr=subprocess.DEVNULL)


@contextmanager
def namespaces() -> Iterator[None]:
    """Make both namespaces and the link between them, while the block runs. SIGINT and SIGTERM end it, too; what a
    check that was killed has left is removed first."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    for left in Path("/var/run/netns").glob(f"{PREFIX}*-[12]"):
        if not psutil.pid_exists(int(left.name.split("-")[2])):
            clear(left.name)
    try:
        for host in HOSTS:
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
        ip("link", "add", "hv1", "netns", FIRST, "type", "veth", "peer", "name", "hv2", "netns", SECOND)
        for number, host in enumerate(HOSTS, 1):
            ip("-n", host, "addr", "add", f"10.77.0.{number}/24", "dev", f"hv{number}")
            ip("-n", host, "link", "set", f"hv{number}", "up")
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one must not interrupt this
            signal.signal(number, signal.SIG_IGN)
        for host in HOSTS:
            clear(host)


def shape(rate: str) -> None:
    """Limit the link in both directions to ``rate``, such as 20mbit."""
    for number, host in enumerate(HOSTS, 1):
        words = ["dev", f"hv{number}", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
        subprocess.run(["ip", "netns", "exec", host, "tc", "qdisc", "replace", *words], check=True)


def begun(*words: str, **changes: Any) -> tuple[Config, subprocess.Popen[str]]:
    """Begin a command in the first namespace, on the first core, with ``changes`` of the section train."""
    params = PARAMS | {"train": PARAMS["train"] | changes}
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    command = ["ip", "netns", "exec", FIRST, "taskset", "-c", "0", sys.executable, "-m", "pipeline", *words]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    variables = {name: value for name, value in variables.items() if not name.endswith("_SOCKET_IFNAME")}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return parse(params), subprocess.Popen(command, env=variables, text=True, **pipes)


def trained(**changes: Any) -> results.Run:
    """Return the record of a whole training."""
    shutil.rmtree("models", ignore_errors=True)
    config, process = begun("train", "ddp", **changes)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return results.read(results.result_file("ddp"), config).runs[0]


def compared(shown: Callable[[], bool]) -> float:
    """Train and measure both variants; return ``exchange()``.

    Up to ``MOST_SESSIONS`` are measured until the report has what must be ``shown``: other work on this machine can
    spoil a session.
    """
    commands: list[list[str]] = [["environment"], ["train", "baseline"], ["train", "ddp"], ["bench"], ["compare"]]
    for _ in range(MOST_SESSIONS):
        for words in commands:
            _, process = begun(*words)
            output, _ = process.communicate(timeout=1200)
            assert process.returncode == 0, output
        if shown():
            break
        commands = [["bench", "--again"], ["compare"]]
    return exchange()


def exchange() -> float:
    """Return the share of a step for ddp's exchange by the report; NaN if it is not known."""
    variant = json.loads((results.REPORTS / "comparison.json").read_text(encoding="utf-8"))["variants"][1]
    return float(variant["figures"].get("exchange_fraction", math.nan))


def report() -> str:
    return (results.REPORTS / "comparison.md").read_text(encoding="utf-8")


def probe(megabit_per_second: int) -> None:
    """Check that the probe finds the link's speed, and names a link that is slower than it states (10 Gbit/s)."""
    shape(f"{megabit_per_second}mbit")
    _, process = begun("probe")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    found = Probe.model_validate_json(Path("reports/probe.json").read_text(encoding="utf-8"))
    large = found.of(2)[-1]
    speed = 8e-6 * large.speed(min(large.seconds))  # other work on this machine takes time of the rest
    print(f"{megabit_per_second} Mbit/s: the probe finds {speed:.1f}")
    assert abs(speed / megabit_per_second - 1) < 0.15
    assert f"The link between {FIRST} and {SECOND} is slower than it should be" in output


def check() -> None:
    fast, near = trained(), compared(lambda: exchange() > 0)
    shutil.rmtree(results.KEPT_BENCHES)  # a bench beside other work, or over another link, would go on from it
    busy = [subprocess.Popen(["taskset", "-c", "1", "sh", "-c", "while :; do :; done"]) for _ in range(3)]
    try:
        compared(lambda: f"wait for process 1 on {SECOND}" in report())
        slow_host = next((line for line in report().splitlines() if "other processes wait" in line), "no host is named")
    finally:
        for neighbour in busy:
            neighbour.kill()
    shutil.rmtree(results.KEPT_BENCHES)
    shape("20mbit")
    slow, far = trained(), compared(lambda: exchange() > 0)
    launch, PARAMS["launch"] = PARAMS["launch"], {}
    alone = trained()
    PARAMS["launch"] = launch
    assert fast.model_sha256 == slow.model_sha256 == alone.model_sha256, "weights differ from those of one host"
    print("equal weights on one host, on two, and over a slow link")
    speeds = [run.samples_per_second or 0.0 for run in (alone, fast, slow)]
    print("samples/s on one host, on two, over 20 Mbit/s:", *(f"{speed:,.0f}" for speed in speeds))
    assert speeds[2] < 0.8 * speeds[1], "the slow link does not show"
    print(f"share of a step for the exchange: {near:.0%}, and over 20 Mbit/s: {far:.0%}")
    assert far > near, "the slow link does not show as exchange"
    print(slow_host)
    assert f"wait for process 1 on {SECOND}" in slow_host, "the host of the shared core is not named"
    for rate in (100, 20):
        probe(rate)
    shutil.rmtree("models")
    _, process = begun("train", "ddp", epochs=2000)
    history = results.history_file("ddp")
    history.unlink()
    while not (history.exists() and len(history.read_text(encoding="utf-8").splitlines()) > 2):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    ip("-n", SECOND, "link", "set", "hv2", "down")
    cut = time.monotonic()
    output, _ = process.communicate(timeout=600)
    print(f"after {time.monotonic() - cut:.0f} s without a link: {output.splitlines()[-1]}")
    assert time.monotonic() - cut < MOST_SECONDS
    assert process.returncode == 2
    assert f"rank 1 on {SECOND}: it is silent for 30 s" in output


def between_hosts(check: Callable[[], object]) -> int:
    """Call ``check`` in an empty directory with the data, while there are both hosts. Return the exit code: 2 if this
    machine cannot have them."""
    there = {"root": os.geteuid() == 0} | {tool: shutil.which(tool) for tool in ("ip", "tc", "taskset")}
    missing = [part for part, installed in there.items() if not installed]
    if missing:
        print(f"hosts-check needs {', '.join(missing)}; on Debian and Ubuntu: sudo apt-get install iproute2")
        return 2
    allowed = subprocess.run(["ip", "netns", "add", FIRST], stderr=subprocess.PIPE, text=True)
    if allowed.returncode:
        print(f"hosts-check cannot make network namespaces here: {allowed.stderr.strip()}")
        return 2
    ip("netns", "del", FIRST)
    with tempfile.TemporaryDirectory() as folder, chdir(folder), namespaces():
        furnish(parse(PARAMS))
        check()
    return 0


if __name__ == "__main__":
    sys.exit(between_hosts(check))
