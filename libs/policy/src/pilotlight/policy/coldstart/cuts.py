"""Where a model is cut into stages."""

from functools import lru_cache

from pilotlight.policy.model import ModelSpec, Stage

USUAL_STAGES = (2, 4)
"""Into so many stages models are usually cut: halves and quarters."""


def even_stages(spec: ModelSpec, size: int) -> tuple[Stage, ...]:
    """Cut a model at layer boundaries into ``size`` stages, so that the largest has as few bytes as
    possible: embedding and head are not split, so M/s is not a stage's size (ParaServe, 4.1.2,
    takes it for one).

    Of equal cuts the one with the most layers in front.

    Raises:
        ValueError: there are fewer layers than stages, or no stage.
    """
    if not 1 <= size <= spec.num_layers:
        raise ValueError(f"{spec.num_layers} layers cannot be cut into {size} stages")
    return _even(spec, size)


def usual_ranges(spec: ModelSpec) -> tuple[Stage, ...]:
    """What stages of groups usually hold: halves, then quarters, as far as there are layers for
    them.
    """
    sizes = (size for size in USUAL_STAGES if size <= spec.num_layers)
    found = (stage for size in sizes for stage in even_stages(spec, size))
    return tuple(dict.fromkeys(found))


@lru_cache(maxsize=4096)
def _even(spec: ModelSpec, size: int) -> tuple[Stage, ...]:
    """Least[stages][stop]: the largest stage of the best cut of [0, stop), by dynamic programming;
    bytes of a stage are a difference of running sums.
    """
    layers = spec.num_layers
    sums = [0]
    for part in range(layers + 2):
        sums.append(sums[-1] + spec.part_bytes[part])
    tied = spec.part_bytes[0] if spec.tied_embeddings else 0

    def stage_bytes(start: int, stop: int) -> int:
        first = sums[1] if start == 0 else 0
        last = sums[layers + 2] - sums[layers + 1] + (tied if start > 0 else 0)
        return first + sums[stop + 1] - sums[start + 1] + (last if stop == layers else 0)

    best: dict[int, tuple[int, tuple[int, ...]]] = {
        stop: (stage_bytes(0, stop), (stop,)) for stop in range(1, layers + 1)
    }
    for stages in range(2, size + 1):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for stop in range(stages, layers + 1):
            options = (
                (max(best[at][0], stage_bytes(at, stop)), (*best[at][1], stop))
                for at in range(stages - 1, stop)
            )
            longer[stop] = min(
                options, key=lambda one: (one[0], tuple(-boundary for boundary in one[1]))
            )
        best = longer
    stops = best[layers][1]
    return tuple(Stage(a, b) for a, b in zip((0, *stops), stops, strict=False))
