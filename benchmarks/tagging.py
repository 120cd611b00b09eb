"""Compare the speed of taggers with transformers; score simple baselines.

    .venv-peers/bin/python -m benchmarks.tagging [--rounds 5] [--data DIR]
    python -m benchmarks.tagging --baselines [--data DIR]

By default this trains configs/ewt.py, on subwords with learned positions, and
transformers' BertForTokenClassification of the same sizes (scaled dot-product
attention, fused AdamW, batches of sentences of similar length), in turn. Then both tag
the training split. This prints non-padding tokens per second, the share of the matmul
ceiling (see benchmarks.training) and the ratios. The data is DIR/ud_ewt if that exists,
else random tokens.

--baselines prints the scores of baselines without neural networks on the dev and test
splits of the corpora in DIR. For tagging, these are the most frequent tag of each word,
and a logistic regression on a word, its affixes and its neighbours; for texts, the most
frequent class, and a logistic regression on words and pairs of words.
"""

# isort: off
from headcount.runtime import bootstrap  # noqa: F401  before JAX is imported

# isort: on
import argparse
import importlib.util
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import numpy as np
from sklearn.feature_extraction import DictVectorizer
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from benchmarks.training import STEPS, Program, print_table, serve, take_turns
from headcount.configs import ewt, movie_reviews, wnut17
from headcount.data.batches import packed_in_order
from headcount.data.encoder_tokenizers import parts_of
from headcount.data.examples import Examples, Ragged
from headcount.tasks import class_scores, make_task
from headcount.tasks.classes import best_classes

PEERS = ("transformers", "transformers, compiled")
NUM_TAGS = 17
# batches to tag in place of each update: long turns, as cores are slow after sleeping
TAGGED = 8


def main():
    """Time the contestants, print the baselines, or serve as a contestant's worker."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--baselines", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--tag", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.baselines:
        return print_baselines(arguments.data)
    if arguments.worker:
        return serve(contestant(arguments), STEPS)
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = Path(folder)
        race(arguments)


def speed_config():
    """Return configs/ewt.py, changed to a model that BERT's classes support, too."""
    config = ewt.get_config()
    config.task.token_dropout = 0.0
    config.data.tokenizer = "sentencepiece"
    config.data.vocab_size = 8000
    config.model.positions = "learned"
    config.model.max_positions = config.data.max_length
    config.model.norm = "post"
    config.model.activation = "gelu"
    config.model.embedding_norm = True
    config.optimizer.label_smoothing = 0.0
    return config


def race(arguments) -> None:
    """Time every contestant in turn, and print medians."""
    config = speed_config()
    fields, origin = corpus(arguments.data / "ud_ewt", config, arguments.folder)
    parts = [x for name in fields for x in (fields[name].tokens, fields[name].offsets)]
    np.savez(arguments.folder / "corpus.npz", *parts)
    names = ["ours"]
    if importlib.util.find_spec("torch"):
        names += PEERS
    else:
        print("torch is not installed: only ours is timed (requirements-peers.txt)")
    print(f"data: {origin}; {config.data.batch_tokens} tokens per update")
    for what, flags, passes in (("training", [], 3), ("tagging", ["--tag"], 1)):
        options = [f"--folder={arguments.folder}", *flags]
        measurements = take_turns(
            "benchmarks.tagging", names, options, arguments.rounds
        )
        print(f"\n{what}:")
        print_table(
            *measurements, passes * flop_per_token(config, fields["source"].lengths)
        )


def corpus(folder: Path, config, to: Path) -> tuple[dict[str, Ragged], str]:
    """Return the training split's fields, and a name of their source."""
    if folder.is_dir():
        config.data.directory = str(folder)
        return make_task(config, to / "tokenizer").load("train").fields, "EWT"
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(4, 45, 12_000))])
    size = offsets[-1]
    fields = {"source": rng.integers(4, 8000, size), "tags": rng.integers(1, 18, size)}
    ragged = {name: Ragged(x.astype(np.int32), offsets) for name, x in fields.items()}
    return ragged, f"random tokens ({folder} is not there)"


def flop_per_token(config, lengths: np.ndarray) -> float:
    """Return the FLOPs of matrix products per token, forward.

    Attention is counted only within sentences.
    """
    D, F = config.model.width, config.model.mlp_dim
    layer = 8 * D * D + 4 * D * F + 4 * D * (lengths**2).sum() / lengths.sum()
    return config.model.num_encoder_layers * layer + 2 * D * NUM_TAGS


def contestant(arguments):
    """Return the contestant that this worker process runs."""
    arrays = list(np.load(arguments.folder / "corpus.npz").values())
    fields = {"source": Ragged(*arrays[:2]), "tags": Ragged(*arrays[2:])}
    config = speed_config()
    if arguments.worker in PEERS:
        from benchmarks.peers_tagging import Transformers

        return Transformers(arguments.worker, config, fields, arguments.tag)
    make = OursTagging if arguments.tag else Program
    task, examples = make_task(config), Examples("train", fields, {})
    return make(config, partial(task.batches, examples))


class OursTagging(Program):
    """Our contestant in tagging; `train` tags instead of training."""

    def __init__(self, config, make_batches):
        super().__init__(config, make_batches)
        task = make_task(config)
        (examples,) = make_batches.args
        self.batches = packed_in_order(
            examples.fields,
            aligned=task.aligned,
            batch_tokens=config.data.batch_tokens,
        )[1]
        graph = self.program.keywords["static"].graph
        self.tag = partial(best_classes, graph, self.state.params, {})
        jax.block_until_ready(self.tag(self.batches[0]))

    def train(self, steps: int) -> int:
        """Tag batches; return the number of non-padding tokens."""
        tokens, steps = 0, TAGGED * steps
        for step in range(self.step, self.step + steps):
            batch = self.batches[step % len(self.batches)]
            np.asarray(self.tag(batch))
            tokens += int((batch["source_segments"] > 0).sum())
        self.step += steps
        return tokens


def print_baselines(data: Path) -> None:
    """Print the scores of the baselines on every corpus in the folder."""
    print("| corpus | metric | baseline | dev | test | seconds |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    for name, config in (("ud_ewt", ewt), ("wnut17", wnut17)):
        if (data / name).is_dir():
            print_tagging(name, config.get_config(), data)
    if (data / "movie_reviews").is_dir():
        print_texts("movie_reviews", movie_reviews.get_config(), data)


def splits_of(config, folder: Path) -> list[dict]:
    """Return the raw text of the training, dev and test splits."""
    config.data.directory = str(folder)
    task = make_task(config)
    return [task.read(split) for split in ("train", "val", "test")]


def print_row(name, metric, baseline, scores, begin) -> None:
    """Print a row of the table."""
    cells = " | ".join(f"{score:.1%}" for score in scores)
    seconds = time.perf_counter() - begin
    print(f"| {name} | {metric} | {baseline} | {cells} | {seconds:.0f} |", flush=True)


def print_tagging(name: str, config, data: Path) -> None:
    """Print the scores of the two baselines on a corpus of tagged words."""
    train, *held_out = (
        [[line.split(" ") for line in text[field]] for field in ("source", "tags")]
        for text in splits_of(config, data / name)
    )
    metric = "entity F1" if config.task.entities else "accuracy"
    for baseline, make in (
        ("most frequent tag", most_frequent),
        ("logistic regression", tag_regression),
    ):
        begin, scores = time.perf_counter(), []
        tag = make(*train)
        for sentences, true in held_out:
            guesses = tag(sentences)
            if config.task.entities:
                scores.append(class_scores.entity_f1(true, guesses))
            else:
                flat = (sum(tags, []) for tags in (true, guesses))
                scores.append(class_scores.score(*flat)["accuracy"])
        print_row(name, metric, baseline, scores, begin)


def most_frequent(sentences, tags):
    """Return a tagger that predicts the most frequent tag of each word.

    For unknown words, it predicts the most frequent tag overall.
    """
    counts = {}
    for words, of_words in zip(sentences, tags, strict=True):
        for word, tag in zip(words, of_words, strict=True):
            counts.setdefault(word, Counter())[tag] += 1
    best = {word: count.most_common(1)[0][0] for word, count in counts.items()}
    rest = sum(counts.values(), Counter()).most_common(1)[0][0]
    return lambda sentences: [[best.get(w, rest) for w in words] for words in sentences]


def word_features(words: list[str], place: int) -> dict:
    """Return the features of a word: its parts, and its neighbours."""
    features = dict.fromkeys(parts_of(words[place]), 1)
    for offset in (-2, -1, 1, 2):
        other = place + offset
        word = words[other] if 0 <= other < len(words) else ""
        features |= {f"{offset} {word.lower()}": 1, f"{offset} {word[-3:]}$": 1}
    return features


def tag_regression(sentences, tags):
    """Return a tagger that uses a logistic regression on the features of each word."""

    def features(sentences):
        return [
            word_features(words, place)
            for words in sentences
            for place in range(len(words))
        ]

    vectors, model = DictVectorizer(), LogisticRegression(max_iter=60)
    model.fit(vectors.fit_transform(features(sentences)), sum(tags, []))

    def tag(sentences):
        labels = iter(model.predict(vectors.transform(features(sentences))).tolist())
        return [[next(labels) for _ in words] for words in sentences]

    return tag


def print_texts(name: str, config, data: Path) -> None:
    """Print the scores of the two baselines on a corpus of labelled texts."""
    train, *held_out = splits_of(config, data / name)
    for baseline in ("most frequent class", "logistic regression"):
        begin = time.perf_counter()
        vectors = CountVectorizer(
            token_pattern=r"\S+", ngram_range=(1, 2), min_df=2, binary=True
        )
        x = vectors.fit_transform(train["source"])
        model = LogisticRegression(C=0.1).fit(x, train["label"])
        rest = Counter(train["label"]).most_common(1)[0][0]
        scores = []
        for text in held_out:
            guesses = [rest] * len(text["label"])
            if baseline == "logistic regression":
                guesses = model.predict(vectors.transform(text["source"])).tolist()
            scores.append(class_scores.score(text["label"], guesses)["accuracy"])
        print_row(name, "accuracy", baseline, scores, begin)


if __name__ == "__main__":
    main()
