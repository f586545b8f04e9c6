"""``python -m pipeline COMMAND``."""

import os
import sys

from pipeline import interpreter

# Between two parallel regions, OpenMP's threads spin. Where other processes share the cores, a spinning thread takes
# the core from the very thread that it waits for. With a short spin, after which they sleep, the default job ran 1.2 to
# 17 times as fast beside one busy process on two cores, and up to 3 times beside two. Its price is the waking: on an
# idle machine nothing with AVX2, 15% of a small net's throughput with AVX-512. Read as torch is loaded. The two sides
# of a gate are processes of their own, which set it for themselves.
if "OMP_WAIT_POLICY" not in os.environ and sys.argv[1:2] != ["gate"]:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def main() -> int:
    from pipeline import cli

    return cli.main()


interpreter.run(main)
