"""A commit held against another: have throughput, memory or accuracy got worse beyond the margins?

The *head* is this work tree, with its uncommitted changes. The *base* is what it is held against: a revision, which is
measured beside the head on this machine, or a ``reports/comparison.json`` that was recorded in the same environment,
of which accuracy alone is decided, and the rest is advice. Ratios are the head's figure over the base's.
"""

from __future__ import annotations

import traceback
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.files import write_text
from pipeline.gate.copies import commit_of
from pipeline.gate.decision import EXIT_CODES, GateError
from pipeline.gate.markdown import markdown
from pipeline.gate.recording import check_current, recorded
from pipeline.gate.side_by_side import measured
from pipeline.params import Config
from pipeline.results import REPORTS

__all__ = ["JSON_FILE", "MARKDOWN_FILE", "GateError", "check_current", "run"]

JSON_FILE = REPORTS / "gate.json"
MARKDOWN_FILE = REPORTS / "gate.md"


def run(config: Config, against: str) -> int:
    """Hold this work tree against ``against``, a file or else a revision; write ``reports/gate.*``, print the Markdown.

    Returns the exit code: 0 if nothing got worse, 1 if something did, 3 if the machine was too noisy to tell, or the
    head's own samples had to be rejected. Held against a file there is no ``gate.json``: nothing is promoted on its
    strength. Raises GateError and other PipelineErrors: what could not be measured or decided is no pass, and leaves
    no ``reports/gate.*``, not even one of an earlier gate.
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
    except Exception as error:  # Python would end with 1, which says that something got worse
        traceback.print_exc()
        raise GateError(f"nothing was decided, because of what stands above: {error!r}") from error
    write_text(MARKDOWN_FILE, text)
    print(text, end="")
    return code


def _is_file(against: str) -> bool:
    """Whether it names a file. Raises GateError for one that is called like a revision: a change could bring it."""
    if not Path(against).is_file():
        return False
    try:
        commit_of(against)
    except GateError:
        return True
    raise GateError(f"--against: found {against!r}, a file and a revision; write ./{against} for the file.")
