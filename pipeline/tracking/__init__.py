"""The only package that uses MLflow. MLflow mirrors the result files, so no result is lost if a store is lost or down.

``follow``, in a process of its own, shows a running training; ``publish`` makes the store agree with the files.
Both turn MLflow's errors into one warning. ``promote`` names the registry's champion, or raises PromotionError.
``health`` describes the state of the store for a person. mlflow is imported only when the store must be opened.
"""

from pipeline.tracking.live import follow
from pipeline.tracking.promoting import PromotionError, promote
from pipeline.tracking.publishing import Published, publish
from pipeline.tracking.stores import Health, health
