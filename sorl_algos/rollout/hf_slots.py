"""Continuous batching for HFEngine: rows join and leave between tokens, and what they attended to can be kept.

Keys and values live in one tensor of slots. The rows that are being decoded fill the first slots, so that each layer
reads a view and nothing is copied from token to token. A row that has finished stays in a slot behind them; a later
prompt that begins with all of its tokens (the next turn of the same episode) goes on from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sorl_algos.rollout.engine import Sampling, StopReason

CAPACITY_STEP = 64  # the length of the slots is a multiple of this
PREFILL_TOKENS = 8192  # most tokens, padding included, of one forward that reads prompts
JOIN_SHARE = 4  # newcomers wait until they are a quarter of the rows at work: a forward for each would cost more

Ends = Callable[[list[int], Sampling], StopReason | None]
Sample = Callable[[Tensor, Tensor, Sampling], tuple[Tensor, Tensor]]


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and what has been sampled for it. ``uniforms``: one random number for each token it may sample."""

    prompt: list[int]
    sampling: Sampling
    uniforms: np.ndarray
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: StopReason = "length"
    finished: bool = False
    cancelled: bool = False

    @property
    def longest(self) -> int:
        return len(self.prompt) + len(self.uniforms)


@dataclass(slots=True, eq=False)
class _Row:
    """What a slot holds: the keys and values of ``ids`` (while it is decoded, not yet those of the last one).

    ``request``: whose row it is now, None for one that is only kept; ``finished_at``: orders the kept ones by age.
    """

    ids: list[int]
    request: Request | None = None
    finished_at: int = 0


class SlotCache:
    """What the model's attention layers call: takes the new keys and values, gives back all that the rows have."""

    def __init__(self, data: Tensor, first: int, rows: int, width: int, write: Sequence[Tensor]) -> None:
        self.data, self.width, self.rows = data, width, slice(first, first + rows)
        self.slots, self.positions, self.sources, self.columns = write

    def update(self, keys: Tensor, values: Tensor, layer: int, *unused: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """``keys, values (rows, heads, new, dim)``; returns views ``(rows, heads, width, dim)``."""
        both = []
        for store, new in zip(self.data[layer], (keys, values), strict=True):
            store[self.slots, :, self.positions] = new[self.sources, :, self.columns]
            both.append(store[self.rows, :, : self.width])
        return both[0], both[1]

    def get_seq_length(self, layer: int = 0) -> int:
        return self.width


class SlotDecoder:
    """Decodes requests, one token of every row a `step`. Not for two threads at once.

    Args:
        model: a transformers causal language model whose layers all attend to everything before.
        sample, ends: draw tokens from logits; say whether and why a completion is over.
        max_rows: rows decoded at one time.
        budget_bytes: most memory of keys and values; None: as much as ``max_rows`` rows need.
        keep: whether finished rows stay for as long as nobody else needs their slot.

    ``read_tokens`` counts prompt tokens that a forward read, ``reused_tokens`` those that a kept row spared.

    Raises:
        ValueError: a model with other kinds of layers.
    """

    def __init__(
        self, model: Any, *, sample: Sample, ends: Ends, max_rows: int, budget_bytes: int | None, keep: bool
    ) -> None:
        config = model.config.get_text_config()
        if kinds := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
            raise ValueError(
                f"model {config.name_or_path!r} has layers of kind {', '.join(sorted(kinds))}, whose state cannot be "
                "kept in slots; use source sync and kv_cache_mb 0"
            )
        self.model, self.sample, self.ends = model, sample, ends
        self.max_rows, self.budget_bytes, self.keep = max_rows, budget_bytes, keep
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._layers, self._heads, self._head_dim = config.num_hidden_layers, heads, head_dim
        self._data = self._zeros(0, 0)
        self._slots: list[_Row | None] = []  # the rows being decoded, then kept rows and empty slots
        self._live = 0
        self._finished = 0
        self._arrived: deque[Request] = deque()  # other threads put them here
        self._waiting: list[Request] = []
        self.read_tokens = 0
        self.reused_tokens = 0

    @property
    def busy(self) -> bool:
        return bool(self._live or self._waiting or self._arrived)

    @property
    def live_rows(self) -> int:
        return self._live

    @property
    def kept_rows(self) -> int:
        return sum(row is not None for row in self._slots[self._live :])

    def add(self, request: Request) -> None:
        """Queues a request. Raises ValueError if the memory cannot hold a single row of its length."""
        if self._rows_that_fit(request.longest) < 1:
            raise ValueError(
                f"a row of {request.longest} tokens needs {self._bytes(request.longest) / 2**20:.1f} MB of keys and "
                f"values, but only {(self.budget_bytes or 0) / 2**20:.1f} MB are allowed; raise kv_cache_mb"
            )
        self._arrived.append(request)

    def forget(self) -> None:
        """Drops every kept row before new weights. Raises RuntimeError while completions are being sampled."""
        self._drop_cancelled()
        if self.busy:
            raise RuntimeError("weights cannot change while completions are being sampled; wait for them first")
        self.drop_kept()

    def drop_kept(self) -> None:
        self._slots = [*self._slots[: self._live], *[None] * (len(self._slots) - self._live)]

    def abandon(self) -> None:
        """Drops everything, requests under way too, after an error; and the memory, which may hold NaN."""
        self._waiting = []
        self._arrived.clear()
        self._data, self._slots, self._live = self._zeros(0, 0), [], 0

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Reads waiting prompts, or else samples a token for every row. Returns the requests that ended."""
        self._drop_cancelled()
        joining = self._joining()
        if joining:
            return self._read(joining)
        return self._decode() if self._live else []

    def _drop_cancelled(self) -> None:
        while self._arrived:
            self._waiting.append(self._arrived.popleft())
        self._waiting = [request for request in self._waiting if not request.cancelled]
        for slot in reversed(range(self._live)):
            if self._request(slot).cancelled:
                self._leave(slot, keep=False)  # the keys of its last token were never made

    def _request(self, slot: int) -> Request:
        row = self._slots[slot]
        assert row is not None and row.request is not None
        return row.request

    # --- Forwards ------------------------------------------------------------------------------------------------

    def _joining(self) -> list[tuple[Request, _Row | None]]:
        """The waiting requests that join now, each with the kept row that it goes on from, which is theirs now."""
        if len(self._waiting) * JOIN_SHARE < self._live:
            return []
        chosen: list[tuple[Request, _Row | None]] = []
        widest, longest = 0, self._data.shape[4]
        while self._waiting:
            request = self._waiting[0]
            longest = max(longest, request.longest)
            row = self._kept_for(request.prompt)
            widest = max(widest, len(request.prompt) - (len(row.ids) if row else 0))
            rows = len(chosen) + 1
            if self._live + rows > self._rows_that_fit(longest) or (chosen and widest * rows > PREFILL_TOKENS):
                break
            if row is not None:
                row.request = request
            chosen.append((self._waiting.pop(0), row))
        return chosen

    def _kept_for(self, prompt: list[int]) -> _Row | None:
        """The longest kept row that this prompt goes on from."""
        best = None
        for row in self._slots[self._live :]:
            if row is None or row.request is not None or not len(best.ids if best else ()) < len(row.ids) < len(prompt):
                continue
            if prompt[: len(row.ids)] == row.ids:
                best = row
        return best

    def _read(self, joining: list[tuple[Request, _Row | None]]) -> list[Request]:
        """One forward over the prompt tokens that no slot holds yet; samples the first tokens."""
        first = self._live
        self._reserve(first + len(joining), max(request.longest for request, _ in joining))
        held = [len(row.ids) if row else 0 for _, row in joining]
        news = [request.prompt[start:] for (request, _), start in zip(joining, held, strict=True)]
        for request, row in joining:
            if row is None:
                self._clear_slot(self._live)
            else:
                self._swap(self._slots.index(row), self._live)
            self._slots[self._live] = _Row(list(request.prompt), request)
            self._live += 1
        self.read_tokens += sum(map(len, news))
        self.reused_tokens += sum(held)
        widest = max(map(len, news))
        ids = torch.zeros(len(news), widest, dtype=torch.long)
        positions = torch.full_like(ids, -1)
        for place, (new, start) in enumerate(zip(news, held, strict=True)):
            ids[place, widest - len(new) :] = torch.tensor(new)
            positions[place, widest - len(new) :] = torch.arange(start, start + len(new))
        return self._advance(first, self._forward(first, ids, positions))

    def _decode(self) -> list[Request]:
        rows = [row for row in self._slots[: self._live] if row is not None]
        ids, places = [[row.ids[-1]] for row in rows], [[len(row.ids) - 1] for row in rows]
        return self._advance(0, self._forward(0, torch.tensor(ids), torch.tensor(places)))

    def _forward(self, first: int, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits ``(rows, V)`` after the last of ``ids (rows, new)``; position -1 marks padding, on the left."""
        width, device = int(positions.max()) + 1, self._data.device
        sources, columns = (positions >= 0).nonzero(as_tuple=True)
        write = [part.to(device) for part in (sources + first, positions[sources, columns], sources, columns)]
        positions = positions.clamp(min=0)
        later = torch.arange(width) > positions[:, :, None]
        mask = torch.zeros(later.shape, dtype=self._data.dtype).masked_fill_(later, torch.finfo(self._data.dtype).min)
        return self.model(
            input_ids=ids.to(device),
            attention_mask=mask[:, None].to(device),
            position_ids=positions.to(device),
            past_key_values=SlotCache(self._data, first, len(ids), width, write),
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def _advance(self, first: int, logits: Tensor) -> list[Request]:
        """Samples a token for the rows from slot ``first`` on; those that end leave the rows being decoded."""
        requests = [self._request(slot) for slot in range(first, first + len(logits))]
        alike: dict[Sampling, list[int]] = {}
        for place, request in enumerate(requests):
            alike.setdefault(request.sampling, []).append(place)
        for sampling, places in alike.items():
            chosen = logits if len(places) == len(requests) else logits[places]
            uniforms = np.array([requests[place].uniforms[len(requests[place].token_ids)] for place in places])
            tokens, logps = self.sample(chosen, torch.from_numpy(uniforms).to(logits.device), sampling)
            for place, token, logp in zip(places, tokens.tolist(), logps.tolist(), strict=True):
                requests[place].token_ids.append(token)
                requests[place].logprobs.append(logp)
        ended = []
        for place in reversed(range(len(requests))):  # a row that leaves changes places with one that was looked at
            request, row = requests[place], self._slots[first + place]
            reason = self.ends(request.token_ids, request.sampling)
            if reason is None and len(request.token_ids) < len(request.uniforms):
                assert row is not None
                row.ids.append(request.token_ids[-1])
                continue
            request.stop, request.finished = reason or "length", True
            self._leave(first + place, keep=self.keep)
            ended.append(request)
        return ended[::-1]

    # --- Slots ---------------------------------------------------------------------------------------------------

    def _leave(self, slot: int, *, keep: bool) -> None:
        """Takes a row out of those being decoded; the last of them gets its slot."""
        row = self._slots[slot]
        assert row is not None
        self._finished += 1
        row.request, row.finished_at = None, self._finished
        if not keep:
            self._slots[slot] = None
        self._live -= 1
        self._swap(slot, self._live)

    def _clear_slot(self, slot: int) -> None:
        """Empties a slot; a kept row in it moves to a free one, or to that of the oldest kept row."""
        if self._slots[slot] is None:
            return
        free = [place for place in range(self._live, len(self._slots)) if self._slots[place] is None]
        if not free:
            kept = [(row.finished_at, place) for place, row in enumerate(self._slots) if row and row.request is None]
            free = [min(kept)[1]]
            self._slots[free[0]] = None
        self._swap(slot, free[0])

    def _swap(self, one: int, other: int) -> None:
        """Exchanges what two slots hold."""
        if one == other:
            return
        rows, saved = self._slots, None
        if (row := rows[other]) is not None:
            saved = self._data[:, :, other, :, : len(row.ids)].clone()
        if (row := rows[one]) is not None:
            self._data[:, :, other, :, : len(row.ids)] = self._data[:, :, one, :, : len(row.ids)]
        if saved is not None:
            self._data[:, :, one, :, : saved.shape[3]] = saved
        rows[one], rows[other] = rows[other], rows[one]

    def _reserve(self, rows: int, tokens: int) -> None:
        """Makes room for so many rows of so many tokens; kept rows that do not fit are dropped, the oldest first."""
        capacity = max(self._data.shape[4], _rounded(tokens))
        slots = len(self._slots) if rows <= len(self._slots) else 2 * rows
        slots = max(rows, min(slots, self._rows_that_fit(capacity)))
        if (slots, capacity) == (len(self._slots), self._data.shape[4]):
            return
        kept = [place for place, row in enumerate(self._slots) if row is not None]
        if len(kept) > slots:
            # those at work, those that a joining request has claimed, then the ones that finished last
            kept.sort(key=lambda place: (self._age(place), place))
            kept = sorted(kept[:slots])
        data = self._zeros(slots, capacity)
        data[:, :, : len(kept), :, : self._data.shape[4]] = self._data[:, :, kept]
        held = [self._slots[place] for place in kept]
        self._data, self._slots = data, [*held, *[None] * (slots - len(held))]

    def _age(self, place: int) -> int:
        row = self._slots[place]
        assert row is not None
        return -self._finished - 1 if row.request is not None else -row.finished_at

    def _zeros(self, slots: int, capacity: int) -> Tensor:
        # Zeros, not empty memory: a masked position counts nothing only while what it holds is finite.
        shape = (self._layers, 2, slots, self._heads, capacity, self._head_dim)
        return torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)

    def _bytes(self, tokens: int) -> int:
        size = self._layers * 2 * self._heads * self._head_dim * self.model.dtype.itemsize
        return size * max(_rounded(tokens), self._data.shape[4])

    def _rows_that_fit(self, tokens: int) -> int:
        if self.budget_bytes is None:
            return self.max_rows
        return min(self.max_rows, self.budget_bytes // self._bytes(tokens))


def _rounded(tokens: int) -> int:
    return -(-tokens // CAPACITY_STEP) * CAPACITY_STEP
