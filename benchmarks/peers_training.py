"""A plain PyTorch training loop of the same model, for `benchmarks.training`.

This is a straightforward implementation in float32: `nn.Transformer` with shared
embeddings, padded batches of sentences of similar length with as many target tokens as
ours, label smoothing, dropout, gradient clipping and fused Adam. The dropout of
`nn.Transformer` on attention weights and hidden units, and its final norm after each
stack of post-norm layers, are disabled.
"""

import math

import numpy as np
import torch
from torch import nn

PAD, BOS = 0, 1


class Model(nn.Module):
    """Embedding, `nn.Transformer`, and logits from the tied embedding."""

    def __init__(self, vocab_size, model, longest):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, model.width, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=model.width**-0.5)
        self.transformer = nn.Transformer(
            model.width,
            model.attention.num_heads,
            model.num_encoder_layers,
            model.num_decoder_layers,
            model.mlp_dim,
            model.dropout,
            batch_first=True,
            norm_first=model.norm == "pre",
        )
        stacks = self.transformer.encoder, self.transformer.decoder
        for stack in stacks:
            for layer in stack.layers:
                layer.dropout.p = 0.0  # on the hidden units
            if model.norm == "post":
                stack.norm = None
        for module in self.transformer.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        self.dropout = nn.Dropout(model.dropout)
        rates = 10_000.0 ** (-torch.arange(0, model.width, 2) / model.width)
        angles = torch.arange(longest)[:, None] * rates
        table = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)
        self.register_buffer("positions", table)

    def embed(self, tokens):
        """Return scaled embeddings plus positions, with dropout."""
        scale = math.sqrt(self.embedding.embedding_dim)
        x = self.embedding(tokens) * scale + self.positions[: tokens.shape[1]]
        return self.dropout(x)

    def forward(self, source, inputs, labels, smoothing):
        """Return the mean label-smoothed cross-entropy over the real target tokens."""
        T = inputs.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool).triu(1)
        padding = source == PAD
        hidden = self.transformer(
            self.embed(source),
            self.embed(inputs),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        logits = hidden @ self.embedding.weight.T
        return nn.functional.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=PAD,
            label_smoothing=smoothing,
        )


class Torch:
    """A contestant in `benchmarks.training`, eager or compiled."""

    def __init__(self, name, config, source, target):
        torch.manual_seed(0)
        longest = int(max(source.lengths.max(), target.lengths.max()))
        self.model = Model(config.data.vocab_size, config.model, longest)
        optimizer = config.optimizer
        self.optimizer = torch.optim.Adam(
            self.model.parameters(),
            1e-3,
            (optimizer.beta1, optimizer.beta2),
            optimizer.epsilon,
            fused=True,
        )
        self.clip_norm, self.smoothing = optimizer.clip_norm, optimizer.label_smoothing
        self.loss = self.model
        if name == "torch.compile":
            self.loss = torch.compile(self.model, dynamic=True)
        self.batches = bucketed(source, target, config.data.batch_tokens)
        self.step = 0
        self.size = 2048
        x = torch.randn(self.size, self.size)
        self.product = lambda: torch.mm(x, x)

    def train(self, steps: int) -> int:
        """Run updates; return the number of non-padding tokens."""
        tokens = 0
        for step in range(self.step, self.step + steps):
            source, inputs, labels = self.batches[step % len(self.batches)]
            loss = self.loss(source, inputs, labels, self.smoothing)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            self.optimizer.step()
            tokens += int((source != PAD).sum() + (labels != PAD).sum())
        self.step += steps
        return tokens


def bucketed(source, target, batch_tokens):
    """Return shuffled batches of sentences of similar length, padded to the longest."""
    batches, rows = [], []
    order = np.lexsort((source.lengths, target.lengths))
    for i in order:
        longest = max(len(target[j]) for j in (*rows[-1:], i))
        if rows and (len(rows) + 1) * longest > batch_tokens:
            batches.append(rows)
            rows = []
        rows.append(i)
    batches.append(rows)
    np.random.default_rng(0).shuffle(batches)
    return [padded(source, target, rows) for rows in batches]


def padded(source, target, rows):
    """Return the padded sources, decoder inputs and labels of some sentences."""

    def stack(sentences):
        width = max(len(s) for s in sentences)
        return torch.tensor(
            np.stack([np.pad(s, (0, width - len(s))) for s in sentences])
        )

    labels = [target[i].astype(np.int64) for i in rows]
    inputs = [np.concatenate([[BOS], s[:-1]]) for s in labels]
    return stack([source[i] for i in rows]), stack(inputs), stack(labels)
