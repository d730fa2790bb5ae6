"""What an item says at its end."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


class CannotRunError(Exception):
    """An item cannot run here; the text says why, and what would help."""


@dataclass
class Outcome:
    """Figures of an item, and the conditions that did not hold."""

    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def note(self, **figures: Any) -> None:
        """Figures, floats to four digits."""
        self.figures |= {name: float(f"{x:.4g}") if isinstance(x, float) else x for name, x in figures.items()}

    def require(self, holds: bool, what: str) -> None:
        """A condition; ``what`` names it with its numbers."""
        if not holds:
            self.failures.append(what)

    def as_dict(self) -> dict[str, Any]:
        return {"status": "FAIL" if self.failures else "PASS", **asdict(self)}
