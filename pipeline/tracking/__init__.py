"""The only package that knows MLflow. Files are the truth, MLflow is the mirror: it can be lost, late or down.

``follow`` shows a running training from a process of its own; ``publish`` makes the store agree with the files.
Neither raises what MLflow raises: that costs one warning. ``promote`` names the registry's champion, and does raise.
``health`` tells a person how the store is. Nothing imports mlflow until the store must be asked.
"""

from pipeline.tracking.checkup import Health, health
from pipeline.tracking.live import follow
from pipeline.tracking.promoting import PromotionError, promote
from pipeline.tracking.publishing import Published, publish

__all__ = ["Health", "PromotionError", "Published", "follow", "health", "promote", "publish"]
