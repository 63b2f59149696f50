"""What the engines of both backends share."""


class Engine:
    """Where a run computes.

    Attributes:
        num_devices: number of devices that share a batch.
        num_replicas: number of replicas that each see a part of the batch and add up
            sums; 1 on JAX, where all see the whole batch.
        num_workers: number of machines (processes).
        worker: number of this one, counted from 0; 0 writes checkpoints and logs.
    """

    num_devices = num_replicas = num_workers = 1
    worker = 0

    @property
    def is_chief(self):
        """Whether this process writes checkpoints and logs."""
        return self.worker == 0

    def agree(self, wish):
        """Returns whether any worker has a wish; all of them are to ask at once."""
        return bool(self.gather(float(wish)).any())
