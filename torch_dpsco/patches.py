"""Rows of convolutions as products of patches, for compiled rows.

torch vectorizes the gradient of a weight over records by one grouped convolution, with a group for each record and
channel, at which kernels for CPUs are slow. The same gradient is a product of two small matrices per record,

    row_i = G_i^T P_i,   P_i (positions, C kh kw) the patches of record i that the kernel saw, G_i (positions, C_out)

and a compiler turns those into one batched product. To make autograd take it, a convolution y = x * w is written as

    y = x * [w] + P([x]) (w - [w])^T,   [.] without gradient

whose second term is 0, and has the gradient of w; the first one has that of x. It costs one more product of the size
of the forward. A record that is not finite has NaN there, and so a row that is dropped. Rows differ by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_MOST = 2**14  # numbers in the patches of a record; measured: faster at 6,000 to 15,000, slower at 20,000 to 70,000


def has_convolutions(model: nn.Module) -> bool:
    """Returns whether a model has layers that call a 2-D convolution."""
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


class PatchedConvolutions(TorchFunctionMode):
    """Runs small 2-D convolutions on a CPU in the form above while it is entered, and all others as they are.

    Example:
        >>> weight, x = torch.ones(1, 1, 2, 2), torch.arange(9.0).view(1, 1, 3, 3)
        >>> with PatchedConvolutions():
        ...     torch.func.grad(lambda w: F.conv2d(x, w).sum())(weight).flatten().tolist()
        [8.0, 12.0, 20.0, 24.0]
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Intercepts calls of torch functions."""
        if func is torch.conv2d:
            return _conv2d(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    covered = input.dim() == 4 and not isinstance(padding, str) and _pair(dilation) == (1, 1) and groups == 1
    if not covered or input.device.type != "cpu":
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    (height, width), (down, right), held = _pair(padding), _pair(stride), weight.detach()
    patches = F.pad(input.detach(), (width, width, height, height))
    patches = patches.unfold(2, weight.shape[2], down).unfold(3, weight.shape[3], right)  # (N, C, H, W, kh, kw)
    if patches[0].numel() > _MOST:
        return F.conv2d(input, weight, bias, stride, padding)
    patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3)
    zero = patches @ (weight - held).flatten(1).t()
    return F.conv2d(input, held, bias, stride, padding) + zero.permute(0, 3, 1, 2)


def _pair(value: Any) -> tuple[int, ...]:
    both = (value,) if isinstance(value, int) else tuple(value)
    return both * 2 if len(both) == 1 else both
