"""A trained run: its model, its vocabulary, and translations by them.

run = load(Path("runs/numbers"))
run.translate(["two hundred and six"], beam_size=5, length_penalty=0.6)  # as eval.py
"""

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import ml_collections
from flax import nnx
from flax.traverse_util import flatten_dict

from headcount.analysis.evaluation import NOTHING, losses, sentences, translations
from headcount.analysis.scoring import log_probs
from headcount.data import corpora, tokenizer
from headcount.data.packing import Sentences
from headcount.decoding.generate import translate
from headcount.models.checks import check_encoder_decoder, choose
from headcount.models.cost import abstract
from headcount.models.transformer import Transformer
from headcount.runtime import sharding
from headcount.runtime.workdir import read_json
from headcount.tasks.scores import published_scores, scores
from headcount.training.restore import READ, restore
from headcount.training.trials import head_gates


class Trained(NamedTuple):
    """A run that can translate."""

    config: ml_collections.ConfigDict
    graph: nnx.GraphDef
    params: nnx.State  # leaves with the trial axis R
    trials: list[dict]  # what each differs in
    head_gates: dict  # of every trial, R L N, where one has other gates than 1
    step: list[int]  # of every trial's parameters
    diverged_at: list[int | None]
    tokenizers: tuple  # of source and target
    mesh: jax.sharding.Mesh | None = None  # of the parameters; None: what is set

    def of(self, trial: int) -> tuple:
        """The parameters and the head gates of a trial; ValueError if it has none."""
        count = len(self.step)
        if not 0 <= trial < count:  # an array gives its last for a larger index
            raise ValueError(f"trial must be from 0 to {count - 1}, got {trial}.")
        return jax.tree.map(lambda leaf: leaf[trial], (self.params, self.head_gates))

    def set_mesh(self) -> None:
        """Compute on its own mesh: another run that was loaded has set another."""
        if self.mesh is not None:
            jax.set_mesh(self.mesh)

    def translate(
        self,
        lines: Sequence[str],
        trial: int = 0,
        first: int = 0,
        n_best: int | None = None,
        **options,
    ) -> list[str] | list[list[tuple[str, float]]]:
        """Translate lines of text; a line without a token stays empty.

        Args:
            lines: a sentence each, in the source language.
            trial: which of the run's.
            first: number of the first line; samples of equal lines differ by it.
            n_best: how many translations of each line to return with their scores, the
                best first; None: the best alone, without.
            options: see `decoding.generate.translate_trials`; default: greedy,
                and `length_penalty` 0, where eval.py has a beam of 5 and 0.6.
        """
        check_listed("lines", lines)
        self.set_mesh()
        source, target = self.tokenizers
        encoded = sentences(source.encode(lines))
        # what the vocabulary's normalisation takes away leaves nothing but EOS
        full = [index for index, ids in enumerate(encoded) if len(ids) > 1]
        params, gates = self.of(trial)
        options |= {"sample_numbers": [first + index for index in full]}
        options |= {"return_scores": n_best is not None, "head_gates": gates}
        chosen = [encoded[index] for index in full]
        out = translate(self.graph, params, chosen, n_best=n_best, **options)
        found = dict(zip(full, out if n_best else out[0], strict=True))
        nothing = NOTHING if n_best else []
        every = [found.get(index, nothing) for index in range(len(lines))]
        return texts(target, every) if n_best else target.decode_many(every)

    def score(
        self, sources: Sequence[str], targets: Sequence[str], trial: int = 0
    ) -> list[tuple[float, int]]:
        """The log-probability (nats) of each target given its source, and its tokens.

        EOS counts in both. Which of two translations is the more probable is what
        contrastive evaluation asks.
        """
        check_listed("sources", sources)
        check_listed("targets", targets)
        if len(sources) != len(targets):
            raise ValueError(
                f"each source needs a target, got {len(sources)} and {len(targets)}."
            )
        self.set_mesh()
        texts = zip(self.tokenizers, (sources, targets), strict=True)
        encoded = (side.encode(lines) for side, lines in texts)
        found = log_probs(self.graph, *self.of(trial), *encoded)
        return list(zip(*(column.tolist() for column in found), strict=True))


def check_listed(name: str, lines: Sequence[str]) -> None:
    """Raise a TypeError for a string, whose letters would each be a sentence."""
    if isinstance(lines, str):
        raise TypeError(f"{name} must be a list of sentences, as in [{lines!r}]")


def texts(target, lists: list) -> list[list[tuple[str, float]]]:
    """The n best translations of every sentence as text, with their scores."""
    return [[(target.decode(ids), score) for ids, score in some] for some in lists]


def listed(lists: list[list[tuple[str, float]]], first: int = 0) -> list[str]:
    """A line for each of the n best translations, as Moses and Marian write them.

    The sentences are numbered from `first` on.
    """
    return [
        f"{index} ||| {text} ||| {score:.4f}"
        for index, some in enumerate(lists, first)
        for text, score in some
    ]


def load(workdir: Path | str, which: str = "best") -> Trained:
    """The model of a run with its "best", "last" or "average" parameters.

    Raises:
        ValueError, OSError: no run there, no checkpoint yet, or a damaged one.
    """
    choose("which", which, READ)
    workdir = Path(workdir)
    path = workdir / "config.json"
    if not path.exists():
        if (workdir / "sweep.json").exists():
            raise FileNotFoundError(
                f"{workdir} holds a sweep; its runs are the folders in "
                f"{workdir / 'groups'}"
            )
        line = ["python", "train.py", "--config=configs/numbers.py"]
        raise FileNotFoundError(
            f"{workdir} holds no run (there is no config.json in it); "
            f"train one, as with {shlex.join([*line, f'--workdir={workdir}'])}"
        )
    config = ml_collections.ConfigDict(read_json(path))
    check_encoder_decoder(config.model.to_dict())
    tokenizers = tokenizer.load(workdir / "tokenizer")
    sizes = tokenizer.vocab_sizes(tokenizers)
    build = partial(Transformer, *sizes, **config.model.to_dict())
    try:
        graph, like = nnx.split(abstract(build))
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):  # a key of the config
            raise
        what = str(error).removeprefix("Attention.__init__() ")
        raise ValueError(
            f"{path} is of another version of the code, or was changed by hand: {what}."
        ) from None
    trials = read_json(workdir / "trials.json")
    params, steps, diverged_at = restore(workdir, which, len(trials), like)
    every = {"trial": None, "data": -1, "model": 1}
    mesh = sharding.make_mesh(every, len(trials), jax.device_count())
    jax.set_mesh(mesh)
    where = sharding.named(mesh, "trial")
    return Trained(
        config,
        graph,
        jax.tree.map(lambda leaf: sharding.put(leaf, where), params),
        trials,
        head_gates(flatten_dict(config.to_dict(), sep="."), trials),
        [int(step) for step in steps],
        [int(step) or None for step in diverged_at],
        tokenizers,
        mesh,
    )


class Pairs(NamedTuple):
    """A split of a run's corpus."""

    split: str
    sources: list[str]
    references: list[str]
    tokenized: list[str] | None  # references as Multi30k's publisher scores them
    source: Sentences  # encoded
    target: Sentences


def read(run: Trained, split: str, directory: str | None = None) -> Pairs:
    """The pairs of a split, of local files in the directory, by default the run's.

    Raises:
        ValueError, OSError: there is no such split, or it can't be read.
    """
    data = run.config.data
    folder = directory or data.directory
    texts = corpora.load(data.name, data.source, data.target, split, folder)
    tokenized = None
    if data.name == "multi30k":
        tokenized = corpora.tokenized_references(data.name, data.target, split, folder)
    encoded = (
        side.encode(text) for side, text in zip(run.tokenizers, texts, strict=True)
    )
    return Pairs(split, *texts, tokenized, *encoded)


def decoded(run: Trained, pairs: Pairs, trials, head_gates: dict, **options) -> tuple:
    """The loss of every trial (nats a token, R), and the translations of some trials.

    Args:
        trials: which translate.
        head_gates: of every trial, R L N by site, in place of the run's.
        options: see `decoding.generate.translate_trials`.
    """
    run.set_mesh()
    model = run.graph, run.params, head_gates
    loss = losses(*model, pairs.source, pairs.target, run.config.data.batch_tokens)
    return loss, translations(*model, sentences(pairs.source), trials, **options)


def scored(run: Trained, pairs: Pairs, hypotheses: list[str]) -> dict:
    """The scores of translations with their signatures, of Multi30k by its own too."""
    found = scores(hypotheses, pairs.references)
    if pairs.tokenized is None:
        return found
    language = run.config.data.target
    return found | published_scores(hypotheses, pairs.tokenized, language)
