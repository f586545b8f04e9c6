"""The textbook's training: torchvision's data set and transforms, a DataLoader, and the same net, run as a script.

``python -m benchmarks.textbook FOLDER EPOCHS BATCH_SIZE LEARNING_RATE SEED`` prints one JSON object. FOLDER holds
FashionMNIST/raw as torchvision expects it.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision.datasets import FashionMNIST
from torchvision.transforms import Compose, Normalize, ToTensor

from pipeline.models import build


def main(folder: str, epochs: int, batch_size: int, learning_rate: float, seed: int) -> None:
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transform = Compose([ToTensor(), Normalize((0.2860,), (0.3530,))])
    train = DataLoader(FashionMNIST(folder, train=True, transform=transform), batch_size, shuffle=True)
    test = DataLoader(FashionMNIST(folder, train=False, transform=transform), batch_size)
    model = build("small_cnn", {}, channels=1, height=28, width=28, classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    correct = 0
    for _ in range(epochs):
        model.train()
        for images, labels in train:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in test:
                correct += int((model(images.to(device)).argmax(1) == labels.to(device)).sum())
    print(json.dumps({"test_accuracy": correct / len(test.dataset)}))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
