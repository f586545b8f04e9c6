"""Techniques of data loading: where batches come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.params.catalogue.base import Entry
from pipeline.params.sections import Section


class DataLoadingSettings(Section):
    """A variant's settings for data loading."""

    data_loading: Literal["auto", "resident", "streamed", "dataloader"] = "auto"
    """Where batches come from. auto: train.placement decides."""
    loader_workers: Annotated[int, Field(ge=0, le=1024)] = 2
    """Number of the DataLoader's worker processes for each training process; 0: the training process itself loads the
    data."""


DATA_LOADING: tuple[Entry, ...] = (
    Entry(
        name="resident_data",
        setting="data_loading: resident",
        searched_for=("data set on the GPU", "GPU data loading"),
        does="The training data are kept on the device (images as uint8), and whole batches are gathered, augmented "
        "and normalised there",
        pays="whenever the training data fit into the device's memory",
        costs="device memory for the training data: for images, one byte per pixel and channel",
        source="Jordan, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU, 2024",
        changes="nothing",
        placement="resident",
    ),
    Entry(
        name="streamed_data",
        setting="data_loading: streamed",
        searched_for=("streaming", "memory map", "prefetching", "pinned memory"),
        does="A thread reads the rows of up to four micro-batches ahead from the prepared files, and copies them to "
        "the device (images as uint8)",
        pays="for data that do not fit on the device",
        costs="CPU time for the thread; memory for four micro-batches",
        source="PyTorch tutorial: pin_memory() and non_blocking",
        changes="nothing",
        placement="streamed",
    ),
    Entry(
        name="dataloader",
        setting="data_loading: dataloader",
        searched_for=("torch.utils.data.DataLoader", "num_workers", "persistent_workers", "torchvision transforms"),
        does="The worker processes of PyTorch's DataLoader read, augment and normalise one sample at a time. The "
        "processes are kept for all epochs. For a GPU, batches are placed in pinned memory",
        pays="when samples must be decoded or changed one by one in Python; otherwise it shows what resident "
        "and streamed data save",
        costs="Python code for every sample; loader_workers processes per training process; the memory of these "
        "workers is not measured",
        source="PyTorch documentation: torch.utils.data",
        changes="nothing",
        implementation="data_loading.DataLoaderData",
        placement="dataloader",
        needs_measuring=True,
        details=("loader_workers",),
    ),
)
