"""A fork server imports this module before all others, so that the server ends with its parent process, even while it
imports the other modules."""

from pipeline.processes import hush_torchao, terminate_with_parent

terminate_with_parent()
hush_torchao()
