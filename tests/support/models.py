"""Train functions for tests, of models as users have them."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.support.trains import Numbers, build, cut_of, die, once

WIDTH = 1021
WORDS, LENGTH = 97, 12


def _train(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, **weights: str) -> None:
    state = run.track(model=model, optimizer=optimizer, scheduler=scheduler, **weights)
    for step in run.steps(state, total=int(run.options["steps"]), clip_norm=1.0):
        for x, y in step.batches(Numbers(), batch_size=64):
            step.backward(((model(x) - y) ** 2).mean())
        if step.number == 0 and run.slot == 1 and not run._loop.rehearsing and "dies" in run.options and once(run, "first"):
            die()
        step.commit()


def loads_its_weights(run: Any) -> None:
    """Built in memory, and given its weights by load_state_dict."""

    def loaded(model: nn.Sequential) -> None:
        model.load_state_dict(load_file(run.options["weights"]))
        cut_of(run)(model)

    _train(run, *build(WIDTH, "layer", loaded))


def is_built_on_meta(run: Any) -> None:
    """It has shapes alone, until Fleet reads its weights."""
    with torch.device("meta"):
        model, optimizer, scheduler = build(WIDTH, "layer", cut_of(run))
    _train(run, model, optimizer, scheduler, weights=run.options["weights"])


# ---- Hugging Face ------------------------------------------------------------------------------------------------------------------------


class Text(torch.utils.data.Dataset[Tensor]):
    """Sample ``i`` is a pure function of ``i``."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Tensor:
        return (torch.arange(LENGTH) * (index + 1) + index) % WORDS


def llama_config(*, tied: bool = False) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=WORDS, hidden_size=56, intermediate_size=108, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, tie_word_embeddings=tied, attn_implementation="eager",
    )  # fmt: skip


def _train_llama(run: Any, model: Any, **weights: str) -> None:
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=run.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = run.track(model=model, optimizer=optimizer, **weights)
    for step in run.steps(state, total=int(run.options["steps"]), clip_norm=1.0):
        for ids in step.batches(Text(), batch_size=32):
            step.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        step.commit()


def hugging_face(run: Any) -> None:
    """Loaded as everyone loads one."""
    from transformers import AutoModelForCausalLM

    _train_llama(run, AutoModelForCausalLM.from_pretrained(run.options["weights"], attn_implementation="eager"))


def hugging_face_on_meta(run: Any) -> None:
    """Its shapes from the configuration, and its weights from where ``save_pretrained`` has put them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(run.options["weights"], attn_implementation="eager")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # a table that no file has
    _train_llama(run, model, weights=run.options["weights"])


# ---- Lightning ---------------------------------------------------------------------------------------------------------------------------


def lightning_module(width: int) -> Any:
    import lightning

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1))

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5)}

    return Regression()


def lightning_fits(run: Any) -> None:
    """Its training_step and configure_optimizers in Fleet's loop."""
    module = lightning_module(WIDTH)
    for part in (module.net[0], module.net):
        fully_shard(part, mesh=run.mesh)
    chosen = module.configure_optimizers()
    state = run.track(model=module, optimizer=chosen["optimizer"], scheduler=chosen["lr_scheduler"])
    for step in run.steps(state, total=int(run.options["steps"]), clip_norm=1.0):
        for index, batch in enumerate(step.batches(Numbers(), batch_size=64)):
            step.backward(module.training_step(batch, index))
        step.commit()
