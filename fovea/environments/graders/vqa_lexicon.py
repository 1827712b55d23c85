"""The words by which short answers are read as sentences; all in the normal form of `vqa_words`."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NEGATIONS = _words(
    "not no never none neither nor nothing nobody nowhere without isnt arent wasnt werent dont doesnt didnt cant cannot"
    " couldnt wont wouldnt shouldnt hasnt havent hadnt aint nope nah false incorrect untrue wrong"
)
YES_WORDS = _words("yes yeah yep yup")
AFFIRMATIONS = YES_WORDS | _words("true correct right so indeed there")
"""What cannot be the case instead, behind a no: `no, it is true`."""
DOUBTS = _words(
    "or either between maybe perhaps possibly probably might could if unless but except than unsure uncertain unlikely"
    " doubt doubtful impossible opposite instead joke lie missing lacking absent hardly barely rather versus vs"
)
OTHER_NUMBER = _words(
    "least most more less fewer over under about around approximately almost nearly roughly minus negative plus to"
    " hundred hundreds thousand thousands million millions billion billions trillion trillions dozen dozens half times"
)
"""What makes another number of the one that stands beside it."""
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
