"""Where batches come from."""

from __future__ import annotations

from pipeline.params.catalogue.base import Entry

DATA_LOADING: tuple[Entry, ...] = (
    Entry(
        name="resident_data",
        setting="data_loading: resident",
        searched_for=("data set on the GPU", "GPU data loading"),
        does="The training images lie on the device as uint8, where whole batches are gathered, augmented, normalised",
        pays="whenever they fit",
        costs="a byte a pixel and channel of the training set",
        source="Jordan, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU, 2024",
        changes="nothing",
        asked=lambda variant: variant.data_loading == "resident",
    ),
    Entry(
        name="streamed_data",
        setting="data_loading: streamed",
        searched_for=("streaming", "memory map", "prefetching", "pinned memory"),
        does="A thread gathers batches from the memory map, a few ahead, and copies them to the device as uint8",
        pays="for data that do not fit on the device",
        costs="a processor's share for the gathering; four batches of memory",
        source="PyTorch tutorial: pin_memory() and non_blocking",
        changes="nothing",
        asked=lambda variant: variant.data_loading == "streamed",
    ),
    Entry(
        name="dataloader",
        setting="data_loading: dataloader",
        searched_for=("torch.utils.data.DataLoader", "num_workers", "persistent_workers", "torchvision transforms"),
        does="PyTorch's DataLoader: processes that read, augment and normalise sample by sample; pinned, kept for all "
        "epochs",
        pays="where samples must be decoded or changed one by one in Python; else it shows what the other ways save",
        costs="Python for every sample; loader_workers processes for each that trains, whose memory no figure counts",
        source="PyTorch documentation: torch.utils.data",
        changes="nothing",
        asked=lambda variant: variant.data_loading == "dataloader",
    ),
)
