"""The only package that uses MLflow. The files are the truth and MLflow mirrors them: it can be lost, late or down.

``follow`` shows a running training from a process of its own; ``publish`` makes the store agree with the files.
Both turn MLflow's errors into one warning. ``promote`` names the registry's champion, and raises.
``health`` tells a person the state of the store. mlflow is imported only when the store must be asked.
"""

from pipeline.tracking.checkup import Health, health
from pipeline.tracking.live import follow
from pipeline.tracking.promoting import PromotionError, promote
from pipeline.tracking.publishing import Published, publish

__all__ = ["Health", "PromotionError", "Published", "follow", "health", "promote", "publish"]
