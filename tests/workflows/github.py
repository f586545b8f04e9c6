"""The part of GitHub's API for comments, as a server on the loopback interface."""

from __future__ import annotations

import json
import re
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

REPOSITORY = "somebody/pipeline"


class GitHub:
    """The part of GitHub's API for comments: at most 100 per page, oldest first."""

    def __init__(self) -> None:
        self.comments: list[dict[str, Any]] = []
        self.refuses = False
        self.address = ""

    def add(self, login: str, body: str) -> dict[str, Any]:
        identity = len(self.comments) + 1
        about = {"id": identity, "user": {"login": login}, "html_url": f"comment/{identity}"}
        self.comments.append({**about, "body": body})
        return self.comments[-1]

    def reply(self, request: BaseHTTPRequestHandler) -> tuple[int, str]:
        asked = urlsplit(request.path)
        length = int(request.headers.get("Content-Length") or 0)
        fields = json.loads(request.rfile.read(length)) if length else {}
        if self.refuses or request.headers["Authorization"] != "Bearer token":
            return 403, ""
        answer: Any
        if asked.path != f"/repos/{REPOSITORY}/issues/7/comments":
            [identity] = re.findall(rf"^/repos/{REPOSITORY}/issues/comments/(\d+)$", asked.path)
            answer = self.comments[int(identity) - 1]
            answer["body"] = fields["body"]
        elif request.command == "POST":
            answer = self.add("github-actions[bot]", fields["body"])
        else:
            asks = {name: int(values[0]) for name, values in parse_qs(asked.query).items()}
            size, page = min(asks.get("per_page", 30), 100), asks.get("page", 1)
            answer = self.comments[size * (page - 1) : size * page]
        return 200, json.dumps(answer)
