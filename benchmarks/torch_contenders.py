"""Contenders of PyTorch: its full attention and the package `routing-transformer`."""

import torch
from torch.nn import functional


def place(device):
    """Returns PyTorch's name of `"cpu"` or `"gpu"`."""
    return "cuda" if device == "gpu" else "cpu"


def full(shape, dtype, passes, device):
    """Returns a function that runs PyTorch's full causal attention once.

    Args:
        shape: `[1, heads, length, size]`.
        dtype: `"float32"` or `"bfloat16"`.
        passes: `"forward"` or `"forward+backward"`.
        device: `"cpu"` or `"gpu"`.
    """

    def attend(query, value):
        attention = functional.scaled_dot_product_attention
        return attention(query, query, value, is_causal=True), 0.0

    return _timed(attend, shape, dtype, passes, device)


def kmeans(shape, window, num_clusters, dtype, passes, device):
    """Returns a function that runs `KmeansAttention` once; see `full`.

    With gradients its centroids move, as the training loop of the package moves them.
    """
    from routing_transformer.routing_transformer import KmeansAttention

    torch.manual_seed(0)
    _, heads, _, size = shape
    layer = KmeansAttention(
        num_clusters, window, heads, size, causal=True, shared_qk=True
    )
    layer.to(device=place(device), dtype=getattr(torch, dtype))
    layer.train(passes != "forward")

    def attend(query, value):
        return layer(query, query, value)

    return _timed(attend, shape, dtype, passes, device, layer.kmeans.update)


def _timed(attend, shape, dtype, passes, device, update=lambda: None):
    """Returns a function that calls `attend`, and with gradients `update`."""
    generator = torch.Generator().manual_seed(0)
    query, value, weights = (
        torch.randn(shape, generator=generator).to(place(device), getattr(torch, dtype))
        for _ in range(3)
    )

    def forward():
        with torch.no_grad():
            attend(query, value)
        _wait(device)

    def both():
        query.grad = value.grad = None
        output, loss = attend(query.requires_grad_(), value.requires_grad_())
        ((output * weights).float().sum() + loss).backward()
        update()
        _wait(device)

    return forward if passes == "forward" else both


def train_step(sizes, length, reversible, dtype, device):
    """Returns a function that trains `RoutingTransformerLM` by one step of Adam.

    Args:
        sizes: see `benchmarks.contenders.SIZES`.
        length: number of tokens.
        reversible: whether activations are computed again from those after them.
        dtype: `"float32"`, or `"bfloat16"` for automatic mixed precision.
        device: `"cpu"` or `"gpu"`.
    """
    lm = _language_model(sizes, length, device, reversible)
    optimizer = torch.optim.Adam(lm.parameters())
    tokens = _tokens(sizes, length + 1, device)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def run():
        enabled = dtype == "bfloat16"
        with torch.autocast(place(device), dtype=torch.bfloat16, enabled=enabled):
            logits, loss = lm(inputs)
            nats = functional.cross_entropy(logits.transpose(1, 2), targets)
        (nats + loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        lm.update_kmeans()
        _wait(device)

    return run


def recompute(sizes, length, device):
    """Returns a function that finds the next token from the whole prefix.

    The package has no cache: this is what its `generate` does at each step.
    """
    lm = _language_model(sizes, length, device).eval()
    tokens = _tokens(sizes, length, device)

    def run():
        with torch.no_grad():
            logits, _ = lm(tokens)
            return logits[:, -1].argmax(-1).item()

    return run


def _language_model(sizes, length, device, reversible=False):
    """The model of the package; its default would be heads of 64."""
    from routing_transformer import RoutingTransformerLM

    torch.manual_seed(0)
    lm = RoutingTransformerLM(
        num_tokens=sizes["vocabulary_size"],
        dim=sizes["hidden_dim"],
        depth=sizes["num_layers"],
        max_seq_len=length,
        heads=sizes["num_heads"],
        dim_head=sizes["hidden_dim"] // sizes["num_heads"],
        n_local_attn_heads=sizes["num_heads"] // 2,
        window_size=sizes["window"],
        causal=True,
        reversible=reversible,
        # Its hook does not fire in reversible layers: `train_step` updates instead.
        _register_kmeans_update=False,
    )
    return lm.to(place(device))


def _tokens(sizes, length, device):
    generator = torch.Generator().manual_seed(0)
    shape = (1, length)
    tokens = torch.randint(sizes["vocabulary_size"], shape, generator=generator)
    return tokens.to(place(device))


def _wait(device):
    """Waits until the GPU is done."""
    if device == "gpu":
        torch.cuda.synchronize()
