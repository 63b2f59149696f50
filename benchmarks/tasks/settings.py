"""What decides how a run ends: the task, the pattern, and all hyperparameters."""

import dataclasses
import hashlib
import json

from benchmarks.tasks import copying
from benchmarks.tasks import listops
from benchmarks.tasks import mad
from benchmarks.tasks import mqar
from benchmarks.tasks import texts
from routing_tf.models.hyperparameters import Hyperparameters
from routing_tf.models.hyperparameters import parse_overrides

#: All tasks by name.
TASKS = {
    task.name: task
    for module in (mqar, mad, copying, texts, listops)
    for task in module.TASKS
}
LOCAL, CONVOLUTION = FIRST_LAYERS = ("local", "convolution")
#: Hyperparameters of all models where the task has no others.
COMMON = parse_overrides(
    "num_layers=2,num_local_only_layers=1,hidden_dim=64,key_dim=64,num_local_heads=0,"
    "num_routed_heads=1,feed_forward=none,routed_relative_positions=false,"
    "relative_key_stddev=2,balance_rate=0.01,learning_rate=0.003,warmup_steps=50,"
    "learning_rate_schedule=constant*linear_warmup*cosine_decay,gradient_clip_norm=1,"
    "train_steps=2000"
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run.

    Args:
        task: a name of `TASKS`.
        pattern: a name that `Hyperparameters.routing` can have, or `"local"`.
        seed: of the weights and the training data.
        first_layer: `"convolution"` for that of zoology instead of the first layer.
        stop_at: accuracy on held-out sequences at which training ends.
        changes: dict of hyperparameters that are not the task's.
    """

    task: str
    pattern: str
    seed: int = 0
    first_layer: str = LOCAL
    stop_at: float = 1.0
    changes: dict = dataclasses.field(default_factory=dict)

    @property
    def of_task(self):
        """The `Task`."""
        return TASKS[self.task]

    @property
    def hyperparameters(self):
        """The `Hyperparameters`; raises a `ValueError` if some do not fit."""
        task = self.of_task
        sizes = {
            "vocabulary_size": task.vocabulary,
            "max_sequence_length": task.length,
            "batch_tokens": task.batch_size * task.length,
        }
        own = COMMON | parse_overrides(task.hyperparameters) | sizes | self.changes
        own.setdefault("max_relative_position", 2 * own["local_block_length"])
        if self.pattern == LOCAL:
            own["num_local_only_layers"] = own["num_layers"]
            own["local_key_shift"] = own.pop("routed_key_shift", 0)
        else:
            own["routing"] = self.pattern
        if task.is_of_encoders:
            own |= {
                "num_encoder_layers": own["num_layers"],
                "max_input_length": task.length,
                "encoder_routing": own.pop("routing", None),
            }
        return Hyperparameters().replace(**own)

    @property
    def batch_size(self):
        """Sequences of a training step."""
        return max(1, self.hyperparameters.batch_tokens // self.of_task.length)

    @property
    def key(self):
        """What a record knows the run by: a dict that JSON can hold."""
        fields, defaults = self.hyperparameters.to_dict(), Hyperparameters().to_dict()
        own = {name: x for name, x in fields.items() if x != defaults[name]}
        run = dataclasses.asdict(self) | {"hyperparameters": own}
        del run["changes"]
        return run

    @property
    def folder(self):
        """Name of the run's folder."""
        text = json.dumps(self.key, sort_keys=True)
        short = hashlib.sha256(text.encode()).hexdigest()[:8]
        return f"{self.task}-{self.pattern}-{self.seed}-{short}"
