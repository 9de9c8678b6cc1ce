"""What DeepSpeed's ZeRO 3 gathers in a step, by its own rules.

Its coordinator writes down in which order one forward pass, and the backward passes up to the next
forward, use the modules. Where the next such round goes the same way it fetches ahead, and keeps what is
used again soon. A LoMDM's rounds differ: features and phi; z1; z2 and the gradient of phi. So at most
every other one has a record, and that one only up to where it goes another way; everything else is
gathered at each use and let go of at once, the small parameters that it would like to keep among them.
"""

from collections import Counter, deque
from functools import cache

from lomdm_dist.config import Config

AHEAD = 50_000_000  # elements that it fetches ahead; this and the next two are DeepSpeed's defaults
SOON = 1_000_000_000  # elements used in between, up to which what is used again is kept
SMALL = 100_000  # elements: up to there a parameter is to be kept
KEPT_AT_MOST = 1_000_000_000
FEW = 4  # micro-batches
BLOCK = ("modulation", "norm1", "qkv", "attention_out", "norm2", "mlp_in", "mlp_out")
# nothing flows back through their inputs, so DeepSpeed sees no end of their backward use, and of what they
# have keeps the small
NO_END = ("backbone.embedding", "backbone.condition.mlp.0", "psi", "psi.block.modulation")
NO_END += ("phi", "phi.block.modulation")
WHOLE = ""  # the model, with no parameters of its own, where a round begins
CONDITION = ["backbone.condition.mlp.0", "backbone.condition.mlp.2"]


def gathered(config: Config, sizes: dict[str, int], ranks: int, accumulation: int) -> tuple[float, float]:
    """(all-gathers, elements) of a step of so many micro-batches: the mean of two steps, after two others.

    sizes: elements of each parameter, by name; gathered, they are filled up to divide over the ranks. After a
    few micro-batches each two more gather what the two before did, so no more than a few are followed.
    """
    rounds = rounds_of(config, {name.rpartition(".")[0] for name in sizes})
    of = tuple(tuple(uses) for uses in rounds), tuple(sizes.items())
    more, few = divmod(accumulation - FEW, 2)
    if more <= 0:
        return _filled(_followed(*of, accumulation), sizes, ranks)
    before, after = (_filled(_followed(*of, n), sizes, ranks) for n in (FEW - 2 + few, FEW + few))
    return tuple(end + more * (end - start) for start, end in zip(before, after, strict=True))


def _filled(counts: tuple[int, Counter], sizes: dict[str, int], ranks: int) -> tuple[float, float]:
    calls, times = counts
    elements = sum(count * -(-sizes[name] // ranks) * ranks for name, count in times.items())
    return calls / 2, elements / 2


@cache
def _followed(rounds: tuple, sizes: tuple, accumulation: int) -> tuple[int, Counter]:
    """The all-gathers of two steps, and how often each parameter is in one."""
    coordinator = _Coordinator(dict(sizes))
    for step in range(4):
        if step == 2:
            coordinator.calls, coordinator.times = 0, Counter()
        for _ in range(accumulation):
            for uses in rounds:
                coordinator.run(list(uses))
        coordinator.update()
    return coordinator.calls, coordinator.times


Use = tuple[str, bool]  # a module, and whether in a backward pass


def rounds_of(config: Config, modules: set[str]) -> list[list[Use]]:
    """The modules that each round uses, in order: one from each forward pass of the engine to the next."""
    objective = config.objective
    blocks = [f"backbone.blocks.{number}" for number in range(config.model.blocks)]
    trunk = [*CONDITION, "backbone.embedding", *_of(blocks)]
    psi, phi = (
        [name for name in [*_of([f"{head}.block"]), head] if name in modules] for head in ("psi", "phi")
    )
    output = ["backbone.output", "backbone.output.modulation", "backbone.output.norm"]
    recompute = config.train.recompute
    backward_of_trunk = [*_backward(_of(blocks), recompute), "backbone.embedding", *CONDITION[::-1]]
    forward = [WHOLE, *trunk, *psi, *output]
    backward = [*output[::-1], *_backward(psi, recompute), *backward_of_trunk]
    forward, backward = _uses(forward, False), _uses(backward, True)
    rounds = [forward + backward] * config.passes[0]
    if objective.samples == 2:
        first = [WHOLE, *(trunk + phi if objective.name == "lomdm" else ["token_exponents"])]
        last = _backward(phi, recompute) if objective.name == "lomdm" else ["token_exponents"]
        if objective.name == "lomdm" and not objective.stop_gradient:
            last += backward_of_trunk
        rounds = [_uses(first, False), *rounds[:-1], rounds[-1] + _uses(last, True)]
    return rounds


def _uses(modules: list[str], backward: bool) -> list[Use]:
    return [(module, backward) for module in modules]


def _of(blocks: list[str]) -> list[str]:
    return [f"{block}.{layer}" for block in blocks for layer in BLOCK]


def _backward(layers: list[str], recompute: str) -> list[str]:
    """In reverse; before that, a block at a time, what is computed again. A head's last layer comes first."""
    again = {"none": (), "attention": ("norm1", "qkv"), "block": BLOCK}[recompute]
    whole = len(layers) // len(BLOCK) * len(BLOCK)
    uses = layers[whole:][::-1]
    for end in range(whole, 0, -len(BLOCK)):
        block = layers[end - len(BLOCK) : end]
        uses += [layer for layer in block if layer.rpartition(".")[2] in again] + block[::-1]
    return uses


class _Coordinator:
    def __init__(self, sizes: dict[str, int]):
        self.sizes, self.own = sizes, {WHOLE: []}
        for name in sizes:
            self.own.setdefault(name.rpartition(".")[0], []).append(name)
        self.small = {name for name, size in sizes.items() if size < SMALL}
        self.calls, self.times = 0, Counter()
        self.mode, self.record = "invalid", []
        self.here, self.ahead = set(), set()  # gathered; of these not yet used
        self.held = 0  # elements of those gathered
        self.released = {}  # by module and place, once and for all: DeepSpeed caches it beyond the record

    def gather(self, names: set[str]) -> None:
        if names:
            self.calls += 1
            self.times.update(names)
            self.keep(names)

    def keep(self, names: set[str]) -> None:
        self.held += sum(self.sizes[name] for name in names - self.here)
        self.here |= names

    def drop(self, names: set[str]) -> None:
        self.held -= sum(self.sizes[name] for name in names & self.here)
        self.here -= names

    def run(self, uses: list[Use]) -> None:
        """One round."""
        self.mode = "record" if self.mode == "invalid" else "complete"
        self.record = [] if self.mode == "record" else self.record
        queue = deque((name, at) for at, module in enumerate(self.record) for name in self.own[module])
        fetched_for = {}
        for at, (module, backward) in enumerate(uses):
            if self.mode == "complete" and self.record[at : at + 1] != [module]:
                self.mode, self.record = "invalid", []
                self.drop(self.ahead)
                self.ahead = set()
            if self.mode == "record":
                self.record.append(module)
            own = set(self.own[module])
            self.gather(own - self.here)
            self.ahead -= own
            if self.mode == "complete":
                self._fetch_ahead(queue, fetched_for, own, at)
                self.drop(self._to_release(module, at, fetched_for))
            else:
                self.drop(own - self.small if backward and module in NO_END else own)

    def _fetch_ahead(self, queue: deque, fetched_for: dict, own: set[str], at: int) -> None:
        due, passed = {name for name in own if fetched_for.get(name, -1) < at}, set()
        while queue and len(passed) < len(due):
            name, place = queue.popleft()
            fetched_for[name] = place
            passed.add(name)
        room = min(AHEAD, KEPT_AT_MOST - self.held)
        names, count = set(), 0
        while queue and count < room:
            name, place = queue.popleft()
            fetched_for[name] = max(fetched_for.get(name, -1), place)
            if name not in self.here and name not in names:
                names.add(name)
                count += self.sizes[name]
        self.gather(names)
        self.ahead |= names

    def _to_release(self, module: str, at: int, fetched_for: dict) -> set[str]:
        key = module, at
        if key not in self.released:
            names = {n for n in self.own[module] if n not in self.small and fetched_for.get(n, -1) <= at + 1}
            used = 0
            for later in self.record[at + 1 :]:
                if used >= SOON:
                    break
                names -= set(self.own[later])
                used += sum(self.sizes[name] for name in self.own[later])
            self.released[key] = names
        return self.released[key]

    def update(self) -> None:
        """After the optimiser, which changed them, the small ones are gathered, one by one."""
        self.calls += len(self.small)
        self.times.update(self.small)
        self.keep(self.small)
