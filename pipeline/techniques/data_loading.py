"""Read a variant's batches through PyTorch's DataLoader, whatever ``train.placement`` is.

The samples, their order and their augmentation are the same with every placement of the data, to the last bit.
"""

from __future__ import annotations

from pipeline.techniques.base import Technique


class DataLoaderData(Technique):
    """Reads the batches with PyTorch's DataLoader and its worker processes (``pipeline.tasks.loader``).

    The measured peak memory does not include the workers' memory.
    """

    name = "dataloader"

    @classmethod
    def prepare_process(cls) -> None:
        import pipeline.tasks.loader  # noqa: F401
