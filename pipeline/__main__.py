"""``python -m pipeline COMMAND``."""

import os
import sys

# Threads of a parallel region wait by spinning, unless told otherwise before torch is loaded. Where other processes
# share the cores, that takes the core from the very thread that is waited for: on a busy 2-core machine training ran
# 4 to 5 times slower than with waiting threads asleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from pipeline.cli import main

sys.exit(main())
