"""Scores of generated text against references, with the signatures that define them."""

import logging
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache
from importlib.metadata import version

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

ROUGE = {"rouge1", "rouge2", "rougeL"}
SQUAD = {"squad_exact_match", "squad_f1"}
ARTICLE = re.compile(r"\b(a|an|the)\b")


def score(
    hypotheses: Sequence[str], references: Sequence[str], names: Collection[str]
) -> tuple[dict, dict]:
    """Score hypotheses against references.

    "bleu", "chrf": sacreBLEU's, 0 to 100; chrF takes most of the time. "rouge1",
    "rouge2", "rougeL": F1 of unigrams, bigrams and the longest common subsequence, by
    rouge-score without stemming, 0 to 100. "exact_match", "squad_exact_match",
    "squad_f1": fractions; SQuAD's ignore case, punctuation and articles.

    A hypothesis is an exact match if it equals its reference after NFKC normalisation
    and with any white space replaced by one blank: a vocabulary can only decode to such
    text. BLEU and chrF use the unmodified text.

    Args:
        names: scores to compute; unknown names are ignored.

    Returns:
        Scores and signatures by name.

    Raises:
        ValueError: the numbers of hypotheses and references differ.
    """
    if len(hypotheses) != len(references):
        raise ValueError(
            f"There are {len(hypotheses)} hypotheses but {len(references)} references."
        )
    scores, signatures = {}, {}
    for name in ("bleu", "chrf"):
        if name in names:
            metric = _metric(name, tuple(references))
            scores[name] = metric.corpus_score(hypotheses, None).score
            signatures[name] = str(metric.get_signature())
    if rouge := sorted(ROUGE & set(names)):
        rouges = rouge_scores(hypotheses, references, rouge)
        scores |= {name: 100 * value for name, value in rouges.items()}
        signatures |= dict.fromkeys(rouge, f"rouge-score:{version('rouge-score')}|F1")
    if SQUAD & set(names):
        columns = zip(*map(squad_scores, hypotheses, references), strict=True)
        for name, column in zip(sorted(SQUAD), columns, strict=True):
            if name in names:
                scores[name] = sum(column) / len(references)
    if "exact_match" in names:
        exact = map(str.__eq__, map(normalize, hypotheses), map(normalize, references))
        scores["exact_match"] = sum(exact) / len(references)
    return scores, signatures


def rouge_scores(
    hypotheses: Sequence[str], references: Sequence[str], names: Sequence[str]
) -> dict[str, float]:
    """Return the mean F1 (0 to 1) of ROUGE (Lin 2004) by name."""
    from rouge_score.rouge_scorer import RougeScorer  # slow to import

    scorer = RougeScorer(list(names), use_stemmer=False)
    results = [scorer.score(*pair) for pair in zip(references, hypotheses, strict=True)]
    return {
        name: sum(row[name].fmeasure for row in results) / len(results)
        for name in names
    }


def squad_scores(hypothesis: str, reference: str) -> tuple[float, float]:
    """Return SQuAD's exact match and F1 of an answer (Rajpurkar et al. 2016)."""
    ours, theirs = (squad_words(text) for text in (hypothesis, reference))
    exact = float(ours == theirs)
    if not ours or not theirs:
        return exact, exact
    common = sum((Counter(ours) & Counter(theirs)).values())
    return exact, 2 * common / (len(ours) + len(theirs))


def squad_words(text: str) -> list[str]:
    """Return the words of an answer: lower case, no punctuation, no articles.

    As in SQuAD's script, only ASCII punctuation is removed. An article next to any
    other, as in "the–end", is removed from the middle of a word, which leaves two.
    """
    letters = "".join(c for c in text.lower() if c not in string.punctuation)
    return ARTICLE.sub(" ", letters).split()


@lru_cache(maxsize=4)
def _metric(name: str, references: tuple[str, ...]):
    """Return a sacreBLEU metric; cached, so that trials share the reference counts."""
    return {"bleu": BLEU, "chrf": CHRF}[name](references=[references])


def normalize(sentence: str) -> str:
    """Apply NFKC, as SentencePiece does, and collapse white space to single blanks."""
    return " ".join(unicodedata.normalize("NFKC", sentence).split())


def published(
    hypotheses: Sequence[str], tokenized_references: Sequence[str], language: str
) -> tuple[dict, dict]:
    """Return BLEU and chrF by Multi30k's published protocol, and their signatures.

    Hypotheses are lowercased, punctuation-normalised and tokenised with Moses, like the
    published references.
    """
    bleu = BLEU(tokenize="none", force=True)  # force: no warning about tokenised text
    chrf = CHRF()
    tokenized, references = moses(hypotheses, language), [tokenized_references]
    metrics = {"published_bleu": bleu, "published_chrf": chrf}
    scores = {
        name: metric.corpus_score(tokenized, references).score
        for name, metric in metrics.items()
    }
    signatures = {
        name: f"{metric.get_signature()}|moses:lc.norm.tok"
        for name, metric in metrics.items()
    }
    return scores, signatures


def moses(sentences: Sequence[str], language: str) -> list[str]:
    """Lowercase, normalise punctuation and tokenise, in Multi30k's order."""
    from sacremoses import MosesPunctNormalizer, MosesTokenizer  # slow to import

    normalizer, tokenizer = MosesPunctNormalizer(language), MosesTokenizer(language)
    return [
        tokenizer.tokenize(normalizer.normalize(sentence.lower()), return_str=True)
        for sentence in sentences
    ]


def paired_bootstrap(
    systems: dict[str, Sequence[str]],
    references: Sequence[str],
    metric: str,
    samples: int = 1000,
) -> dict[str, tuple[float, float, float | None]]:
    """Run sacreBLEU's paired bootstrap over sentences (Koehn 2004).

    Args:
        systems: hypotheses by name; the first is the baseline.
        references: one per sentence.
        metric: "bleu" or "chrf", with sacreBLEU's defaults.
        samples: number of resampled test sets.

    Returns:
        By system: its score, half the width of the score's 95% interval, and the
        p-value for no difference from the baseline (None for the baseline).
    """
    logging.getLogger("sacrebleu").setLevel(logging.WARNING)  # it logs every step
    named = [(name, list(lines)) for name, lines in systems.items()]
    if len(named) == 1:  # the test needs two systems
        named.append((named[0][0] + " again", named[0][1]))
    name, of = {"bleu": ("BLEU", BLEU), "chrf": ("chrF2", CHRF)}[metric]
    test = PairedTest(named, {name: of()}, [list(references)], "bs", n_samples=samples)
    by_metric = test()[1]
    results = {
        system: (result.score, float(result.ci), result.p_value)
        for system, result in zip(systems, by_metric[name], strict=False)
    }
    baseline = results[named[0][0]][0]
    # sacreBLEU calls equal scores different, as no resampled difference exceeds 0
    return {
        system: (score, half, 1.0 if p is not None and score == baseline else p)
        for system, (score, half, p) in results.items()
    }
