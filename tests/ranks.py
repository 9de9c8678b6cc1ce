"""Many processes, one after the other in this one."""


class Ranks:
    """Stands in for the grid of one rank: collects what the ranks so far gave. The last one has all of it."""

    def __init__(self, rank: int, size: int, collected: list):
        self.data_rank, self.data_size, self.device, self.collected = rank, size, "cpu", collected

    @property
    def first(self) -> bool:
        return self.data_rank == 0

    def sum(self, values):
        self.collected.append(values)
        return sum(self.collected)

    def gather(self, value) -> list:
        self.collected.append(value)
        return list(self.collected)
