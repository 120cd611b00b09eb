"""Peers in PyTorch, transformers and CTranslate2 for `benchmarks.language_model`.

The plain PyTorch model is that of `benchmarks.torch_gpt`. GPT2LMHeadModel adds biases.
On a GPU they train with bfloat16 autocast.
"""

from pathlib import Path

import jax
import numpy as np
import torch
import transformers
from flax import nnx
from torch import nn
from torch.nn import functional

from benchmarks.torch_gpt import Model, adamw
from headcount.configs.run import load_config
from headcount.exchange import ctranslate2_format, folding, huggingface
from headcount.exchange.importing import load_model

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def gpt2_config(config, dropout: float):
    """Return the configuration of a GPT-2 with a config's sizes."""
    model = config.model
    return transformers.GPT2Config(
        vocab_size=config.data.vocab_size,
        n_positions=model.max_positions,
        n_embd=model.width,
        n_layer=model.num_decoder_layers,
        n_head=model.attention.num_heads,
        n_inner=model.mlp_dim,
        activation_function="gelu_new",
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout and model.attention.dropout,
        bos_token_id=model.bos,
        eos_token_id=model.bos,
        attn_implementation="sdpa",
    )


class Torch:
    """A contestant in `benchmarks.language_model`.

    Args:
        name: a name in `benchmarks.language_model.PEERS`.
        config: config of the experiment.
        batches: see `data.windows.WindowBatches`.
    """

    def __init__(self, name, config, batches):
        torch.manual_seed(0)
        self.model = Model(config.data.vocab_size, config.model).to(DEVICE)
        self.logits = self.model
        if name.startswith("transformers"):
            self.model = transformers.GPT2LMHeadModel(
                gpt2_config(config, config.model.dropout)
            )
            self.model = self.model.to(DEVICE).train()
            self.logits = lambda inputs: self.model(inputs, use_cache=False).logits
        self.loss = self.mean_loss
        if "compile" in name:
            self.loss = torch.compile(self.mean_loss)
        self.optimizer = adamw(self.model, config.optimizer)
        self.clip_norm = config.optimizer.clip_norm
        self.batches, self.step = batches, 0
        self.size = 8192 if ON_GPU else 2048
        dtype = torch.bfloat16 if ON_GPU else torch.float32
        x = torch.randn(self.size, self.size, dtype=dtype, device=DEVICE)
        self.product = lambda: torch.mm(x, x)[0, 0].item()

    def mean_loss(self, inputs, target):
        """Return the mean cross-entropy of a batch."""
        with torch.autocast(DEVICE, torch.bfloat16, enabled=ON_GPU):
            logits = self.logits(inputs)
            return functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    def train(self, steps: int) -> int:
        """Run updates; return the number of tokens."""
        tokens = 0
        for step in range(self.step, self.step + steps):
            batch = self.batches[step]
            inputs, target = (
                torch.from_numpy(batch[name][0].astype(np.int64)).to(DEVICE)
                for name in ("target_inputs", "target")
            )
            loss = self.loss(inputs, target)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            self.optimizer.step()
            tokens += target.numel()
        loss.item()  # waits for a GPU
        self.step += steps
        return tokens


def random_gpt2(config):
    """Return a GPT-2 with random weights that never generates EOS greedily."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(gpt2_config(config, 0.0)).eval()
    with torch.no_grad():
        model.transformer.wte.weight.mul_(5)  # without it, all continuations are alike
        model.transformer.wte.weight[config.model.bos] = 0
    return model


def transformers_side(model):
    """Return a function that continues prompts with transformers' generate."""

    def side(prompts, new_tokens):
        prompts = torch.tensor(prompts)
        with torch.inference_mode():
            tokens = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=model.config.eos_token_id,
            )
        return tokens[:, prompts.shape[1] :].tolist()

    return side


def ctranslate2_side(run: Path):
    """Return a function that continues prompts with CTranslate2, in float32.

    Args:
        run: workdir of the imported model.
    """
    import ctranslate2  # not needed for training

    config, path = load_config(run / "config.json"), run / "ctranslate2"
    params = huggingface.named(jax.device_get(nnx.split(load_model(run))[1]))
    pieces = list(map(str, range(config.data.vocab_size)))
    path.mkdir()
    params = folding.plain_heads(config, params, {})
    ctranslate2_format.write(config, params, [pieces], path)
    generator = ctranslate2.Generator(
        str(path),
        device="cpu",
        compute_type="float32",
        intra_threads=torch.get_num_threads(),
    )

    def side(prompts, new_tokens):
        results = generator.generate_batch(
            [list(map(str, prompt)) for prompt in prompts],
            max_length=new_tokens,
            min_length=new_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return [x.sequences_ids[0] for x in results]

    return side
