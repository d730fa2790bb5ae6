"""Hand-kept tables: names for codes that the source packages leave as codes, and facts that are left out.

A fact is left out where the two country sources contradict each other in a way that cannot be decided
from the data, where it has changed since the sources were made, or where more than one answer is right.
"""

LANGUAGE_NAMES = {
    "af": "Afrikaans",
    "ak": "Akan",
    "am": "Amharic",
    "ar": "Arabic",
    "ay": "Aymara",
    "az": "Azerbaijani",
    "be": "Belarusian",
    "bem": "Bemba",
    "bg": "Bulgarian",
    "bi": "Bislama",
    "bm": "Bambara",
    "bn": "Bengali",
    "br": "Breton",
    "bs": "Bosnian",
    "ca": "Catalan",
    "ce": "Chechen",
    "ceb": "Cebuano",
    "ch": "Chamorro",
    "co": "Corsican",
    "cs": "Czech",
    "cy": "Welsh",
    "da": "Danish",
    "de": "German",
    "dv": "Dhivehi",
    "dz": "Dzongkha",
    "ee": "Ewe",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "et": "Estonian",
    "eu": "Basque",
    "fa": "Persian",
    "ff": "Fula",
    "fi": "Finnish",
    "fil": "Filipino",
    "fj": "Fijian",
    "fo": "Faroese",
    "fr": "French",
    "fy": "Frisian",
    "ga": "Irish",
    "gag": "Gagauz",
    "gd": "Scottish Gaelic",
    "gil": "Gilbertese",
    "gl": "Galician",
    "gn": "Guarani",
    "gu": "Gujarati",
    "gv": "Manx",
    "ha": "Hausa",
    "haw": "Hawaiian",
    "he": "Hebrew",
    "hi": "Hindi",
    "ho": "Hiri Motu",
    "hr": "Croatian",
    "ht": "Haitian Creole",
    "hu": "Hungarian",
    "hy": "Armenian",
    "hz": "Herero",
    "id": "Indonesian",
    "ig": "Igbo",
    "ilo": "Ilocano",
    "is": "Icelandic",
    "it": "Italian",
    "iu": "Inuktitut",
    "ja": "Japanese",
    "jv": "Javanese",
    "ka": "Georgian",
    "kg": "Kongo",
    "kk": "Kazakh",
    "kl": "Greenlandic",
    "km": "Khmer",
    "ko": "Korean",
    "ku": "Kurdish",
    "ky": "Kyrgyz",
    "la": "Latin",
    "lb": "Luxembourgish",
    "lg": "Luganda",
    "ln": "Lingala",
    "lo": "Lao",
    "lt": "Lithuanian",
    "lv": "Latvian",
    "mg": "Malagasy",
    "mh": "Marshallese",
    "mi": "Maori",
    "mk": "Macedonian",
    "ml": "Malayalam",
    "mn": "Mongolian",
    "ms": "Malay",
    "mt": "Maltese",
    "mwl": "Mirandese",
    "my": "Burmese",
    "na": "Nauruan",
    "nd": "Northern Ndebele",
    "ne": "Nepali",
    "niu": "Niuean",
    "nl": "Dutch",
    "no": "Norwegian",
    "ny": "Chewa",
    "oc": "Occitan",
    "om": "Oromo",
    "pa": "Punjabi",
    "pap": "Papiamento",
    "pau": "Palauan",
    "pl": "Polish",
    "ps": "Pashto",
    "pt": "Portuguese",
    "qu": "Quechua",
    "rm": "Romansh",
    "rn": "Kirundi",
    "ro": "Romanian",
    "rom": "Romani",
    "ru": "Russian",
    "rw": "Kinyarwanda",
    "sc": "Sardinian",
    "sd": "Sindhi",
    "se": "Northern Sami",
    "sg": "Sango",
    "si": "Sinhala",
    "sk": "Slovak",
    "sl": "Slovene",
    "sm": "Samoan",
    "sn": "Shona",
    "so": "Somali",
    "sq": "Albanian",
    "sr": "Serbian",
    "srn": "Sranan Tongo",
    "ss": "Swazi",
    "st": "Sotho",
    "sv": "Swedish",
    "sw": "Swahili",
    "ta": "Tamil",
    "te": "Telugu",
    "tem": "Temne",
    "tet": "Tetum",
    "tg": "Tajik",
    "th": "Thai",
    "ti": "Tigrinya",
    "tk": "Turkmen",
    "tkl": "Tokelauan",
    "tl": "Tagalog",
    "tn": "Tswana",
    "to": "Tongan",
    "tpi": "Tok Pisin",
    "tr": "Turkish",
    "ts": "Tsonga",
    "tt": "Tatar",
    "tum": "Tumbuka",
    "tvl": "Tuvaluan",
    "ty": "Tahitian",
    "ug": "Uyghur",
    "uk": "Ukrainian",
    "ur": "Urdu",
    "uz": "Uzbek",
    "ve": "Venda",
    "vi": "Vietnamese",
    "wo": "Wolof",
    "xh": "Xhosa",
    "yo": "Yoruba",
    "yue": "Cantonese",
    "zh": "Chinese",
    "zu": "Zulu",
}

# GeoNames first-level codes of four countries whose cities are told apart by region in the corpus.
REGION_NAMES = {
    "AU": {
        "01": "Australian Capital Territory",
        "02": "New South Wales",
        "03": "Northern Territory",
        "04": "Queensland",
        "05": "South Australia",
        "06": "Tasmania",
        "07": "Victoria",
        "08": "Western Australia",
    },
    "CA": {
        "01": "Alberta",
        "02": "British Columbia",
        "03": "Manitoba",
        "04": "New Brunswick",
        "05": "Newfoundland and Labrador",
        "07": "Nova Scotia",
        "08": "Ontario",
        "09": "Prince Edward Island",
        "10": "Quebec",
        "11": "Saskatchewan",
        "12": "Yukon",
        "13": "Northwest Territories",
    },
    "DE": {
        "01": "Baden-Württemberg",
        "02": "Bavaria",
        "03": "Bremen",
        "04": "Hamburg",
        "05": "Hesse",
        "06": "Lower Saxony",
        "07": "North Rhine-Westphalia",
        "08": "Rhineland-Palatinate",
        "09": "Saarland",
        "10": "Schleswig-Holstein",
        "11": "Brandenburg",
        "12": "Mecklenburg-Western Pomerania",
        "13": "Saxony",
        "14": "Saxony-Anhalt",
        "15": "Thuringia",
        "16": "Berlin",
    },
    "GB": {"ENG": "England", "NIR": "Northern Ireland", "SCT": "Scotland", "WLS": "Wales"},
}

# No permanent population, dissolved, or not one territory.
SKIPPED_COUNTRIES = frozenset("AQ BV HM UM CS AN TF GS IO".split())

TERRITORIES = frozenset(
    "AI AS AW AX BL BM BQ CC CK CW CX EH FK FO GF GG GI GL GP GU HK IM JE KY MF MO MP MQ MS NC NF NU PF PM "
    "PN PR PS RE SH SJ SX TC TK VG VI WF YT".split()
)

WITH_ARTICLE = frozenset(
    "US GB AE NL PH DO CF CD CG BS MV SB MH CK FO FK KY TC VG VI MP IM CC KM PS AX GM".split()
)

COUNTRY_NAMES = {
    "NL": "Netherlands",
    "AX": "Åland Islands",
    "CW": "Curaçao",
    "BL": "Saint Barthélemy",
    "RE": "Réunion",
    "ST": "São Tomé and Príncipe",
    "VA": "Vatican City",
    "TL": "Timor-Leste",
    "BQ": "Bonaire, Saint Eustatius and Saba",
}

COUNTRY_ALIASES = {
    "US": ("United States of America", "USA", "US", "America"),
    "GB": ("UK", "Great Britain", "Britain"),
    "NL": ("The Netherlands", "Holland"),
    "CZ": ("Czech Republic",),
    "CV": ("Cape Verde",),
    "CI": ("Côte d'Ivoire", "Cote d'Ivoire"),
    "SZ": ("Swaziland",),
    "MM": ("Burma",),
    "MK": ("Macedonia",),
    "TL": ("East Timor", "Timor Leste"),
    "TR": ("Türkiye", "Turkiye"),
    "CD": ("DR Congo", "DRC", "Congo-Kinshasa"),
    "CG": ("Congo-Brazzaville", "Congo"),
    "AE": ("UAE",),
    "KR": ("Republic of Korea",),
    "KP": ("DPRK",),
    "RU": ("Russian Federation",),
    "GM": ("The Gambia",),
    "BS": ("The Bahamas",),
    "MO": ("Macau",),
    "VA": ("Vatican",),
    "ST": ("Sao Tome and Principe",),
    "RE": ("Reunion",),
    "CW": ("Curacao",),
    "AX": ("Aland Islands",),
    "BL": ("Saint Barthelemy",),
    "SX": ("St. Maarten",),
    "FM": ("Federated States of Micronesia",),
}

NO_CAPITAL = frozenset("BO EH GQ IL LK MS PS PW SZ ZA TK BQ".split())
CAPITAL_NAMES = {"KZ": "Astana", "NR": "Yaren", "SX": "Philipsburg"}
NO_CURRENCY = frozenset("BG PS ZW EH PA BT LS NA HT VE".split())
NO_DOMAIN = frozenset("MF BL XK".split())
NO_DEMONYM = frozenset("CV KN TJ KG DJ GI CX GP PM MQ RE YT MP HK MO SJ GG JE IO VA".split())
NO_MAIN_LANGUAGE = frozenset("ET DZ MA NE ML MU SR GY".split())
NO_LARGEST_CITY = frozenset("KW SY SZ MT TC VI IL PS GU GP HK MO SG KE VA MC EH LC GH".split())
NO_BORDER = frozenset({("CU", "US"), ("US", "CU")})
NO_ONLY_NEIGHBOUR = frozenset("DK CA MF SX US".split())
CURRENCY_NAMES = {
    "KHR": "Riel",
    "CNY": "Yuan",
    "BYN": "Ruble",
    "XCD": "East Caribbean Dollar",
    "XOF": "West African CFA Franc",
    "XAF": "Central African CFA Franc",
    "XPF": "CFP Franc",
    "XCG": "Caribbean Guilder",
}

# What people call a currency besides the name in the data.
CURRENCY_ALIASES = {
    "USD": ("US Dollar", "United States Dollar"),
    "AUD": ("Australian Dollar",),
    "NZD": ("New Zealand Dollar",),
    "GBP": ("Pound Sterling", "British Pound"),
    "DKK": ("Danish Krone",),
    "NOK": ("Norwegian Krone",),
    "CHF": ("Swiss Franc",),
    "CNY": ("Renminbi", "Yuan Renminbi"),
    "XAF": ("CFA Franc",),
    "XOF": ("CFA Franc",),
    "XPF": ("Franc",),
    "XCD": ("Dollar",),
    "BYN": ("Belarusian Ruble",),
    "XCG": ("Guilder",),
}
# Whose city it is, or whose capital, is disputed between the states concerned.
DISPUTED_CITY = "Jerusalem"  # and its parts
DISPUTED_TIMEZONES = frozenset({"Europe/Simferopol"})
# Used or dialled in a second place too, though the data name only one.
SHARED_CURRENCIES = frozenset({"ZAR", "INR", "ILS", "MAD"})
SHARED_CALLING = frozenset({"+7", "+47", "+64"})

# Spelling and initials as in the source on the left, the full name on the right.
DISCOVERER_NAMES = {
    "Sir Humphrey Davy": "Humphry Davy",
    "Fredrich Stromeyer": "Friedrich Stromeyer",
    "Smithson Tenant": "Smithson Tennant",
    "Charles Hatchet": "Charles Hatchett",
    "Marguerite Derey": "Marguerite Perey",
    "C.F. Aver von Welsbach": "Carl Auer von Welsbach",
    "Sir William Crookes": "William Crookes",
    "A. Crawford": "Adair Crawford",
    "Antoine J. Balard": "Antoine Balard",
    "J.L. Soret": "Jacques-Louis Soret",
    "Fausto and Juan José de Elhuyar": "Fausto and Juan José Elhuyar",
}
# Atomic numbers whose recorded discovery is disputed, misattributed or garbled in the source.
NO_DISCOVERY = frozenset(
    {2, 4, 5, 8, 27, 34, 39, 60, 77, 78, 86, 91, 95, 99, 100, 102, 103, 104, 105, 106, 107, 113, 116}
)
# Group 3 and the end of the f block are counted differently by different tables; the newest are predictions.
NO_GROUP = frozenset({57, 71, 89, 103})
NO_SERIES = frozenset({71, 84, 85, 103, 109, 110, 111, 112, 113, 114, 115, 116, 117, 118})
# Several crystal forms, none of them the usual one, or a prediction.
NO_LATTICE = frozenset({5, 6, 8, 9, 15, 25, 85, 87, *range(97, 119)})
NO_DENSITY = frozenset({6, 15, 16, 33, 34, 50, 85, 87, *range(99, 119)})
NO_LONGEST = frozenset({43, *range(104, 119)})
# The natural nuclide is an excited state, the tabulated half-life is that of the ground state.
SKIPPED_ISOTOPES = frozenset({(73, 180)})
NO_THERMAL = frozenset({2, 6, 33, 85, 87, *range(97, 119)})

ELEMENT_ALIASES = {"Aluminum": ("Aluminium",), "Sulfur": ("Sulphur",), "Cesium": ("Caesium",)}
SERIES_NAMES = {"Poor metals": "post-transition metal", "Noble gases": "noble gas"}
LATTICES = {
    "HEX": "hexagonal",
    "BCC": "body-centered cubic",
    "FCC": "face-centered cubic",
    "ORC": "orthorhombic",
    "TET": "tetragonal",
    "RHL": "rhombohedral",
    "MCL": "monoclinic",
    "DIA": "diamond cubic",
    "SC": "simple cubic",
    "CUB": "cubic",
}
DECAYS = {"B-": "beta minus decay", "A": "alpha decay", "EC": "electron capture", "SF": "spontaneous fission"}
HALF_LIFE_UNITS = {
    "sec": ("second", 1.0, ""),
    "minute": ("minute", 1.0, ""),
    "hour": ("hour", 1.0, ""),
    "day": ("day", 1.0, ""),
    "year": ("year", 1.0, ""),
    "kyear": ("year", 1e3, ""),
    "Myear": ("year", 1.0, "million "),
    "Gyear": ("year", 1.0, "billion "),
}
UNIT_SECONDS = {
    "sec": 1.0,
    "minute": 60.0,
    "hour": 3600.0,
    "day": 86400.0,
    "year": 3.156e7,
    "kyear": 3.156e10,
    "Myear": 3.156e13,
    "Gyear": 3.156e16,
}
