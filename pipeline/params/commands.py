"""Commands of a person's own training script, written as in a shell."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from pipeline.errors import ConfigError

SEED = "{seed}"
"""What a command has in place of a seed."""
_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)


class Command(NamedTuple):
    """What an arm runs."""

    words: tuple[str, ...]
    variables: dict[str, str] = {}  # noqa: RUF012
    changed: str = ""
    """What the arm changes, in words; for the baseline the whole command."""
    outputs: tuple[str, ...] = ()
    """Files and folders that it writes."""

    def seeded(self, seed: int) -> Command:
        """Return the command with ``seed`` in every place that asks for it."""
        words, outputs = (tuple(text.replace(SEED, str(seed)) for text in own) for own in (self.words, self.outputs))
        variables = {name: value.replace(SEED, str(seed)) for name, value in self.variables.items()}
        return self._replace(words=words, variables=variables, outputs=outputs)


_NOTHING = Command(())


def command_of(where: str, text: str, base: Command = _NOTHING, *, whole: bool = True) -> Command:
    """Return the command in ``text`` with the variables of ``base``; if it is not ``whole``, ``base`` with the further
    arguments and variables in ``text``.

    As in a shell, leading words in the form of ``NAME=value``, with a name in capitals, are environment variables.
    Raises ConfigError, which names ``where``.
    """
    variables: dict[str, str] = {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{where}: found {text!r}, which is no command: {error}.") from None
    while words and (match := re.fullmatch("([A-Z_][A-Z0-9_]*)=(.*)", words[0], re.DOTALL)):
        variables[match[1]] = match[2]
        del words[0]
    if whole and not words:
        raise ConfigError(f"{where}: found {text!r}; expected a command, such as 'python train.py'.")
    if own := re.search("[;<>|&]", _QUOTED.sub("", text)):
        raise ConfigError(
            f"{where}: found {own[0]!r} in {text!r}, but no shell runs the command: quote the character, or give "
            "bash -c '...' with a single training in it."
        )
    return Command((*(() if whole else base.words), *words), base.variables | variables, text)
