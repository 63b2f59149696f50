"""Variables of layers and models by their names in the original release."""

import numpy as np
from keras import ops

from routing_tf import layers

# Variables of one model or layer, by the release's name -> a part of our layers.
_KMEANS_NAMES = {"means": "centroids", "ema_count": "counts", "ema_means": "sums"}
_FEED_FORWARD_NAMES = {
    "geglu": {
        "weight1": "input_dense",
        "weight2": "gate_dense",
        "weight3": "output_dense",
    },
    "relu": {"conv1": "input_dense", "conv2": "output_dense"},
}
# The scope of a kind of heads, by the start of the names of the kind's settings.
HEAD_SCOPES = {
    "local": "local_nd",
    "sparsity_cluster": "cluster_attention/cluster_attention",
    "sparsity_cluster_strided": "cluster_strided_attention/cluster_strided_attention",
    "sparsity_strided": "strided_attention/strided_attention",
}
_KINDS = {
    layers.RoutedHeads: "sparsity_cluster",
    layers.HashedHeads: "sparsity_cluster",
    layers.ClusterStridedHeads: "sparsity_cluster_strided",
    layers.StridedHeads: "sparsity_strided",
    layers.LocalHeads: "local",
}
TOKEN_BIAS_WEIGHT = "token_bias_weight"
MODEL_SCOPE = "sparse_transformer/body"
IMAGE_MODEL_SCOPE = "sparse_imagetransformer/body"


def assign_variables(layer, values):
    """Writes variables of the release into a layer or model.

    Args:
        layer: a layer or model that a function of `routing_tf.models.release` built.
        values: dict of arrays by the release's variable names. Those of token biases
            may be left out. Any other mismatch is a `ValueError`, and nothing is
            written.
    """
    layer.release_feeds_token_bias = any(map(_is_token_bias_weight, values))
    if isinstance(layer, layers.MixedAttention) and not layer.built:
        memory_depth = np.shape(values.get(f"{layer.name}/v/kernel", (0,)))[0]
        depth = (None, None, layer.release_depth)
        layer.build(depth, (None, None, memory_depth or layer.release_depth))
    variables = variables_by_name(layer)
    check_shapes(variables, {name: np.shape(array) for name, array in values.items()})
    for name, variable in variables.items():
        variable.assign(values[name])


def check_shapes(variables, shapes):
    """Raises a `ValueError` that names all variables and shapes that do not match."""
    problems = [f"missing: {name}" for name in variables if name not in shapes]
    problems += [f"left over: {name}" for name in shapes if name not in variables]
    for name in variables.keys() & shapes.keys():
        expected, received = tuple(variables[name].shape), tuple(shapes[name])
        if expected != received:
            problems.append(f"shape: {name} is {expected}, received {received}")
    if problems:
        raise ValueError(
            "The values must match the variables one to one. Received:\n  "
            + "\n  ".join(sorted(problems))
        )


def read_variables(layer):
    """Returns all variables as arrays by the release's names, centroids included."""
    return {
        name: ops.convert_to_numpy(variable)
        for name, variable in variables_by_name(layer).items()
    }


def variables_by_name(layer):
    """Returns the Keras variables of a layer or model by the release's names.

    They include weights of token biases if `assign_variables` was given some.
    """
    if hasattr(layer, "hyperparameters") and hasattr(layer, "logits_dense"):
        is_image = layer.hyperparameters.kind == "image"
        names = _image_model_variables if is_image else _language_model_variables
        variables = names(layer)
    elif isinstance(layer, layers.MixedAttention) and _is_of_the_release(layer):
        variables = _attention_variables(layer, layer.name)
    else:
        raise ValueError(
            "The bridge knows the objects that functions of `models.release` build: "
            "`RoutingTransformerCausalLM`, `RoutingTransformerSeq2SeqLM` and "
            "`RoutingImageTransformer` models, and built `MixedAttention` layers with "
            "patterns of the release and `shared_head_projection=True`. Received: "
            f"{layer!r}"
        )
    if getattr(layer, "release_feeds_token_bias", False):
        return variables
    return {k: v for k, v in variables.items() if not _is_token_bias_weight(k)}


def _is_token_bias_weight(name):
    return name.endswith(f"/{TOKEN_BIAS_WEIGHT}")


def _is_of_the_release(layer):
    known = all(isinstance(group, tuple(_KINDS)) for group in layer.head_groups)
    return layer.built and layer.shared_head_projection and known


def _language_model_variables(lm):
    variables, outside = {}, {}
    norms = [lm.backbone.final_norm]
    if lm.hyperparameters.kind == "seq2seq":
        variables |= _encoder_variables(lm.backbone)
        outside = _encoder_embedding_variables(lm.backbone)
        norms.insert(0, lm.backbone.encoder_final_norm)
    for layer in lm.backbone.embedding_layers:
        if isinstance(layer, layers.TokenEmbedding):
            variables["embeddings/embedding"] = layer.embeddings
        elif layer.name == "embedding_projection":
            variables |= _dense_variables(layer, "emb_dense")
    for index, block in enumerate(lm.backbone.blocks):
        variables |= _block_variables(block, f"decoder_layer_{index}/self_attention")
    for norm, suffix in zip(norms, ("", "_1"), strict=False):
        if norm is not None:
            variables |= _norm_variables(norm, f"layer_prepostprocess{suffix}")
    if lm.output_projection is not None:
        variables |= _dense_variables(lm.output_projection, "final_dense_1")
    variables |= _dense_variables(lm.logits_dense, "final_dense_2")
    inside = {f"{MODEL_SCOPE}/{name}": value for name, value in variables.items()}
    return {**outside, **inside}


def _encoder_variables(backbone):
    variables = {}
    for index, block in enumerate(backbone.encoder_blocks):
        variables |= _block_variables(block, f"encoder_layer_{index}/self_attention")
    return variables


def _encoder_embedding_variables(backbone):
    return {
        encoder_table_name(layer.vocabulary_size, layer.embedding_dim): layer.embeddings
        for layer in backbone.encoder_embedding_layers
        if isinstance(layer, layers.TokenEmbedding)
    }


def encoder_table_name(vocabulary_size, depth):
    """Returns the name of tensor2tensor's table of an encoder's ids."""
    scope = MODEL_SCOPE.partition("/")[0]
    return f"{scope}/symbol_modality_{vocabulary_size}_{depth}/shared/weights_0"


def _image_model_variables(model):
    table = model.embedding.channel_embedding.embeddings
    variables = {"rgb_target_emb_channel": table}
    positions = model.embedding.position_embedding
    if positions is not None:
        variables["pos_emb_0"] = positions.row_embeddings
        variables["pos_emb_1"] = positions.column_embeddings
    if model.class_embedding is not None:
        table = model.class_embedding.embeddings
        variables["class_conditional_embedding/embedding"] = table
    for index, block in enumerate(model.blocks):
        variables |= _block_variables(block, f"decoder_layer_{index}/self_attention")
    if model.final_norm is not None:
        variables |= _norm_variables(model.final_norm, "layer_prepostprocess")
    variables |= _dense_variables(model.logits_dense, "final_dense")
    return {f"{IMAGE_MODEL_SCOPE}/{name}": value for name, value in variables.items()}


def _block_variables(block, scope):
    variables = _attention_variables(block.attention, f"{scope}/self_attention")
    if block.cross_attention is not None:
        variables |= _attention_variables(
            block.cross_attention, f"{scope}/enc_dec_attention"
        )
    if block.feed_forward is not None:
        names = _FEED_FORWARD_NAMES[block.feed_forward.activation]
        for name, attribute in names.items():
            dense = getattr(block.feed_forward, attribute)
            variables |= _dense_variables(dense, f"{scope}/ffn/{name}")
    sides = {
        "pre": ("input", "layer_prepostprocess"),
        "post": ("output", "layer_postprocess"),
    }
    side, name = sides[block.norm_position]
    for part, suffix in zip(block.parts, ("", "_1", "_2"), strict=False):
        (norm,) = getattr(block, f"{part}_{side}").norms
        variables |= _norm_variables(norm, f"{scope}/{name}{suffix}")
    return variables


def _attention_variables(attention, scope):
    variables = {f"{scope}/q/kernel": attention.query_kernel}
    if attention.key_kernel is not None:
        variables[f"{scope}/k/kernel"] = attention.key_kernel
    variables[f"{scope}/v/kernel"] = attention.value_kernel
    for group in attention.head_groups:
        variables |= _group_variables(group, f"{scope}/attention_nd")
    variables[f"{scope}/attention_nd/dense/kernel"] = attention.head_kernel
    variables[f"{scope}/output_transform/kernel"] = attention.output_kernel
    return variables


def _group_variables(group, scope):
    kind = next(kind for cls, kind in _KINDS.items() if isinstance(group, cls))
    group_scope = f"{scope}/{HEAD_SCOPES[kind]}"
    variables = {}
    if isinstance(group, layers.HashedHeads):
        variables[f"{group_scope}/projection_tensors"] = group.projections
    kmeans = getattr(group, "kmeans", None)
    for name, attribute in _KMEANS_NAMES.items():
        if hasattr(kmeans, attribute):
            variables[f"{group_scope}/{name}"] = getattr(kmeans, attribute)
    relative = group.dot_product.relative_position
    if relative is not None:
        tables = (relative.key_embeddings, relative.value_embeddings)
        for kind, table in zip(("keys", "values"), tables, strict=True):
            variables[f"{group_scope}/relative_positions_{kind}/embeddings"] = table
    if group.token_bias_weight is not None:
        helper = group_scope.rpartition("/")[0]
        variables[f"{helper}/{TOKEN_BIAS_WEIGHT}"] = group.bias_weight
    return variables


def _dense_variables(dense, scope):
    variables = {f"{scope}/kernel": dense.kernel}
    if dense.bias is not None:
        variables[f"{scope}/bias"] = dense.bias
    return variables


def _norm_variables(norm, scope):
    return {
        f"{scope}/layer_norm/layer_norm_scale": norm.gamma,
        f"{scope}/layer_norm/layer_norm_bias": norm.beta,
    }
