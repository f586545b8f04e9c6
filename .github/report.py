"""The GPU workflow's report: into the run's summary, and into the pull request as one comment that is kept up to date.

Needs Python alone. Reads what the `gpu` job left in the directory that is named, and GitHub's variables; with
PULL_REQUEST set to a number it comments there, with GITHUB_TOKEN.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

MARKER = "<!-- The GPU workflow finds its comment by this line. -->"
AUTHOR = "github-actions[bot]"
"""Whose comments the workflow's token writes. Anybody can write the marker, so it alone proves nothing."""
LIMIT = 65_536
"""Characters of a comment."""


def report(folder: Path, commit: str, run: str) -> str:
    """Markdown: the gate's decision first, the comparison folded under it where it fits."""
    gate, comparison = folder / "reports" / "gate.md", folder / "reports" / "comparison.md"
    text = f"{MARKER}\n### On the GPU: {commit[:12]}\n\n"
    if gate.is_file():
        text += gate.read_text(encoding="utf-8")
    else:
        text += "**No decision: the run ended before the gate did.** Its log says why.\n"
    ending = f"\n[The run]({run}), with its log and files.\n"
    text = text[: LIMIT - len(ending)]
    if comparison.is_file():
        folded = comparison.read_text(encoding="utf-8")
        folded = f"\n<details><summary>The variants compared</summary>\n\n{folded}\n</details>\n"
        if len(text) + len(folded) + len(ending) <= LIMIT:
            text += folded
    return text + ending


def comment(number: int, text: str) -> str:
    """Write ``text`` into the workflow's own comment on a pull request, a new one if there is none; its address."""
    for page in itertools.count(1):
        found: list[dict[str, Any]] = _api("GET", f"issues/{number}/comments?per_page=100&page={page}")
        for each in found:
            if each["user"]["login"] == AUTHOR and each["body"].startswith(MARKER):
                return str(_api("PATCH", f"issues/comments/{each['id']}", body=text)["html_url"])
        if not found:
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
