"""Runs the command line: ``python -m pipeline COMMAND``."""

import sys

from pipeline import processes

if sys.argv[1:2] != ["gate"]:  # the gate's processes would inherit this, but each commit's code decides for itself
    processes.let_threads_sleep()

from pipeline import cli

sys.exit(cli.main())
