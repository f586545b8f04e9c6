"""What a fork server imports first: it ends with the process that started it, also while it imports the rest."""

from pipeline.processes import terminate_with_parent

terminate_with_parent()
