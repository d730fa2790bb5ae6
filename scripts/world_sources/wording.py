"""Sentence forms of the corpus. {S} subject at the start, {s} in the middle, {P} and {p} possessive."""

SENTENCES: dict[str, tuple[str, ...]] = {
    # countries
    "capital": (
        "The capital of {s} is {v}.", "{P} capital is {v}.", "{S} has {v} as its capital.",
        "{v} is the capital of {s}.", "{v} serves as the capital city of {s}.", "{S} is governed from its capital, {v}."),
    "continent": (
        "{S} is a {noun} in {v}.", "{S} belongs to the continent of {v}.", "{S} lies in {v}.",
        "Geographers place {s} in {v}.", "{S} is part of {v}.", "On the map, {s} is found in {v}."),
    "demonym": (
        "People from {s} are called {v}.", "The demonym of {s} is {v}.", "Someone from {s} is described as {v}.",
        "{P} demonym is {v}.", "Things from {s} are called {v}.", "The word for people of {s} is {v}."),
    "currency": (
        "The currency of {s} is the {v}.", "{P} currency is the {v}.", "{S} uses the {v} as its currency.",
        "Money in {s} is counted in the {v}.", "People in {s} pay with the currency called {v}.",
        "The money used in {s} is the {v}."),
    "currency_code": (
        "The currency code is {v}.", "Banks write the currency code as {v}.",
        "In exchange tables its currency has the code {v}.", "{v} is the three-letter code of its currency.",
        "Its money carries the code {v}."),
    "domain": (
        "{P} internet domain is {v}.", "Web addresses in {s} end in {v}.", "The internet domain of {s} is {v}.",
        "{S} uses the top-level domain {v}.", "Websites of {s} use the domain {v}.",
        "On the internet, {s} has the domain {v}."),
    "language": (
        "The main language of {s} is {v}.", "{P} main language is {v}.", "{S} has {v} as its main language.",
        "Most public life in {s} is in its main language, {v}.", "{v} is the main language of {s}.",
        "In {s} the main language is {v}."),
    "languages": (
        "Languages spoken in {s} include {v}.", "In {s} people speak languages such as {v}.",
        "{S} is home to speakers of {v}.", "Among the languages of {s} are {v}.", "{v} can be heard in {s}."),
    "one_language": (
        "The language listed for {s} is {v}.", "People in {s} speak {v}.", "{v} is spoken in {s}.",
        "In {s} one hears {v}."),
    "more_languages": (
        "{v} can also be heard in {s}.", "Other languages spoken there include {v}.", "People in {s} also speak {v}.",
        "Some people there speak {v}.", "Besides it, {v} can be heard."),
    "neighbours": (
        "{S} shares land borders with {v}.", "{P} neighbours include {v}.", "{S} has a border with {v}.",
        "On land, {s} borders {v}.", "Countries next to {s} include {v}."),
    "only_neighbour": (
        "{P} only land neighbour is {v}.", "{S} has just one land neighbour, {v}.", "The only neighbour of {s} is {v}.",
        "{S} borders a single neighbour, {v}."),
    "no_neighbours": (
        "{S} has no land border.", "No other country shares a land border with {s}.",
        "{S} has no neighbours on land.", "{S} borders no other country by land."),
    "calling": (
        "The calling code of {s} is {v}.", "{P} calling code is {v}.", "To phone {s}, dial the calling code {v}.",
        "Telephone numbers in {s} begin with the calling code {v}.", "{S} is reached by phone with calling code {v}.",
        "{S} has the international calling code {v}."),
    "iso": (
        "The ISO code of {s} is {v}.", "{P} two-letter ISO code is {v}.", "In ISO lists {s} is written {v}.",
        "{S} has the ISO code {v}."),
    "area": (
        "{S} covers about {v} square kilometers.", "{P} area is {v} square kilometers.",
        "The area of {s} is {v} square kilometers.", "{S} measures {v} square kilometers."),
    "largest": (
        "The largest city of {s} is {v}.", "{P} largest city is {v}.", "{v} is the largest city in {s}.",
        "By population, {v} is the largest city of {s}.", "No city in {s} is larger than {v}."),
    "cities": (
        "Other cities in {s} include {v}.", "{v} are also found in {s}.", "Among its other cities are {v}.",
        "{S} also has {v}.", "Further places on its map are {v}."),
    "some_cities": (
        "Cities in {s} include {v}.", "{v} are found in {s}.", "Among the cities of {s} are {v}.",
        "On the map of {s} one finds {v}."),
    # cities
    "city_country": (
        "{S} is a city in {v}.", "{S} lies in {v}.", "{S} is located in {v}.", "The city of {s} is in {v}.",
        "{S} is one of the cities of {v}.", "{S} can be found in {v}."),
    "city_state": (
        "{S} is a city in the US state of {v}.", "{S} lies in the state of {v}, United States.",
        "{S} is located in the American state of {v}.", "The city of {s} is in the US state of {v}.",
        "{S} is one of the cities of {v} in the United States."),
    "city_region": (
        "{S} is a city in {v}, {country}.", "{S} lies in {v}, a region of {country}.",
        "{S} is located in {v}, {country}.", "The city of {s} is in {v}, {country}.",
        "{S} belongs to the region {v} in {country}."),
    "capital_of": (
        "It is the capital of {v}.", "The city is the capital of {v}.", "It serves as capital of {v}.",
        "As the capital, it is the seat of {v}."),
    "population": (
        "About {v} people live there.", "{P} population is {v}.", "The population is about {v}.",
        "{S} has {v} inhabitants.", "It is home to {v} people.", "Some {v} people live in {s}."),
    "timezone": (
        "{P} time zone is {v}.", "Clocks in {s} follow the time zone {v}.", "The time zone is {v}.",
        "{S} keeps the time zone {v}.", "{S} uses the {v} time zone.", "Local time follows the zone {v}."),
    "namesake": (
        "Another {name} lies in {v}.", "There is also a {name} in {v}.", "It should not be confused with {name} in {v}.",
        "A city called {name} is found in {v} too.", "The name {name} is also used in {v}."),
    # states
    "abbreviation": (
        "The abbreviation of {s} is {v}.", "{P} postal abbreviation is {v}.", "{S} is abbreviated {v}.",
        "Letters to {s} carry the abbreviation {v}.", "Its two-letter abbreviation is {v}."),
    "is_state": (
        "{S} is a state of the United States.", "{S} is one of the US states.", "{S} is an American state.",
        "{S} belongs to the United States as a state."),
    "is_district": ("{S} is a federal district of the United States.", "{S} is the federal district of the country."),
    "fips": (
        "The FIPS code of {s} is {v}.", "{P} FIPS code is {v}.", "In federal files its FIPS code is {v}.",
        "{S} has the FIPS code {v}."),
    # currencies and languages
    "used_only": (
        "{S} is the currency of {v}.", "{S} is used in {v}.", "{S} is the money of {v}.",
        "People in {v} pay with {s}.", "{v} uses {s} as its currency."),
    "used_by": (
        "{S} is used in {v}.", "{S} is the currency of {v}.", "Countries that use {s} include {v}.",
        "People pay with {s} in {v}."),
    "money_code": (
        "Its code is {v}.", "The currency code is {v}.", "It is written {v} in exchange tables.",
        "Banks know it by the code {v}.", "Its three-letter code is {v}."),
    "main_only": (
        "{S} is the main language of {v}.", "{S} is the main language in {v}.", "In {v} the main language is {s}.",
        "{v} has {s} as its main language."),
    "main_in": (
        "{S} is the main language of countries such as {v}.", "{S} is the main language in {v}.",
        "Countries whose main language is {s} include {v}."),
    "also_in": (
        "It is also spoken in {v}.", "Speakers are also found in {v}.", "One can hear it in {v} too.",
        "It is heard in {v} as well."),
    "spoken_in": (
        "{S} is spoken in {v}.", "{S} can be heard in {v}.", "Speakers of {s} live in {v}.",
        "{S} is among the languages of {v}."),
    # elements
    "symbol": (
        "The symbol of {s} is {v}.", "{P} chemical symbol is {v}.", "{S} has the chemical symbol {v}.",
        "Chemists write {s} with the symbol {v}.", "{S} is written with the symbol {v}.",
        "In formulas {s} has the symbol {v}."),
    "number": (
        "Its atomic number is {v}.", "{S} has atomic number {v}.", "The atomic number of {s} is {v}.",
        "{S} is the element with atomic number {v}.", "With atomic number {v}, it has {v} protons.",
        "{P} atomic number is {v}."),
    "block": (
        "{S} stands in the {v} block.", "It is a {v}-block element.", "{S} belongs to the {v} block.",
        "{P} block is the {v} block."),
    "period": (
        "{S} is in period {v} of the periodic table.", "{P} period is {v}.", "{S} stands in period {v}.",
        "In the periodic table {s} is in period {v}.", "{S} belongs to period {v}."),
    "group": (
        "{S} is in group {v}.", "{P} group is {v}.", "{S} belongs to group {v} of the periodic table.",
        "{S} stands in group {v}.", "Its column is group {v}."),
    "series": (
        "{S} is classed as a {v}.", "{S} is a {v}.", "Chemists call {s} a {v}.", "{S} counts as a {v}.",
        "By type, {s} is a {v}."),
    "series_an": (
        "{S} is classed as an {v}.", "{S} is an {v}.", "Chemists call {s} an {v}.", "{S} counts as an {v}.",
        "By type, {s} is an {v}."),
    "next": (
        "The next element after {s} is {v}.", "{S} is followed by {v}.", "After {s} comes {v}.",
        "{v} comes right after {s}.", "The element after {s} is {v}."),
    "previous": (
        "The element before {s} is {v}.", "{S} is preceded by {v}.", "Just before {s} stands {v}.",
        "{v} comes right before {s}."),
    "discovered_by": (
        "{S} was discovered by {v}.", "{v} discovered {s}.", "Its discovery is credited to {v}.",
        "The discoverer of {s} was {v}.", "Credit for the discovery of {s} goes to {v}."),
    "discovered_in": (
        "It was discovered in {v}.", "The year of its discovery was {v}.", "The discovery dates from {v}.",
        "{S} was first identified in {v}.", "{S} has been known since its discovery in {v}."),
    "discovered_at": (
        "The discovery took place in {v}.", "It was found in {v}.", "The place of its discovery was {v}.",
        "The work that led to its discovery was done in {v}."),
    "named": (
        "{S} is a chemical element.", "{S} is one of the chemical elements.", "{S} is an element.",
        "The element {s} has a known history."),
    "ancient": (
        "{S} was already known to the ancients.", "{S} was known in ancient times.", "The ancients already knew {s}.",
        "{S} has been known since antiquity, so no discoverer is named."),
    "melting": (
        "{S} melts at {v}.", "{P} melting point is {v}.", "The melting point of {s} is {v}.",
        "{S} becomes liquid at its melting point of {v}.", "{S} has a melting point of {v}."),
    "boiling": (
        "{S} boils at {v}.", "{P} boiling point is {v}.", "The boiling point of {s} is {v}.",
        "{S} has a boiling point of {v}.", "It turns to gas at its boiling point, {v}."),
    "density": (
        "{P} density is {v} grams per cubic centimeter.", "The density of {s} is {v} grams per cubic centimeter.",
        "{S} has a density of {v} grams per cubic centimeter."),
    "lattice": (
        "Its crystals have a {v} structure.", "{P} crystal structure is {v}.", "The crystal structure of {s} is {v}.",
        "{S} forms {v} crystals.", "As a solid, it has a {v} crystal structure."),
    "longest": (
        "The longest-lived radioactive isotope of {s} is {v}.", "Its longest-lived radioactive isotope is {v}.",
        "Among its radioactive isotopes, {v} is the longest-lived.", "{v} is the longest-lived radioactive isotope of {s}."),
    "abundant": (
        "The most abundant natural isotope of {s} is {v}.", "Its most abundant isotope in nature is {v}.",
        "In nature {v} is its most abundant isotope.", "{v} is the most abundant isotope of {s} in nature."),
    "stable_count": (
        "{S} has {v} stable isotopes.", "Nature offers {v} stable isotopes of {s}.",
        "The number of stable isotopes of {s} is {v}."),
    "one_stable": (
        "{S} has just one stable isotope.", "Only one isotope of {s} is stable."),
    "no_stable": (
        "{S} has no stable isotopes.", "No isotope of {s} is stable.", "All isotopes of {s} are radioactive."),
    # isotopes
    "isotope_of": (
        "{S} is an isotope of {v}.", "{S} is one of the isotopes of {v}.", "{S} is a form of {v}.",
        "{S} is a nuclide of the element {v}."),
    "neutrons": (
        "Its nucleus has {v} neutrons.", "{S} has {v} neutrons.", "Each nucleus of {s} holds {v} neutrons.",
        "The number of neutrons in {s} is {v}."),
    "half_life": (
        "{P} half-life is {v}.", "The half-life of {s} is {v}.", "{S} has a half-life of {v}.",
        "Half of any sample of {s} is gone after a half-life of {v}.", "With a half-life of {v}, {s} is radioactive."),
    "decay": (
        "{S} decays by {v}.", "Its decay mode is {v}.", "{S} breaks down by {v}.", "The decay mode of {s} is {v}."),
    "stable": (
        "{S} is stable.", "It does not decay.", "{S} is not radioactive.", "The nucleus of {s} is stable."),
    "abundance": (
        "It makes up {v} percent of natural {element}.", "Its natural abundance is {v} percent.",
        "About {v} percent of {element} in nature is {s}.", "In nature, {v} percent of {element} atoms are of this kind."),
    "isotope_year": (
        "It was discovered in {v}.", "{S} was first identified in {v}.", "The isotope has been known since {v}.",
        "Its discovery dates from {v}."),
    # groups and families
    "members": (
        "{S} includes {v}.", "Elements of {s} include {v}.", "Among the members of {s} are {v}.",
        "{v} belong to {s}."),
}
