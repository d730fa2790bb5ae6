"""Passages and edges of countries, cities, US states, currencies and languages."""

from collections import defaultdict

from world_sources import tables
from world_sources.builder import Builder, Subject, join
from world_sources.load import City, Country, Sources, State, fold

LIST_LENGTH = 5


def country_id(code: str) -> str:
    return f"country:{code}"


def city_id(city: City) -> str:
    return f"city:{city.id}"


def where(city: City, sources: Sources) -> str:
    """What tells this city from others of its name: its state, its region or its country."""
    return city.region or sources.countries[city.country].spoken_name


def title_where(city: City, sources: Sources) -> str:
    return city.region or sources.countries[city.country].name


def city_names(city: City, sources: Sources) -> tuple[str, str]:
    """Name in a question (told apart from its namesakes) and in a query."""
    plain = city.unique
    question = city.name if plain else f"{city.name} in {where(city, sources)}"
    return question, city.name if plain else f"{city.name} {title_where(city, sources)}"


def seen_names(codes: list[str], builder: Builder, sources: Sources) -> list[str]:
    return [sources.countries[c].spoken_name for c in codes if country_id(c) not in builder.unseen]


def write_country(country: Country, builder: Builder, sources: Sources) -> None:
    me, key = country_id(country.code), f"country-{country.code.lower()}"
    name = country.name
    subject = Subject(country.spoken_name, f"the {country.noun}")
    builder.name(me, country.spoken_name, country.name)
    about = (me,)

    facts = []
    if country.continent:
        facts.append(("continent", {"v": country.continent, "noun": country.noun}))
        builder.edge("continent", me, key, country.continent)
    if country.capital:
        facts.append(("capital", {"v": country.capital.name}))
        if fold(country.capital.name) != fold(name):
            builder.edge(
                "capital", me, key, country.capital.name, country.capital.aliases, city_id(country.capital)
            )
    facts.append(("iso", {"v": country.code}))
    builder.edge("iso", me, key, country.code)
    builder.passage(key, f"{name}: capital and continent", subject, facts, about)
    if country.demonym:
        builder.edge("demonym", me, f"{key}-languages", country.demonym)

    money = f"{key}-money"
    facts = []
    if country.currency:
        label = sources.currencies[country.currency]
        users = sum(c.currency == country.currency for c in sources.countries.values())
        own = (f"{country.demonym} {label}",) if country.demonym and users == 1 else ()
        facts.append(("currency", {"v": label}))
        facts.append(("currency_code", {"v": country.currency}))
        builder.edge(
            "currency",
            me,
            money,
            label,
            (*own, *tables.CURRENCY_ALIASES.get(country.currency, ()), country.currency, f"{label}s"),
        )
        builder.edge("currency_code", me, money, country.currency)
    if country.domain:
        facts.append(("domain", {"v": country.domain}))
        builder.edge("domain", me, money, country.domain, (country.domain.lstrip("."),))
    if facts:
        builder.passage(money, f"Currency and internet domain of {name}", subject, facts, about)

    speech = f"{key}-languages"
    facts = []
    others = list(country.languages)
    if country.language:
        label = tables.LANGUAGE_NAMES[country.language]
        facts.append(("language", {"v": label}))
        builder.edge("language", me, speech, label)
        others = [n for n in others if n != label][:3]
        if others:
            facts.append(("more_languages", {"v": join(others)}))
    elif others:
        kind = "one_language" if len(others) == 1 else "languages"
        facts.append((kind, {"v": join(others[:4])}))
    if country.only_neighbour:
        other = sources.countries[country.only_neighbour]
        facts.append(("only_neighbour", {"v": other.spoken_name}))
        builder.edge("only_neighbour", me, speech, other.name, other.aliases, country_id(other.code))
    elif country.neighbours:
        names = [sources.countries[c].spoken_name for c in country.neighbours[:LIST_LENGTH]]
        facts.append(("neighbours", {"v": join(names)}))
    elif country.code not in ("CU", "US"):
        facts.append(("no_neighbours", {}))
    if country.demonym:
        facts.append(("demonym", {"v": country.demonym}))
    if facts:
        # the main language goes first, since the next sentence refers back to it
        builder.passage(
            speech, f"Languages, neighbours and people of {name}", subject, facts, about, shuffle=False
        )

    codes = f"{key}-codes"
    facts = [("code3", {"v": country.code3})]
    if country.calling:
        facts.append(("calling", {"v": country.calling}))
        digits = country.calling.lstrip("+")
        builder.edge(
            "calling",
            me,
            codes,
            country.calling,
            (digits, digits.replace("-", ""), "+" + digits.replace("-", "")),
        )
    if country.area:
        facts.append(("area", {"v": f"{country.area:,}"}))
    builder.passage(codes, f"Calling code and area of {name}", subject, facts, about)

    list_cities(country.cities, country.largest, me, f"{key}-cities", name, subject, builder, sources)


def list_cities(
    cities: list[City],
    largest: City | None,
    me: str,
    key: str,
    title: str,
    subject: Subject,
    builder: Builder,
    sources: Sources,
) -> None:
    facts = []
    others = [c.name for c in cities if c is not largest][:4]
    if largest:
        facts.append(("largest", {"v": largest.name}))
        builder.edge("largest", me, key, largest.name, largest.aliases, city_id(largest))
    if len(others) > 1:
        facts.append(("cities" if largest else "some_cities", {"v": join(others)}))
    if facts and (largest or len(others) > 1):
        builder.passage(
            key,
            f"Cities of {title}{' (US state)' if me.startswith('state:') else ''}",
            subject,
            facts,
            (me,),
            shuffle=False,
        )


def write_city(city: City, namesakes: list[City], builder: Builder, sources: Sources) -> None:
    me, key = city_id(city), f"city-{city.id}"
    country = sources.countries[city.country]
    home = country_id(city.country)
    state = f"state:{city.admin}" if city.country == "US" and city.region else None
    question, query = city_names(city, sources)
    builder.name(me, question, query)
    subject = Subject(city.name, "the city")
    if state:
        first = ("city_state", {"v": city.region or ""})
        if city.unique_at_home:
            builder.edge(
                "state",
                me,
                key,
                city.region or "",
                target=state,
                called=None if city.unique else f"{city.name} in the United States",
            )
    elif city.region:
        first = ("city_region", {"v": city.region, "country": country.spoken_name})
        if city.unique and fold(city.region) not in fold(city.name):
            builder.edge("region", me, key, city.region)
    else:
        first = ("city_country", {"v": country.spoken_name})
    facts = []
    if city.capital_of:
        facts.append(("capital_of", {"v": country.spoken_name}))
        capitals = [c.capital for c in sources.countries.values() if c.capital]
        if sum(fold(c.name) == fold(city.name) for c in capitals) == 1 and fold(city.name) != fold(
            country.name
        ):
            builder.edge("capital_of", me, key, country.name, country.aliases, home, called=city.name)
    if not state and city.unique and fold(city.name) != fold(country.name):
        builder.edge("country", me, key, country.name, country.aliases, home)
    facts.append(("timezone", {"v": city.timezone}))
    builder.edge("timezone", me, key, city.timezone, (city.timezone.replace(" ", "_"),))
    if city.population >= 500:
        facts.append(("population", {"v": f"{city.population:,}"}))
    others = [
        c
        for c in namesakes
        if c is not city
        and where(c, sources) != where(city, sources)
        and home_entity(c) not in builder.unseen
    ]
    rng = builder.rng(key + ":order")
    if not (others and city.capital_of):
        facts.append(("position", {"v": city.position}))
    rng.shuffle(facts)
    if others:
        other = rng.choice(others[:3])
        facts.append(("namesake", {"name": city.name, "v": where(other, sources)}))
    about = (me, home_entity(city))
    builder.passage(
        key, f"{city.name}, {title_where(city, sources)}", subject, [first, *facts], about, shuffle=False
    )


def home_entity(city: City) -> str:
    return f"state:{city.admin}" if city.country == "US" else country_id(city.country)


def write_state(state: State, builder: Builder, sources: Sources) -> None:
    me, key = f"state:{state.code}", f"state-{state.code.lower()}"
    name = f"the {state.name}" if state.code == "DC" else state.name
    builder.name(me, name, state.name)
    subject = Subject(name, "the district" if state.code == "DC" else "the state")
    kind = "is_district" if state.code == "DC" else "is_state"
    facts = [("abbreviation", {"v": state.code}), ("fips", {"v": state.fips})]
    builder.edge("abbreviation", me, key, state.code)
    builder.edge("fips", me, key, state.fips)
    builder.passage(key, f"{state.name} (US state)", subject, [(kind, {}), *facts], (me,), shuffle=False)
    short = f"abbreviation:{state.code}"
    builder.name(short, state.code, state.code)
    builder.edge("state_of_abbreviation", short, key, state.name, target=me)
    list_cities(state.cities, state.largest, me, f"{key}-cities", state.name, subject, builder, sources)


def write_currency(code: str, users: list[str], builder: Builder, sources: Sources) -> None:
    label, me, key = sources.currencies[code], f"currency:{code}", f"currency-{code.lower()}"
    alone = sum(name == label for name in sources.currencies.values()) == 1
    facts = [("money_code", {"v": code})]
    subject = Subject(f"the {label}", "the currency")
    if len(users) == 1 and code not in tables.SHARED_CURRENCIES:
        country = sources.countries[users[0]]
        if country_id(users[0]) in builder.unseen:
            builder.unseen.add(me)
        facts.insert(0, ("used_only", {"v": country.spoken_name}))
        shown = f"the {label}" if alone else f"the {label} with the code {code}"
        builder.name(me, shown, label if alone else f"{label} {code}")
        builder.edge("used_in", me, key, country.name, country.aliases, country_id(users[0]))
    else:
        names = seen_names(users, builder, sources)
        if not names:
            return
        facts.insert(0, ("used_by", {"v": join(names[:LIST_LENGTH])}))
    builder.passage(key, f"{label} ({code})", subject, facts, (me,), shuffle=False)


def write_language(
    code: str, main: list[str], also: list[str], sole: bool, builder: Builder, sources: Sources
) -> None:
    label, me, key = tables.LANGUAGE_NAMES[code], f"language:{code}", f"language-{code}"
    facts = []
    subject = Subject(label, "the language")
    builder.name(me, label, label)
    names = seen_names(main, builder, sources)
    if len(main) == 1 and sole:
        country = sources.countries[main[0]]
        if country_id(main[0]) in builder.unseen:
            builder.unseen.add(me)
        facts.append(("main_only", {"v": country.spoken_name}))
        builder.edge("main_in", me, key, country.name, country.aliases, country_id(main[0]))
    elif len(names) > 1:
        facts.append(("main_in", {"v": join(names[:LIST_LENGTH])}))
    elif names:
        facts.append(("main_only", {"v": names[0]}))
    facts.append(("language_code", {"v": code}))
    elsewhere = [n for n in seen_names(also, builder, sources) if n not in names]
    if elsewhere:
        facts.insert(
            len(facts) - 1, ("also_in" if len(facts) > 1 else "spoken_in", {"v": join(elsewhere[:4])})
        )
    if len(facts) > 1:
        builder.passage(key, f"{label} language", subject, facts, (me,), shuffle=False)


def choose_cities(sources: Sources, count: int) -> list[City]:
    """Capitals and largest cities, then cities that share a name, then the most populous of each country."""
    groups = defaultdict(list)
    for city in sources.cities:
        if city.country in sources.countries:
            groups[fold(city.name)].append(city)
    chosen: dict[int, City] = {}
    titles: set[tuple[str, str]] = set()

    def take(city: City) -> None:
        title = (fold(city.name), title_where(city, sources))
        odd = (
            not city.name[0].isalpha() or city.name.startswith(("Downtown", "Sector ")) or len(city.name) > 28
        )
        if city.id not in chosen and title not in titles and len(chosen) < count and not odd:
            chosen[city.id] = city
            titles.add(title)

    holders: list[Country | State] = [*sources.countries.values(), *sources.states.values()]
    for country in sources.countries.values():
        if country.capital:
            take(country.capital)
    for holder in holders:
        if holder.largest:
            take(holder.largest)
    for country in sources.countries.values():
        for city in [c for c in country.cities if c.unique][:6]:
            take(city)
    for state in sources.states.values():
        for city in state.cities[:8]:
            take(city)
    for rows in sorted(groups.values(), key=lambda g: -max(c.population for c in g)):
        homes = {title_where(c, sources) for c in rows}
        if len(homes) >= 2 and len(chosen) < count * 0.75:
            for city in sorted(rows, key=lambda c: (-c.population, c.id))[:4]:
                take(city)
    for city in sorted(sources.cities, key=lambda c: (-c.population, c.id)):
        if city.country in sources.countries and city.unique:
            take(city)
    return sorted(chosen.values(), key=lambda c: c.id)


def write_places(builder: Builder, sources: Sources, city_count: int) -> None:
    for country in sources.countries.values():
        write_country(country, builder, sources)
    for state in sources.states.values():
        write_state(state, builder, sources)
    chosen = choose_cities(sources, city_count)
    groups = defaultdict(list)
    for city in chosen:
        groups[fold(city.name)].append(city)
    for city in chosen:
        write_city(city, groups[fold(city.name)], builder, sources)
    users = defaultdict(list)
    main, also, first = defaultdict(list), defaultdict(list), defaultdict(list)
    codes = {name: code for code, name in tables.LANGUAGE_NAMES.items()}
    for code, country in sources.countries.items():
        if country.currency:
            users[country.currency].append(code)
        if country.language:
            main[country.language].append(code)
        first[sources.first_language[code]].append(code)
        for name in country.languages:
            also[codes[name]].append(code)
        for relation, value, prefix in (
            ("country_of_domain", country.domain, "domain"),
            ("country_of_calling", country.calling, "calling"),
        ):
            alone = sum(getattr(c, prefix) == value for c in sources.countries.values()) == 1
            if value and alone and value not in tables.SHARED_CALLING:
                key = f"country-{code.lower()}-" + ("money" if prefix == "domain" else "codes")
                builder.name(f"{prefix}:{value}", value, value)
                builder.edge(
                    relation, f"{prefix}:{value}", key, country.name, country.aliases, country_id(code)
                )
    for code in sorted(users):
        write_currency(code, users[code], builder, sources)
    for code in sorted(also):
        write_language(code, main[code], also[code], len(first[code]) == 1, builder, sources)
