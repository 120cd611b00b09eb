"""A plain PyTorch GPT with the layers of configs/shakespeare.py, and its training.

    python benchmarks/torch_gpt.py FOLDER [--compile] [--our_start]

trains like nanoGPT's train.py, on random windows of FOLDER/train.npy, with AdamW, a
cosine schedule and gradient clipping. At each evaluation, it appends a line with the
step and the loss on the windows of FOLDER/dev.npy to FOLDER/torch.jsonl. The settings
are in FOLDER/config.json. Weights start like nanoGPT's, from N(0, 0.02²), or with
--our_start from the distributions of Headcount. It imports neither JAX nor Headcount,
so that its launch is that of a PyTorch program.
"""

import argparse
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """A pre-norm residual block: self-attention, then feed-forward."""

    def __init__(self, model):
        super().__init__()
        D = model.width
        self.num_heads, self.dropout = model.attention.num_heads, model.dropout
        self.attention_dropout = model.attention.dropout
        self.attention_norm = nn.LayerNorm(D, model.norm_epsilon, bias=False)
        self.query_key_value = nn.Linear(D, 3 * D, bias=False)
        self.merge = nn.Linear(D, D, bias=False)
        self.mlp_norm = nn.LayerNorm(D, model.norm_epsilon, bias=False)
        self.up = nn.Linear(D, model.mlp_dim, bias=False)
        self.down = nn.Linear(model.mlp_dim, D, bias=False)

    def forward(self, x):
        """Apply the block to B T D."""
        B, T, D = x.shape
        projected = self.query_key_value(self.attention_norm(x))
        query, key, value = (
            part.view(B, T, self.num_heads, -1).transpose(1, 2)
            for part in projected.split(D, dim=2)
        )
        rate = self.attention_dropout if self.training else 0.0
        heads = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=rate, is_causal=True
        )
        merged = self.merge(heads.transpose(1, 2).reshape(B, T, D))
        x = x + functional.dropout(merged, self.dropout, self.training)
        hidden = functional.gelu(self.up(self.mlp_norm(x)))
        return x + functional.dropout(self.down(hidden), self.dropout, self.training)


class Model(nn.Module):
    """Embeddings, blocks, a norm, and logits from the tied embedding."""

    def __init__(self, vocab_size, model):
        super().__init__()
        D = model.width
        self.embedding = nn.Embedding(vocab_size, D)
        self.positions = nn.Embedding(model.max_positions, D)
        self.blocks = nn.ModuleList(
            [Block(model) for _ in range(model.num_decoder_layers)]
        )
        self.norm = nn.LayerNorm(D, model.norm_epsilon, bias=False)
        self.dropout = model.dropout
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs):
        """Return the logits, B T vocab."""
        x = self.embedding(inputs) + self.positions.weight[: inputs.shape[1]]
        x = functional.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embedding.weight.T


def start_like_ours(model: Model):
    """Draw Xavier uniform kernels, and embeddings of variance 1 / width."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
    for name, weight in model.blocks.named_parameters():
        if weight.dim() > 1:
            parts = 3 if "query_key_value" in name else 1
            for part in weight.detach().chunk(parts):
                nn.init.xavier_uniform_(part)


def adamw(model, optimizer):
    """Return fused AdamW that decays matrices only."""
    decay = {True: [], False: []}
    for parameter in model.parameters():
        decay[parameter.dim() > 1].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": decay[True], "weight_decay": optimizer.weight_decay},
            {"params": decay[False], "weight_decay": 0.0},
        ],
        optimizer.learning_rate,
        (optimizer.beta1, optimizer.beta2),
        optimizer.epsilon,
        fused=True,
    )


def learning_rate(step: int, optimizer, num_steps: int) -> float:
    """Return the rate of an update: linear warmup, then a cosine to final_share."""
    warmup, least = optimizer.warmup_steps, optimizer.final_share
    if step < warmup:
        return optimizer.learning_rate * (step + 1) / warmup
    progress = (step + 1 - warmup) / (num_steps - warmup)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return optimizer.learning_rate * (least + (1 - least) * cosine)


def main():
    """Train, and append the loss of every evaluation to FOLDER/torch.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--our_start", action="store_true")
    arguments = parser.parse_args()
    text = (arguments.folder / "config.json").read_text()
    config = json.loads(text, object_hook=lambda each: SimpleNamespace(**each))
    data, train = config.data, config.train
    T, V = data.max_length, data.vocab_size
    stream, dev = (
        torch.from_numpy(np.load(arguments.folder / f"{name}.npy").astype(np.int64))
        for name in ("train", "dev")
    )
    torch.manual_seed(config.seed)
    model = Model(V, config.model)
    if arguments.our_start:
        start_like_ours(model)
    optimizer = adamw(model, config.optimizer)

    def mean_loss(inputs, target):
        return functional.cross_entropy(model(inputs).view(-1, V), target.view(-1))

    loss = torch.compile(mean_loss) if arguments.compile else mean_loss
    count = (len(dev) - 1) // T
    dev_inputs = dev[: count * T].view(count, T)
    dev_target = dev[1 : count * T + 1].view(count, T)
    for step in range(train.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.optimizer, train.num_steps)
        starts = torch.randint(len(stream) - T, (data.batch_tokens // T,))
        windows = stream[starts[:, None] + torch.arange(T + 1)]
        optimizer.zero_grad()
        loss(windows[:, :-1].contiguous(), windows[:, 1:].contiguous()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        if (step + 1) % train.eval_every_steps == 0:
            model.eval()
            with torch.inference_mode():
                parts = zip(dev_inputs.split(64), dev_target.split(64), strict=True)
                losses = [mean_loss(x, y).item() * len(x) for x, y in parts]
            model.train()
            row = {"step": step + 1, "dev_loss": sum(losses) / count}
            with (arguments.folder / "torch.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
