"""Answers that hedge, and a check that none of them pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import permutations

from fovea_gym.environments.vqa import grade

CONNECTIVES = [
    *(" ", ", ", ". ", "; ", ": ", "\n", "/", " - ", " = ", "? ", "! ", " (", ") ", " is ", " are ", " was ", " and "),
    *(
        " or ",
        " not ",
        " but ",
        " because ",
        " there is ",
        " there are ",
        " it is ",
        " its ",
        " no ",
        " yes ",
        " with ",
    ),
    *(" of ", " in ", " has ", " I see ", " so ", " then ", " the answer is ", " answer: ", " things are ", " looks "),
]


def check_constants(truths: Sequence[str]) -> None:
    """No hedge earns more on rows, without their questions, than the best single answer."""
    counts = Counter(truths)

    def earned(constant: str) -> float:
        return sum(grade(constant, truth).score * count for truth, count in counts.items())

    plain = [truth for truth, _ in counts.most_common(7)]
    pairs = [f"{one}{connective}{other}" for one, other in permutations(plain, 2) for connective in CONNECTIVES]
    triples = [f"{one} {two} is {three}" for one, two, three in permutations(plain, 3)]
    best_plain = max(map(earned, plain))
    assert best_plain == max(counts.values())
    assert [answer for answer in (*pairs, *triples) if earned(answer) > best_plain] == []
