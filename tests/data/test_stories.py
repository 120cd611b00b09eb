"""Stories: every link is what the words say, found without the generator."""

from collections import Counter

import pytest

from headcount.data import stories

PLURALS = {**stories.NOUNS, **stories.PLACES}
VAL = stories.documents("val")


def links(story, relation):
    return [link for link in story.links if link.relation == relation]


def test_every_verb_has_a_subject_of_its_number():
    plural_verbs, verbs = set(stories.VERBS.values()), 0
    others_between = Counter()
    for story in VAL:
        found = {link.word: link.of for link in links(story, "subject")}
        for place, word in enumerate(story.words):
            is_verb = word in (*stories.VERBS, *plural_verbs, *stories.WITH_THING)
            if not is_verb and word != "has":
                assert place not in found
                continue
            verbs += 1
            subject = story.words[found[place]]
            assert found[place] < place
            assert (subject in PLURALS.values()) == (word in plural_verbs)
            between = story.words[found[place] + 1 : place]
            assert "." not in between
            nouns = [x for x in between if x in PLURALS or x in PLURALS.values()]
            for noun in nouns:
                is_plural = noun in PLURALS.values()
                others_between[is_plural == (word in plural_verbs)] += 1
    assert verbs > 5 * len(VAL)
    assert min(others_between.values()) > 100  # nouns that agree, and that don't


def test_the_verbs_that_agree_are_those_with_two_forms():
    forms = {*stories.VERBS, *stories.VERBS.values()}
    for story in VAL:
        subjects = {link.word: link.of for link in links(story, "subject")}
        agreeing = {link.word: link.of for link in links(story, "agreement")}
        assert agreeing.items() <= subjects.items()
        assert sorted(agreeing) == [i for i, w in enumerate(story.words) if w in forms]


def test_a_pronoun_stands_for_the_last_mention_of_its_gender():
    for story in VAL:
        found = {link.word: link.of for link in links(story, "antecedent")}
        pronouns = [i for i, word in enumerate(story.words) if word in ("she", "he")]
        assert sorted(found) == pronouns
        for place, antecedent in found.items():
            names = stories.WOMEN if story.words[place] == "she" else stories.MEN
            earlier = [i for i in range(place) if story.words[i] in names]
            assert earlier[-1] == antecedent


def test_a_name_is_linked_to_its_last_mention_and_its_owner_to_one_thing():
    names = {*stories.WOMEN, *stories.MEN}
    for story in VAL:
        found = {link.word: link.of for link in links(story, "same_name")}
        last, thing = {}, {}
        for place, word in enumerate(story.words):
            if word in names:
                assert found.get(place) == last.get(word)
                last[word] = place
            if word in stories.THINGS:
                of = {link.word: link.of for link in links(story, "subject")}
                owner = of[max(verb for verb in of if verb < place)]
                known = {x.word: x.of for x in links(story, "antecedent")}
                owner = story.words[known.get(owner, owner)]
                assert thing.setdefault(owner, word) == word
        assert len(last) == 2 and len(set(thing.values())) == len(thing) == 2


def test_adjectives_belong_to_the_noun_after_them():
    for story in VAL:
        found = {link.of: link.word for link in links(story, "modifier")}
        places = [i for i, w in enumerate(story.words) if w in stories.ADJECTIVES]
        assert sorted(found) == places
        for adjective, noun in found.items():
            between = story.words[adjective + 1 : noun]
            assert set(between) <= set(stories.ADJECTIVES)
            assert story.words[noun] not in stories.ADJECTIVES


def test_no_distance_says_where_the_subject_is():
    """A head that looks at a fixed distance finds at most half of them or so."""
    most_of = {"subject": 0.6, "agreement": 0.25, "antecedent": 0.2, "same_name": 0.2}
    for relation, most in most_of.items():
        distances = Counter(
            link.word - link.of for story in VAL for link in links(story, relation)
        )
        assert distances.most_common(1)[0][1] < most * distances.total()
        assert len(distances) >= 6


@pytest.mark.slow
def test_splits_are_apart_and_the_same_every_time():
    texts = {name: [s.text for s in stories.documents(name)] for name in stories.SIZES}
    assert {name: len(each) for name, each in texts.items()} == stories.SIZES
    every = [text for each in texts.values() for text in each]
    assert len(set(every)) == len(every)
    assert texts["val"] == [story.text for story in VAL]
    words = {word for text in texts["train"] for word in text.split()}
    assert {w for name in ("val", "test") for t in texts[name] for w in t.split()} <= (
        words
    )
    assert len(words) == 89


def test_a_split_that_is_not_there():
    with pytest.raises(ValueError, match="'dev'.*train, val, test"):
        stories.documents("dev")
