"""``python -m pipeline COMMAND``."""

import sys

from pipeline import processes

if sys.argv[1:2] != ["gate"]:  # each of its two sides is a separate process that makes this call itself
    processes.let_threads_sleep()

from pipeline import cli

sys.exit(cli.main())
