"""The words by which short answers are read as sentences; all in the normal form of `vqa_words`."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NEGATIONS = _words(
    "not no never none neither nor nothing nobody nowhere without isnt arent wasnt werent dont doesnt didnt cant cannot"
    " couldnt wont wouldnt shouldnt hasnt havent hadnt aint nope nah false incorrect untrue wrong lack lacks devoid"
    " fails disagree denies deny excludes exclude nonexistent nil nada naught nought zilch"
)
YES_WORDS = _words("yes yeah yep yup")
AFFIRMATIONS = YES_WORDS | _words("true correct right so indeed there")
"""What cannot be the case instead, behind a no: `no, it is true`."""
DOUBTS = _words(
    "or either between maybe perhaps possibly probably might could if unless but except than unsure uncertain unlikely"
    " doubt doubtful impossible opposite instead joke lie missing lacking absent hardly barely rarely scarcely seldom"
    " contrary rather versus vs"
)
OTHER_NUMBER = _words(
    "least most more less fewer over under about around approximately almost nearly roughly minus negative plus to"
    " hundred hundreds thousand thousands million millions billion billions trillion trillions dozen dozens half times"
)
"""What makes another number of the one that stands beside it."""
_STEMS = (
    "four fif six seven eigh nin ten eleven twelf thirteen fourteen fifteen sixteen seventeen eighteen nineteen twentie"
    " thirtie fortie fiftie sixtie seventie eightie ninetie hundred thousand million billion trillion"
)
FRACTIONS = _words("half halves third thirds quarter quarters") | {
    f"{stem}{end}" for stem in _STEMS.split() for end in ("th", "ths")
}
MULTIPLES = FRACTIONS | _words(
    "pair pairs couple couples duo duos trio trios quartet quartets score scores gross myriad myriads lakh lakhs crore"
    " crores mil mio mn bn tn pi st nd rd th ths twice thrice double doubles triple triples zillion zillions thou kilo"
    " mega giga tera percentage too permille ppm twos threes fours fives sixes sevens eights nines tens teens twenties"
    " thirties forties fifties sixties seventies eighties nineties"
)
"""What makes another number of the one before it: `3 pairs`. Elsewhere it says nothing of one: `the first pair`."""
SHARES = _words("per apiece each every")
"""What makes a number that of a part, wherever it stands behind it: `3 dogs on each side`."""
OPERATIONS = _words(
    "squared cubed doubled tripled trebled quadrupled halved quartered multiplied divided added subtracted raised"
    " factorial inverse reciprocal fold ply odd ish grand something square root power tops max maximum minimum"
    " below above short shy off"
)
"""What makes another number of the one before it if no noun follows: `3 squared`, and not `3 raised hands`."""
PREPOSITIONS = _words("in on at with from by near behind beside under above below inside outside along around")
UNCLEAR = NEGATIONS | YES_WORDS | DOUBTS | OTHER_NUMBER | _words("true correct")
"""What a sentence that says a value may not hold beside it."""
NOT_THINGS = _words("idea clue answer way longer matter problem comment only just")
"""Words behind a `no` by which it counts nothing: `no idea`, `No, only the man is`."""
EMPHASIS = _words("indeed definitely certainly clearly absolutely sure please")
COPULAS_OF_ONE = _words("is was looks appears seems")
COPULAS_OF_SEVERAL = _words("are were look appear seem")
COPULAS = COPULAS_OF_ONE | COPULAS_OF_SEVERAL
PRONOUNS = _words("it this that these those they he she there both all")
DETERMINERS = _words("the a an this that these those its his her their my your our both all each every")


def either(words: frozenset[str]) -> str:
    """The pattern of any one of these words."""
    return f"(?:{'|'.join(sorted(words, reverse=True))})"
