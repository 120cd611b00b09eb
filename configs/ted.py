"""TED talks, Portuguese to English (Qi et al. 2018): 52,000 pairs, low-resource.

    python train.py --config=configs/ted.py --workdir=runs/ted
    python eval.py --workdir=runs/ted --split=test --checkpoint=average

`:az`, `:be`, `:gl`, `:ru` and `:tr` select the other languages, also into English. The
data come from TFDS (ted_hrlr_translate), which needs a network. The recipe is that of
configs/iwslt14.py with a smaller vocabulary, not one from the literature. It has not
been run here. The corpus is published lowercased and tokenised, so BLEU scores are not
comparable with those on plain text.
"""

from headcount.configs import iwslt14

LANGUAGES = ("pt", "az", "be", "gl", "ru", "tr")


def get_config(source: str = "pt"):
    """Return the recipe for one language into English."""
    if source not in LANGUAGES:
        raise ValueError(f"configs/ted.py has :{', :'.join(LANGUAGES)}, not :{source}")
    config = iwslt14.get_config()
    config.data.name = f"ted_hrlr_translate/{source}_to_en"
    config.data.source = source
    config.data.vocab_size = 8000
    config.train.num_steps = 20_000
    return config
