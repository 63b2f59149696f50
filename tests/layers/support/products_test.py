import numpy as np
import pytest

from routing_tf.layers.routing.online_kmeans import normalize
from routing_tf.layers.support.tensors import product
from tests.layers.helpers import normal
from tests.layers.helpers import only_on


@only_on("tensorflow")
@pytest.mark.parametrize(
    "x, y",
    [
        ((2, 3, 4, 5), (2, 3, 5, 6)),
        ((2, 3, 4, 5), (3, 5, 6)),
        ((3, 4, 5), (2, 3, 5, 6)),
        ((2, 1, 4, 5), (2, 3, 5, 6)),
        ((2, 3, 1, 4, 5), (1, 3, 7, 5, 6)),
        ((None, 3, 4, 5), (3, 5, 6)),
    ],
)
def test_no_product_of_tensorflow_broadcasts(x, y):
    """Its `matmul` would write beyond its memory."""
    import tensorflow as tf

    specs = [tf.TensorSpec(shape, "float32") for shape in (x, y)]
    function = tf.function(product, input_signature=specs)
    graph = function.get_concrete_function().graph
    (operation,) = [o for o in graph.get_operations() if "MatMul" in o.type]
    left, right = (tensor.shape[:-2].as_list() for tensor in operation.inputs)
    assert left[1:] == right[1:] and None in x or left == right
    arrays = normal(*(n or 2 for n in x)), normal(*y, seed=1)
    np.testing.assert_allclose(
        function(*arrays), np.matmul(*arrays), rtol=1e-5, atol=1e-6
    )


@only_on("jax")
def test_compiled_products_broadcast():
    """All columns would be the first one if XLA read repeated matrices, on a CPU."""
    import jax

    x, y = normal(2, 2, 1024, 32), normal(2, 128, 32, seed=1)
    scores = jax.jit(lambda x, y: product(normalize(x), y, transpose_y=True))
    expected = np.einsum("bhld,hkd->bhlk", normalize(x), y)
    np.testing.assert_allclose(scores(x, y), expected, rtol=1e-4, atol=1e-4)
