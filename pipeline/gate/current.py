"""Check that this checkout's comparison is up to date, before a promotion relies on it."""

from __future__ import annotations

import json
import sys
from typing import Any

from pipeline import environment, results
from pipeline.environment import stages
from pipeline.gate.copies import output
from pipeline.gate.decision import GateError
from pipeline.params import Config
from pipeline.plans import plans
from pipeline.results import REPORTS, stage_of

COMPARISON_FILE = REPORTS / "comparison.json"
STAGES = ("fetch", "prepare", "train", "bench")
"""The stages whose code and settings a comparison's figures depend on."""


def check_current(config: Config) -> None:
    """Raise GateError unless the comparison was made from the present code, settings and files. `dvc status` says
    whether files changed."""
    made_of, here = environment.read(), stages.described(config, plans(config, environment.machine()))
    described = [("stages", each) for each in STAGES]
    described += [(section, each) for section in ("variants", "teachers") for each in config.variants]
    changed = [
        path
        for section, name in described
        for path, *_ in results.differing(made_of.get(section, {}).get(name), here.get(section, {}).get(name), name)
    ]
    unknown = f"`dvc status` failed, so {COMPARISON_FILE} may not match the present files; fix that error"
    trained = (stage_of(name, variant) for name, variant in config.variants.items())
    stages_held = [*trained, "bench", "compare"]
    text = output([sys.executable, "-m", "dvc", "status", "--json", *stages_held], unknown)
    try:
        changed += [name for of_stage in json.loads(text).values() for change in of_stage for name in _changed(change)]
    except (AttributeError, TypeError, ValueError) as error:
        raise GateError(f"{unknown}: it wrote {text!r} ({error})") from None
    if changed:
        raise GateError(
            f"{COMPARISON_FILE} is out of date: since it was made, {', '.join(dict.fromkeys(changed))} "
            "changed. Run `dvc repro`, which measures it again."
        )


def _changed(change: Any) -> list[str]:
    """Return the changed names in one entry of `dvc status`. Among a stage's outputs, only the comparison counts."""
    if not isinstance(change, dict):
        return [str(change).removeprefix("changed ")]  # the stage's command
    names = [path for path in change.get("changed outs", {}) if path == str(COMPARISON_FILE)]
    for path, how in change.get("changed deps", {}).items():
        names.append(f"{path} ({', '.join(how)})" if isinstance(how, dict) else path)
    return names
