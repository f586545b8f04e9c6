"""What a person can put right."""

from __future__ import annotations

import errno
import re

_CONTROL = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
"""All but tabs and line feeds; also what turns the direction of writing, and halves of characters."""


class PipelineError(Exception):
    """What a person can put right: the command line prints its message alone.

    The message says what was wrong, where, and what to do.
    """


class ConfigError(PipelineError, ValueError):
    """params.yaml, or what it asks of this machine, cannot be. The message says where and what to do."""


_ROOM = "make room there and run it again: what was finished is kept"
_RIGHTS = "let this user read and write there, and run it again"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _ROOM),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST), "move away what stands there, and run it again"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _RIGHTS),
}


def said(error: BaseException) -> str | None:
    """What a person is told: of what can be put right, a disk that is full or read-only included. None of the rest,
    which needs its traceback."""
    if isinstance(error, PipelineError):
        return str(error)
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        return f"{error.filename or 'a file'}: {error.strerror}; {_REMEDIES[error.errno]}."
    if isinstance(error, MemoryError):
        return "this process may not have more memory; give it more, or ask for less of it in params.yaml."
    return None


def redacted(text: str) -> str:
    """``text`` as it may be shown or kept: its addresses without user names, passwords and queries. A user name can be
    a token, and so can a query's value."""
    unnamed = re.sub(r"(://)[^\s/'\"]*@", r"\1***@", text)
    return re.sub(r"(://[^\s?#'\"]*[?#])(?!/)[^\s'\"]+", r"\1***", unnamed)  # "/#/runs" is a page


def printable(text: str) -> str:
    """``text``, into which a file's name or a server's answer may have got, as a terminal and GitHub's log may have it:
    control characters spelled out, and no line that is a workflow command (``::error::`` or ``##[error]``)."""
    spelled = re.sub(_CONTROL, lambda match: match[0].encode("unicode_escape").decode(), text)
    return re.sub(r"(?m)^\s*(?=::)|##(?=\[)", r"\g<0>\\", spelled)


def first_line(error: BaseException) -> str:
    """What another library's ``error`` says, without the pages that may follow."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
