"""Parallel text as batches of packed rows: numpy only, imports nothing of ours.

corpora.load(name, source, target, split, directory=None, data_dir=None)
    -> (source sentences, target sentences), two lists of str of equal length
corpora.splits(name, source, target, directory=None, data_dir=None) -> list of str
corpora.tokenized_references(name, target, split, directory=None, data_dir=None)
    -> list of str; the publisher's lowercased, normalised, tokenised text (multi30k)

tokenizer.load_or_train(folder, sources, targets, vocab_size, joint=True)
    -> (source Tokenizer, target Tokenizer); the same object twice where joint
tokenizer.load(folder) -> the same, of a finished run
Tokenizer.encode(sentences) -> Sentences (each ends with eos)
Tokenizer.decode(ids) -> str, Tokenizer.decode_many(list of ids) -> list of str
Tokenizer.pieces(ids) -> list of str; Tokenizer.vocab_size
tokenizer.vocab_sizes(the two) -> list of int; one where they share a vocabulary

packing.Sentences: tokens (int32, all sentences end to end), offsets; len(), [i]

pipeline.Batches(source, target, *, batch_tokens, seeds, max_length=None)
    source, target: Sentences; seeds: one a trial. batches[step] -> dict of int32 arrays
    (R, B, S) and (R, B, T); .shape (B, S, T), .steps_per_epoch, .fill (source, target)
pipeline.portions(start, end, most, intervals, once=()) -> list of (first step, number)
pipeline.training_batches(batches, portions, most=1)
    -> iterator of dicts of arrays (R, most, B, S) and (R, most, B, T), a portion each;
    .close() ends its threads
pipeline.evaluation_batches(source, target, *, batch_tokens)
    -> list of dicts of (B, S) and (B, T), no trial axis; every pair once

Ids: pad 0, bos 1, eos 2, unk 3. Segments 1, 2, ..., 0 is padding; positions restart.
"""
