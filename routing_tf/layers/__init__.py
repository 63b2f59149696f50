"""Layers for content-based sparse attention.

To import them takes Keras and NumPy alone. What only one backend can do is imported
where it runs.
"""

from routing_tf.layers.clustering import Clustering as Clustering
from routing_tf.layers.embeddings import GridEmbedding as GridEmbedding
from routing_tf.layers.embeddings import TimingSignal as TimingSignal
from routing_tf.layers.embeddings import TokenDropout as TokenDropout
from routing_tf.layers.embeddings import TokenEmbedding as TokenEmbedding
from routing_tf.layers.feed_forward import FeedForward as FeedForward
from routing_tf.layers.heads.axial import AxialHeads as AxialHeads
from routing_tf.layers.heads.block_pair import BlockPairHeads as BlockPairHeads
from routing_tf.layers.heads.block_top_k import BlockTopKHeads as BlockTopKHeads
from routing_tf.layers.heads.cluster_strided import (
    ClusterStridedHeads as ClusterStridedHeads,
)
from routing_tf.layers.heads.clustered_queries import (
    ClusteredQueryHeads as ClusteredQueryHeads,
)
from routing_tf.layers.heads.compressed import CompressedHeads as CompressedHeads
from routing_tf.layers.heads.feature_map import FeatureMapHeads as FeatureMapHeads
from routing_tf.layers.heads.fixed import FixedHeads as FixedHeads
from routing_tf.layers.heads.full import FullHeads as FullHeads
from routing_tf.layers.heads.global_tokens import GlobalHeads as GlobalHeads
from routing_tf.layers.heads.hashed import HashedHeads as HashedHeads
from routing_tf.layers.heads.head_group import HeadGroup as HeadGroup
from routing_tf.layers.heads.induced import InducedHeads as InducedHeads
from routing_tf.layers.heads.known_models import bigbird_heads as bigbird_heads
from routing_tf.layers.heads.known_models import etc_heads as etc_heads
from routing_tf.layers.heads.known_models import longformer_heads as longformer_heads
from routing_tf.layers.heads.linformer import LinformerHeads as LinformerHeads
from routing_tf.layers.heads.local import LocalHeads as LocalHeads
from routing_tf.layers.heads.long_short import LongShortHeads as LongShortHeads
from routing_tf.layers.heads.luna import LunaHeads as LunaHeads
from routing_tf.layers.heads.native_sparse import NativeSparseHeads as NativeSparseHeads
from routing_tf.layers.heads.nystrom import NystromHeads as NystromHeads
from routing_tf.layers.heads.random import RandomHeads as RandomHeads
from routing_tf.layers.heads.random_blocks import RandomBlockHeads as RandomBlockHeads
from routing_tf.layers.heads.routed import RoutedHeads as RoutedHeads
from routing_tf.layers.heads.sinkhorn import SinkhornHeads as SinkhornHeads
from routing_tf.layers.heads.sliding import SlidingHeads as SlidingHeads
from routing_tf.layers.heads.strided import StridedHeads as StridedHeads
from routing_tf.layers.heads.synthesizer import SynthesizerHeads as SynthesizerHeads
from routing_tf.layers.held_updates import hold_updates as hold_updates
from routing_tf.layers.image_embeddings import RowColumnEmbedding as RowColumnEmbedding
from routing_tf.layers.image_embeddings import SubpixelEmbedding as SubpixelEmbedding
from routing_tf.layers.mixed_attention import MixedAttention as MixedAttention
from routing_tf.layers.online_kmeans import OnlineKMeans as OnlineKMeans
from routing_tf.layers.relative_position import RelativePosition as RelativePosition
from routing_tf.layers.routing_attention import RoutingAttention as RoutingAttention
from routing_tf.layers.scaled_dot_product import ScaledDotProduct as ScaledDotProduct
from routing_tf.layers.stated_gradients import (
    automatic_gradients as automatic_gradients,
)
from routing_tf.layers.transformer_block import SublayerSteps as SublayerSteps
from routing_tf.layers.transformer_block import TransformerBlock as TransformerBlock
