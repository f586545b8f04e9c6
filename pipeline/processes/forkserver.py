"""A fork server imports this first, so that it ends with the process that started it, even during further imports."""

from pipeline.processes import terminate_with_parent

terminate_with_parent()
