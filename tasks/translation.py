"""Translation, or any other map from text to text, with an encoder-decoder model."""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import jax
import numpy as np

from headcount.configs.validation import choose
from headcount.data import multi30k, pairs, tokenizers
from headcount.data.examples import Examples, Ragged
from headcount.decoding.generate import default_limit, generate, generate_trials
from headcount.models.transformer import Transformer
from headcount.models.validation import check_bos
from headcount.runtime import distributed, sharding
from headcount.runtime.logging import say
from headcount.tasks import text_scores
from headcount.tasks.base import (
    LOSS,
    Metric,
    Run,
    Task,
    check_lines,
    token_loss,
    warn_of_lines,
)
from headcount.tasks.heldout_loss import heldout_loss, token_log_probabilities

points = partial(Metric, unit="points", bounds=(0, 100))
percent = partial(Metric, unit="%", bounds=(0, 100), margin=0.5)
CHRF = points("chrf", "chrF", margin=0.3)
METRICS = {  # allowed names in task.metrics
    metric.name: metric
    for metric in (
        points("bleu", "BLEU", margin=0.3),
        CHRF,
        percent("exact_match", "exact match"),
        points("rouge1", "ROUGE-1", margin=0.5),
        points("rouge2", "ROUGE-2", margin=0.5),
        points("rougeL", "ROUGE-L", margin=0.5),
        percent("squad_exact_match", "SQuAD exact match"),
        percent("squad_f1", "SQuAD F1"),
    )
}
PUBLISHED = (
    points("published_bleu", "BLEU, published protocol", margin=0.3),
    points("published_chrf", "chrF, published protocol", margin=0.3),
)
SIDES = ("source", "target")
NOTHING = [([], 0.0)]  # the n-best list of a sentence without a token


class Translation(Task):
    """Predicts a text, `target`, from another, `source`."""

    stacks = (True, True)
    text_fields = fields = SIDES
    corpus_keys = ("name", "source", "target", "directory")
    has_targets = True
    options = (
        *("beam_size", "length_penalty", "n_best"),
        *("temperature", "top_k", "top_p", "seed", "batch_size"),
    )
    evaluation_options = options

    def __init__(self, config, folder=None):
        super().__init__(config, folder)
        names = [name.strip() for name in config.task.metrics.split(",")]
        for name in names:
            choose("task.metrics", name, METRICS)
        self.metrics = (*(METRICS[name] for name in dict.fromkeys(names)), LOSS)
        if config.data.name == "multi30k":
            self.metrics += PUBLISHED
            self.test_split = "test_2016_flickr"

    def read(self, split: str) -> dict[str, list[str]]:
        """Return the raw sentences of a split, aligned by index."""
        data = self.config.data
        texts = pairs.load(data.name, data.source, data.target, split, data.directory)
        return dict(zip(SIDES, texts, strict=True))

    def check_references(self, split: str) -> None:
        """See `Task.check_references`; Multi30k has its own tokenised references."""
        self.published_references(split)

    def published_references(self, split: str) -> list[str] | None:
        """Return Multi30k's own tokenised references; None for any other corpus."""
        data = self.config.data
        if data.name != "multi30k":
            return None
        return multi30k.tokenized(data.target, split, data.directory)

    @cached_property
    def tokenizers(self) -> tuple:
        """The tokenizers of source and target, from the run's folder."""
        return tokenizers.load_pair(self.folder)

    def load(self, split: str) -> Examples:
        """See `Task.load`."""
        text, data = self.read_fields(split), self.config.data
        if split == "train":
            self.tokenizers = tokenizers.load_or_train_pair(
                self.folder,
                self.prefixed(text["source"]),
                text["target"],
                data.vocab_size,
                joint=data.joint_vocabulary,
            )
            size = tokenizers.pair_vocab_sizes(self.tokenizers)[0]
            check_bos(self.config.model.bos, size)
        source, target = self.tokenizers
        fields = {
            "source": source.encode(self.prefixed(text["source"])),
            "target": target.encode(text["target"]),
        }
        return Examples(split, fields, text)

    def prefixed(self, sources: Sequence[str]) -> list[str]:
        """Prepend data.prefix to all nonempty sources."""
        prefix = self.config.data.prefix
        return [prefix + text if text.strip() else text for text in sources]

    def build(self, *, rngs) -> Transformer:
        """See `Task.build`."""
        if self.folder is None:
            data = self.config.data
            sizes = [data.vocab_size] * (2 - data.joint_vocabulary)
        else:
            sizes = tokenizers.pair_vocab_sizes(self.tokenizers)
        return Transformer(*sizes, **self.config.model.to_dict(), rngs=rngs)

    def loss(self, model, batch: dict, label_smoothing=0.0, **options):
        """Return the label-smoothed cross-entropy of the target, EOS included."""
        hidden, real = model.hidden(batch, **options), batch["target_segments"] > 0
        return token_loss(model, hidden, batch["target"], real, label_smoothing)

    def evaluate(
        self,
        run: Run,
        examples: Examples,
        trials: Sequence[int] | None = None,
        quick: bool = False,
        **options,
    ) -> list[dict]:
        """Score the loss and the translations; see `Task.evaluate`.

        Args:
            quick: translate greedily, and compute chrF and the scores of the published
                protocol only if they select the best model. If the loss selects it,
                score the loss alone, which takes a fraction of the time.
            options: options of `decoding.generate.generate_trials`. Default: beam
                search with 5 hypotheses and a length penalty of 0.6. With `n_best`,
                `predictions` are the lines of n-best lists.
        """
        trials = range(len(run.trials)) if trials is None else trials
        if quick:
            options = {"beam_size": 1} | options
            slow = {CHRF.name, *(metric.name for metric in PUBLISHED)}
            best = self.config.train.best_metric or self.metrics[0].name
            names = {metric.name for metric in self.metrics} - slow | {best}
        else:
            options = search_defaults(options)
            names = {metric.name for metric in self.metrics}
        n_best = options.get("n_best")
        loss = heldout_loss(run, self.evaluation_batches(examples))
        if quick and best == LOSS.name:
            return [{"loss": float(loss[trial])} for trial in trials]
        outputs = translations(run, examples.fields["source"], trials, **options)
        published = None
        if {metric.name for metric in PUBLISHED} & names:
            published = self.published_references(examples.split)
        rows = []
        mine = list(trials)[jax.process_index() :: jax.process_count()]
        for trial in mine:
            lists = outputs[trial]
            best = [hypotheses[0][0] for hypotheses in lists] if n_best else lists
            hypotheses = [self.tokenizers[1].decode(ids) for ids in best]
            scores, signatures = text_scores.score(
                hypotheses, examples.text["target"], names
            )
            if published is not None:
                more = text_scores.published(
                    hypotheses, published, self.config.data.target
                )
                scores, signatures = scores | more[0], signatures | more[1]
            if n_best:
                hypotheses = n_best_lines(decode_lists(self.tokenizers[1], lists))
            row = {
                "loss": float(loss[trial]),
                **scores,
                "signatures": signatures,
                "options": {k: v for k, v in options.items() if k != "batch_size"},
                "predictions": hypotheses,
            }
            rows.append((trial, row))
        everyone = dict(row for rows in distributed.gather(rows) for row in rows)
        return [everyone[trial] for trial in trials]

    def predict(
        self, run: Run, lines: Sequence[str], trial: int = 0, first: int = 0, **options
    ) -> Iterator[str]:
        """Translate lines; the translation of a line without tokens is empty.

        Args:
            first: number of the first line. Samples depend on the number of their line,
                so equal lines get different ones.
            options: as in `evaluate`.
        """
        options = search_defaults(options)
        self.warn(lines, first)
        results = self.translate(run, lines, trial, first, **options)
        yield from n_best_lines(results, first) if options.get("n_best") else results

    def translate(
        self,
        run: Run,
        lines: Sequence[str],
        trial: int = 0,
        first: int = 0,
        n_best: int | None = None,
        **options,
    ) -> list[str] | list[list[tuple[str, float]]]:
        """Translate lines; with n_best, return n-best lists with scores.

        The options are those of `decoding.generate.generate_trials`. The default is
        greedy decoding.
        """
        check_lines("lines", lines)
        source, target = self.tokenizers
        encoded = [ids.tolist() for ids in source.encode(self.prefixed(lines))]
        # a line that normalisation leaves empty has only EOS
        full = [index for index, ids in enumerate(encoded) if len(ids) > 1]
        params, gates = run.of(trial)
        options |= {"sample_numbers": [first + index for index in full]}
        options |= {"return_scores": n_best is not None, "head_gates": gates}
        with jax.set_mesh(run.mesh):
            chosen = [encoded[index] for index in full]
            most = self.config.data.max_decode_length
            out = generate(
                run.graph, params, chosen, n_best=n_best, max_limit=most, **options
            )
        results = dict(zip(full, out if n_best else out[0], strict=True))
        nothing = NOTHING if n_best else []
        everything = [results.get(index, nothing) for index in range(len(lines))]
        if n_best:
            return decode_lists(target, everything)
        return [target.decode(ids) for ids in everything]

    def score_lines(
        self, run: Run, lines: Sequence[str], trial: int = 0, first: int = 0
    ) -> Iterator[str]:
        """See `Task.score_lines`; a line is a source, a tab, and a target."""
        columns = [line.split("\t") for line in lines]
        for number, fields in enumerate(columns, first + 1):
            if len(fields) != 2:
                raise ValueError(
                    f"Line {number} of the input has {len(fields)} tab-separated "
                    f"fields instead of 2, source and target; fix or remove it."
                )
        sides = [[fields[i] for fields in columns] for i in (0, 1)]
        for side, lines in enumerate(sides):
            self.warn(lines, first, side)
        for log_prob, tokens in self.score(run, *sides, trial):
            yield f"{log_prob:.4f}\t{tokens}"

    def score(
        self, run: Run, sources: Sequence[str], targets: Sequence[str], trial: int = 0
    ) -> list[tuple[float, int]]:
        """Return the log-probability (nats) of each target given its source.

        Each comes with the target's number of tokens. EOS counts in both.
        """
        check_lines("sources", sources)
        check_lines("targets", targets)
        if len(sources) != len(targets):
            raise ValueError(
                f"each source needs a target, got {len(sources)} and {len(targets)}."
            )
        sides = self.prefixed(sources), targets
        texts = zip(SIDES, self.tokenizers, sides, strict=True)
        fields = {side: of.encode(lines) for side, of, lines in texts}
        log_probs = token_log_probabilities(run, fields, trial)
        return [(float(of_tokens.sum()), len(of_tokens)) for of_tokens in log_probs]

    def warn(self, lines: Sequence[str], first: int, side: int = 0) -> None:
        """Log lines unlike those of training; see `warn_of_lines`."""
        tokenizer = self.tokenizers[side]
        encoded = tokenizer.encode(lines if side else self.prefixed(lines))
        longest, part = self.config.data.max_length, ("", "'s target")[side]
        warn_of_lines(encoded, first, tokenizer.unk, longest, part)

    def token_strings(self, field: str, ids) -> list[str]:
        """See `Task.token_strings`."""
        return self.tokenizers[SIDES.index(field)].pieces(ids)

    def fields_to_plot(self, run, examples, index, trial, **options):
        """See `Task.fields_to_plot`; these are a source and its translation."""
        source = Ragged.of([examples.fields["source"][index]])
        options = search_defaults(options)
        options.pop("n_best", None)
        with jax.set_mesh(run.mesh):
            (target,) = translations(run, source, [trial], **options)[trial]
        return {"source": source[0].tolist(), "target": [*target, tokenizers.EOS]}

    def fields_of_text(self, run, source, target, trial) -> dict:
        """See `Task.fields_of_text`; the default target is the model's translation."""
        if target is None:
            (target,) = self.translate(run, [source], trial)
        (source,) = self.prefixed([source])
        texts = zip(SIDES, self.tokenizers, (source, target), strict=True)
        fields = {side: of.encode([text])[0].tolist() for side, of, text in texts}
        self.check_length(fields, "The text")
        return fields

    def bootstrap(self, metric: Metric, systems: dict[str, list[str]], text: dict):
        """See `Task.bootstrap`; BLEU and chrF have one."""
        if metric.name not in ("bleu", "chrf"):
            return None
        return text_scores.paired_bootstrap(systems, text["target"], metric.name)


def search_defaults(options: dict) -> dict:
    """Add the defaults to decoding options: beam search, or those for sampling."""
    if options.get("temperature"):
        return {"top_k": 0, "top_p": 1.0, "seed": 0} | options
    options = {"beam_size": 5, "length_penalty": 0.6} | options
    if options["beam_size"] == 1 and not options.get("n_best"):
        del options["length_penalty"]  # it only affects scores, which are not returned
    return options


def translations(
    run: Run, sources, trials: Sequence[int], n_best: int | None = None, **options
) -> dict[int, list]:
    """Translate sentences; return the token ids of every translation, by trial.

    The translation of a sentence without tokens is empty. With n_best, each sentence
    has a list of (token ids, score). In a multi-process run, processes that hold the
    same trial divide its sentences, and all processes return all translations.
    """
    sentences = [ids.tolist() for ids in sources]
    most = run.config.data.max_decode_length
    cut = sum(default_limit(len(ids), None) > most for ids in sentences)
    if cut:
        say(
            f"{cut} of {len(sentences)} sentences are so long that their translations "
            f"are cut at data.max_decode_length={most} tokens."
        )
    results, full = [], [i for i, ids in enumerate(sentences) if len(ids) > 1]
    for shares, params in sharding.trials_here(run.params, jax.sharding.get_mesh()):
        chosen = [
            list(full[share.place :: share.count]) if share.trial in trials else []
            for share in shares
        ]
        rows = np.array([share.trial for share in shares])
        lists = generate_trials(
            run.graph,
            params,
            sentences,
            chosen,
            head_gates=jax.tree.map(lambda x, rows=rows: x[rows], run.head_gates),
            max_limit=most,
            n_best=n_best,
            return_scores=n_best is not None,
            **options,
        )
        if n_best is None:
            lists = [ids for ids, _ in lists]
        results += [(*share, of) for share, of in zip(shares, lists, strict=True)]
    nothing = [] if n_best is None else NOTHING
    whole = {trial: [nothing for _ in sentences] for trial in trials}
    for part in distributed.gather(results):
        for trial, place, count, outputs in part:
            if trial in whole:
                for index, output in zip(full[place::count], outputs, strict=True):
                    whole[trial][index] = output
    return whole


def decode_lists(target, lists: list) -> list[list[tuple[str, float]]]:
    """Decode n-best lists of token ids to text, keeping their scores."""
    return [[(target.decode(ids), score) for ids, score in best] for best in lists]


def n_best_lines(lists: list, first: int = 0) -> list[str]:
    """Format one line per hypothesis, in the format of Moses and Marian."""
    return [
        f"{index} ||| {text} ||| {score:.4f}"
        for index, best in enumerate(lists, first)
        for text, score in best
    ]
