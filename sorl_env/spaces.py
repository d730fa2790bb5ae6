"""A gymnasium space of free text (gymnasium's own ``Text`` refuses spaces, accents and the empty string)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gymnasium.spaces import Space

_ALPHABET = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJ 0123456789 \n\"'.,?&</>éüñß北京東🧪–"
_LONGEST_SAMPLE = 48


class AnyText(Space[str]):
    """Every ``str``: empty, many lines, any script, any tag. All AnyText spaces are equal."""

    def __init__(self, seed: Any = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """A random text of 0 to 48 characters. Masks make no sense here and raise ValueError."""
        if mask is not None or probability is not None:
            raise ValueError("AnyText.sample takes neither mask nor probability; leave both out")
        length = int(self.np_random.integers(0, _LONGEST_SAMPLE + 1))
        picks = self.np_random.integers(0, len(_ALPHABET), size=length)
        return "".join(_ALPHABET[int(pick)] for pick in picks)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def to_jsonable(self, sample_n: Iterable[str]) -> list[str]:
        return list(sample_n)

    def from_jsonable(self, sample_n: list[Any]) -> list[str]:
        return [str(sample) for sample in sample_n]

    def __repr__(self) -> str:
        return "AnyText()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyText)

    def __hash__(self) -> int:
        return hash(AnyText)
