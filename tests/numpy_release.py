"""The forward pass of the release's language models in plain NumPy.

Written from the rules alone, and sharing no code with the package: tests hold the
models against it. Arrays are float64 `[length, ...]`, one text at a time; weights come
by the release's names without the scope of the model.
"""

import numpy as np


class NumpyLanguageModel:
    """A decoder-only model of the release: local and routed heads, shared queries.

    Args:
        weights: dict of arrays by the release's names.
        hparams: dict of the release's hyperparameters.
    """

    def __init__(self, weights, hparams):
        self.weights = {
            name.partition("/body/")[2]: array.astype("float64")
            for name, array in weights.items()
        }
        self.hparams = hparams

    def logits(self, targets):
        """Returns the logits of one text, given its ids."""
        ids = np.concatenate([[0], targets[:-1]])
        x = self.weights["embeddings/embedding"][ids]
        x = self.dense("emb_dense", x)
        for layer in range(self.hparams["num_decoder_layers"]):
            scope = f"decoder_layer_{layer}/self_attention"
            y = self.attention(f"{scope}/self_attention", x)
            x = self.layer_norm(f"{scope}/layer_postprocess/layer_norm", x + y)
            y = self.feed_forward(f"{scope}/ffn", x)
            x = self.layer_norm(f"{scope}/layer_postprocess_1/layer_norm", x + y)
        if "final_dense_1/kernel" in self.weights:
            x = self.dense("final_dense_1", x)
        return self.dense("final_dense_2", x)

    def dense(self, scope, x):
        y = x @ self.weights[f"{scope}/kernel"]
        return y + self.weights.get(f"{scope}/bias", 0.0)

    def layer_norm(self, scope, x):
        scale = self.weights[f"{scope}/layer_norm_scale"]
        return normalized(x) * scale + self.weights[f"{scope}/layer_norm_bias"]

    def feed_forward(self, scope, x):
        if f"{scope}/conv1/kernel" in self.weights:
            return self.dense(
                f"{scope}/conv2", np.maximum(self.dense(f"{scope}/conv1", x), 0.0)
            )
        gate = self.dense(f"{scope}/weight1", x)
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        gate = gate * 0.5 * (1.0 + np.tanh(inner))
        return self.dense(f"{scope}/weight3", gate * self.dense(f"{scope}/weight2", x))

    def attention(self, scope, x):
        shared = self.weights[f"{scope}/attention_nd/dense/kernel"]
        size = len(shared)
        q, k, v = (self.heads(self.dense(f"{scope}/{name}", x), size) for name in "qkv")
        q = q * size**-0.5
        means = f"{scope}/attention_nd/cluster_attention/cluster_attention/means"
        routed = len(self.weights.get(means, ()))
        cluster = means.rpartition("/")[0]
        outputs = [
            self.routed_head(cluster, self.weights[means][i], q[i], v[i])
            for i in range(routed)
        ]
        local = f"{scope}/attention_nd/local_nd"
        outputs += [
            self.local_head(local, q[i], k[i], v[i]) for i in range(routed, len(q))
        ]
        joined = np.concatenate([output @ shared for output in outputs], axis=-1)
        return self.dense(f"{scope}/output_transform", joined)

    def heads(self, x, size):
        return np.stack([x[:, i : i + size] for i in range(0, x.shape[1], size)])

    def local_head(self, scope, q, k, v):
        """A query sees its block up to itself, and the blocks of the flange before."""
        (block,), (flange,) = self.hparams["query_shape"], self.hparams["memory_flange"]
        i, j = np.ogrid[: len(q), : len(q)]
        seen = (j <= i) & (j // block >= i // block - flange // block)
        return self.attend(scope, q, k, v, seen)

    def routed_head(self, scope, means, q, v):
        """Each mean takes the tokens that score highest; ranks stand for positions."""
        q = normalized(q)
        window = self.hparams["sparsity_cluster_attention_window"]
        total, count = np.zeros_like(v), np.zeros((len(v), 1))
        for mean in means:
            members = np.sort(np.argsort(-(q @ mean), kind="stable")[:window])
            seen = np.tri(len(members), dtype="bool")
            items = q[members]
            total[members] += self.attend(scope, items, items, v[members], seen)
            count[members] += 1
        return total / (count + 0.01)

    def attend(self, scope, q, k, v, seen):
        """Softmax attention with relative positions, if the scope has some."""
        logits = q @ k.T
        tables = [
            self.weights.get(f"{scope}/relative_positions_{kind}/embeddings")
            for kind in ("keys", "values")
        ]
        if tables[0] is not None:
            limit = len(tables[0]) // 2
            places = np.arange(len(k))
            distances = np.clip(places - places[:, None], -limit, limit) + limit
            logits += np.einsum("id,ijd->ij", q, tables[0][distances])
        weights = np.where(seen, np.exp(logits - logits.max(-1, keepdims=True)), 0.0)
        weights /= weights.sum(axis=-1, keepdims=True)
        output = weights @ v
        if tables[0] is not None:
            output += np.einsum("ij,ijd->id", weights, tables[1][distances])
        return output


def normalized(x):
    """Layer normalization without scale or bias."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)
