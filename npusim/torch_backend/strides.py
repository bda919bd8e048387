"""Strides of new tensors that are to look like others."""

from __future__ import annotations


def preserved_stride(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor of this size whose dimensions lie in the same order (``torch.preserve_format``).

    torch's own meta kernel would tell, but its first use imports a compiler. Rule: ``at::infer_dense_strides``; a
    tensor that is dense already, or empty, keeps its strides.
    """
    inner_first = list(reversed(range(len(size))))
    for end in range(1, len(inner_first)):
        moving = end
        for place in reversed(range(end)):
            order = _compare(inner_first[place], inner_first[moving], size, stride)
            if order > 0:
                inner_first[place], inner_first[moving] = inner_first[moving], inner_first[place]
                moving = place
            elif order < 0:
                break
    result = [1] * len(size)
    step = 1
    for dim in inner_first:
        result[dim] = step
        step *= max(size[dim], 1)
    kept = all(extent == 1 or mine == theirs for extent, mine, theirs in zip(size, result, stride, strict=True))
    return stride if kept or 0 in size else tuple(result)


def _compare(first: int, second: int, size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Negative: ``first`` lies further in; positive: further out; zero: they may stay as they are."""
    if stride[first] == 0 or stride[second] == 0:
        return 0
    if stride[first] != stride[second]:
        return -1 if stride[first] < stride[second] else 1
    return 1 if size[first] > size[second] else 0
