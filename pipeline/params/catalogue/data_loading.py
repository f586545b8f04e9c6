"""Techniques of data loading: where batches come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.params.catalogue.base import Entry
from pipeline.params.sections import Section


class DataLoadingSettings(Section):
    """A variant's settings of data loading."""

    data_loading: Literal["auto", "resident", "streamed", "dataloader"] = Field(
        "auto",
        description="Source of batches. auto: as in train.placement. resident: data on the device. streamed: the "
        "memory map. dataloader: PyTorch's DataLoader with loader_workers processes.",
    )
    loader_workers: Annotated[int, Field(ge=0, le=1024)] = Field(
        2, description="Worker processes of a DataLoader per training process; 0: the training process loads the data."
    )


DATA_LOADING: tuple[Entry, ...] = (
    Entry(
        name="resident_data",
        setting="data_loading: resident",
        searched_for=("data set on the GPU", "GPU data loading"),
        does="The training images lie on the device as uint8, where whole batches are gathered, augmented and "
        "normalised",
        pays="whenever the images fit into the device's memory",
        costs="one byte of device memory per pixel and channel of the training set",
        source="Jordan, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU, 2024",
        changes="nothing",
        placement="resident",
    ),
    Entry(
        name="streamed_data",
        setting="data_loading: streamed",
        searched_for=("streaming", "memory map", "prefetching", "pinned memory"),
        does="A thread gathers batches from the memory map, a few ahead, and copies them to the device as uint8",
        pays="for data that do not fit on the device",
        costs="CPU time for the thread; memory for four batches",
        source="PyTorch tutorial: pin_memory() and non_blocking",
        changes="nothing",
        placement="streamed",
    ),
    Entry(
        name="dataloader",
        setting="data_loading: dataloader",
        searched_for=("torch.utils.data.DataLoader", "num_workers", "persistent_workers", "torchvision transforms"),
        does="The worker processes of PyTorch's DataLoader read, augment and normalise one sample at a time. They are "
        "kept for all epochs, and batches are pinned",
        pays="when samples must be decoded or changed one by one in Python; otherwise it shows what the other ways "
        "save",
        costs="Python code for every sample; loader_workers processes per training process, whose memory is not "
        "measured",
        source="PyTorch documentation: torch.utils.data",
        changes="nothing",
        implementation="data_loading.DataLoaderData",
        placement="dataloader",
        needs_measuring=True,
        details=("loader_workers",),
    ),
)
