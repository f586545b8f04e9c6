"""Choose where a variant's batches come from, which overrides ``train.placement``. See ``pipeline.data.batches``.

The samples, their order and their augmentation do not depend on the choice, to the last bit.
"""

from __future__ import annotations

from pipeline.techniques.base import Technique


class DataLoaderData(Technique):
    """PyTorch's DataLoader with worker processes (``pipeline.data.loader``).

    On a CPU, the training process's peak memory does not include the workers' memory. The memory prediction does not
    include the queue of batches that the training process has taken from the workers.
    """

    name = "dataloader"

    @classmethod
    def prepare_process(cls) -> None:
        import pipeline.data.loader  # noqa: F401
