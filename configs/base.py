"""Every config key with its default, unit and meaning; experiments change some.

Set any of them on the command line: --config.model.attention.num_heads=8
"""

import ml_collections
from ml_collections.config_dict import placeholder


def get_config() -> ml_collections.ConfigDict:
    """The original Transformer, small, on the embedded number phrases."""
    config = ml_collections.ConfigDict()
    config.seed = 0  # of the initial values, the data order and dropout
    config.seeds = 1  # number of trials, with seeds seed, seed + 1, ...; one program

    config.task = task = ml_collections.ConfigDict()
    task.name = "translation"  # a name in headcount.tasks.TASKS
    # translation: bleu, chrf, exact_match, rouge1, rouge2, rougeL, squad_exact_match,
    # squad_f1, separated by commas; the first selects models by default.
    task.metrics = "bleu,chrf,exact_match"
    task.entities = False  # tagging: tags are BIO tags of entities
    task.pooling = "mean"  # classification: first, mean or attention
    # Tagging, classification: share of training tokens replaced by the unknown token.
    task.token_dropout = 0.0

    config.data = data = ml_collections.ConfigDict()
    # Pairs: numbers, multi30k, text, or a TFDS translation set. Documents: shakespeare,
    # recall, stories, text, or a TFDS text set. Tagged words: conll, conllu. Labelled
    # texts: labelled, movie_reviews.
    data.name = "numbers"
    data.source = "en"  # translation: language translated from
    data.target = "de"  # translation: language translated into
    data.prefix = ""  # translation: put before every source, as in "summarize: "
    # Folder of local files; None: download multi30k, shakespeare.
    data.directory = placeholder(str)
    # Except translation: sentencepiece, characters, words, bytes. Language models also:
    # gpt2 if imported. Encoders also: affixes, and wordpiece if imported.
    data.tokenizer = "sentencepiece"
    data.tag = "upos"  # conllu: upos, xpos, relation, or feature:NAME
    data.fold = 0  # movie_reviews: the tenth that is the test split; the next is val
    data.num_classes = 16  # assumed if no data is read (--dry_run), else counted
    data.vocab_size = 8000  # maximum; bytes, characters and words have their own
    data.joint_vocabulary = True  # translation: one for both languages; else one each
    # Tokens. Pairs with a longer side are left out; documents are cut into windows.
    data.max_length = 128
    data.max_decode_length = 1024  # translation: maximum length of an output
    data.cross_documents = True  # windows: attend to earlier documents, too
    # Tokens from the start of an evaluation window to the next; None: max_length.
    data.stride = placeholder(int)
    data.test_share = 0.0  # shakespeare: share of its last 10% that is the test split
    data.batch_tokens = 4096  # tokens per update; translation: target tokens

    config.model = model = ml_collections.ConfigDict()
    model.width = 128  # D, size of a token's vector
    model.num_encoder_layers = 2  # 0: decoder only, without cross-attention
    model.num_decoder_layers = 2  # 0: encoder only
    model.mlp_dim = 256  # F, hidden units of the feed-forward
    model.dropout = 0.1  # rate, after the embeddings and after each sublayer
    # sinusoidal, sinusoidal_paper, learned, rotary, relative, alibi, none
    model.positions = "sinusoidal"
    model.max_positions = 512  # learned positions; later tokens share the last one
    model.norm = "post"  # "post": after the residual sum; "pre": before the sublayer
    model.norm_type = "layer_norm"  # or rms_norm
    model.norm_epsilon = 1e-6  # of norms over D, and of queries, keys, latents
    model.use_bias = True  # in feed-forwards and norms; see also attention.use_bias
    model.mlp = "plain"  # or "gated": times another linear map (SwiGLU with silu)
    model.activation = "relu"  # of the feed-forward; or gelu, gelu_tanh, silu
    model.scale_embeddings = True  # multiply embeddings by sqrt(D)
    model.tie_embeddings = True  # share the embedding with the output layer
    model.embedding_norm = False  # after the sum of the embeddings
    model.token_types = 0  # segment types, each with an embedding; encoder only
    model.pooler = False  # tanh of a linear map of the first token; encoder only
    model.output_transform = False  # linear map, activation, norm before the output
    model.output_bias = False  # add a learned bias to the logits, one per token
    model.bos = 1  # id of the token that sequences start with
    model.dtype = placeholder(str)  # bfloat16, float32; None: by device
    model.attention = attention = ml_collections.ConfigDict()
    attention.num_heads = 4  # N, heads
    attention.num_kv_heads = placeholder(int)  # K, key/value heads; None: N
    attention.head_dim = placeholder(int)  # H, query and key size; None: D / N
    attention.value_dim = placeholder(int)  # V, value size; None: D / N
    attention.merge = "concat"  # how heads are combined: a name in MERGE_RULES
    attention.merge_gain = 1.0  # factor on the merge kernel's initial values
    attention.init = "xavier"  # "xavier", or "fan_in": same scale at any H
    attention.mixture_heads = 2  # k of the rules "mixture", "shared_mixture"
    attention.talking_heads = False  # mix heads before and after the softmax
    attention.sink = False  # a learned logit per head, to attend to nothing
    attention.qk_norm = False  # RMS-normalise queries and keys
    attention.dropout = 0.0  # rate, on the attention weights; training only
    attention.scale = placeholder(float)  # of query · key; None: 1 / sqrt(H)
    # Variants of heads; docs/reference/variants.md has their formulas and sources.
    # On heads: sigmoid, double_sigmoid (starts at 1), hard_concrete (learns to close).
    attention.gate = "none"
    attention.gate_size = "head"  # a gate per head or element, or shared by all heads
    attention.gate_features = placeholder(int)  # features that gates read; None: all
    attention.gate_on = "output"  # gate the output of the heads, or the values
    attention.gate_penalty = 0.0  # hard_concrete: nats per token for each open head
    attention.exclusive = False  # remove the part of o along the token's own value
    attention.differential = False  # pairs of heads: one map minus λ times the other
    attention.value_residual = False  # mix values with those of the first layer
    attention.knocking = "none"  # a learned map that all heads share: linear or mlp
    attention.knocking_all = False  # also queries and keys, not values alone
    attention.knocking_shared = False  # the same maps in all layers of a site
    attention.mixture_shared = 1  # merge rule "shared_mixture": heads always on
    attention.mixture_balance = 0.0  # factor on the load-balancing loss of mixtures
    attention.rotary_dim = placeholder(int)  # elements that rotary turns; None: all
    attention.latent_dim = placeholder(int)  # size of the latent c; None: no latent
    # Size of the rotary key part that all heads of latent attention share; None: H / 2
    # with rotary positions, else 0.
    attention.latent_rotary_dim = placeholder(int)
    attention.latent_norm = True  # RMS-normalise the latent
    attention.qk_clip = placeholder(float)  # scale W_q, W_k down if logits exceed it
    attention.use_bias = True  # in the query, key, value and merge projections
    attention.implementation = placeholder(str)  # kernel; None: automatic
    for site in ("encoder", "decoder", "cross"):  # None: as in model.attention
        model[f"{site}_attention"] = site_section = ml_collections.ConfigDict()
        for key in attention:
            site_section[key] = placeholder(attention.get_type(key))

    # Axes of the device mesh. One may be -1: all remaining devices.
    config.mesh = mesh = ml_collections.ConfigDict()
    mesh.trial = placeholder(int)  # shards the trials; None: as many ways as possible
    mesh.data = -1  # shards the rows of a batch
    mesh.model = 1  # shards heads and the feed-forward
    # What to shard over the data axis: none, optimizer (ZeRO-1), parameters (FSDP).
    mesh.shard = "none"

    config.optimizer = optimizer = ml_collections.ConfigDict()
    # adamw; or muon: Muon for the matrices of the layers, AdamW for the rest
    optimizer.name = "adamw"
    # inverse_sqrt, noam, constant, cosine, linear, warmup_stable_decay
    optimizer.schedule = "inverse_sqrt"
    optimizer.learning_rate = 3e-3  # peak; with noam the factor before D^-0.5
    optimizer.warmup_steps = 400  # updates
    # cosine, linear, warmup_stable_decay: update where decay ends; 0: train.num_steps
    optimizer.decay_steps = 0
    optimizer.final_share = 0.1  # final learning rate, as a share of the peak
    optimizer.decay_share = 0.2  # warmup_stable_decay: share of the updates that decay
    optimizer.beta1 = 0.9  # Adam: decay of the gradients' mean
    optimizer.beta2 = 0.98  # Adam: decay of the squared gradients' mean
    optimizer.epsilon = 1e-9  # Adam: added to the denominator
    optimizer.muon_beta = 0.95  # Muon: decay of the gradients' mean
    optimizer.muon_per_head = False  # Muon: orthogonalise each head's matrix by itself
    optimizer.weight_decay = 0.0  # of matrices: decoupled, times the learning rate
    optimizer.clip_norm = 1.0  # largest global gradient norm; 0: no clipping
    optimizer.layer_decay = 1.0  # learning rate relative to that of the layer above
    optimizer.label_smoothing = 0.1  # probability spread over all tokens or classes

    config.train = train = ml_collections.ConfigDict()
    train.init_from = placeholder(str)  # start from the best parameters of this workdir
    train.num_steps = 1000  # updates
    train.steps_per_dispatch = 8  # maximum number of updates per device call
    train.accumulate_steps = 1  # split each batch into parts, to save memory
    # What records metrics besides metrics.jsonl: tensorboard, wandb, both with a comma
    # between them, or none.
    train.tracker = "tensorboard"
    # none, block, dots: what to recompute in the backward pass, to save memory
    train.remat = "none"
    # Write training metrics to metrics.jsonl; the console then updates, at most every
    # ten seconds unless it is a terminal.
    train.log_every_steps = 50
    train.eval_every_steps = 250  # score dev, keep the best parameters
    # At each evaluation, also log the loss on about as much of the training split.
    train.eval_train = False
    # At each evaluation, log each head's entropy, distance, sink weight, largest logit.
    train.log_heads = False
    # Dev metric that selects the best parameters, by the task's names, such as loss,
    # bleu, chrf (slow: computed only if it selects), exact_match; ties are broken by
    # the loss. With loss, nothing is translated during training. None: the task's
    # first.
    train.best_metric = placeholder(str)
    # Stop a trial after this many evaluations without improvement; None: never.
    train.patience = placeholder(int)
    train.checkpoint_every_steps = 250  # save a checkpoint to resume from
    train.keep_checkpoints = 5  # the last k; --checkpoint=average averages them
    return config
