"""Usage examples for the README.md of an export: packages to install, and code.

Placeholders in braces are replaced by the values from `exporting.facts_of`.
"""

CTRANSLATE2_PAIRS = """\
import ctranslate2, sentencepiece

source = sentencepiece.SentencePieceProcessor("tokenizer/{source}.model")
target = sentencepiece.SentencePieceProcessor("tokenizer/{target}.model")
translator = ctranslate2.Translator(".")

def translate(text):
    pieces = source.encode([{prefix}text], out_type=str, add_eos=True)
    (result,) = translator.translate_batch(pieces, beam_size=1)
    return target.decode(result.hypotheses[0])

print(translate("{example}"))
"""
CTRANSLATE2_TEXTS = """\
import ctranslate2, tokenizers

tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
generator = ctranslate2.Generator(".")

def complete(text):
    prompt = ["{separator}", *tokenizer.encode(text).tokens]
    options = {{"max_length": {new_tokens}, "sampling_topk": 10}}
    (result,) = generator.generate_batch([prompt], **options)
    return tokenizer.decode(result.sequences_ids[0])

print(complete("{example}"))
"""
MARIAN = """\
from transformers import MarianMTModel, MarianTokenizer

model = MarianMTModel.from_pretrained(".")
tokenizer = MarianTokenizer.from_pretrained(".")
batch = tokenizer([{prefix}"{example}"], return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True))
"""
CAUSAL = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
# a text starts with the token that separates documents
batch = tokenizer([tokenizer.bos_token + "{example}"], return_tensors="pt")
print(tokenizer.decode(model.generate(**batch, max_new_tokens={new_tokens})[0]))
"""
BERT = """\
import torch
from tokenizers import Tokenizer
from transformers import BertForTokenClassification

model = BertForTokenClassification.from_pretrained(".").eval()
tokenizer = Tokenizer.from_file("tokenizer.json")
# each word is tokenized by itself, and its first token carries its tag
words = [
    tokenizer.encode(word, add_special_tokens=False).ids or [{unk}]
    for word in "{example}".split()
]
ids = [{bos}, *sum(words, []), {eos}]
logits = model(torch.tensor([ids])).logits[0]
place = 1
for word in words:
    print(model.config.id2label[int(logits[place].argmax())])
    place += len(word)
"""
IMPORTED = 'import transformers\n\ntransformers.AutoModel.from_pretrained(".")\n'
_LOAD = """\
from jax import export
from safetensors.numpy import load_file

def program(name):
    with open(name + ".stablehlo", "rb") as file:
        return export.deserialize(bytearray(file.read())).call

params = load_file("model.safetensors")

def padded(texts):  # token ids, padded behind with 0, and lengths, all int32
    lengths = np.array([len(ids) for ids in texts], np.int32)
    rows = np.zeros((len(texts), lengths.max()), np.int32)
    for row, ids in zip(rows, texts):
        row[: len(ids)] = ids
    return rows, lengths
"""
_STEPS = """
prefill, step = program("prefill"), program("step")

def generate(prompts, length):  # greedily; at most `length` tokens of each
    prompt = prefill(params, *padded(prompts))
    B, L = len(prompts), length
    cache = [
        [np.zeros(shape, np.float32) for shape in layer]
        for layer in {cache}
    ]
    token, tokens = prompt["first"], []
    for number in range(length):
        logits, cache = step(params, prompt, cache, token, np.int32(number))
        logits = np.array(logits)
        logits[:, {banned}] = -np.inf
        token = logits.argmax(-1).astype(np.int32)
        tokens.append(token)
    rows = [[*row.tolist(), {eos}] for row in np.stack(tokens, 1)]
    return [row[: row.index({eos})] for row in rows]
"""
STABLEHLO_PAIRS = (
    "import numpy as np, sentencepiece\n"
    + _LOAD
    + _STEPS
    + """
source = sentencepiece.SentencePieceProcessor("tokenizer/{source}.model")
target = sentencepiece.SentencePieceProcessor("tokenizer/{target}.model")
texts = source.encode([{prefix}"{example}"], add_eos=True)
outputs = generate(texts, 50)
print(target.decode(outputs))
outputs = [[*ids, {eos}] for ids in outputs]
log_probs = program("score")(params, *padded(texts), *padded(outputs))  # of each token
"""
)
STABLEHLO_TEXTS = (
    "import numpy as np, tokenizers\n"
    + _LOAD
    + _STEPS
    + """
tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
ids = tokenizer.encode("{example}").ids
# a prompt starts with the token that separates documents
(outputs,) = generate([[{bos}, *ids]], {new_tokens})
print(tokenizer.decode(outputs))
log_probs = program("score")(params, *padded([ids]))  # of each token
"""
)
STABLEHLO_CLASSES = (
    "import json\n\nimport numpy as np\n"
    + _LOAD
    + """
with open("tokenizer/classes.json") as file:
    classes = json.load(file)
# the tokens of "{example}"
logits = program("classify")(params, *padded([{ids}]){types})  # B S C
for place in {places}:  # of the tokens that have a class
    print(classes[int(logits[0, place].argmax())])
"""
)

SERVE = """\

Serve it as a web page and over HTTP, after `pip install gradio`:

```python
import gradio
gradio.Interface({function}, "text", "text").launch()
```
"""

# For each usage, the packages to install with pip, and its code.
USAGES = {
    "ctranslate2_pairs": ("ctranslate2 sentencepiece", CTRANSLATE2_PAIRS),
    "ctranslate2_texts": ("ctranslate2 tokenizers", CTRANSLATE2_TEXTS),
    "marian": ("torch transformers sentencepiece", MARIAN),
    "causal": ("torch transformers", CAUSAL),
    "bert": ("torch transformers", BERT),
    "imported": ("torch transformers", IMPORTED),
    "stablehlo_pairs": ("jax flatbuffers safetensors sentencepiece", STABLEHLO_PAIRS),
    "stablehlo_texts": ("jax flatbuffers safetensors tokenizers", STABLEHLO_TEXTS),
    "stablehlo_classes": ("jax flatbuffers safetensors", STABLEHLO_CLASSES),
}
# The function in a usage's code that a server can call.
SERVED = {"ctranslate2_pairs": "translate", "ctranslate2_texts": "complete"}


def section(usage: str, facts: dict) -> str:
    """Format how to use an export, in Markdown.

    Args:
        usage: a key of `USAGES`.
        facts: values of the placeholders.
    """
    packages, code = USAGES[usage]
    text = f"```\npip install {packages}\n```\n\nIn this folder:\n\n"
    text += f"```python\n{code.format(**facts)}```\n"
    if usage in SERVED:
        text += SERVE.format(function=SERVED[usage])
    return text
