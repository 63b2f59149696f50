"""Loading a tokenizer from the folder of a model."""

import keras_hub

from routing_tf.files import safe_loading


class PresetTokenizer(keras_hub.tokenizers.Tokenizer):
    """A tokenizer that presets of all models of this package may have.

    keras_hub takes tokenizers to be made for one backbone each.

    Args:
        *args: arguments of `keras_hub.tokenizers.Tokenizer`.
        **kwargs: arguments of `keras_hub.tokenizers.Tokenizer`, such as `name`.
    """

    @classmethod
    def from_preset(cls, preset, config_file="tokenizer.json", **kwargs):
        """Loads the tokenizer of a saved model.

        Args:
            preset: preset directory of a model of `routing_tf.models`, which must have
                been imported, or a handle that keras_hub downloads.
            config_file: name of the tokenizer's file there. Defaults to
                `"tokenizer.json"`.
            **kwargs: changes of the arguments of the tokenizer.

        Raises:
            ValueError: if the preset has a tokenizer of another class, or
                `routing_tf.files.safe_loading.check_preset` refuses a directory.

        Example:

        ```python
        from routing_tf import models
        from routing_tf.tokenizers import ByteTokenizer

        lm = models.RoutingTransformerCausalLM.from_preset(
            "byte_tiny",
            preprocessor=models.RoutingTransformerCausalLMPreprocessor(ByteTokenizer()),
        )
        lm.save_to_preset("my_preset")
        tokenizer = ByteTokenizer.from_preset("my_preset")
        ```
        """
        safe_loading.check_preset(preset)
        tokenizer = keras_hub.tokenizers.Tokenizer.from_preset(
            preset, config_file=config_file, **kwargs
        )
        if not isinstance(tokenizer, cls):
            raise ValueError(
                f"The tokenizer of the preset must be a {cls.__name__}. Received: "
                f"preset={preset!r} with a {type(tokenizer).__name__}. Call "
                "`from_preset` of this class"
            )
        return tokenizer
