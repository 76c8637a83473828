"""A small convolutional network with BatchNorm reads the 1,797 digits that come with scikit-learn."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fleet


class Digits(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Item: an image (1, 8, 8) with values in 0..1 and its digit. Every fifth one is held out."""

    def __init__(self, held_out: bool = False) -> None:
        bunch = load_digits()
        chosen = (torch.arange(len(bunch.target)) % 5 == 0) == held_out
        self.images = torch.tensor(bunch.images, dtype=torch.float32)[chosen].unsqueeze(1) / 16
        self.digits = torch.tensor(bunch.target)[chosen]

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.digits[index]


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    features = nn.Sequential(convolution(1, 16), convolution(16, 32), nn.MaxPool2d(2), convolution(32, 64), nn.AdaptiveAvgPool2d(1))
    model = nn.Sequential(features, nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


@torch.no_grad()
def validate(model: nn.Module, data: Digits) -> dict[str, float]:
    scores = model.eval()(data.images)
    right = (scores.argmax(1) == data.digits).float().mean()
    return {"val_loss": nn.functional.cross_entropy(scores, data.digits).item(), "val_accuracy": right.item()}


def train(run: fleet.Run) -> None:
    data, held_out = Digits(), Digits(held_out=True)
    model, optimizer = build()
    state = run.track(model=model, optimizer=optimizer)
    for step in run.steps(state, total=int(run.options.get("steps", "200"))):
        for images, digits in step.batches(data, batch_size=128):
            step.backward(nn.functional.cross_entropy(model.train()(images), digits))
        step.commit()
        run.evaluate(lambda: validate(model, held_out), every=50)
