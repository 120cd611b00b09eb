"""Export models to CTranslate2's format with its own specification classes.

Supports encoder-decoders and decoder-only models; pre- and post-norm; layer and RMS
norms; plain and gated feed-forwards; sinusoidal, learned, rotary, relative or no
positions; grouped heads. Only this module needs the package ctranslate2; see
requirements-peers.txt.
"""

from pathlib import Path

import numpy as np

from headcount.configs.sites import layers_of
from headcount.exchange import folding
from headcount.models.positions import FARTHEST

TARGET = "CTranslate2"
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}
MODEL = (
    *("mlp", "positions", "max_positions", "norm", "norm_type", "norm_epsilon"),
    *("use_bias", "activation", "scale_embeddings", "tie_embeddings"),
    *("embedding_norm", "output_bias"),
)
HEADS = ("num_kv_heads", "head_dim", "value_dim", "qk_norm")
POSITIONS = ("sinusoidal", "sinusoidal_paper", "learned", "rotary", "relative", "none")
POSITION_ROWS = 1024  # minimum; longer texts can't be translated


def check(config) -> None:
    """Raise a ValueError if CTranslate2 can't express a config's model."""
    folding.check_plain(config, TARGET, MODEL, HEADS)
    folding.require(config, TARGET, positions=POSITIONS)
    if not config.model.num_decoder_layers:
        folding.refuse(TARGET, "model.num_decoder_layers", "at least 1", 0)
    sizes = {x: folding.head_sizes(config, x) for x in layers_of(config.model)}
    for site, (N, K, H, V) in sizes.items():
        path = folding.site_settings(config, site)["path"]
        if V != H:
            folding.refuse(TARGET, f"{path}.value_dim", f"head_dim = {H}", V)
        if site == "cross" and sizes["decoder"][:3] != (N, K, H):
            folding.refuse(
                TARGET, f"{path}.num_heads", f"as in the decoder, {sizes['decoder']}", N
            )
    normed = [folding.site_settings(config, site)["qk_norm"] for site in sizes]
    if any(normed) and config.model.num_encoder_layers:
        folding.refuse(
            f"{TARGET} with an encoder", "model.attention.qk_norm", False, True
        )
    if len(set(normed)) > 1:
        folding.refuse(TARGET, "model.attention.qk_norm", "the same at all sites", None)


def write(
    config,
    params: dict,
    vocabularies: list[list[str]],
    folder: Path,
    quantization: str | None = None,
) -> None:
    """Write a model.

    Args:
        config: the run's config, which has passed `check`.
        params: parameters by path, from `folding.plain_heads`.
        vocabularies: the text of each token of the target vocabulary, and of the source
            vocabulary if it differs.
        folder: an existing empty folder.
        quantization: "int8", or None for float32.
    """
    from ctranslate2.specs import common_spec, transformer_spec

    model = config.model
    options = {
        "pre_norm": model.norm == "pre",
        "activation": common_spec.Activation[ACTIVATIONS[model.activation]],
        "layernorm_embedding": model.embedding_norm,
        "ffn_glu": model.mlp == "gated",
        "rms_norm": model.norm_type == "rms_norm",
        "relative_attention_bias": model.positions == "relative",
    }
    if model.positions == "rotary":  # 0 rotates all dimensions of a head
        options |= {"rotary_dim": 0, "rotary_interleave": False}

    cross = model.num_encoder_layers > 0

    def stack(kind, site, **more):
        N, K, H, _ = folding.head_sizes(config, site)
        qk_norm = folding.site_settings(config, site)["qk_norm"]
        # its cross-attention doesn't support groups, so repeat keys and values per head
        grouped = K != N and not cross
        shape = {"num_heads_kv": K if grouped else None, "head_dim": H}
        count = layers_of(config.model).get(site, 0)
        return kind(count, N, qk_norm=qk_norm, **shape, **options, **more)

    decoder = stack(
        transformer_spec.TransformerDecoderSpec, "decoder", with_encoder_attention=cross
    )
    rows = max(POSITION_ROWS, 2 * config.data.max_length + 16)
    tables = folding.position_tables(config, params, rows)
    params = folding.ungrouped(params) if cross else params
    # copies, because quantisation changes arrays in place
    params = {name: np.array(array) for name, array in params.items()}
    filled = Filler(params, model)
    table = params.get("output_table", params["embedding"])
    filled.stack(decoder, "decoder", tables["decoder"], params["embedding"])
    decoder.projection.weight = table
    if "output_bias" in params:
        decoder.projection.bias = params["output_bias"]
    target = vocabularies[0]
    if cross:
        encoder = stack(transformer_spec.TransformerEncoderSpec, "encoder")
        source = params.get("source_embedding", params["embedding"])
        filled.stack(encoder, "encoder", tables["encoder"], source)
        spec = transformer_spec.TransformerSpec(encoder, decoder)
        spec.register_source_vocabulary(vocabularies[-1])
        spec.register_target_vocabulary(target)
        spec.config.decoder_start_token = target[model.bos]
        spec.config.eos_token = target[2]
    else:
        spec = transformer_spec.TransformerDecoderModelSpec(decoder)
        spec.register_vocabulary(target)
        spec.config.eos_token = target[model.bos]  # separates documents
    spec.config.bos_token = target[model.bos]
    spec.config.unk_token = target[3] if "<unk>" not in target else "<unk>"
    spec.config.layer_norm_epsilon = model.norm_epsilon
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(folder))


class Filler:
    """Fill the specification's fields with parameters."""

    def __init__(self, params: dict, model):
        self.params, self.model = params, model

    def stack(self, spec, side: str, positions, embedding) -> None:
        """Fill an encoder or a decoder."""
        embeddings = spec.embeddings if side == "decoder" else spec.embeddings[0]
        embeddings.weight = embedding
        spec.scale_embeddings = bool(self.model.scale_embeddings)
        if self.model.positions not in ("rotary", "relative"):
            spec.position_encodings.encodings = positions
        for index, layer in enumerate(spec.layer):
            self.layer(layer, f"{side}.{index}", side)
        if self.model.norm == "pre":
            self.norm(spec.layer_norm, f"{side}_norm")
        if self.model.embedding_norm:
            self.norm(spec.layernorm_embedding, f"{side}_embedding_norm")

    def layer(self, spec, name: str, side: str) -> None:
        """Fill a layer."""
        self.attention(spec.self_attention, f"{name}.self_attention", True)
        self.norm(spec.self_attention.layer_norm, f"{name}.self_norm")
        if self.model.positions == "relative":
            table = self.params[f"{side}_positions"]
            spec.self_attention.relative_attention_bias = np.ascontiguousarray(table)
            far = np.dtype("int32").type(FARTHEST)
            spec.self_attention.relative_attention_max_distance = far
        if f"{name}.cross_attention.query" in self.params:
            self.attention(spec.attention, f"{name}.cross_attention", False)
            self.norm(spec.attention.layer_norm, f"{name}.cross_norm")
        up, down = f"{name}.mlp.up", f"{name}.mlp.down"
        if self.model.mlp == "gated":
            self.linear(spec.ffn.linear_0, (f"{name}.mlp.gate",))
            self.linear(spec.ffn.linear_0_noact, (up,))
        else:
            self.linear(spec.ffn.linear_0, (up,))
        self.linear(spec.ffn.linear_1, (down,))
        self.norm(spec.ffn.layer_norm, f"{name}.mlp_norm")

    def attention(self, spec, name: str, is_self: bool) -> None:
        """Fill an attention, concatenating the projections of each input."""
        query, key, value = (f"{name}.{x}" for x in ("query", "key", "value"))
        groups = [(query, key, value)] if is_self else [(query,), (key, value)]
        for linear, group in zip(spec.linear, groups, strict=False):
            self.linear(linear, group)
        merge = self.params[f"{name}.merge.kernel"]
        spec.linear[-1].weight = matrix(merge.reshape(-1, merge.shape[-1]))
        bias = self.params.get(f"{name}.merge_bias")
        spec.linear[-1].bias = zeros(merge.shape[-1]) if bias is None else bias
        for short in ("query", "key"):
            if f"{name}.{short}_norm.scale" in self.params:
                norm = getattr(spec, f"{short[0]}_norm")
                norm.gamma = self.params[f"{name}.{short}_norm.scale"]

    def linear(self, spec, names: tuple[str, ...]) -> None:
        """Fill a linear map with one or several of ours, concatenated."""
        kernels, biases = [], []
        for name in names:
            of_linear = f"{name}.kernel" in self.params
            kernel = self.params[f"{name}.kernel" if of_linear else name]
            kernels.append(kernel.reshape(len(kernel), -1))
            bias = self.params.get(f"{name}.bias" if of_linear else f"{name}_bias")
            size = kernels[-1].shape[1]
            biases.append(zeros(size) if bias is None else bias.reshape(-1))
        spec.weight = matrix(np.concatenate(kernels, axis=1))
        spec.bias = np.concatenate(biases)

    def norm(self, spec, name: str) -> None:
        """Fill a norm."""
        spec.gamma = self.params[f"{name}.scale"]
        if self.model.norm_type == "layer_norm":
            bias = self.params.get(f"{name}.bias")
            spec.beta = zeros(len(spec.gamma)) if bias is None else bias


def matrix(kernel: np.ndarray) -> np.ndarray:
    """Transpose a kernel, inputs × outputs, to outputs × inputs."""
    return np.ascontiguousarray(kernel.T)


def zeros(size: int) -> np.ndarray:
    """Return a bias of zeros."""
    return np.zeros(size, np.float32)
