"""GPT-2 from scratch on local documents, with nanoGPT's recipe.

    python train.py --config=configs/gpt2.py:small --workdir=runs/gpt2 \\
      --config.data.directory=FOLDER
    python eval.py --workdir=runs/gpt2 --split=val

`:small` has 12 layers, 12 heads and width 768, `:medium` has 24, 16 and 1024
(124,439,808 and 354,823,168 parameters). Learning rates are those of Brown et al. 2020,
Table 2.1. This recipe is for accelerators and has not been run here. To estimate what a
step with 16 seeds needs:

    python train.py --config=configs/gpt2.py --dry_run=v5e:16x16 --config.seeds=16

The vocabulary is a SentencePiece model of the training split. For GPT-2's own, put its
tokenizer.json into FOLDER:

    python train.py --config=configs/gpt2.py:small --workdir=runs/gpt2 \\
      --config.data.directory=FOLDER --config.data.tokenizer=gpt2 \\
      --config.model.bos=50256

In contrast to nanoGPT's recipe, a batch has 512 windows rather than 480, which more
meshes divide.
"""

from headcount.configs import presets


def get_config(size: str = "small"):
    """Return the preset of a size, with data, optimizer and schedule."""
    if size not in ("small", "medium"):
        raise ValueError(f"configs/gpt2.py has :small and :medium, not :{size}")
    config = presets.get_config(f"gpt2_{size}")
    config.data.max_length = 1024
    config.data.batch_tokens = 512 * 1024
    config.model.dropout = 0.0
    config.model.bos = 1
    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = {"small": 6e-4, "medium": 3e-4}[size]
    config.optimizer.warmup_steps = 2000
    config.optimizer.beta2 = 0.95
    config.optimizer.epsilon = 1e-8
    config.optimizer.weight_decay = 0.1
    config.optimizer.label_smoothing = 0.0
    config.train.num_steps = 600_000
    config.train.eval_every_steps = 2000
    config.train.checkpoint_every_steps = 2000
    config.train.accumulate_steps = 4
    config.train.remat = "block"
    return config
