"""Follows edges into one-, two- and three-hop questions, and deals them into splits."""

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from world_sources import tables
from world_sources.asking import ASK, BACK, PHRASE, QUERIES
from world_sources.builder import Builder, Edge, Passage
from world_sources.load import fold

SHARES = {1: 0.60, 2: 0.30, 3: 0.10}


@dataclass(frozen=True)
class Chain:
    edges: tuple[Edge, ...]
    start: str  # what a query calls the first source

    @property
    def kind(self) -> str:
        return f"{len(self.edges)}-hop"

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(e.relation for e in self.edges)

    @property
    def entities(self) -> tuple[str, ...]:
        ids = [self.edges[0].source, *(e.target for e in self.edges if e.target)]
        return tuple(dict.fromkeys(ids))


def outgoing(builder: Builder) -> dict[str, list[Edge]]:
    out: dict[str, list[Edge]] = defaultdict(list)
    for edge in builder.edges.values():
        out[edge.source].append(edge)
    return out


def says(passage: Passage, phrase: str) -> bool:
    """Whether the passage has the phrase as whole words."""
    text = f"{passage.title} {passage.text}".lower()
    wanted = phrase.lower()
    return wanted in text and re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", text) is not None


def follow(starts: Iterable[Chain], out: dict[str, list[Edge]], texts: dict[str, Passage]) -> Iterator[Chain]:
    """Every chain one hop longer that needs the new passage and does not turn back."""
    for chain in starts:
        last = chain.edges[-1]
        if last.target is None or last.relation not in PHRASE:
            continue
        asked = fold(chain.edges[0].answer)
        for edge in out.get(last.target, ()):
            docs = {e.doc for e in chain.edges}
            loop = edge.target in chain.entities or (last.relation, edge.relation) in BACK
            if loop or edge.doc in docs or fold(edge.answer) == asked:
                continue
            if any(says(texts[d], edge.answer) for d in docs) or says(texts[edge.doc], chain.start):
                continue
            if edge.relation in ("country", "capital_of", "state", "fips", "iso") and len(chain.edges) > 1:
                continue
            yield Chain((*chain.edges, edge), chain.start)


def deal(pools: dict[tuple[str, ...], list[Chain]], count: int) -> list[Chain]:
    """Takes turns between the kinds of path, so that none crowds out the others."""
    taken: list[Chain] = []
    queues = [list(rows) for _, rows in sorted(pools.items())]
    while len(taken) < count and any(queues):
        for queue in queues:
            if queue and len(taken) < count:
                taken.append(queue.pop())
    return taken


def noun_of(edge: Edge) -> str:
    code = (edge.target or "").removeprefix("country:")
    return "territory" if code in tables.TERRITORIES else "country"


def wording(chain: Chain, builder: Builder, rng: random.Random) -> str:
    subject = chain.edges[0].called or builder.names[chain.edges[0].source]
    for edge in chain.edges[:-1]:
        subject = rng.choice(PHRASE[edge.relation]).format(x=subject, noun=noun_of(edge))
    last = chain.edges[-1]
    text = rng.choice(ASK[last.relation]).format(x=subject)
    if last.target and last.target.startswith("country:") and noun_of(last) == "territory":
        text = text.replace("country", "territory", 1)
    return text[0].upper() + text[1:]


def row(chain: Chain, builder: Builder, texts: dict[str, Passage]) -> dict[str, Any]:
    key = "/".join((chain.edges[0].source, *chain.path))
    last, rng = chain.edges[-1], builder.rng("queries:" + key)
    return {
        "id": key,
        "question": wording(chain, builder, builder.rng("question:" + key)),
        "golden_answers": [last.answer, *last.aliases],
        "kind": chain.kind,
        "metadata": {
            "hops": len(chain.edges),
            "relations": list(chain.path),
            "supporting_ids": [e.doc for e in chain.edges],
            "queries": [query(e, builder, rng) for e in chain.edges],
            "hop_answers": [verbatim(e, texts) for e in chain.edges],
            "entities": list(chain.entities),
        },
    }


def query(edge: Edge, builder: Builder, rng: random.Random) -> str:
    return rng.choice(QUERIES[edge.relation]).format(x=edge.called or builder.queries[edge.source])


def verbatim(edge: Edge, texts: dict[str, Passage]) -> str:
    """The answer as it stands in the passage (a name may open a sentence there)."""
    text = texts[edge.doc].text
    for form in (edge.answer, edge.answer[0].upper() + edge.answer[1:]):
        if re.search(rf"(?<!\w){re.escape(form)}(?!\w)", text):
            return form
    raise ValueError(
        f"passage {edge.doc!r} does not contain {edge.answer!r} ({edge.relation} of {edge.source})"
    )


def pick(chains: dict[int, list[Chain]], count: int, rng: random.Random) -> list[Chain]:
    taken = []
    for hops, share in SHARES.items():
        pools: dict[tuple[str, ...], list[Chain]] = defaultdict(list)
        for chain in chains[hops]:
            pools[chain.path].append(chain)
        for rows in pools.values():
            rng.shuffle(rows)
        taken += deal(pools, round(share * count))
    return taken


def make_questions(builder: Builder, sizes: dict[str, int]) -> dict[str, list[dict[str, Any]]]:
    """Rows for each split; `sizes` has the numbers wanted for train, dev, test and test_unseen."""
    texts = {p.id: p for p in builder.passages}
    out = outgoing(builder)
    chains: dict[int, list[Chain]] = {
        1: [
            Chain((e,), e.called or builder.queries[e.source])
            for e in builder.edges.values()
            if e.doc in texts
        ]
    }
    chains[2] = list(follow(chains[1], out, texts))
    chains[3] = list(follow(chains[2], out, texts))
    rng = builder.rng("splits")
    groups: dict[bool, dict[int, list[Chain]]] = {True: defaultdict(list), False: defaultdict(list)}
    for hops, followed in chains.items():
        for chain in followed:
            marks = {entity in builder.unseen for entity in chain.entities}
            if len(marks) == 1:
                groups[marks.pop()][hops].append(chain)
    seen_count = sizes["train"] + sizes["dev"] + sizes["test"]
    used: set[str] = set()
    result: dict[str, list[dict[str, Any]]] = {}
    for unseen, count in ((False, seen_count), (True, sizes["test_unseen"])):
        rows: list[dict[str, Any]] = []
        for chain in pick(groups[unseen], count, rng):
            made = row(chain, builder, texts)
            if (plain := fold(made["question"])) not in used:
                used.add(plain)
                rows.append(made)
        rng.shuffle(rows)
        if unseen:
            result["test_unseen"] = rows
        else:
            cut = sizes["test"], sizes["test"] + sizes["dev"]
            result |= {"test": rows[: cut[0]], "dev": rows[cut[0] : cut[1]], "train": rows[cut[1] :]}
    return {name: sorted(result[name], key=lambda r: r["id"]) for name in sizes}
