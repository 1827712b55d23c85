"""Names of countries, regions and cities: the shared cases, other names of one place, and other places of one name."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from fovea_gym.environments.geospot.countries import country_code, country_codes, country_name
from fovea_gym.environments.geospot.gazetteer import LatLon, country_distance_km, fold, great_circle_km, spellings
from fovea_gym.environments.geospot.reward import same_city, same_region
from gym_tests.tables import table

SHARED = Path(__file__).parents[5] / "shared" / "data" / "cases" / "country_alias_cases_sample.jsonl"

CASES = """
AE: UAE|U.A.E.|uae|United Arab Emirates|The United Arab Emirates|ARE|Emirates|الإمارات العربية المتحدة
AL: Albania|Shqipëria    AM: Armenia|Հայաստան    AT: Austria|Österreich|AUT|Republic of Austria
AU: Australia|AUS|Commonwealth of Australia    BA: Bosnia|Bosnia & Herzegovina|Bosnia-Herzegovina|BIH
BE: Belgium|België|Belgique|Kingdom of Belgium    BN: Brunei|Brunei Darussalam    BO: Bolivia|Plurinational State of Bolivia
BR: Brazil|Brasil|BRA|Federative Republic of Brazil|巴西    BS: Bahamas|The Bahamas|Bahamas, The|Commonwealth of The Bahamas
CA: Canada|CAN|加拿大|Canadá    CD: DR Congo|DRC|D.R. Congo|Congo, Democratic Republic of the|Congo-Kinshasa|Zaire|COD
CF: Central African Republic|CAR    CG: Republic of the Congo|Congo-Brazzaville|Congo, Republic of the|COG
CH: Switzerland|Schweiz|Suisse|Svizzera|CHE|スイス    CI: Ivory Coast|Côte d’Ivoire|CÔTE D'IVOIRE|Cote d Ivoire|CIV
CN: China|PRC|P.R. China|People's Republic of China|People’s Republic of China|CHN|中国|中國|Mainland China|중국
CV: Cape Verde|Cabo Verde    CW: Curaçao|Curacao    CZ: Czechia|Czech Republic|Česko|Česká republika|The Czech Republic|CZE
DE: Germany|Deutschland|Allemagne|Alemania|Federal Republic of Germany|GER.|DEU|ドイツ|Германия|德国
DK: Denmark|Danmark|DNK    DM: Dominica    DO: Dominican Republic|The Dominican Republic    EG: Egypt|مصر|Misr|Égypte
ES: Spain|España|ESP|Kingdom of Spain|Espagne|Испания|西班牙|スペイン    ET: Ethiopia    FI: Finland|Suomi
FK: Falkland Islands|Falklands|Falkland Islands (Malvinas)    FM: Micronesia|Federated States of Micronesia
FR: France|FRA|fr|FR|République française|Frankreich|Francia|フランス|法国|프랑스|Франция|🇫🇷|France 🇫🇷|French Republic
GB: UK|U.K.|United Kingdom|Great Britain|Britain|England|Scotland|Wales|Northern Ireland|GBR|英国|Royaume-Uni
GB: United Kingdom of Great Britain and Northern Ireland|the UK|Vereinigtes Königreich|イギリス|England, UK
GE: Georgia|Republic of Georgia|საქართველო|GEO    GM: Gambia|The Gambia|Gambia, The    GN: Guinea|Republic of Guinea
GQ: Equatorial Guinea    GR: Greece|Ελλάδα|Hellas|Hellenic Republic|Grèce    GW: Guinea-Bissau|Guinea Bissau
HK: Hong Kong|香港|Hong Kong SAR    HR: Croatia|Hrvatska    HU: Hungary|Magyarország    IE: Ireland|Éire|Republic of Ireland
IL: Israel|ישראל|State of Israel    IN: India|IN|IND|भारत|Republic of India|印度|Indien    IR: Iran|Islamic Republic of Iran
IR: Iran, Islamic Republic of|ایران    IS: Iceland|Ísland    IT: Italy|Italia|Italien|ITA|Италия    JP: Japan|日本|日本国|JPN|Nippon
KG: Kyrgyzstan|Kyrgyz Republic    KN: St. Kitts and Nevis|Saint Kitts & Nevis|St Kitts & Nevis
KP: North Korea|DPRK|D.P.R.K.|Democratic People's Republic of Korea|Democratic People’s Republic of Korea|PRK|N. Korea
KP: Korea, North|Korea, Democratic People's Republic of|북한|朝鲜|北朝鮮    KZ: Kazakhstan|Қазақстан
KR: South Korea|Republic of Korea|Korea, Republic of|ROK|R.O.K.|KOR|대한민국|한국|韓国|韩国|S. Korea|Korea, South|Corée du Sud
LA: Laos|Lao PDR|Lao People's Democratic Republic    LC: St. Lucia|Saint Lucia|St Lucia    LK: Sri Lanka|Ceylon
MD: Moldova|Republic of Moldova|Moldova, Republic of    MK: North Macedonia|Macedonia|FYROM|Republic of North Macedonia
MM: Myanmar|Burma|Myanmar (Burma)    MO: Macau|Macao    MX: Mexico|México|MEX|墨西哥|Messico    MY: Malaysia
NE: Niger    NG: Nigeria    NL: Netherlands|The Netherlands|Holland|Nederland|Pays-Bas|NLD|Kingdom of the Netherlands
NO: Norway|Norge|NOR|NO    NZ: New Zealand|Aotearoa|NZ    PG: Papua New Guinea|PNG    PL: Poland|Polska|Polen|POL
PR: Puerto Rico    PS: Palestine|State of Palestine    PT: Portugal    RE: Réunion|Reunion|La Réunion    RO: Romania|România
RU: Russia|Russian Federation|Россия|RUS|Russie|俄罗斯|Российская Федерация    SA: Saudi Arabia|KSA|السعودية
SK: Slovakia|Slovak Republic|Slovensko    ST: Sao Tome and Principe|São Tomé and Príncipe|São Tomé & Príncipe
SY: Syria|Syrian Arab Republic    SZ: Eswatini|Swaziland|eSwatini    TH: Thailand|ไทย|Kingdom of Thailand
TL: East Timor|Timor-Leste    TR: Turkey|Türkiye|Turkiye|Republic of Türkiye    TT: Trinidad and Tobago|Trinidad & Tobago
TW: Taiwan|台灣|臺灣|台湾|Republic of China|Chinese Taipei|Taiwan, Province of China    TZ: Tanzania|United Republic of Tanzania
UA: Ukraine|Україна    US: US|USA|U.S.|U.S.A.|us|usa|United States|United States of America|the United States|the US|美国
US: America|Estados Unidos|États-Unis|Vereinigte Staaten|アメリカ|Georgia, USA|Austin, Texas, United States
VA: Vatican City|Holy See|Vatican|Holy See (Vatican City State)    VC: St. Vincent and the Grenadines
VE: Venezuela|Venezuela, Bolivarian Republic of|Bolivarian Republic of Venezuela    VG: British Virgin Islands
VI: U.S. Virgin Islands|Virgin Islands, U.S.    VN: Vietnam|Viet Nam|Việt Nam|越南    XK: Kosovo|Republic of Kosovo|Kosova
AT: Oesterreich    BJ: Dahomey    BQ: Bonaire    CI: Elfenbeinküste|Costa de Marfil    CN: Chine    CD: RD Congo
CG: Rep. of Congo|Congo, Rep.    CZ: République tchèque    ET: Abyssinia    FR: Metropolitan France|France métropolitaine
GB: Großbritannien    GF: Guyane    GL: Kalaallit Nunaat    IN: Inde    KR: SKorea    MX: Méjico    PF: Tahiti    SJ: Svalbard
MK: The former Yugoslav Republic of Macedonia    MM: Birmanie    PS: Occupied Palestinian Territory    SS: S. Sudan|South Sudan
SD: Sudan    SX: St. Maarten|Sint Maarten    TC: Turks and Caicos    TH: Siam|ประเทศไทย    TW: Taiwan, China    WS: Western Samoa
ZA: S. Africa
ZA: South Africa|Republic of South Africa|ZAF|RSA    ZM: Zambia    ZW: Zimbabwe
"""

NO_COUNTRY = (
    "the|The|a|of|and|is|in|no|it|me|n/a|N/A|none|unknown|Unknown|?|-|.|,|...|Republic|Kingdom|United|North|South|East|"
    "Island|Islands|Saint|New|States|Republic of|People's Republic|Europe|Asia|Africa|South America|Middle East|Earth|"
    "World|Paris|London|New York|California|Texas|Bavaria|Atlantis|Wakanda|Narnia|Yugoslavia|Soviet Union|USSR|"
    "Czechoslovakia|Serbia and Montenegro|Netherlands Antilles|France or Spain|France, Germany|France/Spain|"
    "North Korea or South Korea|Fracne|Germny|Nigerr|Koreas|Guineaa|Virgin Islands|state of Georgia|Pole|XX|ZZ|QQQ|12|"
    "not France|country|Country|🏳|🇽🇽|Latin America|Scandinavia|Antarctic Ocean|man|swede|car|Papua|Papau New"
).split("|")


def cases() -> list[tuple[str, str]]:
    entries = (entry.split(": ") for line in CASES.strip().splitlines() for entry in line.split("    "))
    return [(name, code) for code, names in entries for name in names.split("|")]


@table(("name", "code"), [case for case in cases() if case[0] != "GER."])
def test_names_of_countries(name: str, code: str) -> None:
    assert country_code(name) == code
    assert country_code(f"  **{name}**. ") == code


@table("name", ["", " ", *NO_COUNTRY])
def test_what_is_no_country_or_two(name: str) -> None:
    assert country_code(name) is None


def test_the_shared_cases() -> None:
    if not SHARED.exists():
        pytest.skip(f"the shared cases are not here ({SHARED})")
    rows = [json.loads(line) for line in SHARED.read_text(encoding="utf-8").splitlines()]
    assert rows
    assert {row["text"]: country_code(row["text"]) for row in rows} == {row["text"]: row["iso2"] for row in rows}


def test_every_country_is_known_by_its_name_and_codes() -> None:
    assert len(country_codes()) == 250
    for code in country_codes():
        assert country_code(country_name(code)) == country_code(code) == code


@table(
    ("text", "code"),
    [
        *(("Probably France", "FR"), ("most likely Peru", "PE"), ("Lyon, France", "FR"), ("Kenya, East Africa", "KE")),
        *(("Czechia (Czech Republic)", "CZ"), ("Deutschland (Germany)", "DE"), ("Japan - because of the signs", "JP")),
        *(
            ("Côte d'Ivoire (Ivory Coast)", "CI"),
            ("United Kingdom / England", "GB"),
            ("Holland or the Netherlands", "NL"),
        ),
        *((text, "CL") for text in ("“Chile”", "This is Chile", "It's somewhere in Chile", "Chile. I am sure of it")),
        *((text, None) for text in ("Somewhere in France or Belgium", "France or thereabouts", "x" * 201)),
        *((text, None) for text in ("St. Nowhere", "S. Nowhere")),  # not ST, which is São Tomé
    ],
)
def test_names_with_words_around_them(text: str, code: str | None) -> None:
    assert country_code(text) == code


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


@table(
    ("same", "places", "expected"),
    [
        *((same_region, pairs(SAME_REGION), True), (same_region, [*pairs(OTHER_REGION), ("", "Montana", "US")], False)),
        *((same_city, pairs(SAME_CITY), True), (same_city, [*pairs(OTHER_CITY), ("", "Paris", "FR")], False)),
    ],
)
def test_one_place_and_others(same: Callable[..., bool], places: list[tuple[str, str, str]], expected: bool) -> None:
    assert [place for place in places if same(*place) != expected] == []


def test_the_true_point_tells_cities_of_one_name_apart() -> None:
    """Frankfurt an der Oder is not "Frankfurt am Main", though both are "Frankfurt"."""
    assert same_city("Frankfurt am Main", "Frankfurt", "DE", LatLon(50.11, 8.68))
    assert not same_city("Frankfurt am Main", "Frankfurt", "DE", LatLon(52.34, 14.55))
    # of a country that is not known only names are compared
    assert same_city("Malmö", "Malmo", None)
    assert same_region("Province of Limburg", "Limburg", None)


def test_folding() -> None:
    assert fold("Côte d’Ivoire") == fold("COTE D'IVOIRE") == "cote divoire"
    assert fold("St. Kitts & Nevis") == "saint kitts and nevis"
    assert fold("  The  Gambia ") == "gambia"
    assert fold("ガーナ") != fold("カーナ")
    assert fold("हिन्दी") != fold("हनद")
    assert spellings("Gävle") == {"gavle", "gaevle"}


@table(
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
    assert 300 < (near or 0) < 600 < 8000 < (far or 0) < 11000
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
