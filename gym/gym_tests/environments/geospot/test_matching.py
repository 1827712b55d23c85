"""Regions and cities: other names of one place, and other places of one name."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from fovea_gym.environments.geospot.gazetteer import LatLon, country_distance_km, fold, great_circle_km, spellings
from fovea_gym.environments.geospot.reward import same_city, same_region
from gym_tests.tables import table

LOCATIONS = Path(__file__).parents[5] / "shared" / "data" / "geospot" / "locations_160.csv"

SAME_REGION = """
DE Bavaria=Bayern | DE Free State of Bavaria=Bayern | DE BY=Bavaria | DE Saxony=Sachsen | DE Hessen=Hesse
AU NSW=New South Wales | AU State of Victoria=Victoria | FR Ile de France=Île-de-France | FR IDF=Île-de-France
FR Bretagne=Brittany | ES Catalonia=Cataluña | ES Catalunya=Catalonia | ES Comunidad de Madrid=Madrid
ES Andalusia=Andalucía | IT Lombardia=Lombardy | IT Tuscany=Toscana | IT Sicily=Sicilia | CN Tianjin=Tianjin Shi
JP Tokyo Prefecture=Tokyo | JP Tōkyō-to=Tokyo | JP Osaka=Osaka-fu | CN Guangdong Province=Guangdong Sheng
ML Ségou=Segou | ML Segou Region=Segou | ID West Sulawesi=Sulawesi Barat | SE Gävleborg County=Gaevleborg
SE Gävleborgs län=Gaevleborg | TR Çanakkale=Canakkale | US MT=Montana | US California=CA | US State of Montana=Montana
KZ Almaty Region=Almaty Oblysy | CU Havana=La Habana | IQ Najaf=An Najaf | CA Québec=Quebec | CA ON=Ontario
NL North Brabant=Noord-Brabant | KR Seoul=Seoul-teukbyeolsi | KR Gyeonggi Province=Gyeonggi-do
RU Moscow Oblast=Moskovskaya oblast' | GR Crete=Kríti | CH Geneva=Genève | CH Zurich=Zürich | AT Styria=Steiermark
PL Masovian Voivodeship=Mazowieckie | EG Cairo=Al Qāhirah
"""
OTHER_REGION = """
DE Saxony=Saxony-Anhalt | NL North Holland=South Holland | IN West Bengal=Bihar | US Virginia=West Virginia
US Carolina=North Carolina | US State=Montana | CA Province=Ontario | AU Western=Western Australia | US CA=Colorado
AU Australia=South Australia | US Washington=Oregon | IT Lombardy / Tuscany=Tuscany | US Montana or Idaho=Montana
"""
SAME_CITY = """
DE Munich=München | DE Muenchen=München | JP 東京=Tokyo | RU Москва=Moscow | US New York=New York City
AU Sydney, NSW=Sydney | RU St. Petersburg=Saint Petersburg | IN Bombay=Mumbai | IN Bangalore=Bengaluru | DE Köln=Cologne
IT Firenze=Florence | VN Saigon=Ho Chi Minh City | UA Kiev=Kyiv | CN Peking=Beijing | PT Lisboa=Lisbon | CZ Praha=Prague
NL Den Haag=The Hague | MX Mexico City=Ciudad de México | IN Calcutta=Kolkata | MM Rangoon=Yangon | GB City of London=London
CA Montreal=Montréal | AT Wien=Vienna | IQ Najaf=An Najaf | DE Halle=Halle (Saale) | FR PARIS=Paris | BR Sao Paulo=São Paulo
"""
OTHER_CITY = """
FR Paris=Lyon | US York=New York | FR Paris / Lyon=Paris | US Portland=Salem | FR Lyon, not Paris=Paris | DE Frank=Frankfurt
FR Paris, Lyon=Lyon
"""


def pairs(text: str) -> list[tuple[str, str, str]]:
    entries = [entry.strip() for line in text.strip().splitlines() for entry in line.split(" | ")]
    return [(entry[3:].partition("=")[0], entry.partition("=")[2], entry[:2]) for entry in entries]


@table(("given", "truth", "country"), pairs(SAME_REGION))
def test_one_region(given: str, truth: str, country: str) -> None:
    assert same_region(given, truth, country)


@table(("given", "truth", "country"), [*pairs(OTHER_REGION), ("", "Montana", "US")])
def test_other_regions(given: str, truth: str, country: str) -> None:
    assert not same_region(given, truth, country)


@table(("given", "truth", "country"), pairs(SAME_CITY))
def test_one_city(given: str, truth: str, country: str) -> None:
    assert same_city(given, truth, country)


@pytest.mark.parametrize(("given", "truth", "country"), [*pairs(OTHER_CITY), ("", "Paris", "FR")])
def test_other_cities(given: str, truth: str, country: str) -> None:
    assert not same_city(given, truth, country)


def test_the_true_point_tells_cities_of_one_name_apart() -> None:
    """Frankfurt an der Oder is not "Frankfurt am Main", though both are "Frankfurt"."""
    assert same_city("Frankfurt am Main", "Frankfurt", "DE", LatLon(50.11, 8.68))
    assert not same_city("Frankfurt am Main", "Frankfurt", "DE", LatLon(52.34, 14.55))


def test_a_country_that_is_not_known_compares_names_only() -> None:
    assert same_city("Malmö", "Malmo", None)
    assert same_region("Province of Limburg", "Limburg", None)


def test_folding() -> None:
    assert fold("Côte d’Ivoire") == fold("COTE D'IVOIRE") == "cote divoire"
    assert fold("St. Kitts & Nevis") == "saint kitts and nevis"
    assert fold("  The  Gambia ") == "gambia"
    assert fold("ガーナ") != fold("カーナ")
    assert fold("हिन्दी") != fold("हनद")
    assert spellings("Gävle") == {"gavle", "gaevle"}


@pytest.mark.parametrize(
    ("one", "other", "km"),
    [
        ((48.8566, 2.3522), (51.5074, -0.1278), 343.5),  # Paris to London
        ((0, 0), (0, 180), math.pi * 6371.0088),
        ((0, 179.5), (0, -179.5), 111.195),
        ((90, 0), (-90, 77), math.pi * 6371.0088),
        ((12, 34), (12, 34), 0),
    ],
)
def test_distances(one: tuple[float, float], other: tuple[float, float], km: float) -> None:
    assert great_circle_km(LatLon(*one), LatLon(*other)) == pytest.approx(km, abs=0.5)


def test_distances_between_countries() -> None:
    near, far = country_distance_km("FR", "BE"), country_distance_km("FR", "JP")
    assert near is not None
    assert far is not None
    assert 300 < near < 600 < 8000 < far < 11000
    assert country_distance_km("FR", "AQ") is None  # no city there


def test_places_that_three_sources_agree_on_match_themselves() -> None:
    if not LOCATIONS.exists():
        pytest.skip(f"the shared locations are not here ({LOCATIONS})")
    rows = list(csv.DictReader(LOCATIONS.open(encoding="utf-8")))
    assert len(rows) == 160
    for row in rows:
        at = LatLon(float(row["lat"]), float(row["lon"]))
        assert same_city(row["city"], row["city"], row["country_iso2"], at)
        assert same_region(row["region_ascii"], row["region"], row["country_iso2"]), row
