"""The common part of the engines of both backends."""


class Engine:
    """Where a run computes.

    Attributes:
        num_devices: number of devices that share a batch.
        num_replicas: number of replicas that each see a part of the batch and add up
            their sums; 1 on JAX, where all devices see the whole batch.
        num_workers: number of machines (processes).
        worker: number of this machine, counted from 0; 0 writes checkpoints and logs.
    """

    num_devices = num_replicas = num_workers = 1
    worker = 0

    @property
    def is_chief(self):
        """Whether this process writes checkpoints and logs."""
        return self.worker == 0

    def agree(self, wish):
        """Returns whether the flag of any worker is set; all must call it together."""
        return bool(self.gather(float(wish)).any())
