"""Write the GPU workflow's report into the run's summary, and into one comment of the pull request.

The script needs only Python. It reads the files that the `gpu` job left in the given directory, and GitHub's
environment variables. If PULL_REQUEST has a number, the script writes its comment on this pull request, with
GITHUB_TOKEN.

The pull request's own code wrote these files, but the comment appears under the workflow's name. So the comment shows
only figures, known names and known words from the files. It quotes the gate's text in a form in which links do not
work.
"""

from __future__ import annotations

import html
import itertools
import json
import os
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

MARKER = "<!-- The GPU workflow finds its comment by this line. -->"
AUTHOR = "github-actions[bot]"
"""The author of comments that the workflow's token writes. Anybody can write the marker, so the author is checked."""
LIMIT = 65_536
"""The largest number of characters in a comment."""
LARGEST = 1 << 25
"""The largest number of bytes that are read from a file."""
OUTCOMES = {
    "passed": "Nothing was shown to be worse.",
    "worse": "Worse than the base.",
    "untrusted": "Not decided, because the measurement is not to be trusted.",
    "undecided": "Not decided.",
}
ONE_SESSION = "Measured in one session: in other sessions the ratios may differ by an unknown amount."
WORDS = {"better", "same", "worse", "undecided", "untrusted", "pays", "trades", "costs", "neutral"}
DAMAGED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""The errors that malformed JSON can raise."""


def report(folder: Path, commit: str, run: str) -> str:
    """Return the comment in Markdown: the gate's decision, then the gate's text and the comparison, each folded. A
    folded part is left out if the comment would be too long with it."""
    reports = folder / "reports"
    text = f"{MARKER}\n### On the GPU: {commit[:12]}\n\n"
    try:
        gate = json.loads(_content(reports / "gate.json"))
        rows = [*gate["variants"], *filter(None, [gate["together"]])]
        text += f"**{OUTCOMES[gate['outcome']]}** {ONE_SESSION}\n\n{table('head against base', rows)}"
    except FileNotFoundError:
        text += "**No decision: the run ended before the gate did.** Its log says why.\n"
    except DAMAGED:
        text += "**No decision: gate.json is not what the gate writes.**\n"
    ending = f"\n[The run]({run}), with its log and files.\n"
    text = text[: LIMIT - len(ending)]
    for summary, content in (("What the gate said", _said(reports)), ("The variants compared", _compared(reports))):
        folded = f"\n<details><summary>{summary}</summary>\n\n{content}\n</details>\n"
        if content and len(text) + len(folded) + len(ending) <= LIMIT:
            text += folded
    return text + ending


def table(heading: str, rows: list[Any]) -> str:
    """Return a Markdown table with each variant's throughput ratio, memory ratio and accuracy difference. Each has its
    interval and decision.

    Raises one of ``DAMAGED`` if a cell is not a figure, a name or a known word."""
    lines = [f"| {heading} | throughput | peak memory | test accuracy, points |", "| --- | --- | --- | --- |"]
    for row in rows:
        if not re.fullmatch("[a-z0-9][a-z0-9_-]{0,99}|all together", row["variant"]):
            raise ValueError(row["variant"])
        ratios = [_figure(row[key], "{:.3f}") for key in ("throughput", "memory")]
        accuracy = _figure(row["accuracy"], "{:+.2%}")
        verdict = f": {_word(row['verdict'])}" if "verdict" in row else ""
        lines.append(f"| {row['variant']}{verdict} | {' | '.join(ratios)} | {accuracy.replace('%', '')} |")
    return "\n".join(lines) + "\n"


def _figure(difference: Any, form: str) -> str:
    if difference is None:
        return "not known"
    ends = [difference[key] for key in ("estimate", "low", "high")]
    numbers = [form.format(float(end)) for end in ends if end is not None]
    interval = f" ({numbers[1]} to {numbers[2]})" if len(numbers) == 3 else ""
    return f"{numbers[0] if numbers else 'not known'}{interval} {_word(difference['decision'])}"


def _word(word: Any) -> str:
    if word not in WORDS:
        raise ValueError(word)
    return str(word)


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(LARGEST).decode(errors="replace")


def _said(reports: Path) -> str:
    path = reports / "gate.md"
    return f"<pre>\n{html.escape(_content(path))}</pre>\n" if path.is_file() else ""


def _compared(reports: Path) -> str:
    try:
        variants = json.loads(_content(reports / "comparison.json"))["variants"]
        return table("variant against baseline", [row for row in variants if row["verdict"] is not None])
    except (FileNotFoundError, *DAMAGED):
        return ""


def comment(number: int, text: str) -> str:
    """Write ``text`` into the workflow's comment on a pull request, or into a new comment. Return its URL."""
    for page in itertools.count(1):
        comments: list[dict[str, Any]] = _api("GET", f"issues/{number}/comments?per_page=100&page={page}")
        for earlier in comments:
            if earlier["user"]["login"] == AUTHOR and earlier["body"].startswith(MARKER):
                return str(_api("PATCH", f"issues/comments/{earlier['id']}", body=text)["html_url"])
        if not comments:
            break
    return str(_api("POST", f"issues/{number}/comments", body=text)["html_url"])


def _api(method: str, path: str, **fields: str) -> Any:
    request = urllib.request.Request(
        f"{os.environ['GITHUB_API_URL']}/repos/{os.environ['GITHUB_REPOSITORY']}/{path}",
        data=json.dumps(fields).encode() if fields else None,
        method=method,
        headers={
            "Accept": "application/vnd.github+json",
            "Authorization": f"Bearer {os.environ['GITHUB_TOKEN']}",
            "Content-Type": "application/json",
            "X-GitHub-Api-Version": "2022-11-28",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        sys.exit(f"error: {method} {path} ended with {error.code}: {error.read().decode(errors='replace')}")


def main(folder: Path) -> None:
    variables = os.environ
    run = f"{variables['GITHUB_SERVER_URL']}/{variables['GITHUB_REPOSITORY']}/actions/runs/{variables['GITHUB_RUN_ID']}"
    text = report(folder, variables["COMMIT"], run)
    with Path(variables["GITHUB_STEP_SUMMARY"]).open("a", encoding="utf-8") as summary:
        summary.write(text)
    if number := variables.get("PULL_REQUEST"):
        print(comment(int(number), text))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
