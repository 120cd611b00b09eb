"""Language modelling: predict each token of documents with a decoder-only model.

The documents of a split are joined into one stream, with the token `model.bos` before
each, and cut into windows of `data.max_length` tokens (see `data.windows`).

The loss is in nats per predicted token. The separator before a document counts as a
predicted token, too: it ends the previous document. Bits per byte divide the same sum
by the number of UTF-8 bytes of the documents, and are comparable between lossless
tokenizers. Every token of a split is scored exactly once, in windows that start
`data.stride` tokens apart.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import jax
import numpy as np

from headcount.configs.validation import choose
from headcount.data import documents, tokenizers, windows
from headcount.data.examples import Examples, Ragged
from headcount.data.packing import num_rows
from headcount.decoding import generate as decoding
from headcount.decoding.generate import generate
from headcount.decoding.search import Vocabulary
from headcount.models.validation import check_bos
from headcount.runtime.logging import say
from headcount.tasks.base import (
    LOSS,
    Metric,
    Run,
    Task,
    check_lines,
    token_loss,
    warn_of_lines,
)
from headcount.tasks.heldout_loss import heldout_sums, token_log_probabilities

BITS_PER_BYTE = Metric(
    "bits_per_byte", "bits per byte", "bits", False, ".4f", (0, None), margin=0.005
)
PERPLEXITY = Metric(
    "perplexity", "perplexity", "", False, ".3f", (1, None), per_token=True
)
# In the spirit of the in-context learning score of Olsson et al. 2022, which compares
# the 50th token with the 500th.
CONTEXT_GAIN = Metric(
    "context_gain", "context gain", "nats per token", format=".4f", per_token=True
)


class LanguageModel(Task):
    """Predicts each token of documents from the previous tokens."""

    options = (
        *("beam_size", "length_penalty", "temperature", "top_k", "top_p", "seed"),
        *("batch_size", "max_new_tokens", "stop", "samples"),
    )
    evaluation_options = ("stride",)
    metrics = (LOSS, BITS_PER_BYTE, PERPLEXITY, CONTEXT_GAIN)
    stacks = (False, True)
    text_fields = ("text",)
    fields = ("target",)
    has_predictions = False

    def __init__(self, config, folder=None):
        super().__init__(config, folder)
        data = config.data
        choose("data.tokenizer", data.tokenizer, tokenizers.KINDS)
        self.stride = data.max_length if data.stride is None else data.stride
        self.check_stride("data.stride", self.stride)
        if config.train.best_metric == CONTEXT_GAIN.name:
            raise ValueError(
                "train.best_metric can't be context_gain: it is a difference of two "
                "losses, which does not measure quality; choose loss."
            )
        documents.check_test_share(data)

    @cached_property
    def corpus_keys(self) -> tuple[str, ...]:
        """See `Task`; a subclass may set it instead."""
        return documents.corpus_keys(self.config.data)

    @cached_property
    def test_split(self) -> str:
        """See `Task`; a subclass may set it instead."""
        return documents.test_split(self.config.data)

    def check_stride(self, name: str, stride: int) -> None:
        """Raise a ValueError if windows at this stride would not cover all tokens."""
        length = self.config.data.max_length
        if not 1 <= stride <= length:
            raise ValueError(
                f"{name} must be from 1 to data.max_length={length}, got {stride}."
            )

    def check_options(self, options: dict, evaluates: bool = False) -> None:
        """See `Task.check_options`."""
        super().check_options(options, evaluates)
        if "stride" in options:
            self.check_stride("--stride", options["stride"])

    def read(self, split: str) -> dict[str, list[str]]:
        """See `Task.read`."""
        return {"text": documents.load(self.config.data, split)}

    @cached_property
    def tokenizer(self):
        """The tokenizer in the run's folder."""
        return tokenizers.load_or_make(self.folder, self.config.data.tokenizer, None, 0)

    def load(self, split: str) -> Examples:
        """See `Task.load`."""
        text = self.read_fields(split)
        if split == "train":
            self.make_tokenizer(text["text"])
        tokens = self.tokenizer.encode(text["text"], eos=False)
        self.check_tokens(split, tokens.tokens)
        return Examples(split, {"target": tokens}, text)

    def make_tokenizer(self, texts: list[str]) -> None:
        """Load the tokenizer in the run's folder, or make it from training texts.

        Raises:
            ValueError: the vocabulary does not fit the config.
        """
        data = self.config.data
        if data.tokenizer == "gpt2" and data.directory is not None:
            source = Path(os.path.expanduser(data.directory)) / "tokenizer.json"
            tokenizers.copy_gpt2(source, self.folder, self.config.model.bos)
        self.tokenizer = tokenizers.load_or_make(
            self.folder, data.tokenizer, texts, data.vocab_size
        )
        vocab_size = self.tokenizer.vocab_size
        check_bos(self.config.model.bos, vocab_size)
        is_copied = self.config.train.init_from is not None  # it may be smaller
        is_own = data.tokenizer == "sentencepiece" and not is_copied
        if is_own and vocab_size < data.vocab_size:
            raise ValueError(
                f"data.vocab_size={data.vocab_size} is more than the training "
                f"split supports; set it to {vocab_size} or less."
            )

    def check_tokens(self, split: str, tokens: np.ndarray) -> None:
        """Raise a ValueError if `val` is too short; log unknown tokens of a split."""
        length = self.config.data.max_length
        count, unknown = len(tokens), (tokens == self.tokenizer.unk).sum()
        if split == "val" and count < length:
            raise ValueError(
                f"The split val has {count} tokens, fewer than one window "
                f"(data.max_length={length}); add text to it, or lower "
                f"data.max_length."
            )
        if unknown:
            say(
                f"{split}: {unknown:,} of {count:,} tokens are unknown to the "
                f"tokenizer. All of them are scored as the same token, so loss and "
                f"bits per byte look better than they are."
            )

    def spec(self, rows: int | None = None, length: int | None = None) -> dict:
        """See `Task.spec`."""
        data = self.config.data
        if rows is None:
            rows, length = num_rows(data.batch_tokens, data.max_length), data.max_length
        return windows.window_spec(rows, length)

    def batches(self, examples: Examples, seeds: list[int]):
        """See `Task.batches`."""
        data = self.config.data
        return windows.WindowBatches(
            self.token_stream(examples),
            length=data.max_length,
            batch_tokens=data.batch_tokens,
            seeds=seeds,
            separator=self.config.model.bos,
            cross=data.cross_documents,
        )

    def evaluation_batches(
        self, examples: Examples, packed: bool = True, stride: int | None = None
    ) -> Iterable[dict]:
        """See `Task.evaluation_batches`; if not packed, an example is a window.

        Args:
            examples, packed: see `Task.evaluation_batches`.
            stride: tokens between the starts of windows; default: data.stride.
        """
        return windows.evaluation_windows(
            self.token_stream(examples),
            length=self.config.data.max_length,
            stride=stride or self.stride,
            batch_tokens=self.tokens_at_once,
            separator=self.config.model.bos,
            cross=self.config.data.cross_documents,
        )

    def token_stream(self, examples: Examples) -> np.ndarray:
        """Return the documents as one stream; see `data.windows.make_stream`."""
        return windows.make_stream(examples.fields["target"], self.config.model.bos)

    def loss(self, model, batch: dict, label_smoothing=0.0, **options):
        """Return the label-smoothed cross-entropy of the scored tokens."""
        hidden = model.hidden(batch, **options)
        scored = scored_tokens(batch)
        return token_loss(model, hidden, batch["target"], scored, label_smoothing)

    def loss_by_context(self, model, batch: dict, **options) -> tuple[jax.Array, ...]:
        """Return loss and weight of three sets of tokens.

        They are all tokens, those with less than an eighth of a window before them, and
        those with at least half of one.
        """
        hidden = model.hidden(batch, **options)
        scored, context = scored_tokens(batch), batch["target_positions"]
        T = self.config.data.max_length
        parts = (scored, scored & (context < T / 8), scored & (context >= T / 2))
        pairs = [token_loss(model, hidden, batch["target"], x, 0.0) for x in parts]
        return tuple(number for pair in pairs for number in pair)

    def evaluate(
        self,
        run: Run,
        examples: Examples,
        trials: Sequence[int] | None = None,
        quick: bool = False,
        stride: int | None = None,
    ) -> list[dict]:
        """Score the loss and derived metrics; see `Task.evaluate`.

        Args:
            run, examples, trials, quick: see `Task.evaluate`.
            stride: see `evaluation_batches`.
        """
        trials = range(len(run.trials)) if trials is None else trials
        function = self.loss if quick else self.loss_by_context
        overlap = (stride or self.stride) < self.config.data.max_length
        loss, weight, *others = heldout_sums(
            run, function, self.evaluation_batches(examples, stride=stride)
        )
        num_bytes = sum(len(text.encode()) for text in examples.text["text"])
        rows = []
        for trial in trials:
            mean = float(loss[trial] / weight[trial])
            bits = float(loss[trial] / np.log(2) / num_bytes)
            perplexity = float(np.exp(min(mean, 700.0)))
            row = {"loss": mean, "bits_per_byte": bits, "perplexity": perplexity}
            if not quick:
                gain = context_gain(*(sums[trial] for sums in others))
                row["context_gain"] = None if overlap else gain
            rows.append(row | ({"options": {"stride": stride}} if stride else {}))
        return rows

    def predict(
        self,
        run: Run,
        lines: Sequence[str],
        trial: int = 0,
        first: int = 0,
        max_new_tokens: int = 256,
        stop: str | None = None,
        samples: int = 1,
        **options,
    ) -> Iterator[str]:
        """Continue prompts; yield each prompt with its continuation.

        Args:
            max_new_tokens: maximum number of tokens of a continuation.
            stop: text that ends a continuation; it is not part of the result.
            samples: number of continuations per prompt, which are consecutive.
            options: options of `decoding.generate.generate_trials`; greedy by default.
        """
        prompts, limits = self.prompts(lines, first, max_new_tokens)
        repeated = range(len(lines) * samples)
        params, gates = run.of(trial)
        with jax.set_mesh(run.mesh):
            continuations, _ = generate(
                run.graph,
                params,
                [prompts[i // samples] for i in repeated],
                return_scores=False,
                limits=[limits[i // samples] for i in repeated],
                sample_numbers=[first * samples + i for i in repeated],
                head_gates=gates,
                vocabulary=self.vocabulary,
                **options,
            )
        for i, ids in enumerate(continuations):
            text = self.continuation(prompts[i // samples], ids)
            yield lines[i // samples] + (text.split(stop)[0] if stop else text)

    def stream(
        self,
        run: Run,
        line: str,
        trial: int = 0,
        first: int = 0,
        max_new_tokens: int = 256,
        stop: str | None = None,
        seed: int = 0,
        **options,
    ) -> Iterator[str]:
        """Yield parts of one continuation while its tokens are generated.

        The arguments are those of `predict`, which returns the same text.
        """
        (prompt,), (limit,) = self.prompts([line], first, max_new_tokens)
        params, gates = run.of(trial)
        options = {
            k: v for k, v in options.items() if k not in ("batch_size", "samples")
        }
        ids, shown = [], 0
        with jax.set_mesh(run.mesh):
            for token in decoding.stream(
                run.graph,
                params,
                prompt,
                limit=limit,
                head_gates=gates,
                seed=seed,
                number=first,
                vocabulary=self.vocabulary,
                **options,
            ):
                ids.append(token)
                text = self.continuation(prompt, ids)
                if stop and stop in text:
                    yield text.split(stop)[0][shown:]
                    return
                held = max(len(stop) - 1, 0) if stop else 0
                if text.endswith("\ufffd"):  # an incomplete character of UTF-8
                    continue
                piece = text[shown : max(shown, len(text) - held)]
                if piece:
                    yield piece
                    shown += len(piece)
        yield self.continuation(prompt, ids)[shown:]

    def continuation(self, prompt: list[int], ids: list[int]) -> str:
        """Decode generated tokens after a prompt, including any leading blank."""
        before = self.tokenizer.decode(prompt[1:])
        return self.tokenizer.decode([*prompt[1:], *ids])[len(before) :]

    def fields_to_plot(self, run, examples, index, trial, **options) -> dict:
        """See `Task.fields_to_plot`; only the first tokens of a long document."""
        length = min(self.config.data.max_length, 64)
        return {"target": examples.fields["target"][index][:length].tolist()}

    def encode_text(self, text: str) -> dict[str, list[int]]:
        """See `Task.encode_text`."""
        return {"target": self.tokenizer.encode([text], eos=False)[0].tolist()}

    def prompts(self, lines: Sequence[str], first: int, max_new_tokens: int):
        """Return each prompt's token ids, and its maximum number of new tokens.

        The number includes the separator, which the last step is forced to.
        """
        check_lines("lines", lines)
        if max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens must be at least 1, got {max_new_tokens}."
            )
        model = self.config.model
        encoded = self.tokenizer.encode(list(lines), eos=False)
        self.warn(encoded, first)
        prompts = [[model.bos, *ids.tolist()] for ids in encoded]
        limits = [max_new_tokens] * len(prompts)
        if model.positions == "learned":
            limits = [
                min(max_new_tokens, model.max_positions - len(p) + 1) for p in prompts
            ]
            for number, limit in enumerate(limits, first + 1):
                if limit < 1:
                    raise ValueError(
                        f"Line {number} has {encoded.lengths[number - first - 1]} "
                        f"tokens, and the model's context (model.max_positions="
                        f"{model.max_positions}) holds at most "
                        f"{model.max_positions - 1} before a continuation."
                    )
            if prompts and (least := min(limits)) < max_new_tokens:
                say(
                    f"Some continuations may get no more than {least} of the "
                    f"{max_new_tokens} tokens: then the model's context is full "
                    f"(model.max_positions={model.max_positions})."
                )
        return prompts, [limit + 1 for limit in limits]

    def warn(self, encoded: Ragged, first: int) -> None:
        """Log lines unlike those of training; see `warn_of_lines`.

        Learned positions set a limit of their own, which raises an error.
        """
        is_learned = self.config.model.positions == "learned"
        longest = math.inf if is_learned else self.config.data.max_length
        warn_of_lines(encoded, first, self.tokenizer.unk, longest)

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens that may be generated: text, ended by the document separator."""
        bos = self.config.model.bos
        if self.config.data.tokenizer == "gpt2":
            return Vocabulary(eos=bos, banned=())
        special = range(tokenizers.NUM_SPECIAL)
        return Vocabulary(eos=bos, banned=tuple(i for i in special if i != bos))

    def score_lines(
        self, run: Run, lines: Sequence[str], trial: int = 0, first: int = 0
    ) -> Iterator[str]:
        """See `Task.score_lines`; a line is a document."""
        for ids, log_probabilities in self.log_probabilities(run, lines, trial, first):
            yield f"{log_probabilities.sum():.4f}\t{len(ids)}"

    def score_tokens(
        self, run: Run, lines: Sequence[str], trial: int = 0, first: int = 0
    ) -> Iterator[str]:
        """See `Task.score_tokens`; a line is a document."""
        for ids, log_probabilities in self.log_probabilities(run, lines, trial, first):
            row = {
                "tokens": self.tokenizer.pieces(ids),
                "log_probabilities": log_probabilities.round(4).tolist(),
            }
            yield json.dumps(row, ensure_ascii=False)

    def log_probabilities(
        self, run: Run, lines: Sequence[str], trial: int, first: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return each line's tokens and log-probabilities; a line is a document.

        Raises:
            ValueError: a line has more tokens than there are learned positions.
        """
        fields = {"target": self.tokenizer.encode(list(lines), eos=False)}
        self.warn(fields["target"], first)
        longest = self.config.model.max_positions
        for number, size in enumerate(fields["target"].lengths, first + 1):
            if self.config.model.positions == "learned" and size > longest:
                raise ValueError(
                    f"Line {number} has {size} tokens, more than "
                    f"model.max_positions={longest}."
                )
        scores = token_log_probabilities(run, fields, trial)
        return list(zip(fields["target"], scores, strict=True))


def context_gain(near_loss, near, far_loss, far) -> float | None:
    """Return the loss with little context minus that with much; None without either."""
    if not near or not far:
        return None
    return float(near_loss / near - far_loss / far)


def scored_tokens(batch: dict):
    """Return a mask of the scored tokens of a batch, of shape B T."""
    real = batch["target_segments"] > 0
    if "target_weights" in batch:
        real &= batch["target_weights"] > 0
    return real
