"""``python -m pipeline COMMAND``."""

import sys

from pipeline.cli import main

sys.exit(main())
