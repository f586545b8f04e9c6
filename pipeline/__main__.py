"""``python -m pipeline COMMAND``."""

import os
import sys

from pipeline import interpreter

# Between two parallel regions, OpenMP's threads spin. Where other processes share the cores, a spinning thread takes
# the core from the very thread that it waits for. With a short spin, after which they sleep, the default job kept its
# speed on an idle 2-core machine, and beside one busy process it ran 1.2 to 17 times as fast. Read as torch is loaded.
# The two sides of a gate are processes of their own, which set it for themselves.
if "OMP_WAIT_POLICY" not in os.environ and sys.argv[1:2] != ["gate"]:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def main() -> int:
    from pipeline import cli

    return cli.main()


interpreter.run(main)
