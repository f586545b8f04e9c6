"""A fork server imports this module first, so that the server ends with its parent process, even during later
imports."""

from pipeline.processes import terminate_with_parent

terminate_with_parent()
