"""Runs the command line: ``python -m pipeline COMMAND``."""

import sys

from pipeline import processes

if sys.argv[1:2] != ["gate"]:  # its processes would inherit the setting, but each commit's code decides on it
    processes.let_threads_sleep()

from pipeline import cli

sys.exit(cli.main())
