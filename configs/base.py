"""Every config key with its default, unit and meaning; experiments change some.

Set any of them on the command line: --config.model.attention.num_heads=8
"""

import ml_collections
from ml_collections.config_dict import placeholder


def get_config() -> ml_collections.ConfigDict:
    """The original Transformer, small, on the embedded number phrases."""
    config = ml_collections.ConfigDict()
    config.seed = 0  # of the initial values, the data order and dropout
    config.seeds = 1  # trials, which train as one program: seed, seed + 1, ...

    config.task = task = ml_collections.ConfigDict()
    task.name = "translation"  # a name in headcount.tasks.TASKS
    task.entities = False  # tagging: tags are BIO tags of entities
    task.pooling = "mean"  # classification: first, mean or attention

    config.data = data = ml_collections.ConfigDict()
    # Pairs: numbers, multi30k, text, or a TFDS translation set. Documents: shakespeare,
    # recall, text, or a TFDS text set. Tagged words: conll, conllu. Labelled texts:
    # labelled, movie_reviews.
    data.name = "numbers"
    data.source = "en"  # translation: language translated from
    data.target = "de"  # translation: language translated into
    # Folder of local files; None: download multi30k, shakespeare.
    data.directory = placeholder(str)
    # Of documents: sentencepiece, characters, words, bytes, gpt2 (imported weights).
    data.tokenizer = "sentencepiece"
    data.tag = "upos"  # conllu: upos, xpos, relation, or feature:NAME
    data.fold = 0  # movie_reviews: the tenth that is the test split; the next is val
    data.num_classes = 16  # assumed where no data is read, as by --dry_run
    data.vocab_size = 8000  # size of a SentencePiece vocabulary
    data.joint_vocabulary = True  # translation: one for both languages; else one each
    # Tokens. Pairs with a longer side are left out; documents are cut into windows.
    data.max_length = 128
    data.cross_documents = True  # windows: may a token attend to the document before?
    data.stride = placeholder(int)  # windows in evaluation; None: max_length
    data.batch_tokens = 4096  # target tokens per update

    config.model = model = ml_collections.ConfigDict()
    model.width = 128  # D
    model.num_encoder_layers = 2  # 0: a decoder alone, without cross-attention
    model.num_decoder_layers = 2  # 0: an encoder alone
    model.mlp_dim = 256  # F
    model.dropout = 0.1  # rate, after the embeddings and after each sublayer
    # Or sinusoidal_paper, learned, rotary, relative, none.
    model.positions = "sinusoidal"
    model.max_positions = 512  # tokens that learned positions tell apart
    model.norm = "post"  # "post": after the residual sum; "pre": before the sublayer
    model.norm_type = "layer_norm"  # or rms_norm
    model.norm_epsilon = 1e-6  # of every norm, added to the variance
    model.use_bias = True  # in feed-forwards and norms; attention has its own
    model.mlp = "plain"  # or "gated": times another linear map (SwiGLU with silu)
    model.activation = "relu"  # of the feed-forward; or gelu, gelu_tanh, silu
    model.scale_embeddings = True  # times sqrt(D)
    model.tie_embeddings = True  # the embedding is the output's table, too
    model.embedding_norm = False  # after the sum of the embeddings
    model.token_types = 0  # kinds of tokens with an embedding each; encoder-only
    model.pooler = False  # tanh of a linear map of the first token; encoder-only
    model.output_transform = False  # linear map, activation and norm before the output
    model.output_bias = False  # a number a piece
    model.bos = 1  # id of the token before the first, see data/tokenizers.py
    model.dtype = placeholder(str)  # bfloat16, float32; None: bfloat16 if it is fast
    model.attention = attention = ml_collections.ConfigDict()
    attention.num_heads = 4  # N
    attention.num_kv_heads = placeholder(int)  # K; None: num_heads
    attention.head_dim = placeholder(int)  # H; None: width / num_heads
    attention.value_dim = placeholder(int)  # V; None: width / num_heads
    attention.merge = "concat"  # from N head outputs to one, see attention/merge.py
    attention.merge_gain = 1.0  # what the merge's kernel begins times, beside init's
    attention.init = "xavier"  # of kernels; "fan_in": the same scale at any head size
    attention.mixture_heads = 2  # k of the merge rule "mixture"
    attention.talking_heads = False  # mix the maps before and after the softmax
    attention.sink = False  # a learned logit a head, to attend to nothing
    attention.qk_norm = False  # RMS-normalise queries and keys
    attention.scale = placeholder(float)  # times query · key; None: 1 / sqrt(H)
    attention.use_bias = True  # in the four projections
    attention.implementation = placeholder(str)  # None: by platform and shape
    for site in ("encoder", "decoder", "cross"):  # None: as in model.attention
        model[f"{site}_attention"] = own = ml_collections.ConfigDict()
        for key in attention:
            own[key] = placeholder(attention.get_type(key))

    # Of devices; one of the first three may be -1, what the others leave.
    config.mesh = mesh = ml_collections.ConfigDict()
    mesh.trial = placeholder(int)  # parts of the trials; None: as many as go
    mesh.data = -1  # parts of a batch's rows; -1: the rest, or 1 if trial is -1 too
    mesh.model = 1  # parts of the heads and the feed-forward
    mesh.shard = "none"  # data also divides: "optimizer" (ZeRO-1), "parameters" (FSDP)

    config.optimizer = optimizer = ml_collections.ConfigDict()
    # inverse_sqrt, noam, constant, cosine, linear, warmup_stable_decay
    optimizer.schedule = "inverse_sqrt"
    optimizer.learning_rate = 3e-3  # at its peak; with noam the factor before D^-0.5
    optimizer.warmup_steps = 400  # updates
    # Where cosine, linear and warmup_stable_decay end: update (0: train.num_steps),
    # and share of the peak; the last one decays over decay_share of the updates.
    optimizer.decay_steps = 0
    optimizer.final_share = 0.1
    optimizer.decay_share = 0.2
    optimizer.beta1 = 0.9  # decay of the mean of gradients (Adam)
    optimizer.beta2 = 0.98  # and of that of their squares
    optimizer.epsilon = 1e-9  # added to the root of the latter
    optimizer.weight_decay = 0.0  # decoupled, times the learning rate (AdamW)
    optimizer.clip_norm = 1.0  # largest global norm of the gradient; 0: any
    optimizer.label_smoothing = 0.1  # share of probability spread over all pieces

    config.train = train = ml_collections.ConfigDict()
    train.init_from = placeholder(str)  # workdir whose best parameters to begin with
    train.num_steps = 1000  # updates
    train.steps_per_dispatch = 8  # updates that the device does without Python, at most
    train.accumulate_steps = 1  # parts that an update computes its batch in, for memory
    train.remat = "none"  # or "block", "dots": compute again what would fill the memory
    train.log_every_steps = 50  # a row of metrics: means since the last
    train.eval_every_steps = 250  # dev loss, and scores of greedy translations
    # Dev metric that selects the best parameters, by the task's names, such as loss,
    # bleu, chrf (slow: computed only if it selects), exact_match; ties are broken by
    # the loss. None: the task's first.
    train.best_metric = placeholder(str)
    train.patience = placeholder(int)  # evaluations without a better one; None: never
    train.checkpoint_every_steps = 250  # from which a run goes on
    train.keep_checkpoints = 5  # the last k, which --checkpoint=average averages
    return config
