"""Errors that the user can correct, and messages that are safe to print."""

from __future__ import annotations

import difflib
import errno
import re
import shutil
import sysconfig
import textwrap
import unicodedata
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TextIO

_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Unicode's categories of control and format characters (bidirectional controls, tags, byte order marks), lone
surrogates, and line separators."""


class PipelineError(Exception):
    """An error that the user can correct: the command line prints its message without a traceback.

    The message says what was wrong, where, and what to do.
    """


class ConfigError(PipelineError, ValueError):
    """params.yaml is invalid, or this machine cannot run what params.yaml asks for. The message says what to change."""


_ROOM = "make room there and run the command again: finished work is kept"
_AWAY = "move it away, and run the command again"
_RIGHTS = "let this user read and write there, and run the command again"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _ROOM),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTSUP), _AWAY),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _RIGHTS),
}


def said(error: BaseException) -> str | None:
    """Return the message for an error that the user can correct, such as a full or read-only disk. Return None for any
    other error, so that the caller shows its traceback."""
    if isinstance(error, PipelineError):
        return str(error)
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        return f"{error.filename or 'standard output or an unnamed file'}: {error.strerror}; {_REMEDIES[error.errno]}."
    # Python's tempfile raises this error with ENOENT. _REMEDIES does not have ENOENT, because it has many other causes.
    if isinstance(error, OSError) and str(error.strerror).startswith("No usable temporary directory"):
        return (
            f"{error.strerror}; make room in one of these directories, or set TMPDIR to another directory, and run the "
            "command again."
        )
    if isinstance(error, MemoryError):
        return "this process has reached its memory limit; raise the limit, or reduce the memory need in params.yaml."
    return None


def redacted(text: str) -> str:
    """Return ``text`` with user names, passwords, parameters, queries and fragments removed from its URLs. A user name
    or a query's value can be a token. User and password are also removed from an address without ``://``, such as an
    image's."""
    inner = r"'(?![\s,;:.)\]}]|$)"  # a quote that does not end the address
    of_urls = re.sub(rf"""(?<=://)(?:(?<==)\\?"[^\s,"]+"|[^\s"']|{inner})+""", _redacted_url, text)
    return re.sub(rf"""(?<![^\s"`])(?:[^\s"'`]|{inner})+@(?!sha\d+:)""", _redacted_address, of_urls)


def _redacted_url(match: re.Match[str]) -> str:
    url, authority = match[0], match[0].partition("/")[0]
    if ":" in authority.partition("@")[0]:  # the password may hold slashes
        url = re.sub("^.*@", "***@", url)
    elif "@" in authority:
        url = f"***@{authority.rpartition('@')[2]}{url[len(authority) :]}"
    parameters = r"^([^?#;]*(?:;(?![^;=]+=)[^?#;]*)*(?:[?#]|;(?=[^;=]+=)))(?!/).+"  # "/#/runs" is a page's path
    return re.sub(parameters, r"\1***", url)


def _redacted_address(match: re.Match[str]) -> str:
    before, user, password = re.findall(r"^([(\[]*'?(?:\w+=)?'?)([^:/]*)(.*)@", match[0])[0]
    named = user and len(password) > 1 and not password.startswith("://") and not user.endswith(".yaml")
    return f"{before}***@" if named and password[0] == ":" else match[0]


def spelled(text: str) -> str:
    """Return ``text`` with control and format characters, except tab and line feed, escaped as in Python."""

    def visible(match: re.Match[str]) -> str:
        unseen = unicodedata.category(match[0]) in _UNSEEN
        return match[0].encode("unicode_escape").decode() if unseen else match[0]

    return re.sub(r"[^\t\n -~]", visible, text)


def printable(text: str) -> str:
    """Return ``text`` in a form that is safe for a terminal and GitHub's log. ``text`` may contain a file's name or a
    server's answer. It is ``spelled``, and workflow commands (``::error::``, ``##[error]``) are made ineffective."""
    return re.sub(r"(?m)^\s*(?=::)|##(?=\[)", r"\g<0>\\", spelled(text))


def say(text: str, file: TextIO | None = None, end: str = "\n") -> None:
    """Print ``text``, in ``printable`` form, at once: the only place that prints for a person."""
    print(printable(text), file=file, end=end, flush=True)


def hanging(head: str, text: str) -> str:
    """Return ``head`` with ``text`` beside it, wrapped to the terminal's width. A longer word, such as a path to copy,
    stays whole."""
    width = max(min(shutil.get_terminal_size((100, 24)).columns, 120) - len(head), 30)
    wrap = partial(textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False)
    return head + f"\n{' ' * len(head)}".join(line for paragraph in text.splitlines() for line in wrap(paragraph))


def own_place(trace: str) -> str:
    """Return the innermost line of the user's own code in a formatted traceback, as "my_models.py, line 7, in forward";
    empty if there is none. Python, this package and installed packages do not count."""
    not_theirs = (sysconfig.get_path("stdlib"), str(Path(__file__).parent), "<")
    frames = re.findall(r'(?m)^ *File "(.+)", line (\d+), in (.+)$', trace)
    work_tree = f"{Path.cwd()}/"
    own = [
        f"{file.removeprefix(work_tree)}, line {line}, in {name}"
        for file, line, name in frames
        if not file.startswith(not_theirs) and not {"site-packages", "dist-packages"} & {*Path(file).parts}
    ]
    return own[-1] if own else ""


def count(amount: int, noun: str) -> str:
    """Return ``amount`` and ``noun``, in the singular or plural: "1 round", "2 rounds", "1,000 processes"."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}{'es' if noun.endswith(('s', 'batch')) else 's'}"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return " Did you mean NAME?" with up to three similar ``known`` names; an empty string if none is similar."""
    close = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message; the error's type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
