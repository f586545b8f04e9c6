"""Check whether throughput, memory or accuracy of a commit is worse than another commit's by more than the margins.

The *head* is this work tree, with its uncommitted changes. The *base* is a revision, which is measured side by side
with the head on this machine. A ratio is the head's figure divided by the base's.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline import environment
from pipeline.comparison import advice
from pipeline.comparison.verdicts import HEAP_BYTES
from pipeline.environment import stages
from pipeline.errors import PipelineError, say, spelled
from pipeline.files import differing, write_text
from pipeline.gate.copies import output
from pipeline.gate.decision import Gated, GateError, Held, supported
from pipeline.gate.side_by_side import measured
from pipeline.pages import render
from pipeline.params import Config
from pipeline.plans import plans
from pipeline.results import REPORTS, read_document, stage_of
from pipeline.results.figures import QUANTITIES

__all__ = ["JSON_FILE", "MARKDOWN_FILE", "GateError", "check_current", "confirm", "run"]

JSON_FILE = REPORTS / "gate.json"
MARKDOWN_FILE = REPORTS / "gate.md"
COMPARISON_FILE = REPORTS / "comparison.json"
STAGES = ("fetch", "prepare", "train", "bench")
"""The stages whose code and settings a comparison's figures depend on."""


def run(config: Config, against: str) -> int:
    """Compare this work tree with the revision ``against``, write ``reports/gate.*``, and print the Markdown.

    Returns the exit code: 0 if nothing got worse, 1 if something got worse, 3 if the outcome is untrusted or undecided
    (``decision.EXIT_CODES``). Raises GateError and other PipelineErrors if something could not be measured or decided;
    then no ``reports/gate.*`` exists, because earlier files are removed first.
    """
    for file in (JSON_FILE, MARKDOWN_FILE):
        file.unlink(missing_ok=True)
    try:
        gated = measured(config, against)
        text = spelled(markdown(gated))
        write_text(JSON_FILE, gated.to_json())
    except PipelineError:
        raise
    except Exception as error:  # Python would exit with 1, which means that something got worse
        traceback.print_exc()
        raise GateError(
            f"nothing was decided, because of the error above: {error!r}. If one side is of another version of the "
            "pipeline, compare this work tree with a newer commit."
        ) from error
    write_text(MARKDOWN_FILE, text)
    say(text, end="")
    return gated.exit_code


def confirm(config: Config) -> None:
    """Check ``reports/gate.json`` against its own raw samples and this machine, before a promotion relies on it.

    Raises ResultError if the file cannot be read. Raises GateError if it says "passed" but its samples do not support
    this with the present settings, or if it was made in another environment or with other code and settings. Does
    nothing if the file is missing, because ``promote`` itself refuses then.
    """
    if not JSON_FILE.exists():
        return
    again = "run `python -m pipeline gate --against REVISION` again"
    gated = read_document(JSON_FILE, Gated, again)
    content = environment.read()
    present = environment.hash_of(content, "variants", *config.variants)
    if gated.head.environment != present:
        raise GateError(
            f"{JSON_FILE}: the head was measured in environment {gated.head.environment[:12]}, but environment.json "
            f"describes environment {present[:12]}; {again}."
        )
    if gated.head.made_of != stages.made_of(content):
        raise GateError(
            f"{JSON_FILE}: the head ran with other code, settings or plans than environment.json records; {again}."
        )
    try:
        outcome = supported(gated, config.compare, config.gate.must_see)
    except (KeyError, ValueError) as error:
        raise GateError(f"{JSON_FILE}: its arms do not fit together ({error!r}); {again}.") from None
    if gated.outcome == "passed" != outcome:
        raise GateError(
            f"{JSON_FILE} says passed, but its samples say {outcome}: the file was edited, or gate.must_see or "
            f"compare.max_spread was made stricter; {again}."
        )


def check_current(config: Config) -> None:
    """Raise GateError unless the comparison was made from the present code, settings and files. `dvc status` says
    whether files changed."""
    recorded, present = environment.read(), stages.described(config, plans(config, environment.machine(config.launch)))
    entries = [("stages", stage) for stage in STAGES]
    entries += [(section, variant) for section in ("variants", "teachers") for variant in config.variants]
    changed = [
        path
        for section, name in entries
        for path, *_ in differing(recorded.get(section, {}).get(name), present.get(section, {}).get(name), name)
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


def markdown(gated: Gated) -> str:
    """Return the outcome in the first line, then the figures in a table, then the remarks."""
    rows = [*gated.variants, *([gated.together] if gated.together else [])]
    least = any(row.memory and row.memory.margin > gated.margins.memory for row in rows)
    return render(
        "gate.md",
        gated=gated,
        rows=rows,
        decided=lambda decision: _decided(rows, decision),
        rounds=min(len(arm.samples) for side in (gated.base, gated.head) for arm in side.arms),
        remarks=dict.fromkeys([*_open(gated, rows), *gated.hidden, *gated.unseen, *gated.remarks]),
        confidences=advice.confidences(row.known for row in rows),
        least_mib=HEAP_BYTES // 2**20 if least else 0,
        margin_of_accuracy=advice.percentage_points(gated.margins.accuracy),
    )


def _decided(rows: Sequence[Held], decision: str) -> str:
    """Return the quantities with this ``decision``, such as "throughput (baseline, ddp), accuracy (ddp)"."""
    variants: dict[str, list[str]] = {noun: [] for noun in (*(figure.noun for figure in QUANTITIES), "accuracy")}
    for row in rows:
        for noun, difference in row.known.items():
            variants[noun] += [row.variant] if difference.decision == decision else []
    return ", ".join(f"{noun} ({', '.join(names)})" for noun, names in variants.items() if names)


def _open(gated: Gated, rows: Sequence[Held]) -> Iterator[str]:
    """Yield the reasons why figures are untrusted or undecided, and what correlated rounds did to intervals. If
    something is worse, leave out the reasons of undecided ratios."""
    explained = ("untrusted",) if gated.outcome == "worse" else ("untrusted", "undecided")
    for row in rows:
        for figure, ratio in row.ratios.items():
            if ratio.decision in explained:
                of_all = ratio.decision == gated.noises[figure].decision == "untrusted"  # the machine's noise
                whose = "" if of_all else f"{row.variant}: "
                yield from (whose + why for why in advice.ratio_reasons(ratio, figure, gated.cost))
            yield from (f"{row.variant}: {why}" for why in advice.correlation_reasons(ratio, figure))
        yield from (f"{row.variant}: {why}" for why in (advice.accuracy_reasons(row.accuracy) if row.accuracy else []))
