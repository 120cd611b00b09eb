"""How good translations are: corpus scores with the signatures that define them."""

import unicodedata
from collections.abc import Sequence
from functools import lru_cache


def untied(score: float, loss: float) -> float:
    """The score, less what tells apart two that are equal: the loss.

    That counts for less than any difference of two scores that is more than rounding,
    and one that is not finite as a very large one.
    """
    return score - 1e-9 * (loss if loss < 1e3 else 1e3)


def scores(
    hypotheses: Sequence[str], references: Sequence[str], chrf: bool = True
) -> dict:
    """sacreBLEU and chrF (0 to 100) with signatures, and the share that is exact.

    Without `chrf`, which takes four times as long as all else, that is left out.

    A translation is exact if it equals its reference once both are NFKC-normalised
    and any white space is one blank, for a vocabulary decodes to such text only. BLEU
    and chrF are of the text as it is.

    Raises:
        ValueError: there are not as many hypotheses as references.
    """
    if len(hypotheses) != len(references):
        raise ValueError(
            f"There are {len(hypotheses)} translations but {len(references)} "
            "references."
        )
    names = ("bleu", "chrf") if chrf else ("bleu",)
    metrics = {name: _metric(name, tuple(references)) for name in names}
    exact = map(str.__eq__, map(normalized, hypotheses), map(normalized, references))
    result = {
        name: of.corpus_score(hypotheses, None).score for name, of in metrics.items()
    }
    result["exact_match"] = sum(exact) / len(references)
    for name, of in metrics.items():
        key = "signature" if name == "bleu" else f"{name}_signature"
        result[key] = str(of.get_signature())
    return result


@lru_cache(maxsize=4)
def _metric(name: str, references: tuple[str, ...]):
    """Of sacreBLEU, with what it counts in the references: trials share these."""
    from sacrebleu.metrics import BLEU, CHRF

    return {"bleu": BLEU, "chrf": CHRF}[name](references=[references])


def normalized(sentence: str) -> str:
    """NFKC, as SentencePiece normalises, and one blank for any white space."""
    return " ".join(unicodedata.normalize("NFKC", sentence).split())


def published_scores(
    hypotheses: Sequence[str], tokenized_references: Sequence[str], language: str
) -> dict:
    """Multi30k's published protocol: BLEU and chrF of lowercased, tokenised text.

    The hypotheses are lowercased, punctuation-normalised and tokenised as Moses does,
    which is how the publisher made the references; both are scored as they are.
    """
    from sacrebleu.metrics import BLEU, CHRF

    bleu = BLEU(tokenize="none", force=True)  # tokenised on purpose: no warning
    chrf = CHRF()
    tokenized, references = moses(hypotheses, language), [tokenized_references]
    result = {
        "published_bleu": bleu.corpus_score(tokenized, references).score,
        "published_chrf": chrf.corpus_score(tokenized, references).score,
    }
    for name, metric in (("published", bleu), ("published_chrf", chrf)):
        result[f"{name}_signature"] = f"{metric.get_signature()}|moses:lc.norm.tok"
    return result


def moses(sentences: Sequence[str], language: str) -> list[str]:
    """Lowercase, normalise the punctuation and tokenise, in Multi30k's order."""
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    normalizer, tokenizer = MosesPunctNormalizer(language), MosesTokenizer(language)
    return [
        tokenizer.tokenize(normalizer.normalize(sentence.lower()), return_str=True)
        for sentence in sentences
    ]
