"""Models as users have them (weights in a file, a Hugging Face model, a Lightning module) train cut, through a kill, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fleet.protocol.records import HistoryBegun, ViewPublished
from fleet.settings.run import RunSettings
from storage.checkpoint.export import export_weights, load_state
from storage.checkpoint.store import CheckpointStore
from tests.fault.test_bad_luck import after, of, settings, survived, train_through
from tests.support import models
from tests.support.plain import PlainFleet
from tests.support.trains import build

STEPS = 14
KILL = after(4)


def kill_one(fleet: PlainFleet) -> None:
    KILL(fleet)
    fleet.kill(1)


def chosen(folder: Path, sharding: str, world: int = 3, nodes: int = 2, **options: str) -> RunSettings:
    return settings(folder, world=world, nodes=nodes, optimizer_sharding=sharding, options={"steps": str(STEPS), **options})


def same_bits_through_a_kill(train: Callable[[Any], None], folder: Path, truth: str, **options: str) -> None:
    made = folder / "cut"
    outcome, records, digest = train_through(train, chosen(made, "fsdp", **options), made, kill_one)
    survived(outcome, records, digest, truth)
    assert len(of(ViewPublished, records)) >= 2, "the kill changed no view"
    assert not of(HistoryBegun, records)


def whole(train: Callable[[Any], None], folder: Path, **options: str) -> str:
    """The digest of an undisturbed run of whole replicas, of another world size."""
    made = folder / "whole"
    outcome, _, digest = train_through(train, chosen(made, "none", world=2, **options), made)
    assert outcome.status == "completed", outcome
    return digest


# ---- weights in a file -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that no seed of a run would give."""
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    with torch.random.fork_rng():
        torch.manual_seed(77)
        save_file(build(1021, "layer")[0].state_dict(), path)
    return path


@pytest.fixture(scope="module")
def loaded(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of whole replicas that have loaded the weights in the ordinary way."""
    return whole(models.loads_its_weights, tmp_path_factory.mktemp("loaded"), weights=str(weights))


def test_weights_that_are_read_in_stretches_change_no_bit(weights: Path, loaded: str, tmp_path: Path) -> None:
    same_bits_through_a_kill(models.is_built_on_meta, tmp_path, loaded, weights=str(weights))


def test_a_rank_lost_in_the_first_step_takes_nothing_along(weights: Path, loaded: str, tmp_path: Path) -> None:
    """All still can read what they keep."""
    outcome, records, digest = train_through(
        models.is_built_on_meta, chosen(tmp_path, "fsdp", nodes=1, weights=str(weights), dies="yes"), tmp_path
    )
    survived(outcome, records, digest, loaded)
    states = [record.view.state.step for record in of(ViewPublished, records)]
    assert states[:2] == [0, 0], "it was to be lost before the first step is committed"


def test_whole_replicas_read_all_of_the_weights(weights: Path, loaded: str, tmp_path: Path) -> None:
    assert whole(models.is_built_on_meta, tmp_path, weights=str(weights)) == loaded


# ---- Hugging Face and Lightning ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as ``save_pretrained`` writes it, in several files."""
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        LlamaForCausalLM(models.llama_config(tied=True)).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def test_a_hugging_face_model_has_the_bits_of_whole_replicas(pretrained: Path, tmp_path: Path) -> None:
    """Built on meta, cut, and killed; or loaded by from_pretrained, and whole."""
    truth = whole(models.hugging_face, tmp_path, weights=str(pretrained))
    same_bits_through_a_kill(models.hugging_face_on_meta, tmp_path, truth, weights=str(pretrained))
    is_read_by_from_pretrained(tmp_path / "cut", pretrained, tmp_path / "exported")


def is_read_by_from_pretrained(run: Path, pretrained: Path, folder: Path) -> None:
    """What the run has trained, without its optimizer, in several files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    store = CheckpointStore(f"file://{run}")
    name = store.newest_valid()
    assert name is not None
    assert len(export_weights(store, name, folder, file_bytes=100_000)) > 1
    AutoConfig.from_pretrained(pretrained).save_pretrained(folder)
    model, reported = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(reported.values()), reported
    known = load_state(store, name)[0]["model"]
    assert model.state_dict().keys() == known.keys()
    assert all(torch.equal(value, known[key]) for key, value in model.state_dict().items())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_lightning_module_has_the_bits_of_whole_replicas(tmp_path: Path) -> None:
    truth = whole(models.lightning_fits, tmp_path)
    same_bits_through_a_kill(models.lightning_fits, tmp_path, truth)
