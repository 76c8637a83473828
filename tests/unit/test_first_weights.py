"""The first weights of a model from a file: stretches of each parameter, in the order of its memory."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from actors.rank.fsdp.stand_ins import nothing
from actors.rank.state.weights import WeightFiles, load_weights


def test_a_parameter_is_read_in_the_order_of_its_memory_also_while_it_has_none(tmp_path: Path) -> None:
    plain = nn.Conv2d(3, 2, 2)
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        live = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    readers = load_weights({"model": live}, WeightFiles(tmp_path), torch.device("cpu"), chunked=True)
    read = readers[id(live.weight)]
    with torch.no_grad():
        live.weight = nn.Parameter(nothing(torch.empty_like(live.weight, device="cpu"), torch.float32))  # as between two uses of a unit
    expected = plain.weight.detach().permute(0, 2, 3, 1).reshape(-1)
    assert torch.equal(read(0, 24), expected)
    assert torch.equal(read(5, 11), expected[5:11])
