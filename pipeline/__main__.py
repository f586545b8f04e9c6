"""``python -m pipeline COMMAND``."""

import sys

from pipeline import processes

if sys.argv[1:2] != ["gate"]:  # each side of the gate is a separate process, which makes this call itself
    processes.let_threads_sleep()

from pipeline import cli

sys.exit(cli.main())
