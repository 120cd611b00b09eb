"""How an export is used, for its README.md: code that runs in its folder.

Words in braces are replaced; `weights.facts_of` has them.
"""

CTRANSLATE2_PAIRS = """\
import ctranslate2, sentencepiece

source = sentencepiece.SentencePieceProcessor("tokenizer/{source}.model")
target = sentencepiece.SentencePieceProcessor("tokenizer/{target}.model")
translator = ctranslate2.Translator(".")
pieces = source.encode(["{example}"], out_type=str, add_eos=True)
(result,) = translator.translate_batch(pieces, beam_size=1)
print(target.decode(result.hypotheses[0]))
"""
CTRANSLATE2_TEXTS = """\
import ctranslate2, tokenizers

tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
generator = ctranslate2.Generator(".")
prompt = ["{separator}", *tokenizer.encode("{example}").tokens]
(result,) = generator.generate_batch([prompt], max_length=50, sampling_topk=10)
print(tokenizer.decode(result.sequences_ids[0]))
"""
MARIAN_USAGE = """\
from transformers import MarianMTModel, MarianTokenizer

model = MarianMTModel.from_pretrained(".")
tokenizer = MarianTokenizer.from_pretrained(".")
batch = tokenizer(["{example}"], return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True))
"""
CAUSAL_USAGE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
# a text starts with the token that separates documents
batch = tokenizer([tokenizer.bos_token + "{example}"], return_tensors="pt")
print(tokenizer.decode(model.generate(**batch, max_new_tokens=50)[0]))
"""
BERT_USAGE = """\
import torch
from tokenizers import Tokenizer
from transformers import BertForTokenClassification

model = BertForTokenClassification.from_pretrained(".").eval()
tokenizer = Tokenizer.from_file("tokenizer.json")
# each word is tokenized by itself, and its first token carries its tag
words = [tokenizer.encode(word).ids for word in "{example}".split()]
logits = model(torch.tensor([sum(words, [])])).logits[0]
place = 0
for word in words:
    print(model.config.id2label[int(logits[place].argmax())])
    place += len(word)
"""
_LOAD = """\
import numpy as np
from jax import export
from safetensors.numpy import load_file

def program(name):
    with open(name + ".stablehlo", "rb") as file:
        return export.deserialize(bytearray(file.read())).call

params = load_file("model.safetensors")
"""
_STEPS = """\
# then a token at a time; L: the most that are generated
B = len(prompt["first"])
cache = [
    [np.zeros((B, K, H, L), np.float32), np.zeros((B, K, L, V), np.float32)]
    for K, H, V in {cache}
]
token = prompt["first"]
step = program("step")
for number in range(L):
    logits, cache = step(params, prompt, cache, token, np.int32(number))
    logits = np.array(logits)
    logits[:, {banned}] = -np.inf
    token = logits.argmax(-1).astype(np.int32)  # {eos} ends a text
"""
STABLEHLO_PAIRS = (
    _LOAD
    + """\
# token ids B S and B T, padded behind with 0, and their lengths B, all int32
log_probs = program("score")(params, source, source_lengths, target, target_lengths)
prompt = program("prefill")(params, source, source_lengths)
"""
    + _STEPS
)
STABLEHLO_TEXTS = (
    _LOAD
    + """\
# token ids B T, padded behind with 0, and their lengths B, all int32
log_probs = program("score")(params, tokens, lengths)
# prompts start with the token that separates documents, {bos}
prompt = program("prefill")(params, prompts, prompt_lengths)
"""
    + _STEPS
)
STABLEHLO_CLASSES = (
    _LOAD
    + """\
# token ids B S, padded behind with 0, and their lengths B, all int32
logits = program("classify")(params, tokens, lengths)  # B S C
"""
)

USAGES = {
    "ctranslate2_pairs": CTRANSLATE2_PAIRS,
    "ctranslate2_texts": CTRANSLATE2_TEXTS,
    "marian": MARIAN_USAGE,
    "causal": CAUSAL_USAGE,
    "bert": BERT_USAGE,
    "stablehlo_pairs": STABLEHLO_PAIRS,
    "stablehlo_texts": STABLEHLO_TEXTS,
    "stablehlo_classes": STABLEHLO_CLASSES,
}
