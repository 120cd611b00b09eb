"""Masked language modelling: an encoder predicts tokens that were hidden from it.

The model predicts 15% of the tokens of a text. Of these, 80% are masked, 10% are
replaced by random tokens, and 10% are unchanged (Devlin et al. 2019).
"""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from headcount.data import documents
from headcount.data.examples import Examples, Ragged
from headcount.models.dropout import random_bits
from headcount.tasks.base import LOSS, Metric, Run, token_loss
from headcount.tasks.encoder import EncoderTask, is_text, make_tokenizer
from headcount.tasks.heldout_loss import logits_of, loss_and_share

ACCURACY = Metric(
    *("masked_accuracy", "accuracy of masked tokens", "%"),
    bounds=(0, 100),
    margin=0.5,
    per_token=True,
)
PREDICTED, MASKED, RANDOM = 0.15, 0.8, 0.1  # MASKED and RANDOM: fractions of PREDICTED
MASK = "[MASK]"  # in the input lines of `predict`
MOST_PROBABLE = 5  # number of tokens that `predict` lists per mask


class MaskedLanguageModel(EncoderTask):
    """Predicts hidden tokens of documents.

    Documents are cut into pieces of at most `data.max_length` tokens, including BOS and
    EOS. If the tokenizer has no mask token, the unknown token is used instead.
    """

    metrics = (LOSS, ACCURACY)
    has_predictions = False
    text_fields = ("text",)

    def __init__(self, config, folder=None):
        super().__init__(config, folder)
        documents.check_test_share(config.data)

    @cached_property
    def corpus_keys(self) -> tuple[str, ...]:
        """See `Task`; a subclass may set it instead."""
        return documents.corpus_keys(self.config.data)

    @cached_property
    def test_split(self) -> str:
        """See `Task`; a subclass may set it instead."""
        return documents.test_split(self.config.data)

    def read(self, split: str) -> dict[str, list[str]]:
        """See `Task.read`."""
        return {"text": documents.load(self.config.data, split)}

    def load(self, split: str) -> Examples:
        """See `Task.load`; an example is a piece of a document."""
        texts = self.read_fields(split)["text"]
        if split == "train":
            self.tokenizer = make_tokenizer(self.config, self.folder, texts)
        pieces = [piece for text in texts for piece in self.cut(text)]
        parts = [[piece] for piece in pieces]
        fields, _ = self.encode_parts(split, parts)
        return Examples(split, fields, {"text": pieces})

    def cut(self, text: str) -> list[str]:
        """Cut a document at blanks into pieces of at most max_length tokens.

        A word with more tokens becomes a longer piece of its own.
        """
        words = text.split()
        room = self.config.data.max_length - 2
        # include the blank before each word, which may be a separate token
        sizes = self.tokenizer.encode([f" {w}" for w in words], eos=False).lengths
        pieces, size = [[]], 0
        for word, word_size in zip(words, sizes, strict=True):
            if pieces[-1] and size + word_size > room:
                pieces.append([])
                size = 0
            pieces[-1].append(word)
            size += word_size
        return [" ".join(piece) for piece in pieces if piece]

    def loss(self, model, batch: dict, label_smoothing=0.0, **options):
        """Return the label-smoothed cross-entropy of the predicted tokens.

        Without a key, as in evaluation, the same tokens are chosen each time.
        """
        inputs, chosen = self.masked(batch, options.get("key"), model)
        hidden = model.hidden(inputs, **options)
        return token_loss(model, hidden, batch["source"], chosen, label_smoothing)

    def masked(self, batch: dict, key, model) -> tuple[dict, jax.Array]:
        """Return the masked batch, and which tokens to predict, of shape B S."""
        key = jax.random.key(0) if key is None else jax.random.fold_in(key, 1 << 20)
        source, shape = batch["source"], batch["source"].shape

        def below(share, index):
            bits = random_bits(jax.random.fold_in(key, index), shape)
            return bits < jnp.uint32(share * 2.0**32)

        text = is_text(batch, self.special)
        chosen = below(PREDICTED, 0) & text
        chosen = jnp.where(chosen.any(), chosen, text)  # in a batch of few tokens
        masked = chosen & below(MASKED, 1)
        replaced = chosen & ~masked & below(RANDOM / (1 - MASKED), 2)
        vocab_size = jnp.uint32(model.embedding.shape[0])
        random_ids = random_bits(jax.random.fold_in(key, 3), shape) % vocab_size
        random_ids = random_ids.astype(source.dtype)
        inputs = jnp.where(masked, self.special.mask, source)
        inputs = batch | {"source": jnp.where(replaced, random_ids, inputs)}
        for name in batch:  # features would reveal the hidden tokens
            if name.startswith("source_features_"):
                hidden = masked | replaced
                inputs[name] = jnp.where(hidden, self.special.unk, batch[name])
        return inputs, chosen

    def evaluate(
        self,
        run: Run,
        examples: Examples,
        trials: Sequence[int] | None = None,
        quick: bool = False,
    ) -> list[dict]:
        """Score the loss and accuracy on 15% of the tokens; see `Task.evaluate`."""
        trials = range(len(run.trials)) if trials is None else trials
        batches = self.evaluation_batches(examples)
        return loss_and_share(run, self.scores, batches, trials, "masked_accuracy")

    def scores(self, model, batch: dict, **options) -> tuple[jax.Array, ...]:
        """Return the summed loss, its weight, and the number of exact predictions."""
        loss, weight = self.loss(model, batch, **options)
        inputs, chosen = self.masked(batch, None, model)
        logits = model.logits(model.hidden(inputs, **options))
        exact = (logits.argmax(-1) == batch["source"]) & chosen
        return loss, weight, exact.sum().astype(jnp.float32)

    def predict(
        self, run: Run, lines: Sequence[str], trial: int = 0, first: int = 0
    ) -> Iterator[str]:
        """Fill in each [MASK]; yield a JSON list of {token: probability} per line."""
        params, gates = run.of(trial)
        for line in lines:
            before, *rest = line.split(MASK)
            texts = [before, *rest]
            encoded = self.tokenizer.encode(texts, eos=False)
            source, places = [self.special.bos, *encoded[0].tolist()], []
            for ids in list(encoded)[1:]:
                places.append(len(source))
                source += [self.special.mask, *ids.tolist()]
            source.append(self.special.eos)
            self.warn_of_long("input", Ragged.of([source]))
            batch = self.row(texts, source, places)
            with jax.set_mesh(run.mesh):
                logits = logits_of(run.graph, params, gates, batch)
                probs = np.asarray(jax.nn.softmax(logits))
            answers = []
            for place in places:
                best = np.argsort(-probs[0, place])[:MOST_PROBABLE]
                names = self.tokenizer.pieces(best)
                shares = probs[0, place, best].tolist()
                pairs = zip(names, shares, strict=True)
                answers.append({name: round(share, 4) for name, share in pairs})
            yield json.dumps(answers, ensure_ascii=False)

    def row(self, texts: list[str], source: list[int], places: list[int]) -> dict:
        """Return a batch of one text, padded to a multiple of 32 tokens."""
        T = -(-len(source) // 32) * 32
        batch = {name: np.zeros((1, T), np.int32) for name in self.spec(1, T)}
        batch["source"][0, : len(source)] = source
        batch["source_segments"][0, : len(source)] = 1
        batch["source_positions"][0] = np.arange(T)
        names = [name for name in batch if name.startswith("source_features_")]
        if names:
            features = self.tokenizer.features(texts)
            text = [i for i in range(1, len(source) - 1) if i not in places]
            for number, name in enumerate(names):
                batch[name][0, text] = features[:, number]
                batch[name][0, places] = self.special.unk
        return batch
