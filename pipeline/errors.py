"""What a person can put right."""

from __future__ import annotations

import re


class PipelineError(Exception):
    """What a person can put right: the command line prints its message alone.

    The message says what was wrong, where, and what to do.
    """


class ConfigError(PipelineError, ValueError):
    """params.yaml, or what it asks of this machine, cannot be. The message says where and what to do."""


def redacted(text: str) -> str:
    """``text`` as it may be shown or kept: its addresses without user names, passwords and queries. A user name can be
    a token, and so can a query's value."""
    unnamed = re.sub(r"(://)[^\s/'\"]*@", r"\1***@", text)
    return re.sub(r"(://[^\s?#'\"]*[?#])(?!/)[^\s'\"]+", r"\1***", unnamed)  # "/#/runs" is a page


def first_line(error: BaseException) -> str:
    """What another library's ``error`` says, without the pages that may follow."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
