"""Passages and edges of chemical elements and isotopes."""

from collections import defaultdict

from world_sources import tables
from world_sources.builder import Builder, Subject, join
from world_sources.load import Element, Isotope, Sources

NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def element_id(number: int) -> str:
    return f"element:{number}"


def isotope_id(element: Element, isotope: Isotope) -> str:
    return f"isotope:{element.symbol}-{isotope.mass_number}"


def isotope_name(element: Element, isotope: Isotope) -> str:
    return f"{element.name}-{isotope.mass_number}"


def plural(family: str) -> str:
    return family + ("es" if family.endswith("s") else "s")


def write_element(element: Element, builder: Builder, sources: Sources, chosen: list[Isotope]) -> None:
    me, key = element_id(element.number), f"element-{element.number:03d}"
    low = element.name.lower()
    builder.name(me, low, low)
    about = (me,)
    subject = Subject(low, "the element")
    aliases = tables.ELEMENT_ALIASES.get(element.name, ())

    facts = [("symbol", {"v": element.symbol}), ("number", {"v": str(element.number)})]
    facts.append(("weight", {"v": element.weight}))
    if element.block:
        facts.append(("block", {"v": element.block}))
    builder.edge("symbol", me, key, element.symbol)
    builder.edge("number", me, key, str(element.number))
    builder.passage(key, f"{element.name} (element)", subject, facts, about)
    for relation, value in (
        ("element_of_symbol", element.symbol),
        ("element_of_number", str(element.number)),
    ):
        source = f"{'symbol' if relation == 'element_of_symbol' else 'number'}:{value}"
        builder.name(source, value, value)
        builder.edge(relation, source, key, low, aliases, me)

    table = f"{key}-table"
    facts = [("period", {"v": str(element.period)})]
    builder.edge("period", me, table, str(element.period))
    if element.group:
        facts.append(("group", {"v": str(element.group)}))
        builder.edge("group", me, table, str(element.group))
    if element.series:
        facts.append(("series_an" if element.series[0] in "aeiou" else "series", {"v": element.series}))
        builder.edge("series", me, table, element.series, (plural(element.series),))
    builder.passage(table, f"{element.name}: period, group and type of element", subject, facts, about)

    row = f"{key}-neighbours"
    facts = []
    for relation, number in (("next", element.number + 1), ("previous", element.number - 1)):
        other = sources.elements.get(number)
        if other:
            facts.append((relation, {"v": other.name.lower()}))
            builder.edge(
                relation,
                me,
                row,
                other.name.lower(),
                tables.ELEMENT_ALIASES.get(other.name, ()),
                element_id(number),
            )
    if element.lattice:
        facts.append(("lattice", {"v": element.lattice}))
        builder.edge("lattice", me, row, element.lattice)
    builder.passage(
        row, f"{element.name}: element before, element after, crystal structure", subject, facts, about
    )

    found = f"{key}-discovery"
    facts = []
    if element.ancient:
        facts.append(("ancient", {}))
    if element.discoverer:
        facts.append(("discovered_by", {"v": element.discoverer}))
        last = element.discoverer.split()[-1]
        builder.edge(
            "discovered_by",
            me,
            found,
            element.discoverer,
            (last,) if " and " not in element.discoverer and len(element.discoverer.split()) <= 3 else (),
        )
    if element.year:
        facts.append(("discovered_in", {"v": str(element.year)}))
        builder.edge("discovered_in", me, found, str(element.year))
    if element.place:
        facts.append(("discovered_at", {"v": element.place}))
        builder.edge("discovered_at", me, found, element.place)
    if facts:
        named = Subject(low, "the element", pronoun=False)
        builder.passage(
            found,
            f"Discovery of {low}",
            named if len(facts) == 1 else subject,
            [("named", {}), *facts] if not element.ancient else facts,
            about,
            shuffle=False,
        )

    heat = f"{key}-heat"
    facts = []
    for relation, heat_k in (("melting", element.melting), ("boiling", element.boiling)):
        if heat_k:
            facts.append((relation, {"v": f"{heat_k} kelvin"}))
            builder.edge(relation, me, heat, f"{heat_k} kelvin", (f"{heat_k} K", str(heat_k)))
    if element.density:
        facts.append(("density", {"v": element.density}))
        builder.edge("density", me, heat, element.density)
    if facts:
        builder.passage(heat, f"{element.name}: melting point, boiling point, density", subject, facts, about)

    kinds = f"{key}-isotopes"
    stable = [i for i in element.isotopes if i.stable]
    timed = [i for i in element.isotopes if i.seconds]
    facts = []
    if not stable:
        facts.append(("no_stable", {}))
    elif len(stable) == 1:
        facts.append(("one_stable", {}))
    elif len(stable) < len(NUMBER_WORDS):
        facts.append(("stable_count", {"v": NUMBER_WORDS[len(stable)]}))
        builder.edge("stable_count", me, kinds, NUMBER_WORDS[len(stable)], (str(len(stable)),))
    unknown = any(i.seconds is None and not i.stable and i.abundance for i in element.isotopes)
    ranked = sorted(timed, key=lambda i: (-(i.seconds or 0.0), i.mass_number))
    if ranked and not unknown and element.number not in tables.NO_LONGEST:
        top = ranked[0]
        name = isotope_name(element, top).lower()
        facts.append(("longest", {"v": name}))
        builder.edge(
            "longest",
            me,
            kinds,
            name,
            (f"{element.symbol}-{top.mass_number}",),
            isotope_id(element, top) if top in chosen else None,
        )
    natural = sorted((i for i in element.isotopes if i.abundance), key=lambda i: -(i.abundance or 0.0))
    if len(natural) > 1:
        name = isotope_name(element, natural[0]).lower()
        facts.append(("abundant", {"v": name}))
        builder.edge(
            "abundant",
            me,
            kinds,
            name,
            (f"{element.symbol}-{natural[0].mass_number}",),
            isotope_id(element, natural[0]) if natural[0] in chosen else None,
        )
    if len(facts) > 1:
        builder.passage(kinds, f"Isotopes of {low}", subject, facts, about)


def choose_isotopes(element: Element, count: int) -> list[Isotope]:
    """The natural ones and the longest-lived ones, with at least one fact besides the name."""
    natural = sorted((i for i in element.isotopes if i.abundance), key=lambda i: -(i.abundance or 0.0))[:5]
    timed = sorted(
        (i for i in element.isotopes if (i.seconds or 0.0) >= 1.0 and i not in natural),
        key=lambda i: (-(i.seconds or 0.0), i.mass_number),
    )
    return sorted([*natural, *timed][:count], key=lambda i: i.mass_number)


def write_isotope(element: Element, isotope: Isotope, builder: Builder) -> None:
    me = isotope_id(element, isotope)
    key = f"isotope-{element.symbol.lower()}-{isotope.mass_number}"
    name = isotope_name(element, isotope)
    low = name.lower()
    builder.name(me, low, low)
    facts = [("isotope_of", {"v": element.name.lower()})]
    if isotope.half_life:
        facts.append(("half_life", {"v": isotope.half_life}))
        builder.edge("half_life", me, key, isotope.half_life)
    if isotope.decay:
        facts.append(("decay", {"v": isotope.decay}))
        builder.edge("decay", me, key, isotope.decay)
    if isotope.stable:
        facts.append(("stable", {}))
    if isotope.abundance:
        digits = 4 if isotope.abundance < 99.9 or isotope.abundance == 100 else 6
        share = f"{isotope.abundance:.{digits}g}"
        facts.append(("abundance", {"v": share, "element": element.name.lower()}))
        builder.edge("abundance", me, key, share, (f"{share}%", f"{share} percent"))
    neutrons = str(isotope.mass_number - element.number)
    facts.append(("neutrons", {"v": neutrons}))
    builder.edge("neutrons", me, key, neutrons)
    if isotope.year and len(facts) < 4:
        facts.append(("isotope_year", {"v": str(isotope.year)}))
        builder.edge("isotope_year", me, key, str(isotope.year))
    rng = builder.rng(key + ":order")
    rest = facts[1:]
    rng.shuffle(rest)
    builder.passage(
        key,
        name,
        Subject(low, "this isotope"),
        [facts[0], *rest],
        (me, element_id(element.number)),
        shuffle=False,
    )


def write_families(builder: Builder, sources: Sources) -> None:
    groups, series = defaultdict(list), defaultdict(list)
    for element in sources.elements.values():
        if element_id(element.number) in builder.unseen:
            continue
        if element.group:
            groups[element.group].append(element.name.lower())
        if element.series:
            series[element.series].append(element.name.lower())
    for number, names in sorted(groups.items()):
        builder.passage(
            f"group-{number}",
            f"Group {number} of the periodic table",
            Subject(f"group {number}", "the group"),
            [("members", {"v": join(names[:6])})],
            (),
        )
    for name, names in sorted(series.items()):
        builder.passage(
            f"series-{name.replace(' ', '-')}",
            plural(name).capitalize(),
            Subject(f"the family of {plural(name)}", "the family"),
            [("members", {"v": join(names[:7])})],
            (),
        )


def write_chemistry(builder: Builder, sources: Sources, isotopes_each: int) -> None:
    for element in sources.elements.values():
        chosen = choose_isotopes(element, isotopes_each)
        write_element(element, builder, sources, chosen)
        for isotope in chosen:
            write_isotope(element, isotope, builder)
    write_families(builder, sources)
