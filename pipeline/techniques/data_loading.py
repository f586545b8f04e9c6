"""Where batches come from: a variant's own choice, which overrides ``train.placement``. See ``pipeline.data.batches``.

With every choice, the samples, their order and their augmentation are the same to the last bit.
"""

from __future__ import annotations

from pipeline.techniques.base import Technique


class DataLoaderData(Technique):
    """PyTorch's DataLoader with worker processes (``pipeline.data.loader``).

    On a CPU the trainer's peak memory does not include the workers' memory, and the memory prediction does not foresee
    the queue of batches that the trainer has taken from the workers.
    """

    name = "dataloader"

    @classmethod
    def prepare_process(cls) -> None:
        import pipeline.data.loader  # noqa: F401
