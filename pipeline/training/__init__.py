"""Run trainings: the loop around the step, evaluation, checkpoints, and the job that trains every seed."""
