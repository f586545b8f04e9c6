"""Check whether throughput, memory or accuracy of a commit is worse than another commit's by more than the margins.

The *head* is this work tree, with its uncommitted changes. The *base* is a revision, which is measured side by side
with the head on this machine. A ratio is the head's figure divided by the base's.
"""

from __future__ import annotations

import traceback

from pipeline import environment
from pipeline.environment import stages
from pipeline.errors import PipelineError, say, spelled
from pipeline.files import write_text
from pipeline.gate.current import check_current
from pipeline.gate.decision import Gated, GateError, supported
from pipeline.gate.markdown import markdown
from pipeline.gate.side_by_side import measured
from pipeline.params import Config
from pipeline.results import REPORTS, read_document

__all__ = ["JSON_FILE", "MARKDOWN_FILE", "GateError", "check_current", "confirm", "run"]

JSON_FILE = REPORTS / "gate.json"
MARKDOWN_FILE = REPORTS / "gate.md"


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
        raise GateError(f"nothing was decided, because of the error above: {error!r}") from error
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
    here = environment.hash_of(content, "variants", *config.variants)
    if gated.head.environment != here:
        raise GateError(
            f"{JSON_FILE}: the head was measured in environment {gated.head.environment[:12]}, but environment.json "
            f"describes environment {here[:12]}; {again}."
        )
    if gated.head.made_of != stages.made_of(content):
        raise GateError(
            f"{JSON_FILE}: the head ran with other code, settings or plans than environment.json records; {again}."
        )
    try:
        outcome = supported(gated, config.compare.baseline, config.compare.max_spread, config.gate.must_see)
    except (KeyError, ValueError) as error:
        raise GateError(f"{JSON_FILE}: its arms do not fit together ({error!r}); {again}.") from None
    if gated.outcome == "passed" != outcome:
        raise GateError(
            f"{JSON_FILE} says passed, but its samples say {outcome}: the file was edited, or gate.must_see or "
            f"compare.max_spread was made stricter; {again}."
        )
