"""``python -m pipeline COMMAND``."""

import sys

from pipeline import interpreter

if sys.argv[1:2] != ["gate"]:  # its two sides are processes of their own, which say it for themselves
    interpreter.let_threads_sleep()

from pipeline import cli

sys.exit(cli.main())
