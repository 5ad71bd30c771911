"""From gradient patterns, which have the shape of a parameter, to row ranges along one of its dimensions."""

from __future__ import annotations

from torch import Tensor, nn

Ranges = tuple[tuple[int, int], ...]


def merged_ranges(rows: Tensor) -> Ranges:
    """The (start, stop) ranges of a vector of booleans, in order."""
    ranges: list[tuple[int, int]] = []
    for row in rows.nonzero().flatten().tolist():
        if ranges and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    return tuple(ranges)


def row_layout(masks: dict[str, Tensor], module: nn.Module | None) -> tuple[int, dict[str, Ranges]]:
    """The dimension along which `masks` are whole rows, and the rows of each.

    Args:
        masks: boolean patterns of one parameter's shape, by role.
        module: the module that holds the parameter; it settles the output dimension where the patterns do not.

    Returns:
        The dimension that leaves the fewest entries unexplained, and the merged ranges by role.
    """
    sample = next(iter(masks.values()))
    if sample.dim() == 0:
        return 0, {role: ((0, 1),) for role, mask in masks.items() if bool(mask)}
    preferred = list(range(sample.dim()))
    if sample.dim() == 2 and type(module).__name__ == "Conv1D":
        preferred = [1, 0]  # transformers' Conv1D keeps [in, out]
    stacked = sample.dim() == 3 and not isinstance(module, nn.Conv1d)  # [experts, out, in]
    if stacked:
        preferred = [1, 2]

    def rows(mask: Tensor, dim: int) -> Tensor:
        others = [other for other in range(mask.dim()) if other != dim]
        return mask.amax(dim=others) if others else mask

    def unexplained(dim: int) -> int:
        total = 0
        for mask in masks.values():
            pattern = mask.amax(dim=0, keepdim=True) if stacked else mask
            shape = [-1 if axis == dim else 1 for axis in range(pattern.dim())]
            total += int((rows(pattern, dim).view(shape) & ~pattern).sum())
        return total

    dim = min(preferred, key=unexplained)
    return dim, {role: merged_ranges(rows(mask, dim)) for role, mask in masks.items()}
