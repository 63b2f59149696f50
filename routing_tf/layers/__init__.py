"""Layers for content-based sparse attention.

Importing them needs only Keras and NumPy. Code for a single backend is imported where
it runs.
"""

from routing_tf.layers.attention.mixed_attention import MixedAttention as MixedAttention
from routing_tf.layers.attention.projection import ProjectionConfig as ProjectionConfig
from routing_tf.layers.attention.routing_attention import (
    RoutingAttention as RoutingAttention,
)
from routing_tf.layers.blocks.embeddings import GridEmbedding as GridEmbedding
from routing_tf.layers.blocks.embeddings import TimingSignal as TimingSignal
from routing_tf.layers.blocks.embeddings import TokenDropout as TokenDropout
from routing_tf.layers.blocks.embeddings import TokenEmbedding as TokenEmbedding
from routing_tf.layers.blocks.feed_forward import FeedForward as FeedForward
from routing_tf.layers.blocks.image_embeddings import (
    RowColumnEmbedding as RowColumnEmbedding,
)
from routing_tf.layers.blocks.image_embeddings import (
    SubpixelEmbedding as SubpixelEmbedding,
)
from routing_tf.layers.blocks.transformer_block import SublayerSteps as SublayerSteps
from routing_tf.layers.blocks.transformer_block import (
    TransformerBlock as TransformerBlock,
)
from routing_tf.layers.heads.cluster_strided import (
    ClusterStridedHeads as ClusterStridedHeads,
)
from routing_tf.layers.heads.fixed import FixedHeads as FixedHeads
from routing_tf.layers.heads.full import FullHeads as FullHeads
from routing_tf.layers.heads.hashed import HashedHeads as HashedHeads
from routing_tf.layers.heads.head_group import HeadGroup as HeadGroup
from routing_tf.layers.heads.local import LocalHeads as LocalHeads
from routing_tf.layers.heads.multipole import MultipoleHeads as MultipoleHeads
from routing_tf.layers.heads.random import RandomHeads as RandomHeads
from routing_tf.layers.heads.routed import RoutedHeads as RoutedHeads
from routing_tf.layers.heads.sliding import SlidingHeads as SlidingHeads
from routing_tf.layers.heads.strided import StridedHeads as StridedHeads
from routing_tf.layers.routing.online_kmeans import Clustering as Clustering
from routing_tf.layers.routing.online_kmeans import OnlineKMeans as OnlineKMeans
from routing_tf.layers.softmax.relative_position import (
    RelativePosition as RelativePosition,
)
from routing_tf.layers.softmax.scaled_dot_product import (
    ScaledDotProduct as ScaledDotProduct,
)
from routing_tf.layers.support.backends import (
    automatic_gradients as automatic_gradients,
)
from routing_tf.layers.support.parts_of_batches import hold_updates as hold_updates
