"""A text classifier, after the examples for transformers and checkpoints in Ray Train's documentation. It resumes from its checkpoint."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from fleet import Trainer as TorchTrainer, current_run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE, STEPS = 16, 16
"""Of each of two workers, and how many steps make an epoch of 512 sentences."""
CONFIG = {"lr": 3e-3, "epochs": 4}
WORDS = ["the", "film", "was", "is", "really", "quite", "not", "good", "great", "bad", "dull", "fine", "awful", "and", "long", "short"]
LENGTH = 12


def sentences(count: int, seed: int) -> TensorDataset:
    """Sentences of words that are drawn, as numbers; those with more praise than blame have the label 1."""
    draw = random.Random(seed)
    drawn = [draw.choices(range(len(WORDS)), k=LENGTH) for _ in range(count)]
    praise = [sum((WORDS[word] in ("good", "great", "fine")) - (WORDS[word] in ("bad", "dull", "awful")) for word in one) for one in drawn]
    return TensorDataset(torch.tensor(drawn), torch.tensor([int(each > 0) for each in praise]))


class Classifier(nn.Module):
    """A transformer of one layer, whose mean is judged."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layer(self.words(words)).mean(1))
        return found


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Share of the sentences that are judged right."""
    model.eval()
    with torch.no_grad():
        words, labels = data.tensors
        return float((model(words).argmax(1) == labels).float().mean())


def steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """Steps taken so far, as the optimizer counts them."""
    return next((int(state["step"]) for state in optimizer.state.values()), 0)


def train_func(config: dict[str, Any]) -> None:
    """One worker's part."""
    train_data, test_data = sentences(512, 0), sentences(128, 1)
    network = Classifier()
    optimizer = torch.optim.AdamW(network.parameters(), lr=config["lr"])
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), weights_only=True)
            network.load_state_dict(state["network"])
            optimizer.load_state_dict(state["optimizer"])
    model = ray.train.torch.prepare_model(network)
    loader = ray.train.torch.prepare_data_loader(DataLoader(train_data, batch_size=BATCH_SIZE, shuffle=True))
    for step in current_run().steps(current_run().track(model=model, optimizer=optimizer), total=STEPS * config["epochs"]):
        model.train()
        for words, labels in step.batches(loader.dataset, batch_size=2 * BATCH_SIZE):
            loss = nn.functional.cross_entropy(model(words), labels)
            optimizer.zero_grad()
            step.backward(loss)
        if step.commit() and (step.number + 1) % STEPS == 0:
            with tempfile.TemporaryDirectory() as folder:
                torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder, "state.pt"))
                metrics = {"accuracy": accuracy(network, test_data), "steps": steps_taken(optimizer)}
                ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_func,
        train_loop_config=CONFIG,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(Path("runs").resolve())),
    )
    print(trainer.fit().metrics)
