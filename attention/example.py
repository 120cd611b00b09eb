"""Multi-head attention by hand: 5 tokens, 2 heads of size 4, width 8.

    python -m headcount.attention.example

Everything is plain NumPy, printed with its shape. The outputs, with and without masks,
are compared with this package's. docs/walkthrough.md explains the printed text.
"""

import jax.numpy as jnp
import numpy as np

from headcount import attention

T, D, N, H = 5, 8, 2, 4  # tokens, width, heads, size of a head; here V = H


def main() -> None:
    """Print the parts of the walk-through."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(T, D)).astype(np.float32)
    kernels = [rng.normal(size=(D, N, H)) / D**0.5 for _ in range(3)]
    kernels = [kernel.astype(np.float32) for kernel in kernels]
    output = (rng.normal(size=(N, H, D)) / (N * H) ** 0.5).astype(np.float32)

    query, key, value = projections(x, kernels)
    weights = maps(query, key)
    heads = outputs(weights, value)
    merged(heads, output, query, key, value)
    masks(query, key, value)
    parameters()


def projections(x, kernels):
    """Compute the query, key and value of every token and head."""
    title("1. Queries, keys, values")
    show("x, a vector per token", x, "T D")
    query, key, value = (np.einsum("td,dnh->tnh", x, kernel) for kernel in kernels)
    show("W_Q, a matrix D H per head", kernels[0], "D N H", values=False)
    show("Q = x W_Q, head 0", query[:, 0], "T H")
    show("K = x W_K, head 0", key[:, 0], "T H")
    show("V = x W_V, head 0", value[:, 0], "T V")
    return query, key, value


def maps(query, key):
    """Compute how each token distributes its attention over the tokens, per head."""
    title("2. Attention maps")
    logits = np.einsum("tnh,snh->nts", query, key) / H**0.5
    weights = softmax(logits)
    for head in range(N):
        show(f"softmax(Q K^T / sqrt(H)), head {head}", weights[head], "T S")
    print(f"each row sums to {weights.sum(-1).min():.2f}")
    return weights


def outputs(weights, value):
    """Average the values with each token's attention weights, per head."""
    title("3. Heads")
    heads = np.einsum("nts,snv->tnv", weights, value)
    for head in range(N):
        show(f"weights V, head {head}", heads[:, head], "T V")
    return heads


def merged(heads, output, query, key, value):
    """Concatenate and project; or project each head and add up."""
    title("4. Concatenation and output projection")
    joined = heads.reshape(T, N * H)
    show("both heads side by side", joined, "T NV")
    out = joined @ output.reshape(N * H, D)
    show("times W_O", out, "T D")
    apart = sum(heads[:, head] @ output[head] for head in range(N))
    same("the sum over heads of head n times rows n of W_O", apart, out)
    arrays = (jnp.asarray(array)[None] for array in (query, key, value))
    result = attention.dot_product_attention(*arrays)
    rule = attention.MERGE_RULES["concat"].function
    result = rule(result, jnp.zeros((1, T, D)), kernel=jnp.asarray(output))
    same("attention.dot_product_attention and the rule concat", result[0], out)


def masks(query, key, value):
    """Compare a causal and a padding mask with this package's arguments."""
    title("5. Masks: True means may attend")
    causal = np.tril(np.ones((T, T), bool))
    real = np.broadcast_to(np.arange(T) < 3, (T, T))
    logits = np.einsum("tnh,snh->nts", query, key) / H**0.5
    arrays = [jnp.asarray(array)[None] for array in (query, key, value)]
    options = {
        "causal: no later token": (causal, {"is_causal": True}),
        "padding: only the first 3 are real": (
            real,
            {"key_value_seq_lengths": jnp.array([3])},
        ),
    }
    for name, (mask, arguments) in options.items():
        weights = softmax(np.where(mask, logits, -np.inf))
        show(f"{name}, head 0", weights[0], "T S")
        heads = np.einsum("nts,snv->tnv", weights, value)
        result = attention.dot_product_attention(*arrays, **arguments)
        (argument,) = arguments
        same(f"attention.dot_product_attention with {argument}", result[0], heads)


def parameters() -> None:
    """Print the number of parameters per head and in total."""
    title("6. Parameters, without biases")
    per_head, total = 3 * D * H + H * D, 3 * D * N * H + N * H * D
    print(f"a head: W_Q, W_K, W_V of D x H each, and H rows of W_O: {per_head}")
    print(f"all {N} heads: {total} = {N} x {per_head} = 4 x D^2")
    wrong = 3 * D * H + D * D
    print(f"the whole W_O counted for each head: {wrong} x {N} = {wrong * N}, wrong")


def softmax(logits):
    """Compute the softmax along the last axis."""
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def title(text: str) -> None:
    """Print a section heading."""
    print(f"\n{text}\n")


def show(name: str, array, letters: str, values: bool = True) -> None:
    """Print an array with its shape in letters."""
    shape = " x ".join(map(str, array.shape))
    print(f"{name}: {letters} = {shape}")
    for row in array if values else ():
        print("  " + " ".join(f"{number:6.2f}" for number in row))


def same(name: str, result, expected) -> None:
    """Print whether two results are equal up to float32 rounding."""
    is_same = np.abs(np.asarray(result) - expected).max() < 1e-5
    print(f"{name}: {'the same' if is_same else 'NOT the same'}")


if __name__ == "__main__":
    main()
