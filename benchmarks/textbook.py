"""The textbook's training: torchvision's data set and transforms, a DataLoader, and the same net, run as a script.

``python -m benchmarks.textbook FOLDER EPOCHS BATCH_SIZE LEARNING_RATE SEED DATA`` prints one JSON object. FOLDER holds
FashionMNIST/raw as torchvision expects it; DATA is "loaded", or "in_memory" for the same script without the DataLoader.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision.datasets import FashionMNIST
from torchvision.transforms import Compose, Normalize, ToTensor

from pipeline.models import build


def in_memory(images: FashionMNIST, batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of the normalised pixels, without files, transforms or workers."""
    pixels = ((images.data.unsqueeze(1).float() / 255) - 0.2860) / 0.3530
    order = torch.randperm(len(pixels)) if images.train else torch.arange(len(pixels))
    for chosen in order.split(batch_size):
        yield pixels[chosen], images.targets[chosen]


def main(folder: str, epochs: int, batch_size: int, learning_rate: float, seed: int, data: str) -> None:
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transform = Compose([ToTensor(), Normalize((0.2860,), (0.3530,))])
    images = {split: FashionMNIST(folder, train=split == "train", transform=transform) for split in ("train", "test")}
    train = DataLoader(images["train"], batch_size, shuffle=True)
    test = DataLoader(images["test"], batch_size)
    model = build("small_cnn", {}, channels=1, height=28, width=28, classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    correct = 0
    for _ in range(epochs):
        model.train()
        for pixels, labels in train if data == "loaded" else in_memory(images["train"], batch_size):
            pixels, labels = pixels.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(pixels), labels)
            loss.backward()
            optimizer.step()
        model.eval()
        correct = 0
        with torch.no_grad():
            for pixels, labels in test if data == "loaded" else in_memory(images["test"], batch_size):
                correct += int((model(pixels.to(device)).argmax(1) == labels.to(device)).sum())
    print(json.dumps({"test_accuracy": correct / len(images["test"])}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
