"""transformers' BertForTokenClassification: the peer of `benchmarks.tagging`."""

import numpy as np
import torch
import transformers
from torch import nn

from benchmarks.tagging import TAGGED

PAD, UNSCORED = 0, -100


class Transformers:
    """A contestant in `benchmarks.tagging`.

    Args:
        name: its name; models with "compiled" in their name are compiled.
        config: config of the experiment.
        fields: the same `source` and `tags` as for ours.
        is_tagging: whether to tag the sentences instead of training on them.
    """

    def __init__(self, name, config, fields, is_tagging):
        torch.manual_seed(0)
        model = config.model
        self.model = transformers.BertForTokenClassification(
            transformers.BertConfig(
                vocab_size=config.data.vocab_size,
                hidden_size=model.width,
                num_hidden_layers=model.num_encoder_layers,
                num_attention_heads=model.attention.num_heads,
                intermediate_size=model.mlp_dim,
                max_position_embeddings=model.max_positions,
                hidden_dropout_prob=model.dropout,
                attention_probs_dropout_prob=0.0,
                num_labels=config.data.num_classes,
                attn_implementation="sdpa",
            )
        )
        self.model.train(not is_tagging)
        optimizer = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            1e-3,
            (optimizer.beta1, optimizer.beta2),
            optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self.clip_norm = optimizer.clip_norm
        self.forward = self.model
        if "compiled" in name:
            self.forward = torch.compile(self.model, dynamic=True)
        self.batches = bucketed(fields, config.data.batch_tokens)
        self.one = self.tag if is_tagging else self.update
        self.each = TAGGED if is_tagging else 1
        self.step = 0
        self.size = 2048
        x = torch.randn(self.size, self.size)
        self.product = lambda: torch.mm(x, x)

    def train(self, steps: int) -> int:
        """Run updates, or tag batches; return the number of non-padding tokens."""
        tokens, steps = 0, self.each * steps
        for step in range(self.step, self.step + steps):
            source, tags = self.batches[step % len(self.batches)]
            self.one(source, tags)
            tokens += int((source != PAD).sum())
        self.step += steps
        return tokens

    def update(self, source, tags) -> None:
        """Run one update."""
        loss = self.forward(source, attention_mask=source != PAD, labels=tags).loss
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()

    @torch.inference_mode()
    def tag(self, source, tags) -> None:
        """Tag one batch."""
        del tags
        self.forward(source, attention_mask=source != PAD).logits.argmax(-1).numpy()


def bucketed(fields, batch_tokens):
    """Return shuffled batches of sentences of similar length, padded to the longest."""
    batches, rows = [], []
    for i in np.argsort(fields["source"].lengths, kind="stable"):
        if rows and (len(rows) + 1) * len(fields["source"][i]) > batch_tokens:
            batches.append(rows)
            rows = []
        rows.append(i)
    batches.append(rows)
    np.random.default_rng(0).shuffle(batches)
    return [padded(fields, rows) for rows in batches]


def padded(fields, rows):
    """Return the padded sources and labels of some sentences."""
    source, tags = ([fields[name][i] for i in rows] for name in ("source", "tags"))
    width = max(len(ids) for ids in source)
    labels = [np.where(array > 0, array - 1, UNSCORED) for array in tags]
    return tuple(
        torch.tensor(
            np.stack(
                [np.pad(x, (0, width - len(x)), constant_values=value) for x in array]
            ),
            dtype=torch.int64,
        )
        for array, value in ((source, PAD), (labels, UNSCORED))
    )
