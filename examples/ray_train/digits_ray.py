"""An image classifier, after the example for Fashion MNIST in Ray Train's documentation: two workers, and a report for each epoch."""

from __future__ import annotations

from typing import Any

import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE, STEPS = 32, 24
"""Of each of two workers, and how many steps make an epoch of 1,536 images."""
CONFIG = {"lr": 0.05, "epochs": 3}


def images() -> tuple[TensorDataset, TensorDataset]:
    """Handwritten digits of 8 by 8 pixels, to train on and to test with."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16.0, torch.tensor(digits.target)
    return TensorDataset(pixels[:1536], labels[:1536]), TensorDataset(pixels[1536:], labels[1536:])


class NeuralNetwork(nn.Module):
    """Three layers, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.25), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(64, 10)]
        self.layers = nn.Sequential(*layers)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(pixels)
        return found


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Share of the images that are recognised."""
    model.eval()
    with torch.no_grad():
        pixels, labels = data.tensors
        return float((model(pixels).argmax(1) == labels).float().mean())


def train_func(config: dict[str, Any]) -> None:
    """One worker's part."""
    train_data, test_data = images()
    model = ray.train.torch.prepare_model(NeuralNetwork())
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    loader = ray.train.torch.prepare_data_loader(DataLoader(train_data, batch_size=BATCH_SIZE, shuffle=True))
    for _ in range(config["epochs"]):
        model.train()
        for pixels, labels in loader:
            loss = nn.functional.cross_entropy(model(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ray.train.report({"accuracy": accuracy(model, test_data)})


if __name__ == "__main__":
    trainer = TorchTrainer(train_func, train_loop_config=CONFIG, scaling_config=ScalingConfig(num_workers=2))
    print(trainer.fit().path)
