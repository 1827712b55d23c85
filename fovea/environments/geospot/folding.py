"""Folding of names for comparison: without accents, case, punctuation and the other ways of writing one word."""

from __future__ import annotations

import re
import unicodedata

# Letters that Unicode does not take apart into a base and a mark.
_LETTERS = str.maketrans(
    {"ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "œ": "oe", "ı": "i", "ħ": "h", "ŋ": "ng", "ə": "e"}
)
# Sources without accents write Gaevleborg and Muenchen, others Gavleborg and Munchen.
_WRITTEN_OUT = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "å": "aa", "ø": "oe"})
_LATIN_MARKS = re.compile("[\u0300-\u036f]")  # not the vowel signs of Indic scripts, which are letters of their own
_APOSTROPHES = re.compile("['`´.\u02b9-\u02bf\u2018\u2019\u201b\u2032\uff07]")
_SHORT_WORDS = {"st": "saint", "ste": "sainte", "mt": "mount", "ft": "fort"}


def fold(name: str) -> str:
    """`"Côte d’Ivoire"` becomes `"cote divoire"`, `"St. Kitts & Nevis"` becomes `"saint kitts and nevis"`."""
    text = unicodedata.normalize("NFKC", name).casefold().translate(_LETTERS)
    text = unicodedata.normalize("NFC", _LATIN_MARKS.sub("", unicodedata.normalize("NFKD", text)))
    text = _APOSTROPHES.sub("", text).replace("&", " and ")
    letters = (char if unicodedata.category(char)[0] in "LMN" else " " for char in text)
    words = [_SHORT_WORDS.get(word, word) for word in "".join(letters).split()]
    return " ".join(words[1:] if words[:1] == ["the"] and len(words) > 1 else words)


def spellings(name: str) -> frozenset[str]:
    """The folded name, and the one with umlauts written out."""
    written_out = unicodedata.normalize("NFC", name).casefold().translate(_WRITTEN_OUT)
    return frozenset({fold(name), fold(written_out)} - {""})
