"""Generated short stories from a small grammar, with known links between words.

A woman and a man each own a thing. Further sentences are about them and about others:

    anna has the red kite . ben has the old drum . the dogs near the house often run .
    she shows the kite . ben finds the drum .

Links refer to words by their indices. A verb's subject is 1 to 12 words before it, with
other nouns in between. Verbs of bystanders (run, runs) agree with the subject in
number; verbs of characters (has, shows) have only one form. A pronoun refers to the
character of its gender. Names are repeated, and the sentences about a character mention
the thing that the character owns. An adjective modifies the noun after it.
"""

from typing import NamedTuple

import numpy as np

SIZES = {"train": 12_000, "val": 300, "test": 600}
SEEDS = {"train": 1706, "val": 3762, "test": 3763}
SENTENCES = 3, 6  # least and most sentences after the first two

WOMEN = ("anna", "clara", "emma", "lena", "maria", "nora")
MEN = ("ben", "david", "felix", "jonas", "oscar", "tom")
NOUNS = {  # plural by singular
    "dog": "dogs",
    "cat": "cats",
    "bird": "birds",
    "child": "children",
    "woman": "women",
    "man": "men",
    "horse": "horses",
    "teacher": "teachers",
}
PLACES = {
    "house": "houses",
    "tree": "trees",
    "river": "rivers",
    "bridge": "bridges",
    "wall": "walls",
    "garden": "gardens",
}
THINGS = ("kite", "drum", "book", "lamp", "boat", "coin", "ring", "map", "bell", "hat")
ADJECTIVES = ("red", "old", "small", "big", "green", "new", "heavy", "strange")
PREPOSITIONS = ("near", "behind", "above", "beside")
ADVERBS = ("often", "never", "always", "slowly")
VERBS = {  # plural by singular
    "runs": "run",
    "sings": "sing",
    "sleeps": "sleep",
    "waits": "wait",
    "falls": "fall",
    "comes": "come",
}
WITH_THING = ("shows", "finds", "takes", "sells", "likes", "paints")


class Link(NamedTuple):
    """A relation between two words of a story, by their indices."""

    relation: str  # subject, agreement, modifier, antecedent or same_name
    word: int  # verb, noun, pronoun, or repeated name
    of: int  # subject (also for "agreement"), adjective, antecedent, or previous name


class Story(NamedTuple):
    """A document: its words, and the links between them."""

    words: list[str]
    links: list[Link]

    @property
    def text(self) -> str:
        """The words, separated by spaces."""
        return " ".join(self.words)


def documents(split: str) -> list[Story]:
    """Generate the stories of a split; no story is in two splits.

    The result is the same on every machine.

    Raises:
        ValueError: there is no such split.
    """
    if split not in SIZES:
        raise ValueError(f"stories has no split {split!r}; it has {', '.join(SIZES)}.")
    rng = np.random.default_rng(SEEDS[split])
    return [_story(rng) for _ in range(SIZES[split])]


def _story(rng) -> Story:
    """Generate one story."""
    story = Story([], [])
    woman, man = _one(rng, WOMEN), _one(rng, MEN)
    owned = dict(zip((woman, man), rng.permutation(THINGS)[:2].tolist(), strict=True))
    order = [woman, man] if rng.random() < 0.5 else [man, woman]
    last = {}  # index of each character's last mention by name
    for owner in order:
        last[owner] = _add(story, owner)
        story.links.append(Link("subject", _add(story, "has"), last[owner]))
        _noun_phrase(rng, story, owned[owner], adjective=0.6)
        _add(story, ".")
    for _ in range(rng.integers(SENTENCES[0], SENTENCES[1] + 1)):
        draw = rng.random()
        if draw < 0.6:
            _bystanders(rng, story)
        else:
            _of_character(rng, story, order, owned, last, by_name=draw < 0.8)
    return story


def _bystanders(rng, story: Story) -> None:
    """Add a sentence whose subject is followed by phrases with other nouns."""
    plural = rng.random() < 0.5
    singular = _one(rng, tuple(NOUNS))
    noun = NOUNS[singular] if plural else singular
    subject = _noun_phrase(rng, story, noun, adjective=0.4)
    for _ in range(_one(rng, (0, 1, 1, 1, 2, 2))):
        _add(story, _one(rng, PREPOSITIONS))
        place = _one(rng, tuple(PLACES))
        other = PLACES[place] if rng.random() < 0.5 else place
        _noun_phrase(rng, story, other, adjective=0.2)
    if rng.random() < 0.5:
        _add(story, _one(rng, ADVERBS))
    verb = _one(rng, tuple(VERBS))
    place = _add(story, VERBS[verb] if plural else verb)
    story.links.extend(Link(name, place, subject) for name in ("subject", "agreement"))
    _add(story, ".")


def _of_character(rng, story: Story, characters, owned, last, by_name: bool) -> None:
    """Add a sentence about a character and the thing that the character owns."""
    owner = _one(rng, characters)
    if by_name:
        subject = _add(story, owner)
        story.links.append(Link("same_name", subject, last[owner]))
        last[owner] = subject
    else:
        subject = _add(story, "she" if owner in WOMEN else "he")
        story.links.append(Link("antecedent", subject, last[owner]))
    if rng.random() < 0.4:
        _add(story, _one(rng, ADVERBS))
    story.links.append(Link("subject", _add(story, _one(rng, WITH_THING)), subject))
    _noun_phrase(rng, story, owned[owner], adjective=0.0)
    _add(story, ".")


def _noun_phrase(rng, story: Story, noun: str, adjective: float) -> int:
    """Add an article, up to two adjectives, and a noun; return the noun's index."""
    _add(story, "the")
    chosen = []
    if rng.random() < adjective:
        chosen = rng.permutation(ADJECTIVES)[: _one(rng, (1, 1, 2))].tolist()
    indices = [_add(story, word) for word in chosen]
    place = _add(story, noun)
    story.links.extend(Link("modifier", place, index) for index in indices)
    return place


def _add(story: Story, word: str) -> int:
    """Add a word and return its index."""
    story.words.append(word)
    return len(story.words) - 1


def _one(rng, choices):
    """Draw one of the choices uniformly."""
    return choices[rng.integers(len(choices))]
