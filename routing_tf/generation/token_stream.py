"""An endless stream of tokens, in constant memory."""

from routing_tf.files import safe_loading
from routing_tf.models import patterns
from routing_tf.models import steps
from routing_tf.models.preprocessing import known_ids

# Positions are int32.
MAX_TOKENS = 2**31 - 1


class TokenStream:
    """Continues prompts token by token, with one compiled step.

    The step is compiled once for each number of prompts. Memory is that of a cache,
    which has a fixed size if heads remember a bounded number of tokens (such as local,
    routed and hashed heads), or only sums (linear heads).

    Args:
        lm: a `RoutingTransformerCausalLM`.
        sampler: a keras_hub sampler that draws token by token, such as
            `keras_hub.samplers.TopPSampler(p=0.95, seed=1)`.
        num_tokens: number of tokens of a sequence, including the prompt, at which a
            stream ends; None (the default) for no end, if memory is bounded.

    Call arguments:
        prompts: list of prompts, each a list of at least one id; a text starts with the
            id 0.

    Yields:
        A position and the tokens there, a NumPy array `<int>[prompts]`: new ones, or
        those of prompts that have not ended yet. The first new token is at the length
        of the shortest prompt; earlier positions may come before it.

    Example:

    ```python
    import itertools
    import keras_hub
    from routing_tf import models
    from routing_tf.generation.token_stream import TokenStream

    lm = models.RoutingTransformerCausalLM.from_preset("byte_tiny")
    stream = TokenStream(lm, keras_hub.samplers.TopPSampler(p=0.95, seed=1))
    for position, tokens in itertools.islice(stream([[0, 102, 113]]), 5):
        print(position, tokens[0])
    ```
    """

    def __init__(self, lm, sampler, num_tokens=None):
        check_steps(lm.hyperparameters)
        self.num_tokens = num_tokens
        self.cache_length = cache_length(lm.hyperparameters, num_tokens)
        self._steps = steps.TextSteps(lm)
        self._draw = steps.drawing(lm, sampler)

    def __call__(self, prompts):
        self._check(prompts)
        size = self._steps.model.hyperparameters.vocabulary_size
        prompts = [known_ids(prompt, size, "a prompt").tolist() for prompt in prompts]
        longest = max(map(len, prompts))
        rows = [[*prompt, *[-1] * (longest - len(prompt))] for prompt in prompts]
        state = self._steps.begin(len(prompts), self.cache_length)
        length = self.num_tokens or MAX_TOKENS
        return steps.stream(self._steps, self._draw, rows, state, length)

    def _check(self, prompts):
        lengths = [len(prompt) for prompt in prompts]
        limit = self.num_tokens or MAX_TOKENS
        if not lengths or min(lengths) < 1 or max(lengths) >= limit:
            raise ValueError(
                "`prompts` must hold at least one, each of at least one id, and leave "
                f"room in `num_tokens`. Received: {len(lengths)} prompts of lengths "
                f"{lengths}, num_tokens={self.num_tokens}"
            )


def check_steps(hyperparameters):
    """Raises a `ValueError` if a model cannot compute token by token."""
    setting = hyperparameters.sees_later_tokens("prefix")
    if setting is not None:
        raise ValueError(
            "A stream of tokens needs a model in which no later token decides what a "
            f"head sees. Received: a model with `{setting}`, a flaw of the release. "
            "Its texts are computed as a whole, without a stream"
        )


def remembers_all_tokens(hyperparameters):
    """Returns the setting that makes the memory of a text model grow with the text.

    It is `"name=value"`; None if the memory does not grow.
    """
    h = hyperparameters
    if h.num_strided_heads:
        return f"num_strided_heads={h.num_strided_heads}"
    if h.num_factorized_heads:
        return f"num_factorized_heads={h.num_factorized_heads}"
    if h.coordinate_embeddings:
        return "coordinate_embeddings=True"
    if h.num_local_only_layers >= h.num_layers:
        return None
    if h.num_cluster_strided_heads:
        return f"num_cluster_strided_heads={h.num_cluster_strided_heads}"
    if h.routed_heads is not None:
        classes = [config["class_name"] for config in h.routed_heads]
        return f"routed_heads of {', '.join(classes)}, which are data"
    pattern = patterns.find(h.routing)
    grows = h.routing in ("full", "random") or pattern and not pattern.is_bounded
    return f"routing={h.routing!r}" if h.num_routed_heads and grows else None


def cache_length(hyperparameters, num_tokens=None):
    """Returns the `max_length` that the cache of a stream needs.

    The stream ends at `num_tokens` tokens; None for no end.

    Raises:
        ValueError: if there is no such length, or heads would remember far more tokens,
            see `safe_loading.check_memory`.
    """
    h = hyperparameters
    if num_tokens is not None and not 2 <= num_tokens <= MAX_TOKENS:
        raise ValueError(
            "`num_tokens` must be None or at least 2, for a prompt and a new token. "
            f"Received: num_tokens={num_tokens}"
        )
    if h.truncate_length is not None and (num_tokens or MAX_TOKENS) > h.truncate_length:
        received = "no end" if num_tokens is None else f"{num_tokens} tokens"
        raise ValueError(
            "A stream must end at the length to which this model cuts its inputs, "
            f"truncate_length={h.truncate_length}. Received: {received}, the prompt "
            "included. Set a smaller number of tokens"
        )
    if num_tokens is not None:
        steps.check_not_cut(h, num_tokens, "num_tokens")
    setting = remembers_all_tokens(h)
    if setting is None:
        safe_loading.check_memory(h, num_tokens)
        # The number of tokens that a head can see, for any length.
        return max(h.attention_window, h.local_reach)
    if num_tokens is None:
        raise ValueError(
            "An endless stream needs heads that remember a bounded number of tokens, "
            "or sums of them, such as local ones, or those of `routing` with token "
            "choice, expert choice, hashes or linear attention. Heads as data are not "
            f"judged. Received: a model with {setting}. Set a number of tokens"
        )
    return num_tokens
