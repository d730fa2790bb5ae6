"""Question forms. {x} is the thing asked about: a name, or a phrase that has to be looked up first."""

# relation: forms of the question for it
ASK: dict[str, tuple[str, ...]] = {
    "capital": (
        "What is the capital of {x}?", "Which city is the capital of {x}?", "Name the capital of {x}.",
        "Which city serves as capital of {x}?", "What is the capital city of {x}?"),
    "continent": (
        "On which continent is {x}?", "Which continent does {x} belong to?", "What continent is {x} part of?",
        "In what continent does one find {x}?", "Name the continent of {x}."),
    "demonym": (
        "What are people from {x} called?", "What is the demonym of {x}?", "How does one call someone from {x}?",
        "Which word is used for people of {x}?", "By what name are the people of {x} known?"),
    "currency": (
        "What is the currency of {x}?", "Which currency is used in {x}?", "What money do people use in {x}?",
        "With which currency does one pay in {x}?", "Name the currency of {x}."),
    "currency_code": (
        "What is the currency code of {x}?", "Which three-letter code does the currency of {x} have?",
        "What code do banks use for the money of {x}?", "Give the currency code of {x}."),
    "domain": (
        "What is the internet domain of {x}?", "Which internet domain belongs to {x}?",
        "What do web addresses in {x} end in?", "Which top-level domain is used by {x}?",
        "Give the internet domain of {x}."),
    "language": (
        "What is the main language of {x}?", "Which language is mainly spoken in {x}?",
        "What language do most people speak in {x}?", "Name the main language of {x}.",
        "Which language is the main one in {x}?"),
    "only_neighbour": (
        "Which country is the only land neighbour of {x}?", "What is the only neighbour of {x} on land?",
        "With which single country does {x} share a land border?", "Name the only land neighbour of {x}."),
    "calling": (
        "What is the calling code of {x}?", "Which calling code is used to phone {x}?",
        "What code does one dial to call {x}?", "Which international calling code does {x} have?",
        "Give the calling code of {x}."),
    "iso": (
        "What is the two-letter ISO code of {x}?", "Which ISO code does {x} have?", "How is {x} written in ISO code?",
        "Give the ISO code of {x}."),
    "largest": (
        "What is the largest city of {x}?", "Which city is the largest in {x}?", "Name the largest city in {x}.",
        "Which city of {x} has the most people?", "What is the biggest city in {x}?"),
    "country": (
        "In which country is {x}?", "Which country is {x} in?", "In what country does one find {x}?",
        "Where is {x}: in which country?", "To which country does {x} belong?"),
    "capital_of": (
        "Of which country is {x} the capital?", "{x} is the capital of which country?",
        "Which country has {x} as its capital?", "Which country is governed from its capital {x}?"),
    "state": (
        "In which US state is {x}?", "Which US state is {x} in?", "In what American state does one find {x}?",
        "To which state does {x} in the United States belong?"),
    "region": (
        "In which region is {x}?", "Which region is {x} in?", "To which region does {x} belong?",
        "In what state or province does one find {x}?"),
    "timezone": (
        "What is the time zone of {x}?", "Which time zone is used in {x}?", "What time zone does {x} keep?",
        "Which time zone do clocks follow in {x}?", "Give the time zone of {x}."),
    "abbreviation": (
        "What is the postal abbreviation of {x}?", "How is {x} abbreviated?", "Which two letters stand for {x}?",
        "Give the abbreviation of {x}."),
    "fips": (
        "What is the FIPS code of {x}?", "Which FIPS code does {x} have?", "Give the FIPS code of {x}.",
        "What number is the FIPS code of {x}?"),
    "state_of_abbreviation": (
        "Which US state has the abbreviation {x}?", "For which US state does {x} stand?",
        "Which American state is abbreviated {x}?", "What state do the letters {x} mean in a US address?"),
    "used_in": (
        "Which country uses {x}?", "In which country is {x} the currency?", "Where do people pay with {x}?",
        "{x} is the currency of which country?"),
    "main_in": (
        "Which country has {x} as its main language?", "In which country is {x} the main language?",
        "{x} is the main language of which country?", "Where is {x} the main language?"),
    "country_of_domain": (
        "Which country has the internet domain {x}?", "To which country does the internet domain {x} belong?",
        "Which country uses web addresses that end in {x}?", "The domain {x} stands for which country?"),
    "country_of_calling": (
        "Which country has the calling code {x}?", "Which country is reached with the calling code {x}?",
        "To which country does the calling code {x} belong?", "Which place does one phone with code {x}?"),
    "symbol": (
        "What is the chemical symbol of {x}?", "Which symbol stands for {x}?", "How do chemists write {x} as a symbol?",
        "Give the symbol of {x}.", "What symbol does {x} have?"),
    "number": (
        "What is the atomic number of {x}?", "Which atomic number does {x} have?", "How many protons does {x} have?",
        "Give the atomic number of {x}."),
    "period": (
        "In which period of the periodic table is {x}?", "Which period does {x} belong to?", "What is the period of {x}?",
        "Give the period of {x} in the periodic table."),
    "group": (
        "In which group of the periodic table is {x}?", "Which group does {x} belong to?", "What is the group of {x}?",
        "Give the group number of {x}."),
    "series": (
        "What type of element is {x}?", "How is {x} classed among the elements?", "What kind of element is {x}?",
        "Which family of elements does {x} count to?"),
    "next": (
        "Which element comes right after {x} in the periodic table?", "What is the next element after {x}?",
        "Which element follows {x}?", "Name the element after {x}."),
    "previous": (
        "Which element comes right before {x} in the periodic table?", "What element stands just before {x}?",
        "Which element precedes {x}?", "Name the element before {x}."),
    "lattice": (
        "What crystal structure does {x} have?", "What is the crystal structure of {x}?",
        "Which crystal structure does solid {x} show?", "How are the crystals of {x} built?"),
    "discovered_by": (
        "Who discovered {x}?", "Who was the discoverer of {x}?", "To whom is the discovery of {x} credited?",
        "Name the discoverer of {x}."),
    "discovered_in": (
        "In which year was {x} discovered?", "When was {x} discovered?", "What year was {x} first identified?",
        "From which year does the discovery of {x} date?"),
    "discovered_at": (
        "In which country was {x} discovered?", "Where was {x} discovered?", "Where did the discovery of {x} take place?",
        "What is the place of the discovery of {x}?"),
    "melting": (
        "At what temperature does {x} melt?", "What is the melting point of {x}?", "How hot must {x} be to melt?",
        "Give the melting point of {x}."),
    "boiling": (
        "At what temperature does {x} boil?", "What is the boiling point of {x}?", "How hot must {x} be to boil?",
        "Give the boiling point of {x}."),
    "density": (
        "What is the density of {x} in grams per cubic centimeter?", "How dense is {x}?", "Give the density of {x}.",
        "Which density does {x} have?"),
    "stable_count": (
        "How many stable isotopes does {x} have?", "What is the number of stable isotopes of {x}?",
        "How many isotopes of {x} are stable?", "Give the number of stable isotopes of {x}."),
    "longest": (
        "What is the longest-lived radioactive isotope of {x}?", "Which radioactive isotope of {x} is the longest-lived?",
        "Which isotope of {x} lives longest among the radioactive ones?", "Name the longest-lived radioactive isotope of {x}."),
    "abundant": (
        "What is the most abundant natural isotope of {x}?", "Which isotope of {x} is the most abundant in nature?",
        "Name the most abundant isotope of {x}.", "Which isotope makes up most of natural {x}?"),
    "element_of_symbol": (
        "Which element has the symbol {x}?", "What element is written {x}?", "For which element does the symbol {x} stand?",
        "Name the element with the chemical symbol {x}."),
    "element_of_number": (
        "Which element has atomic number {x}?", "What element has {x} protons?", "Name the element with atomic number {x}.",
        "The atomic number {x} belongs to which element?"),
    "half_life": (
        "What is the half-life of {x}?", "How long is the half-life of {x}?", "Which half-life does {x} have?",
        "Give the half-life of {x}."),
    "decay": (
        "How does {x} decay?", "What is the decay mode of {x}?", "By which process does {x} decay?",
        "Name the decay mode of {x}."),
    "abundance": (
        "What percentage of the natural element is {x}?", "What is the natural abundance of {x} in percent?",
        "How abundant is {x} in nature, in percent?", "Give the natural abundance of {x} in percent."),
    "neutrons": (
        "How many neutrons does {x} have?", "What is the number of neutrons in {x}?",
        "How many neutrons are in a nucleus of {x}?", "Give the neutron number of {x}."),
    "isotope_year": (
        "In which year was {x} discovered?", "When was {x} first identified?", "What is the discovery year of {x}?",
        "Since which year has {x} been known?"),
}

# relation that leads to an entity: phrases that stand for the entity it leads to
PHRASE: dict[str, tuple[str, ...]] = {
    "country": (
        "the {noun} where {x} lies", "the {noun} in which {x} is found", "the {noun} that {x} is in",
        "the {noun} to which the city of {x} belongs"),
    "capital_of": (
        "the {noun} whose capital is {x}", "the {noun} that has {x} as its capital", "the {noun} governed from {x}",
        "the {noun} with the capital {x}"),
    "used_in": (
        "the {noun} that uses {x}", "the {noun} whose currency is {x}", "the {noun} where people pay with {x}",
        "the {noun} with {x} as its money"),
    "main_in": (
        "the {noun} whose main language is {x}", "the {noun} where {x} is the main language",
        "the {noun} that has {x} as its main language", "the {noun} with {x} as main language"),
    "country_of_domain": (
        "the {noun} with the internet domain {x}", "the {noun} whose web addresses end in {x}",
        "the {noun} that uses the domain {x}", "the {noun} to which the domain {x} belongs"),
    "country_of_calling": (
        "the {noun} with the calling code {x}", "the {noun} whose calling code is {x}",
        "the {noun} that one phones with code {x}", "the {noun} reached by the calling code {x}"),
    "only_neighbour": (
        "the only land neighbour of {x}", "the one country that borders {x}", "the single country next to {x} on land",
        "the only country with a land border to {x}"),
    "capital": (
        "the capital of {x}", "the capital city of {x}", "the city that is the capital of {x}",
        "the city from which {x} is governed"),
    "largest": (
        "the largest city of {x}", "the largest city in {x}", "the biggest city of {x}",
        "the city of {x} with the most people"),
    "state": (
        "the US state where {x} lies", "the US state in which {x} is found", "the American state that {x} is in",
        "the US state to which {x} belongs"),
    "state_of_abbreviation": (
        "the US state abbreviated {x}", "the US state with the abbreviation {x}", "the American state written {x} for short",
        "the US state for which {x} stands"),
    "next": (
        "the element after {x}", "the element that follows {x}", "the element right after {x} in the periodic table",
        "the next element after {x}"),
    "previous": (
        "the element before {x}", "the element that precedes {x}", "the element right before {x} in the periodic table",
        "the element just before {x}"),
    "element_of_symbol": (
        "the element with the symbol {x}", "the element written {x}", "the element whose symbol is {x}",
        "the element with chemical symbol {x}"),
    "element_of_number": (
        "the element with atomic number {x}", "the element that has {x} protons", "the element whose atomic number is {x}",
        "the element number {x} of the periodic table"),
    "longest": (
        "the longest-lived radioactive isotope of {x}", "the radioactive isotope of {x} that lives longest",
        "the radioactive isotope of {x} with the longest life", "the isotope of {x} that is the longest-lived radioactive one"),
    "abundant": (
        "the most abundant natural isotope of {x}", "the most abundant isotope of {x} in nature",
        "the isotope of {x} that is most abundant in nature", "the isotope that makes up most of natural {x}"),
}

# pairs that lead back to where one came from
BACK = frozenset({
    ("country", "capital"), ("capital_of", "capital"), ("capital", "capital_of"), ("capital", "country"),
    ("largest", "country"), ("largest", "state"), ("largest", "capital_of"), ("used_in", "currency"),
    ("used_in", "currency_code"), ("main_in", "language"), ("country_of_domain", "domain"),
    ("country_of_calling", "calling"), ("only_neighbour", "only_neighbour"), ("next", "previous"),
    ("previous", "next"), ("element_of_symbol", "symbol"), ("element_of_number", "number"),
    ("state_of_abbreviation", "abbreviation"), ("capital", "region"), ("next", "number"), ("previous", "number"),
}) - {("country", "capital")}
