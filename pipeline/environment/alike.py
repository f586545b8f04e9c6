"""What several hosts must have in common."""

from __future__ import annotations

from typing import Any

from pipeline import environment, params, plans
from pipeline.environment import stages
from pipeline.files import PREPARED, file_sha256


def record() -> dict[str, Any]:
    """Return the plain values of this host on which numbers depend: settings, code, data, hardware and software.

    They are computed, not read from environment.json, which hosts with one file system share. Raises PipelineError.
    """
    config, machine = params.load(), environment.machine()
    fingerprint = environment.fingerprint(plans.relied_on(config))
    described = stages.described(config, plans.plans(config, machine))
    parts = [*described["stages"].values(), *described["variants"].values()]
    return {
        **config.model_dump(mode="json", exclude={"launch", "publish"}),
        "code": {file: digest for part in parts for file, digest in part["code"].items()},
        "data": {file.name: file_sha256(file) for file in PREPARED.glob("*.json")},
        "machine": machine.model_dump(mode="json", exclude={"installed"}) | {"installed": sorted(machine.installed)},
        "hardware": fingerprint["hardware"],
        "software": fingerprint["software"] | fingerprint["relied_on"],
        "environment": fingerprint["settings"],
    }
