"""Runs the command line: ``python -m pipeline COMMAND``."""

import sys

from pipeline import processes

if sys.argv[1:2] != ["gate"]:  # the gate's processes would inherit this setting, but each commit's code must set it
    processes.let_threads_sleep()

from pipeline import cli

sys.exit(cli.main())
