"""Check whether throughput, memory or accuracy of a commit is worse than another commit's by more than the margins.

The *head* is this work tree, with its uncommitted changes. The *base* is a revision, which is measured side by side
with the head on this machine. It can also be a ``reports/comparison.json`` that was recorded in the same environment;
then only accuracy is decided, and all other figures are advisory. A ratio is the head's figure divided by the base's.
"""

from __future__ import annotations

import traceback
from pathlib import Path

from pipeline import environment
from pipeline.environment import stages
from pipeline.errors import PipelineError
from pipeline.files import write_text
from pipeline.gate.copies import commit_of
from pipeline.gate.decision import EXIT_CODES, Gated, GateError, supported
from pipeline.gate.markdown import markdown
from pipeline.gate.recording import check_current, recorded
from pipeline.gate.side_by_side import measured
from pipeline.params import Config
from pipeline.results import REPORTS, read_document

__all__ = ["JSON_FILE", "MARKDOWN_FILE", "GateError", "check_current", "confirm", "run"]

JSON_FILE = REPORTS / "gate.json"
MARKDOWN_FILE = REPORTS / "gate.md"


def run(config: Config, against: str) -> int:
    """Compare this work tree with ``against``, a file or else a revision; write ``reports/gate.*``, print the Markdown.

    Returns the exit code: 0 if nothing got worse, 1 if something got worse, 3 if the outcome is untrusted or undecided
    (``decision.EXIT_CODES``). Against a file, no ``gate.json`` is written, so no promotion can rely on it. Raises
    GateError and other PipelineErrors if something could not be measured or decided; then no ``reports/gate.*`` exists,
    because earlier files are removed first.
    """
    for file in (JSON_FILE, MARKDOWN_FILE):
        file.unlink(missing_ok=True)
    try:
        if _is_file(against):
            text, worse = recorded(config, Path(against))
            code = EXIT_CODES["worse" if worse else "passed"]
        else:
            gated = measured(config, against)
            text, code = markdown(gated), gated.exit_code
            write_text(JSON_FILE, gated.to_json())
    except PipelineError:
        raise
    except Exception as error:  # Python would exit with 1, which means that something got worse
        traceback.print_exc()
        raise GateError(f"nothing was decided, because of the error above: {error!r}") from error
    write_text(MARKDOWN_FILE, text)
    print(text, end="")
    return code


def confirm(config: Config) -> None:
    """Check ``reports/gate.json`` against its own raw samples and this machine, before a promotion relies on it.

    Raises ResultError if the file cannot be read. Raises GateError if its samples do not support the outcome, or if it
    was made in another environment or with other code and settings. Does nothing if the file is missing, because
    ``promote`` itself refuses then.
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
        raise GateError(f"{JSON_FILE} says passed, but its samples say {outcome}: the file was edited; {again}.")


def _is_file(against: str) -> bool:
    """True if ``against`` names a file. Raises GateError if it is a revision too: a commit could add such a file."""
    if not Path(against).is_file():
        return False
    try:
        commit_of(against)
    except GateError:
        return True
    raise GateError(
        f"--against: found {against!r}, which is both a file and a revision; write ./{against} to name the file."
    )
