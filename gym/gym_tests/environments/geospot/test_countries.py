"""Names of countries: the shared cases, many more of their kinds, and what must not be a country."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fovea_gym.environments.geospot.countries import country_code, country_codes, country_name
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
    entries = [entry for line in CASES.strip().splitlines() for entry in line.split("    ")]
    return [
        (name, code) for entry in entries for code, _, names in [entry.partition(": ")] for name in names.split("|")
    ]


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
    assert {code: country_code(country_name(code)) for code in country_codes()} == {
        code: code for code in country_codes()
    }
    assert all(country_code(code) == code for code in country_codes())


@table(
    ("text", "code"),
    [
        ("Probably France", "FR"),
        ("most likely Peru", "PE"),
        ("Czechia (Czech Republic)", "CZ"),
        ("Deutschland (Germany)", "DE"),
        ("Japan - because of the signs", "JP"),
        ("Kenya, East Africa", "KE"),
        ("Côte d'Ivoire (Ivory Coast)", "CI"),
        ("United Kingdom / England", "GB"),
        ("“Chile”", "CL"),
        ("This is Chile", "CL"),
        ("It's somewhere in Chile", "CL"),
        ("Somewhere in France or Belgium", None),
        ("France or thereabouts", None),
        ("Holland or the Netherlands", "NL"),
        ("St. Nowhere", None),  # not ST, which is São Tomé
        ("S. Nowhere", None),
        ("Chile. I am sure of it", "CL"),
        ("Lyon, France", "FR"),
        ("x" * 201, None),
    ],
)
def test_names_with_words_around_them(text: str, code: str | None) -> None:
    assert country_code(text) == code
