import keras
import numpy as np
import pytest

from routing_tf.layers.support.products import product
from tests.layers.helpers import normal

SHAPES = [
    ((2, 3, 4, 5), (2, 3, 5, 6)),
    ((2, 3, 4, 5), (3, 5, 6)),
    ((3, 4, 5), (2, 3, 5, 6)),
    ((2, 1, 4, 5), (2, 3, 5, 6)),
    ((2, 3, 1, 4, 5), (1, 3, 7, 5, 6)),
]


@pytest.mark.parametrize("x, y", SHAPES)
def test_axes_of_the_batch_are_broadcast(x, y):
    x, y = normal(*x), normal(*y, seed=1)
    found = keras.ops.convert_to_numpy(
        product(*map(keras.ops.convert_to_tensor, (x, y)))
    )
    np.testing.assert_allclose(found, np.matmul(x, y), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="of TensorFlow")
@pytest.mark.parametrize("x, y", SHAPES)
def test_no_product_of_tensorflow_broadcasts(x, y):
    """Its `matmul` would write beyond its memory."""
    import tensorflow as tf

    known = [tf.TensorSpec(shape, "float32") for shape in (x, y)]
    graph = tf.function(product).get_concrete_function(*known).graph
    (operation,) = [o for o in graph.get_operations() if "MatMul" in o.type]
    left, right = (tensor.shape[:-2] for tensor in operation.inputs)
    assert left == right


def test_the_batch_may_be_unknown():
    x, y = normal(2, 3, 4, 5), normal(3, 5, 6)
    inputs = keras.Input(x.shape[1:])
    model = keras.Model(
        inputs,
        keras.layers.Lambda(lambda x: product(x, keras.ops.convert_to_tensor(y)))(
            inputs
        ),
    )
    np.testing.assert_allclose(model.predict(x, verbose=0), x @ y, rtol=1e-5, atol=1e-6)
