"""Test the projections of ``scale`` on jobs with known arithmetic, over links of known speed. Needs root, ip and tc.

    python -m benchmarks.scaling [ddp | fsdp] [NUMBER]

Each of four network namespaces is a host, joined to the others by a link that is shaped. A layer of the model sleeps
for a known time a sample, and has parameters of a known size, whose gradients real collectives send, with fsdp also
the parameters. For each job, ``scale`` measures two hosts and projects four; then it measures four. Three predictions
come of it: that of two and that of four without their own measurement, and that of four by two. ``NUMBER``: of jobs;
all by default.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from benchmarks import machines
from benchmarks.pairs import ROOT

HOSTS = [f"scaling-{number}" for number in range(1, 5)]
BRIDGE = "scaling-bridge"
LAYERS = 6
RATES = (100, 200, 500, 1000)
"""Of each host's link in each direction, in Mbit/s."""
SIZES = (64, 256)
"""Of a layer's gradients, in KiB."""
MODEL = """
import time

import torch
from torch import nn


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs, seconds):
        context.seconds = seconds * len(inputs)
        time.sleep(context.seconds)
        return inputs.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(2 * context.seconds)
        return gradient.clone(), None


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.inner = nn.Identity()  # what has a part of its own is a block, which fsdp gathers by itself

    def forward(self, inputs):
        return Sleep.apply(inputs * self.weight.mean(), 1e-4)


def make(classes, layers, size, **_):
    return nn.Sequential(nn.Flatten(), *(Layer(size) for _ in range(layers)), nn.Linear(64, classes))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def namespaces() -> Iterator[None]:
    """Make the hosts and their links, while the block runs."""
    try:
        ip("netns", "add", BRIDGE)
        ip("-n", BRIDGE, "link", "add", "bridge", "type", "bridge")
        ip("-n", BRIDGE, "link", "set", "bridge", "up")
        for number, host in enumerate(HOSTS, 1):
            ip("netns", "add", host)
            ip("link", "add", "uplink", "netns", host, "type", "veth", "peer", "name", f"to{number}", "netns", BRIDGE)
            ip("-n", BRIDGE, "link", "set", f"to{number}", "master", "bridge", "up")
            ip("-n", host, "addr", "add", f"10.79.0.{number}/24", "dev", "uplink")
            for name in ("lo", "uplink"):
                ip("-n", host, "link", "set", name, "up")
        yield
    finally:
        for host in (*HOSTS, BRIDGE):
            subprocess.run(["ip", "netns", "del", host], stderr=subprocess.DEVNULL)


def shape(rate: int) -> None:
    """Limit what each host sends to ``rate`` Mbit/s."""
    words = ["root", "tbf", "rate", f"{rate}mbit", "burst", "32kb", "latency", "50ms"]
    for host in HOSTS:
        subprocess.run(["ip", "netns", "exec", host, "tc", "qdisc", "replace", "dev", "uplink", *words], check=True)


def params(hosts: int, size: int, parallelism: str) -> dict[str, Any]:
    """``size``: the number of a layer's parameters."""
    variant = {"parallelism": parallelism} | ({"bucket_mb": 4 * size / 2**20} if parallelism == "ddp" else {})
    return {
        "fetch": {"dataset": "digits"},
        "train": {
            "device": "cpu", "batch_size": 64, "learning_rate": 0.001, "seeds": [0],
            "model": "sleeping:make", "model_options": {"layers": LAYERS, "size": size},
        },
        "bench": {"max_foreign_load": 1.0, "max_rounds": 6, "window_seconds": 1.0},
        "launch": {"hosts": HOSTS[:hosts], "on_host": "ip netns exec {host}", "address": "10.79.0.1"},
        "variants": {"baseline": {}, parallelism: variant},
    }  # fmt: skip


def scaled(hosts: int, size: int, parallelism: str) -> dict[int, dict[str, Any]]:
    """Run ``scale`` on the first hosts. Return number of processes -> point of the curve."""
    Path("params.yaml").write_text(yaml.safe_dump(params(hosts, size, parallelism)), encoding="utf-8")
    variables = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path.cwd()}"}
    for words in (
        ["environment"],
        ["fetch"],
        ["prepare"],
        ["scale", parallelism, "--up-to", "4", "--minutes", "0.1"],
    ):
        command = ["ip", "netns", "exec", HOSTS[0], sys.executable, "-m", "pipeline", *words]
        subprocess.run(command, env=variables, check=True)
    (curve,) = json.loads(Path("reports/scaling.json").read_text(encoding="utf-8"))["curves"]
    return {point["place"]["processes"]: point for point in curve["points"]}


def prediction(kind: str, projected: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": kind,
        "projected": [projected[end] for end in ("estimate", "low", "high")],
        "measured": [measured[end] for end in ("estimate", "low", "high")],
        "error_fraction": projected["estimate"] / measured["estimate"] - 1,
        "inside": projected["low"] <= measured["estimate"] <= projected["high"],
    }


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces go
    sharded = "fsdp" in sys.argv
    parallelism = "fsdp" if sharded else "ddp"
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    jobs = [*product(RATES, SIZES)][: numbers[0] if numbers else None]
    made: dict[str, list[dict[str, Any]]] = {}
    with namespaces():
        for rate, size in jobs:
            shape(rate)
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                Path("sleeping.py").write_text(MODEL, encoding="utf-8")
                two, four = (scaled(hosts, 256 * size, parallelism) for hosts in (2, 4))
                os.chdir(ROOT)
            of_job = [
                prediction("2, left out", two[2]["left_out"], two[2]["speedup"]),
                prediction("4, left out", four[4]["left_out"], four[4]["speedup"]),
                prediction("4 by 2", two[4]["speedup"], four[4]["speedup"]),
            ]
            made["fsdp, " * sharded + f"{rate} Mbit/s, {LAYERS} x {size} KiB"] = of_job
            for one in of_job:
                print(rate, size, one, flush=True)
    figure = {"jobs": made}
    name = "sleeping layers" + ", fsdp" * sharded
    print(machines.keep(machines.FIGURES, "scaling-", "projections", name, figure)[0])


if __name__ == "__main__":
    main()
