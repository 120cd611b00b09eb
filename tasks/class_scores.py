"""Scores of predicted labels: accuracy, F1 per class, entity F1, confusions."""

import warnings
from collections import Counter
from collections.abc import Sequence

MOST_CONFUSIONS = 10


def score(true: Sequence[str], predicted: Sequence[str]) -> dict:
    """Compute `accuracy`, and `macro_f1` over the classes that occur in `true`."""
    classes = sorted(set(true))
    exact = sum(a == b for a, b in zip(true, predicted, strict=True))
    *_, f1, _ = _per_class(true, predicted, classes)
    return {"accuracy": exact / len(true), "macro_f1": float(f1.mean())}


def report(true: Sequence[str], predicted: Sequence[str]) -> list[dict]:
    """Compute precision, recall, F1 and support of every class."""
    classes = sorted(set(true) | set(predicted))
    columns = _per_class(true, predicted, classes)
    names = ("precision", "recall", "f1", "support")
    return [
        {"class": label} | dict(zip(names, map(float, values), strict=True))
        for label, *values in zip(classes, *columns, strict=True)
    ]


def confusions(true: Sequence[str], predicted: Sequence[str]) -> list[dict]:
    """Return the most frequent pairs of a true class and a wrong prediction."""
    wrong = Counter((a, b) for a, b in zip(true, predicted, strict=True) if a != b)
    return [
        {"true": a, "predicted": b, "count": count}
        for (a, b), count in wrong.most_common(MOST_CONFUSIONS)
    ]


def entity_f1(true: list[list[str]], predicted: list[list[str]]) -> float:
    """Return seqeval's micro-averaged F1 of entities in BIO tags."""
    from seqeval.metrics import f1_score  # slow to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that are never predicted
        return float(f1_score(true, predicted, zero_division=0))


def entity_report(true: list[list[str]], predicted: list[list[str]]) -> list[dict]:
    """Compute precision, recall, F1 and support of every entity type in BIO tags."""
    from seqeval.metrics import classification_report  # slow to import

    if not any(tag != "O" for tags in (*true, *predicted) for tag in tags):
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of types that are never predicted
        by_type = classification_report(
            true, predicted, output_dict=True, zero_division=0
        )
    names = {"precision": "precision", "recall": "recall", "f1-score": "f1"}
    names |= {"support": "support"}
    return [
        {"class": kind} | {ours: float(row[theirs]) for theirs, ours in names.items()}
        for kind, row in by_type.items()
        if not kind.endswith(" avg")
    ]


def _per_class(true, predicted, classes):
    from sklearn.metrics import precision_recall_fscore_support  # slow to import

    return precision_recall_fscore_support(
        true, predicted, labels=classes, zero_division=0
    )
