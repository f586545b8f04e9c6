"""Runs the command line: ``python -m pipeline COMMAND``."""

import sys

from pipeline import cli, processes

# Not for trainings: variants train at different times, and must train alike.
processes.set_openmp_spins(measures=sys.argv[1:2] in (["bench"], ["profile"], ["infer"], ["gate"], ["script"]))

sys.exit(cli.main())
