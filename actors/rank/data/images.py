"""Images in folders, one for each class, decoded by Pillow."""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from actors.rank.data.readers import File, Records, Whole, needed

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


@dataclasses.dataclass(frozen=True)
class Images:
    """Each file is an image, and the name of its folder is its class: a sample is (image, number of the class).

    Attributes:
        transform: a PIL image -> the model's input; None makes a uint8 tensor of shape (channels, height, width).
        mode: Pillow's name of the colours that images are converted to, as "L" for grey; None leaves them.
        classes: names of the folders, in order of their numbers; empty: all folders, in alphabetical order.
    """

    transform: Callable[[Any], Any] | None = None
    mode: str | None = "RGB"
    classes: Sequence[str] = ()
    numbers: Mapping[str, int] = dataclasses.field(default_factory=dict, repr=False)
    """Class -> number, filled in by :meth:`prepare`."""

    def takes(self, path: str) -> bool:
        """Of the files in a folder, those whose names end as those of images."""
        return path.lower().endswith(SUFFIXES)

    def prepare(self, files: Sequence[File]) -> Images:
        """The same reader with all classes. Raises ConfigError when Pillow is missing."""
        needed("PIL.Image", "Images", "pillow")
        classes = self.classes or tuple(sorted({_folder(file) for file in files}))
        return dataclasses.replace(self, classes=classes, numbers={name: number for number, name in enumerate(classes)})

    def records(self, file: File) -> Records:
        """Raises ConfigError when the file lies in a folder that ``classes`` does not name."""
        label = self.numbers.get(_folder(file))
        if label is None:
            reason = f"it lies in the folder {_folder(file)!r}, which is none of the classes {', '.join(self.classes)}"
            raise file.refused(reason, "Name it in classes=(...), or leave the file out.")
        return Whole(functools.partial(_decoded, file, self, label)).records(file)


def _folder(file: File) -> str:
    return ("/" + file.path).split("/")[-2]


def _decoded(file: File, reader: Images, label: int, data: bytes) -> tuple[Any, int]:
    """(image, label). Raises ConfigError with the file's name when Pillow cannot read it."""
    image = _opened(file, reader.mode, data)
    return (_tensor(image) if reader.transform is None else reader.transform(image)), label


def _opened(file: File, mode: str | None, data: bytes) -> Any:
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data))
        image.load()
        return image if mode is None else image.convert(mode)
    except Exception as error:  # a damaged image can raise OSError, SyntaxError, ValueError, struct.error and more
        raise file.refused(f"Pillow cannot read it: {error}", "Repair it, or leave it out.") from error


def _tensor(image: Any) -> torch.Tensor:
    pixels = np.array(image)
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous() if pixels.ndim == 3 else torch.from_numpy(pixels).unsqueeze(0)
