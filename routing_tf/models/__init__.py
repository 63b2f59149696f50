"""Models on keras_hub's conventions, their presets and the bridge to the release."""

from routing_tf.models import release as release
from routing_tf.models.encoder_decoder import (
    RoutingTransformerEncoderDecoder as RoutingTransformerEncoderDecoder,
)
from routing_tf.models.hyperparameters import Hyperparameters as Hyperparameters
from routing_tf.models.image_transformer import (
    RoutingImageTransformer as RoutingImageTransformer,
)
from routing_tf.models.language_models import (
    RoutingTransformerCausalLM as RoutingTransformerCausalLM,
)
from routing_tf.models.language_models import (
    RoutingTransformerCausalLMPreprocessor as RoutingTransformerCausalLMPreprocessor,
)
from routing_tf.models.language_models import (
    RoutingTransformerSeq2SeqLM as RoutingTransformerSeq2SeqLM,
)
from routing_tf.models.language_models import (
    RoutingTransformerSeq2SeqLMPreprocessor as RoutingTransformerSeq2SeqLMPreprocessor,
)
from routing_tf.models.presets import preset_description as preset_description
from routing_tf.models.presets import preset_hyperparameters as preset_hyperparameters
from routing_tf.models.presets import preset_names as preset_names
from routing_tf.models.routing_transformer import (
    RoutingTransformer as RoutingTransformer,
)
from routing_tf.settings.hyperparameters import AttentionConfig as AttentionConfig
from routing_tf.settings.hyperparameters import ImageConfig as ImageConfig
from routing_tf.settings.hyperparameters import LocalHeadsConfig as LocalHeadsConfig
from routing_tf.settings.hyperparameters import ModelConfig as ModelConfig
from routing_tf.settings.hyperparameters import RoutedHeadsConfig as RoutedHeadsConfig
from routing_tf.settings.hyperparameters import TrainingConfig as TrainingConfig
