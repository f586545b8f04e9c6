"""Write scikit-learn's 8x8 digits as an image folder, DIRECTORY/train/CLASS/*.png. No network is needed.

python examples/vit/make_images.py DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def make(directory: Path) -> int:
    """Write all 1,797 digits, and return their number."""
    digits = load_digits()
    for index, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        folder = directory / "train" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        grey = np.round(pixels * (255 / 16)).astype(np.uint8)  # the digits' values go from 0 to 16
        Image.fromarray(grey).save(folder / f"{index:04}.png")
    return len(digits.target)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    print(f"{make(target):,} images in {target}")
