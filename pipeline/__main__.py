"""``python -m pipeline COMMAND``."""

import sys

from pipeline import interpreter

if sys.argv[1:2] != ["gate"]:  # its two sides are processes of their own, which say it for themselves
    interpreter.let_threads_sleep()


def main() -> int:
    from pipeline import cli

    return cli.main()


interpreter.run(main)
