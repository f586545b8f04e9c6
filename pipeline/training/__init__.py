"""The step, the loop around it, and the job that runs it for every seed."""
