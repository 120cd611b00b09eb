"""Common base of the encoder-only tasks: tokens, their features, batches."""

from functools import cached_property

import numpy as np
from absl import logging

from headcount.configs.validation import choose
from headcount.data import encoder_tokenizers, tokenizers
from headcount.data.examples import Ragged
from headcount.tasks.base import Task


class EncoderTask(Task):
    """Encodes examples that are lists of texts.

    In addition to `source`, a batch may have features and types of its tokens.
    """

    stacks = (True, False)
    own_fields: tuple[str, ...] = ()  # additional fields, aligned with the source
    eos_after_each = True  # whether EOS follows each part, instead of only the last
    min_length = 3  # BOS, one token, EOS; leaves out empty examples

    def __init__(self, config, folder=None):
        super().__init__(config, folder)
        choose("data.tokenizer", config.data.tokenizer, encoder_tokenizers.KINDS)

    @cached_property
    def tokenizer(self):
        """The tokenizer in the run's folder."""
        return make_tokenizer(self.config, self.folder, None)

    @property
    def special(self):
        """The tokenizer, for its special ids; without data, one that has our ids."""
        return tokenizers.ByteTokenizer() if self.folder is None else self.tokenizer

    @property
    def aligned(self) -> dict[str, str]:
        """The fields of a batch that are aligned with the source."""
        names = [*self.own_fields]
        if self.config.data.tokenizer == "affixes":
            count = encoder_tokenizers.AffixTokenizer.num_features
            names += [f"source_features_{i}" for i in range(count)]
        if self.config.model.token_types:
            names.append("source_types")
        return dict.fromkeys(names, "source")

    def encode_parts(
        self, split: str, examples: list[list[str]]
    ) -> tuple[dict[str, Ragged], list[list[int]]]:
        """Tokenise examples: BOS, the tokens of each part, EOS.

        Parts are tokenised separately.

        Args:
            split: split of the examples, for the log.
            examples: the parts of each example: words, or one or two texts.

        Returns:
            The fields except `own_fields`, and the position of each part's first token.
        """
        tokenizer = self.tokenizer
        flat = [part for parts in examples for part in parts]
        encoded = tokenizer.encode(flat, eos=False)
        lengths, start = encoded.lengths, 0
        ids = encoded.tokens.tolist()
        sources, origins, types, firsts, at = [], [], [], [], 0
        for parts in examples:
            source, origin, kinds, places = [tokenizer.bos], [-1], [0], []
            for number in range(len(parts)):
                end = start + int(lengths[at])
                places.append(len(source))
                # a part that normalisation leaves empty becomes one unknown token
                part_ids = ids[start:end] or (
                    [] if self.eos_after_each else [tokenizer.unk]
                )
                source += part_ids
                origin += range(start, end) if end > start else [-1] * len(part_ids)
                if self.eos_after_each or number == len(parts) - 1:
                    source.append(tokenizer.eos)
                    origin.append(-1)
                kind = int(self.eos_after_each and number > 0)
                kinds += [kind] * (len(source) - len(kinds))
                start, at = end, at + 1
            sources.append(source)
            origins.append(origin)
            types.append(kinds)
            firsts.append(places)
        fields = {"source": Ragged.of(sources)}
        if "source_types" in self.aligned:
            fields["source_types"] = Ragged.of(types)
            if self.config.model.token_types == 1 and any(map(any, types)):
                raise ValueError(
                    "model.token_types=1 has no type for the second text of a pair; "
                    "set it to 0 or 2."
                )
        if "source_features_0" in self.aligned:
            features = tokenizer.features(flat)
            features = np.pad(features, ((0, 1), (0, 0)))  # origin -1: BOS and EOS
            chosen = features[Ragged.of(origins).tokens]
            for number, column in enumerate(chosen.T):
                field = Ragged(np.ascontiguousarray(column), fields["source"].offsets)
                fields[f"source_features_{number}"] = field
        self.warn_of_long(split, fields["source"])
        return fields, firsts

    def encode_text(self, text: str) -> dict[str, list[int]]:
        """See `Task.encode_text`; a tab separates the texts of a pair."""
        if not text.strip():
            raise ValueError("The text has no tokens.")
        encoded, _ = self.encode_parts("input", [self.parts_of_text(text)])
        return {name: field[0].tolist() for name, field in encoded.items()}

    def parts_of_text(self, text: str) -> list[str]:
        """Split a text into the parts of an example, which are tokenised separately."""
        return text.split("\t")

    def warn_of_long(self, split: str, source: Ragged) -> None:
        """Log how many examples have more tokens than there are learned positions."""
        model = self.config.model
        count = int((source.lengths > model.max_positions).sum())
        if model.positions == "learned" and count:
            logging.warning(
                "%d of %d examples of %s have more tokens than model.max_positions=%d; "
                "the tokens beyond share the last position.",
                count,
                len(source),
                split,
                model.max_positions,
            )


def is_text(batch: dict, special):
    """Return a mask of the tokens that are not padding, BOS or EOS, of shape B S.

    Args:
        batch: batch of one trial.
        special: tokenizer, for its special ids.
    """
    source = batch["source"]
    ends = (source == special.bos) | (source == special.eos)
    return ~ends & (batch["source_segments"] > 0)


def make_tokenizer(config, folder, texts: list[str] | None):
    """Load the tokenizer of an encoder's run; train it on texts if there is none."""
    kind, size = config.data.tokenizer, config.data.vocab_size
    kinds = encoder_tokenizers.KINDS
    return tokenizers.load_or_make(folder, kind, texts, size, kinds)
