"""The one value that a short answer claims, read without any knowledge of the true answer.

An answer is a bare value (`red`, `three dogs`, `yes`), or a sentence of a few known forms that states one value:

* yes or no, and a clause that agrees with it: `Yes, there is a dog.`, `No, it is not.`, `No, the dog is brown.`;
* a count: `There are 3 dogs in the image.`, `I see 3 dogs`, `no dogs`;
* a predicate whose subject is a pronoun or a noun with its article: `The car is red.`, `It's red`.

Any other answer claims exactly its own words, not a part of them: `yes 2 is red`, `2 or 3`, `I cannot see 3`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from fovea_gym.graders.math_answer import last_boxed
from fovea_gym.graders.vqa_words import (
    MAX_CHARS,
    NUMBER,
    option_letter,
    plain_words,
    same_words,
    spelled,
    without_articles,
    yes_or_no,
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NEGATIONS = _words(
    "not no never none neither nor nothing nobody nowhere without isnt arent wasnt werent dont doesnt didnt cant cannot"
    " couldnt wont wouldnt shouldnt hasnt havent hadnt aint nope nah false incorrect untrue wrong lack lacks devoid"
    " fails disagree denies deny excludes exclude nonexistent nil nada naught nought zilch"
)
YES_WORDS = _words("yes yeah yep yup")
AFFIRMATIONS = YES_WORDS | _words("true correct right so indeed there")
"""Words that contradict a preceding no: `no, it is true`."""
DOUBTS = _words(
    "or either between maybe perhaps possibly probably might could if unless but except than unsure uncertain unlikely"
    " doubt doubtful impossible opposite instead joke lie missing lacking absent hardly barely rarely scarcely seldom"
    " contrary rather versus vs"
)
OTHER_NUMBER = _words(
    "least most more less fewer over under about around approximately almost nearly roughly minus negative plus to"
    " hundred hundreds thousand thousands million millions billion billions trillion trillions dozen dozens half times"
)
"""Words that change the number next to them."""
_STEMS = (
    "four fif six seven eigh nin ten eleven twelf thirteen fourteen fifteen sixteen seventeen eighteen nineteen twentie"
    " thirtie fortie fiftie sixtie seventie eightie ninetie hundred thousand million billion trillion"
)
MULTIPLES = {f"{stem}{end}" for stem in _STEMS.split() for end in ("th", "ths")} | _words(
    "half halves third thirds quarter quarters"
    " pair pairs couple couples duo duos trio trios quartet quartets score scores gross myriad myriads lakh lakhs crore"
    " crores mil mio mn bn tn pi st nd rd th ths twice thrice double doubles triple triples zillion zillions thou kilo"
    " mega giga tera percentage too permille ppm twos threes fours fives sixes sevens eights nines tens teens twenties"
    " thirties forties fifties sixties seventies eighties nineties"
)
"""Words that change a preceding number: `3 pairs`, but not `the first pair`."""
SHARES = _words("per apiece each every")
"""Words that make a preceding number the count of one part only: `3 dogs on each side`."""
OPERATIONS = _words(
    "squared cubed doubled tripled trebled quadrupled halved quartered multiplied divided added subtracted raised"
    " factorial inverse reciprocal fold ply odd ish grand something square root power tops max maximum minimum"
    " below above short shy off"
)
"""Words that change a preceding number if no noun follows: `3 squared`, but not `3 raised hands`."""
PREPOSITIONS = _words("in on at with from by near behind beside under above below inside outside along around")
UNCLEAR = NEGATIONS | YES_WORDS | DOUBTS | OTHER_NUMBER | _words("true correct")
"""Words that make the value of a sentence unclear."""
NOT_THINGS = _words("idea clue answer way longer matter problem comment only just")
"""Words after which a preceding `no` does not count things: `no idea`, `No, only the man is`."""
EMPHASIS = _words("indeed definitely certainly clearly absolutely sure please")
COPULAS_OF_SEVERAL = _words("are were look appear seem")
COPULAS = COPULAS_OF_SEVERAL | _words("is was looks appears seems")
PRONOUNS = _words("it this that these those they he she there both all")
DETERMINERS = _words("the a an this that these those its his her their my your our both all each every")


def either(words: frozenset[str]) -> str:
    """A pattern that matches any one of these words."""
    return f"(?:{'|'.join(sorted(words, reverse=True))})"


MAX_WORDS = 20
"""Maximum number of words of an answer that is read as sentences; a longer response has to mark its answer."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of an answer, in normal form."""

    phrase: str
    """The value in the answer's own words: `3 dogs` for `There are 3 dogs`."""
    number: str | None = None
    """The number in a phrase that counts something, without the things counted."""


_COPULA = rf"{either(COPULAS)}(?: to be)?"
_PRONOUN, _DETERMINER = either(PRONOUNS), either(DETERMINERS)
_SUBJECT = rf"(?:{_PRONOUN}|{_DETERMINER}(?: \S+){{1,11}}?)"
_IS = re.compile(rf"({_SUBJECT}) (?:{_COPULA}|says|reads) (.+)")
_ITS = re.compile(r"(its|thats|theres|theyre|hes|shes) (.+)")
_IS_THE_ANSWER = re.compile(r"()(.+) is (?:(?:the|my) )?(?:(?:final|correct|right) )*answer")
_IMAGE = r"(?:the|this) (?:image|picture|photo|scene|figure|diagram)"
_INTRODUCTION = re.compile(
    r"(?:(?:so|well|okay|ok|therefore|thus|hence|overall"
    r"|(?:i|we) (?:think|believe|guess|say|would say|can say)(?: that)?"
    rf"|(?:in|from|looking at|based on) {_IMAGE}) ){{1,3}}(?=\S)"
)
_WHERE = re.compile(rf"(?<=\S) (?:in (?:{_IMAGE}|colou?r))+$")
_BEFORE_A_COUNT = re.compile(
    rf"(?:(?:there {_COPULA}|theres|(?:i|we|you)(?: can)? (?:see|count|spot|find|observe|notice|saw|counted|found)"
    rf"|{_SUBJECT} (?:has|have|had|shows?|contains?|depicts?|includes?|displays?|features?|holds?)"
    r"|(?:total|count)(?! of)|(?:total|count|number)(?: of(?: \S+){1,4}?)? is) )?"
)
_COUNTED = re.compile(
    rf"(?:(?:exactly|only|just|precisely|all|the|in total|(?:a )?total of) ){{0,3}}({NUMBER}|no)(?: (.+))?"
)
_CLAUSE = re.compile(
    r"(?:(?:because|since|indeed|definitely|certainly|clearly|absolutely) )?"
    rf"(?:(?:{_PRONOUN}|i|we|you|its|thats|theres|theyre|hes|shes)(?: .+)?|(?:(?:only|not) )?{_DETERMINER} .+"
    r"|(?:nobody|nothing|neither|no 1) .+|\d+ of (?:them|these|those|the) .+)"
)
_COMPARED = re.compile(r"(?<!\S)((?:more|fewer|less|(?!other|rather|either)\w+er)(?: \S+){0,3}?) than(?!\S)")
_TWICE = re.compile(r"\b(\w+) ?\((\w+)\)")
# `without doubt`, and the denied part of `not red but blue`
_NOT_DENIED = re.compile(r"(?<!\S)(?:no|without|without a) doubts?(?!\S)|(?<!\S)not(?: \S+){1,3}? but (?=\S)")


@lru_cache(maxsize=256)  # answers of a group are often equal, and grading an answer calls this twice
def claim_of(answer: str) -> Claim:
    """The claim of an answer that `found_answer` returned."""
    letter = option_letter(answer)
    if letter is not None:
        return Claim(letter.lower())
    answer = _said_once(answer[:MAX_CHARS])
    whole = spelled(answer)
    if len(whole.split()) > MAX_WORDS:
        return Claim(whole)
    return _claim_of_sentence(answer) or _claim_of_all(re.split(r"(?<=[.!?;])\s+|\n", answer)) or Claim(whole)


def _said_once(answer: str) -> str:
    """An answer without repetitions in parentheses: `Three dogs` for `Three (3) dogs`."""
    return _TWICE.sub(lambda said: said[1 if same_words(spelled(said[1]), spelled(said[2])) else 0], answer)


def _claim_of_all(sentences: list[str]) -> Claim | None:
    claims = [_claim_of_sentence(sentence) for sentence in sentences if spelled(sentence)]
    first = claims[0] if claims else None
    if first and all(other and same_words(_value(first), _value(other)) for other in claims[1:]):
        return first
    return None


def _value(claim: Claim) -> str:
    return claim.number or claim.phrase


def _claim_of_sentence(sentence: str) -> Claim | None:
    """The claim of a sentence that has one of the known forms, else None."""
    words = plain_words(sentence)
    introduction = _INTRODUCTION.match(words)
    if introduction is not None:
        words = words[introduction.end() :]
    claim = _yes_or_no(words) or _count(words) or _predicate(words)
    return Claim(without_articles(words)) if claim is None and introduction is not None else claim


def _yes_or_no(words: str) -> Claim | None:
    """The claim of a leading yes or no, if the rest of the sentence is empty or agrees with it."""
    first, _, rest = words.partition(" ")
    said = yes_or_no(first)
    rest = " ".join(_COMPARED.sub(r"\1", _NOT_DENIED.sub(" ", rest)).split())
    if said is None or not (not rest or rest in EMPHASIS or (_CLAUSE.fullmatch(rest) and _agrees(said, rest))):
        return None
    return Claim(said)


def _agrees(said: str, clause: str) -> bool:
    """True if a clause agrees with the yes or no before it: it affirms, or it denies or names the alternative."""
    words = clause.split()
    if not (DOUBTS | YES_WORDS).isdisjoint(words):
        return False
    # `plain_words` has turned `none of them` into `0 of them`
    num_negations = sum(word in NEGATIONS for word in words) + _counts_none(clause)
    if said == "yes" or num_negations:
        return num_negations == (said == "no")
    clause = clause.removeprefix("only ")
    instead = _IS.fullmatch(clause) or _ITS.fullmatch(clause)
    if instead is None or not AFFIRMATIONS.isdisjoint(instead[2].split()):
        return False
    return not instead[1].startswith("there") or _counted(instead[2]) is not None


def _counts_none(clause: str) -> bool:
    """True if a clause denies something with a 0, as `there are 0` and `0 of them` do; `the score is 0` does not."""
    if "0" not in clause.split():
        return False
    said = _IS.fullmatch(clause) or _ITS.fullmatch(clause)
    return said is None or said[1].startswith("there") or said[2].split()[0] != "0"


def _count(words: str) -> Claim | None:
    """The claim of a sentence that counts, such as `there are exactly 3 dogs in the image`."""
    before = _BEFORE_A_COUNT.match(words)
    assert before is not None, words  # the pattern also matches the empty text
    return _counted(words[before.end() :]) if _is_plain(before.group()) else None


def _counted(words: str) -> Claim | None:
    """The claim of a counting phrase such as `exactly 3 dogs` or `no dogs`."""
    match = _COUNTED.fullmatch(words)
    if match is None:
        return None
    number, things = match[1], match[2] or ""
    if not _are_things(things, number):
        return None
    phrase = f"{number} {without_articles(things)}".strip()
    return Claim(phrase, "0" if number == "no" else number)


def _are_things(words: str, number: str) -> bool:
    """True if the words name the counted things and do not change or deny the number."""
    things = words.split()
    if not things:
        return number != "no"
    if _makes_another_number(things):
        return False
    first_is_thing = things[0] not in PRONOUNS | DETERMINERS | COPULAS | NOT_THINGS | {"and"}
    copulas = [place for place, word in enumerate(things) if word in COPULAS]
    # a plural number allows only plural verbs: `3 dogs are here`, not `3 is red`
    allowed = COPULAS if number in ("0", "1", "no") else COPULAS_OF_SEVERAL
    says_little = len(copulas) <= 1 and all(things[place] in allowed and things[place + 1 :] for place in copulas)
    return first_is_thing and says_little and _is_plain(words) and not re.search(r"\d", words)


def _makes_another_number(things: list[str]) -> bool:
    """True if the words after a number change it: `3 pairs`, `3 k`, `3 ‰`, `3 squared`, `3 dogs on each side`."""
    is_word = sum(map(str.isalpha, things[0])) > 1
    noun = [things[0], *takewhile(lambda word: word not in PREPOSITIONS | COPULAS, things[1:])]
    shared = not SHARES.isdisjoint(things)
    return not is_word or shared or not MULTIPLES.isdisjoint(noun) or noun[-1] in OPERATIONS


def _is_plain(words: str) -> bool:
    """True if the words neither deny nor doubt, and do not change a number."""
    return UNCLEAR.isdisjoint(words.split())


def _predicate(words: str) -> Claim | None:
    """The claim of a predicate: `red` for `the car is red`, and 3 for `it is 3`."""
    said = _IS_THE_ANSWER.fullmatch(words) or _IS.fullmatch(words) or _ITS.fullmatch(words)
    if said is None or not _is_plain(said[1]) or not COPULAS.isdisjoint(said[2].split()):
        return None
    phrase = _WHERE.sub("", said[2])
    value = re.sub(r"^\S+ing (?=\d)", "", phrase)
    counted = None if value.startswith("no ") else _counted(value)
    return counted or Claim(without_articles(phrase))


_ENOUGH_AGREE = 3

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_LABEL = re.compile(r"\banswer\b\**\s*(?:is\b|:)[\s:*]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?;\n]")
_DENIAL = re.compile(
    r"\b(?:not|never|cannot|wrong|incorrect|false|if|unless|doubt|neither|nor|no(?=\W*(?:\w+\W*)?$))\b|n\Wt\b",
    re.IGNORECASE,
)
_FONT = re.compile(r"\\(?:text[a-z]*|math[a-z]+|mbox|operatorname) ?\{([^{}]*)\}")


def found_answer(response: str) -> str:
    r"""The answer in a response, in its most explicit form.

    The forms are, in this order: the last closed `\boxed{...}`; the last `<answer>...</answer>`; the text after the
    last "answer:" or "answer is", up to the end of its line, unless its sentence denies it; the text after `</think>`.
    """
    boxed = last_boxed(response)
    marked = _last_marked(response) if boxed is None else boxed
    tail = response.rpartition("</think>")[2].strip() if marked is None else marked
    labelled = _labelled(tail) if marked is None else None
    return _FONT.sub(r"\1", tail if labelled is None else labelled)


def _labelled(text: str) -> str | None:
    """The text after the last label such as `answer:`; None without a label, or after `I doubt that the answer is`."""
    labels = list(_LABEL.finditer(text))
    if not labels:
        return None
    sentence = _SENTENCE_END.split(text[: labels[-1].start()])[-1]
    return None if _DENIAL.search(sentence) else text[labels[-1].end() :].split("\n", maxsplit=1)[0]


def _last_marked(response: str) -> str | None:
    """The text in the last pair of tags, found in linear time."""
    tags = list(_TAG.finditer(response))
    pairs = [(opening, closing) for opening, closing in itertools.pairwise(tags) if closing[1] > opening[1]]
    return response[pairs[-1][0].end() : pairs[-1][1].start()] if pairs else None


def soft_accuracy(given: str, truths: Sequence[str]) -> float:
    """VQA's accuracy: min(annotators who agree / 3, 1), averaged over all subsets that leave one annotator out.

    With fewer than four annotators, all others have to agree; a single annotator's answer is the truth. An annotator
    agrees if their answer equals the whole given answer or its claim.
    """
    claim = claim_of(given)
    claimed = (spelled(given), claim.phrase, claim.number or "")
    agree = [any(same_words(words, spelled(truth)) for words in claimed) for truth in truths]
    if len(agree) < 2:
        return float(any(agree))
    enough = min(_ENOUGH_AGREE, len(agree) - 1)
    left = [min((sum(agree) - one) / enough, 1.0) for one in agree]
    return sum(left) / len(left)
