"""The only package that knows MLflow. Files are the truth, MLflow is the mirror: it can be lost, late or down.

``follow`` mirrors a running training from a process of its own; ``publish`` makes the store agree with the files.
Neither raises what MLflow raises: that costs one warning. Nothing imports mlflow until there is something to log.
``health`` tells a person how the store is.
"""

from pipeline.tracking.checkup import Health, health
from pipeline.tracking.following import follow
from pipeline.tracking.publishing import Published, publish

__all__ = ["Health", "Published", "follow", "health", "publish"]
