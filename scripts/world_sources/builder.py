"""Collects passages and the edges (facts that questions are made of) while the world is written down."""

import random
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

from world_sources.wording import SENTENCES


@dataclass(frozen=True)
class Edge:
    """One fact: `source` has `answer` under `relation`, said in passage `doc`."""

    relation: str
    source: str  # entity id
    doc: str  # id of the supporting passage
    answer: str  # as it stands in the passage
    aliases: tuple[str, ...] = ()
    target: str | None = None  # entity id of the answer, where it is an entity
    called: str | None = None  # what the question calls the source, where its usual name says too much


@dataclass(frozen=True)
class Passage:
    id: str
    title: str
    text: str
    unseen: bool


@dataclass(frozen=True)
class Subject:
    """How a sentence names what it is about: by name first, then by name or a short form."""

    name: str  # as in the middle of a sentence
    short: str  # "the country"
    pronoun: bool = True

    def slots(self, first: bool, rng: random.Random) -> dict[str, str]:
        name = self.name
        start = name[0].upper() + name[1:]
        own = name + ("'" if name.endswith("s") else "'s")
        own_start = own[0].upper() + own[1:]
        if not first and rng.random() < 0.65:
            plain = self.short[0].upper() + self.short[1:]
            return {
                "S": rng.choice(("It", plain)) if self.pronoun else plain,
                "s": self.short,
                "P": "Its" if self.pronoun else f"{plain}'s",
                "p": "its",
            }
        return {"S": start, "s": name, "P": own_start, "p": own}


@dataclass
class Builder:
    seed: int
    unseen: set[str] = field(default_factory=set)
    passages: list[Passage] = field(default_factory=list)
    edges: dict[tuple[str, str], Edge] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # entity id to the name used in questions
    queries: dict[str, str] = field(default_factory=dict)  # entity id to the name used in queries

    def rng(self, key: str) -> random.Random:
        return random.Random(f"{self.seed}:{key}")

    def name(self, entity: str, in_question: str, in_query: str | None = None) -> None:
        self.names[entity] = in_question
        self.queries[entity] = in_query or in_question

    def passage(
        self,
        key: str,
        title: str,
        subject: Subject,
        facts: Sequence[tuple[str, dict[str, str]]],
        about: Sequence[str],
        shuffle: bool = True,
    ) -> None:
        """Writes the facts as sentences: `facts` are (kind in SENTENCES, slots); `about` are entity ids."""
        rng = self.rng(key)
        order = list(facts)
        if shuffle:
            rng.shuffle(order)
        sentences: list[str] = []
        for kind, slots in order:
            forms = SENTENCES[kind]
            if not sentences:  # the first sentence has to name its subject
                forms = tuple(f for f in forms if any(slot in f for slot in ("{S}", "{s}", "{P}", "{p}")))
            template = rng.choice(forms)
            sentence = template.format(**subject.slots(not sentences, rng), **slots)
            sentences.append(sentence[0].upper() + sentence[1:])
        self.passages.append(Passage(key, title, " ".join(sentences), any(e in self.unseen for e in about)))

    def edge(
        self,
        relation: str,
        source: str,
        doc: str,
        answer: str,
        aliases: Sequence[str] = (),
        target: str | None = None,
        called: str | None = None,
    ) -> None:
        plain = [unaccented(a) for a in (answer, *aliases)]
        extra = tuple(dict.fromkeys(a for a in (*aliases, *plain) if a and a != answer))
        self.edges[source, relation] = Edge(relation, source, doc, answer, extra, target, called)


def unaccented(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


def join(names: Sequence[str]) -> str:
    """a; a and b; a, b and c."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
