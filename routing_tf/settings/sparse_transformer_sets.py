"""The models of Child et al. (2019) by name, with the training of the paper.

The paper leaves open the learning rates of text and ImageNet, all batch sizes, and the
arrangement of heads for images. Here, learning rates are those of CIFAR-10, and batches
have one or two sequences for each of its GPUs. Heads of images alternate, which is the
paper's first choice and that of OpenAI's later code (`distribution_augmentation`); that
code also has the stride of CIFAR-10, one row of an image.
"""

_SHARED = {
    "num_local_heads": 0,
    "num_routed_heads": 0,
    "coordinate_embeddings": True,
    "feed_forward": "sigmoid_gelu",
    "attention_bias": True,
    "initializer": "fan_in_normal",
    "initializer_gain": 0.125,
    "scale_residual_initializer": True,
    "drops_inputs": False,
    "remat": True,
    "optimizer": "adamw",
    "adam_beta_2": 0.999,
    "adam_epsilon": 1e-8,
    "learning_rate": 0.00035,
    "learning_rate_schedule": "constant*linear_warmup*cosine_decay",
    "warmup_steps": 5000,
    "weight_decay": 0.01,
    "gradient_clip_norm": 1.0,
}

# name -> (description, hyperparameters)
SPARSE_TRANSFORMER_SETS = {
    "sparse_transformer_cifar10": (
        "Sparse Transformer of Child et al.: strided, CIFAR-10, 59 million weights.",
        dict(
            **_SHARED,
            vocabulary_size=256,
            max_sequence_length=32 * 32 * 3,
            image_height=32,
            image_width=32,
            num_channels=3,
            num_layers=128,
            hidden_dim=256,
            # Half of the usual size.
            intermediate_dim=512,
            key_dim=64,
            value_dim=128,
            num_factorized_heads=2,
            local_block_length=96,
            residual_dropout=0.25,
            batch_tokens=16 * 32 * 32 * 3,
            # 120 epochs of 48,000 images.
            train_steps=360_000,
        ),
    ),
    "sparse_transformer_enwik8": (
        "Sparse Transformer of Child et al.: fixed, enwik8, 95 million weights.",
        dict(
            **_SHARED,
            vocabulary_size=258,
            max_sequence_length=12288,
            num_layers=30,
            hidden_dim=512,
            intermediate_dim=2048,
            num_factorized_heads=8,
            factorized_pattern="fixed",
            factorized_arrangement="merged",
            local_block_length=128,
            num_summary_columns=32,
            # Preferable with several heads (section 4.3).
            distinct_summaries=True,
            residual_dropout=0.4,
            batch_tokens=8 * 12288,
            # 80 epochs of 90 million bytes.
            train_steps=73_242,
        ),
    ),
    "sparse_transformer_imagenet64": (
        "Sparse Transformer of Child et al.: strided, ImageNet 64 x 64, 152 million "
        "weights.",
        dict(
            **_SHARED,
            vocabulary_size=256,
            max_sequence_length=64 * 64 * 3,
            image_height=64,
            image_width=64,
            num_channels=3,
            num_layers=48,
            hidden_dim=512,
            intermediate_dim=2048,
            num_factorized_heads=16,
            local_block_length=128,
            residual_dropout=0.01,
            batch_tokens=64 * 64 * 64 * 3,
            # 70 epochs of 1,281,149 images.
            train_steps=1_401_257,
        ),
    ),
}
