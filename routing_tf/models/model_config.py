"""What makes a model as a whole, documented in this one place."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Settings of a model as a whole: sizes, blocks, initial weights, dropout, memory.

    One class serves all models: decoders of text, encoders with decoders
    (`num_encoder_layers` is not 0) and models of images (see `ImageConfig`). Lengths
    are in tokens; an image has one token for each channel of a pixel.

    `Hyperparameters` has these settings together with those of attention
    (`AttentionConfig`, `LocalHeadsConfig` and `RoutedHeadsConfig`), of images and of
    training, and checks that they fit each other.

    Args:
        vocabulary_size: number of token ids, including padding and end; for an image,
            number of intensities.
        max_sequence_length: length of the sequences that the model is trained on.
        max_input_length: length of the sequences that an encoder reads.
        truncate_length: length to which longer inputs are silently cut (the release);
            None for no limit.
        num_encoder_layers: number of blocks of the encoder; 0 for no encoder.
        encoder_inputs: what an encoder reads: `"tokens"`, or `"embeddings"` of the
            size `hidden_dim` (the release).
        num_layers: number of transformer blocks of the decoder.
        hidden_dim: size of a token's vector between the blocks.
        embedding_dim: size of the token embeddings; None for `hidden_dim`.
        intermediate_dim: size inside the feed-forward parts.
        feed_forward: `"geglu"`, `"relu"`, `"sigmoid_gelu"` or `"none"`, see
            `FeedForward`. Or a layer of another system: `"mixture_of_experts"`, two
            of eight experts in every other block; `"product_key_memory"`, a memory in
            the middle block; or `"sparse_feed_forward"`. Blocks without such a layer
            have `"geglu"`. The three take no rectangular blocks of images.
        norm_position: `"pre"` or `"post"`, where each block normalizes.
        scale_embeddings: whether token embeddings are multiplied by the square root of
            their size.
        timing_signal: whether sinusoidal positions are added to the embeddings.
        coordinate_embeddings: whether positions have embeddings of their coordinates,
            see `GridEmbedding`. In an image: embeddings of row, column and channel
            instead of the others, and one table of values for all channels. In a text:
            embeddings of the local block and of the place in it, up to
            `max_sequence_length`.
        restart_positions: whether the positions of `timing_signal` and
            `coordinate_embeddings` restart in each document of packed rows, which the
            segment ids among the inputs of a text model tell apart.
        input_dropout: rate of elements of the encoder's inputs that are set to 0; the
            others are not scaled.
        token_dropout: rate of the decoder's input tokens replaced by id 0.
        embedding_dropout: rate of dropout on the token embeddings.
        residual_dropout: rate of dropout on the output of each part of a block.
        drops_inputs: whether the input of the first block also has `residual_dropout`.
        feed_forward_dropout: rate of dropout inside the feed-forward parts.
        remat: whether training recomputes the activations inside a block for the
            gradients instead of storing them: less memory, more time.
        remat_feed_forward: whether training recomputes only the feed-forward parts.
            Together with `remat_attention`, this needs nearly as little memory as
            `remat`, and less time.
        initializer: `"unit_scaling"`, the uniform one of tensor2tensor; or
            `"fan_in_normal"`, that of the Sparse Transformer: weights are normal with a
            standard deviation of `initializer_gain / sqrt(inputs)`, embeddings with
            `initializer_gain / sqrt(size)`, as is the sum of coordinate embeddings, and
            logits start at 0.
        initializer_gain: scale of the initializer of all weights.
        scale_residual_initializer: whether the initial weights of the last projection
            of each part of a block are divided by `sqrt(2 * layers)` of its stack.
        compatibility: flaws of the release to reproduce: `"trained"`, those that its
            trained weights rely on; `"exact"`, all of them; `"exact_shared_padding"`,
            all, with the padding of the first row for the whole batch
            (`cache_padding_bias`); or None for no flaws. Patterns that the release does
            not have never have flaws.
    """

    vocabulary_size: int = 98302
    max_sequence_length: int = 4096
    max_input_length: int = 4096
    truncate_length: int | None = None
    num_encoder_layers: int = 0
    encoder_inputs: str = "tokens"
    num_layers: int = 12
    hidden_dim: int = 512
    embedding_dim: int | None = None
    intermediate_dim: int = 2048
    feed_forward: str = "geglu"
    norm_position: str = "pre"
    scale_embeddings: bool = False
    timing_signal: bool = False
    coordinate_embeddings: bool = False
    restart_positions: bool = False
    input_dropout: float = 0.0
    token_dropout: float = 0.0
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    drops_inputs: bool = True
    feed_forward_dropout: float = 0.0
    remat: bool = False
    remat_feed_forward: bool = False
    initializer: str = "unit_scaling"
    initializer_gain: float = 1.0
    scale_residual_initializer: bool = False
    compatibility: str | None = None
