"""Images in folders, one for each class, decoded by Pillow."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from actors.rank.data.readers import File, needed

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


@dataclasses.dataclass(frozen=True)
class Images:
    """Each file is an image, and the folder that it lies in names its class: a sample is (image, number of the class).

    Attributes:
        transform: a PIL image -> what the model gets; None makes a uint8 tensor of shape (channels, height, width).
        mode: Pillow's name of the colours that images are converted to, as "L" for grey; None leaves them.
        classes: names of the folders, in order of their numbers; empty takes those that are there, in alphabetical order.
    """

    transform: Callable[[Any], Any] | None = None
    mode: str | None = "RGB"
    classes: Sequence[str] = ()
    numbers: Mapping[str, int] = dataclasses.field(default_factory=dict, repr=False)
    """Of the classes: filled in when they are known."""

    def takes(self, path: str) -> bool:
        """Of a folder, the files that end as images do."""
        return path.lower().endswith(SUFFIXES)

    def prepare(self, files: Sequence[File]) -> Images:
        """The reader that knows all classes. Raises ConfigError when Pillow is missing."""
        needed("PIL.Image", "Images", "pillow")
        classes = self.classes or tuple(sorted({_folder(file) for file in files}))
        return dataclasses.replace(self, classes=classes, numbers={name: number for number, name in enumerate(classes)})

    def records(self, file: File) -> OneImage:
        """Raises ConfigError when the file lies in a folder that ``classes`` does not name."""
        label = self.numbers.get(_folder(file))
        if label is None:
            reason = f"it lies in the folder {_folder(file)!r}, which is none of the classes {', '.join(self.classes)}"
            raise file.refused(reason, "Name it in classes=(...), or leave the file out.")
        return OneImage(file, self, label)


def _folder(file: File) -> str:
    return ("/" + file.path).split("/")[-2]


class OneImage:
    """The one record of a file."""

    def __init__(self, file: File, reader: Images, label: int) -> None:
        self._file, self._reader, self._label = file, reader, label

    def __len__(self) -> int:
        return 1

    @property
    def layout(self) -> tuple[int, int, int]:
        """Where the record lies, as ``DataFile`` has it."""
        return 0, self._file.size, self._file.size

    def span(self, index: int) -> tuple[int, int]:
        """All of the file."""
        return 0, self._file.size

    def decode(self, data: bytes) -> Any:
        """(image, label). Raises ConfigError with the file's name when Pillow cannot read it."""
        image = self._open(data)
        return (_tensor(image) if self._reader.transform is None else self._reader.transform(image)), self._label

    def _open(self, data: bytes) -> Any:
        from PIL import Image

        try:
            image = Image.open(io.BytesIO(data))
            image.load()
            return image if self._reader.mode is None else image.convert(self._reader.mode)
        except Exception as error:  # of a damaged image nearly anything: OSError, SyntaxError, ValueError, struct.error
            raise self._file.refused(f"Pillow cannot read it: {error}", "Repair it, or leave it out.") from error


def _tensor(image: Any) -> torch.Tensor:
    pixels = np.array(image)
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous() if pixels.ndim == 3 else torch.from_numpy(pixels).unsqueeze(0)
