"""The pages that people read, each a Jinja template in this folder, and the formats of the numbers in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pipeline.pages import formats

CODE = re.compile(r"`([\w .-]+)`")
"""Matches a command or a name in backticks within a sentence."""


def render(template: str, escape: Literal["html", "markdown"] | None = None, **values: Any) -> str:
    """Return the page of ``template``, a file in this folder. ``formats`` is known in all templates.

    ``escape``: how every value is escaped and put on one line, unless a macro made it. None: the values are from this
    project and the machine, and stand as they are.
    """
    import jinja2  # takes a while, and not every command writes a page
    from markupsafe import Markup

    def finalised(value: object) -> object:
        if hasattr(value, "__html__"):
            return value
        return on_one_line(str(value)) if escape == "html" else Markup(escaped(str(value)))

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent, encoding="utf-8"),
        undefined=jinja2.StrictUndefined,
        autoescape=escape is not None,
        finalize=finalised if escape else None,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["formats"] = formats
    environment.filters["marked"] = marked
    return environment.get_template(template).render(values)


def on_one_line(text: str) -> str:
    """Return ``text`` with a space for all that ``str.splitlines`` takes for the end of a line."""
    return re.sub(r"[ \t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]+", " ", text)  # a no-break space stays


def escaped(text: str) -> str:
    """Return ``text`` on one line, with Markdown and HTML escaped. Backticks around a command or a name stay."""
    shown = on_one_line(text).strip().replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(rf"({CODE.pattern})|([\\`*_{{}}\[\]|#~!])", lambda match: match[1] or f"\\{match[3]}", shown)


def marked(text: str) -> Any:
    """Return ``text`` as HTML: figures in brackets, which are untrusted, in grey, and words in backticks as code."""
    from markupsafe import Markup, escape

    coded = CODE.sub(r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\[[^]]*\]", r'<span class="unbelieved">\g<0></span>', coded))
