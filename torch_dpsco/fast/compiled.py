"""Compiled rows: per-sample gradients by `torch.func`, one record's gradient vectorized over records, and compiled.

    row_i = d/dw loss_fn(model(x_i), y_i),  x_i a batch of ONE record

Batches are cut into micro-batches of one fixed size, the last one filled up with records of zeros, so that Poisson
batches of any size run one compiled program. Rows of the filling are cut off before anyone sees them; the others go
to the optimizer micro-batch by micro-batch, so that memory does not grow with the batch. Compiled code makes rows and
nothing else: norms, clipping and sums are those of `GradBatch` and the oracle, on the rows as they are in memory, so
that no fused arithmetic of a compiler comes between a row and its norm. Differs from `attach` in:

1. the model keeps its layers and is not hooked; there is no gradient of a batch, so nothing to drop or to compare;
2. a loss that is a mean and one that is a sum give the same rows, those of a batch of one;
3. a term on the weights (`loss + lam * model.weight.square().sum()`) is in every row, and clipped with it;
4. a layer that needs to see the whole batch sees one record.

Convolutions. torch vectorizes the gradient of a weight over records by one grouped convolution, with a group for each
record and channel, at which kernels for CPUs are slow. The same gradient is a product of two small matrices per record,

    row_i = G_i^T P_i,   P_i (positions, C kh kw) the patches of record i that the kernel saw, G_i (positions, C_out)

and a compiler turns those into one batched product. To make autograd take it, a convolution y = x * w is written as

    y = x * [w] + P([x]) (w - [w])^T,   [.] without gradient

whose second term is 0, and has the gradient of w; the first one has that of x. It costs one more product of the size
of the forward. A record that is not finite has NaN there, and so a row that is dropped. Rows differ by rounding only.

Size of a micro-batch. A part of s records takes a time of about s + c records: c stands for what a part costs whatever
its size (calls, and kernels that are slow on few records). A batch of n records has ceil(n / s) parts: the expected
time of a step is

    E[ceil(n / s)] (s + c)

with n of fixed size, or of the law of Poisson where sampling is; the sum of it over the draws of a plan. Large s means
few calls, and much filling for batches that are a little larger than a multiple of s: the minimum is a divisor for
fixed batches, and some standard deviations above the mean for small Poisson batches. All of this is public: design and
number of parameters.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from torch_dpsco import _validate as check
from torch_dpsco._validate import typed
from torch_dpsco.accounting.designs import Assigned, Design, Full, Parts, Poisson, Undeclared
from torch_dpsco.compat import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch_dpsco.errors import PrivacyError, SequenceError, warn
from torch_dpsco.losses.base import as_module, read_for
from torch_dpsco.rows.attach import is_attached, require_supported
from torch_dpsco.rows.batch import forget_rows, leave_rows
from torch_dpsco.sampling import PrivateLoader, UserLoader
from torch_dpsco.sampling.loader import to_device
from torch_dpsco.step.checks import require_same_parameters
from torch_dpsco.step.step import PrivateOptimizer
from torch_dpsco.trial import (
    SEED,
    Answer,
    Leaf,
    Mixed,
    RandomStreams,
    Refused,
    attempt,
    both_fills,
    compare,
    rows_first,
    seed_torch,
)

# numbers in the patches of a record; measured: faster at 6,000 to 15,000, slower at 20,000 to 70,000
_MOST_PATCHES = 2**14


def has_convolutions(model: nn.Module) -> bool:
    """Returns whether a model has layers that call a 2-D convolution."""
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


class PatchedConvolutions(TorchFunctionMode):
    """While entered, runs small 2-D convolutions on a CPU in the form above, and leaves all others unchanged.

    Example:
        >>> weight, x = torch.ones(1, 1, 2, 2), torch.arange(9.0).view(1, 1, 3, 3)
        >>> with PatchedConvolutions():
        ...     torch.func.grad(lambda w: F.conv2d(x, w).sum())(weight).flatten().tolist()
        [8.0, 12.0, 20.0, 24.0]
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
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
    common = _pair(dilation) == (1, 1) and groups == 1 and not isinstance(padding, str)
    if not common or input.dim() != 4 or input.device.type != "cpu":
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    height, width = _pair(padding)
    down, right = _pair(stride)
    held = weight.detach()
    patches = F.pad(input.detach(), (width, width, height, height))
    # (N, C, H, W, kh, kw)
    patches = patches.unfold(2, weight.shape[2], down).unfold(3, weight.shape[3], right)
    if patches[0].numel() > _MOST_PATCHES:
        return F.conv2d(input, weight, bias, stride, padding)
    patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3)
    zero = patches @ (weight - held).flatten(1).t()
    return F.conv2d(input, held, bias, stride, padding) + zero.permute(0, 3, 1, 2)


def _pair(value: Any) -> tuple[int, ...]:
    both = (value,) if isinstance(value, int) else tuple(value)
    return both * 2 if len(both) == 1 else both


_LossFn = Callable[[Any, Any], Any]
_Rows = tuple[Tensor, ...]
# records that are made up, and how far from the model's parameters their rows are taken
_MADE_UP = 7
_APART = 0.1
_COUPLED = (
    "records must not reach each other in model and loss (with {what} as one of several made-up"
    " records, rows of others changed): an operation with a vmap rule of its own"
    " (torch.autograd.Function, torch.library) sees the whole batch there; give it"
    " generate_vmap_rule = True, or leave it out"
)
_CHANGED = (
    "a forward must not change buffers or weights, they would carry private data out of the model;"
    " use layers without running statistics, e.g. GroupNorm"
)


@typed
class CompiledRows:
    """Makes the steps of a private optimizer from per-sample gradients that a compiled function computes.

    It takes the place of forward, backward and `optimizer.step()` in a loop; the optimizer does with the rows what it
    does with those of `attach`. The first batch costs a compilation (seconds to half a minute).

    Args:
        model: not attached; what `attach` refuses is refused here too.
        loss_fn: loss_fn(model(input), target) -> scalar tensor, for a batch of one record; "mean" or "sum" is the same.
        micro_batch_size: records that are computed at once, >= 1; batches are filled up to multiples of it. Default:
            chosen by `micro_batch_size` for the design of the first optimizer, before compiling. Give it, as a
            divisor, where draws come in parts (`physical_batch_size`) that are smaller than a batch.
        backend: of torch.compile; None vectorizes without compiling.

    Raises:
        SequenceError: the model is attached.
        ValueError: the model has no trainable parameter, or a layer that `attach` refuses (batch normalization).

    Guarantee:
        That of the optimizer. Row i is a function of record i, the parameters and random masks; it never sees another
        record. Assumes that torch's vectorized and compiled kernels keep records apart, as the hooks' kernels do.

    Example:
        >>> import torch_dpsco as dp
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.ones(100, 1))
        >>> model = nn.Linear(3, 1)
        >>> plan = dp.HolderSGD.plan(problem=dp.losses.Logistic().problem(bound_x=2.0), n=100,
        ...                          budget=dp.Budget(1.0, 1e-3), batch_size=20, epochs=1)
        >>> optimizer = dp.HolderSGD(model.parameters(), plan)
        >>> rows = CompiledRows(model, nn.BCEWithLogitsLoss(), backend=None)
        >>> for x, y in optimizer.loader(data):
        ...     rows.step(optimizer, x, y)
        >>> optimizer.steps
        5
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: _LossFn,
        *,
        micro_batch_size: int | None = None,
        backend: str | Callable[..., Any] | None = "inductor",
    ) -> None:
        if is_attached(model):
            raise SequenceError(
                "model must not be attached to compile its rows: call dp.detach(model) first"
            )
        require_supported(model, batch_first=True)
        if micro_batch_size is not None:
            check.positive_count(micro_batch_size=micro_batch_size)
        self.micro_batch_size = micro_batch_size
        self.backend = backend
        self._model = model
        self._loss = _RecordLoss(model, as_module(loss_fn))
        self._layers = list(model.modules())
        self._eager = _rows_of(self._one)
        self._fast: Callable[..., _Rows] | None = None  # for records of the first batch's shape
        self._shapes: tuple[Any, ...] | None = None
        self._verdicts: dict[str, str] = {}  # whether records reach each other in the rows

    def step(
        self,
        optimizer: PrivateOptimizer,
        inputs: Any,
        targets: Any,
        *,
        users: Tensor | None = None,
    ) -> None:
        """Makes one private step from a batch, or adds a physical batch that is not the last of its draw.

        Args:
            optimizer: on exactly the model's trainable parameters.
            inputs: tensor, or nested tensors, with the records in the first dimension, as model(inputs) takes them.
            targets: the same for loss_fn(output, targets).
            users: see `PrivateOptimizer.step`.

        Raises:
            PrivacyError: the forward changes buffers or weights, or the loss reaches weights outside of the model.
            SequenceError: as `PrivateOptimizer.step`; the model was attached since.
            ValueError: inputs and targets differ in their number of records; the model cannot be vectorized.
            BudgetExceeded: see `PrivateOptimizer.step`.
        """
        if not isinstance(optimizer, PrivateOptimizer):
            raise ValueError(
                f"optimizer must be a PrivateOptimizer (got {type(optimizer).__name__})"
            )
        if is_attached(self._model):
            raise SequenceError(
                "model must not be attached to compile its rows: call dp.detach(model) first"
            )
        require_same_parameters(self._model, optimizer)
        if optimizer.outstanding_rows == 0:
            # an empty draw is a step of noise only, whatever its batch looks like
            optimizer.step(users=users)
            return
        params = self._trained()
        optimizer.note_checks(self._verdicts)
        # a user has any number of records
        self._size(optimizer.design if optimizer.oracle.unit == "example" else None)
        try:
            for index, last in self._micro_batches(optimizer, params, inputs, targets):
                ids = None if users is None else users[index]
                if last:
                    optimizer.step(users=ids)
                else:
                    optimizer.accumulate(users=ids)
        finally:
            forget_rows(params)

    def prepare(self, inputs: Any, targets: Any) -> str | None:
        """Checks model and loss and compiles them, for records of the shapes of this batch; reads no value in it.

        The first `step` does it if it was not done.

        Returns:
            Why rows are not compiled, but only vectorized; None if they are compiled.

        Raises:
            PrivacyError: see `step`; rows of made-up records move with other records.
            ValueError: see `step`.
        """
        _batch_size(inputs, targets)
        size = self._size()
        zeros = tree_map(lambda t: t.new_zeros(size, *t.shape[1:]), (inputs, targets))
        values = [t.clone() for t in self._state()]
        rows = attempt("vectorizing by torch.func.vmap", lambda: self._call(self._eager, *zeros))
        if isinstance(rows, Refused):
            raise ValueError(
                f"model must be one that torch.func.vmap vectorizes: {rows}"
            ) from rows.error
        for old, new in zip(values, self._state(), strict=True):
            # a write through `.data` leaves no trace in versions
            if not torch.isclose(old, new, rtol=0.0, atol=0.0, equal_nan=True).all():
                raise PrivacyError(_CHANGED)
        self._require_no_capture(*zeros)
        self._verdicts.update(dict.fromkeys(("model", "loss"), self._compared(inputs, targets)))
        self._shapes = _shapes(inputs, targets)
        self._fast = self._eager
        if self.backend is None:
            return "backend is None"
        patched = has_convolutions(self._model) and self._patches_agree(*zeros)
        compiled = self._compile(self._patched, zeros) if patched else None
        if compiled is None or isinstance(compiled, Refused):
            compiled = self._compile(self._one, zeros)
        if isinstance(compiled, Refused):
            return str(compiled)
        self._fast = compiled
        return None

    def _compile(
        self, loss: Callable[..., Tensor], batch: tuple[Any, Any]
    ) -> Callable[..., _Rows] | Refused:
        assert self.backend is not None
        # isolated: other models that run the same code must not count as recompilations of this one
        known = inspect.signature(torch.compile).parameters
        isolated: Any = {"isolate_recompiles": True} if "isolate_recompiles" in known else {}
        fast = torch.compile(
            _rows_of(loss), backend=self.backend, fullgraph=True, dynamic=False, **isolated
        )
        tried = attempt("torch.compile", lambda: self._call(fast, *batch))
        return tried if isinstance(tried, Refused) else fast

    def _size(self, design: Design | None = None) -> int:
        """Returns the records that are computed at once, chosen for a design the first time."""
        if self.micro_batch_size is None:
            self.micro_batch_size = micro_batch_size(self._model, design)
        return self.micro_batch_size

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _micro_batches(
        self, optimizer: PrivateOptimizer, params: list[nn.Parameter], inputs: Any, targets: Any
    ) -> Iterator[tuple[slice, bool]]:
        """Leaves rows of one micro-batch after the other on the parameters; drops the batch if that fails.

        Yields:
            (index into the batch, whether it is the last).
        """
        try:
            parts = self._parts(inputs, targets)
            if isinstance(optimizer.design, Undeclared) and len(parts) > 1:
                # takes the rows of a step at once, or none
                rows = [self._rows(inputs, targets, part) for part in parts]
                leave_rows(params, [torch.cat(side) for side in zip(*rows, strict=True)])
                parts = [slice(0, parts[-1].stop)]
            else:
                leave_rows(params, self._rows(inputs, targets, parts[0]))
        except BaseException:
            optimizer.discard()
            raise
        yield parts[0], len(parts) == 1
        for part in parts[1:]:
            try:
                # no name holds the rows before: kernels run faster in memory that was used just now
                leave_rows(params, self._rows(inputs, targets, part))
            except BaseException:
                optimizer.discard()
                raise
            yield part, part is parts[-1]

    def _parts(self, inputs: Any, targets: Any) -> list[slice]:
        """Returns where to cut a batch, after what has to be done before the first one."""
        n = _batch_size(inputs, targets)
        if self._fast is None:
            reason = self.prepare(inputs, targets)
            if reason is not None and self.backend is not None:
                warn(f"rows are vectorized, but not compiled: {reason}", stacklevel=5)
        size = self._size()
        return [slice(start, min(start + size, n)) for start in range(0, max(n, 1), size)]

    def _rows(self, inputs: Any, targets: Any, part: slice) -> _Rows:
        """Returns the rows of some records by parameter: (records, *shape) each."""
        n = part.stop - part.start
        size = self._size()
        batch = tree_map(lambda t: _filled(t[part], size), (inputs, targets))
        same = _shapes(inputs, targets) == self._shapes
        rows = self._call(self._fast if same and self._fast is not None else self._eager, *batch)
        # PRIVACY: rows of the filling are no records (test_rows_of_the_filling_never_count)
        return rows if n == size else tuple(row[:n] for row in rows)

    def _compared(self, inputs: Any, targets: Any) -> str:
        """Returns what made-up records show of records in the rows of others; raises PrivacyError where they are."""
        leaves, structure = tree_flatten((inputs, targets))
        if any(t.device.type != "cpu" and not t.is_floating_point() for t in leaves):
            return "not checked, a wrong index ends the process on this device"
        n_inputs = len(tree_leaves(inputs))
        made = []
        for k, t in enumerate(leaves):
            shape = (_MADE_UP, *t.shape[1:])
            made.append(Leaf(shape, t.dtype, t.device, 0, target=k >= n_inputs))

        def rows(batch: list[Tensor]) -> list[Answer]:
            seed_torch(SEED)
            # at zeros few rows would move
            params = tuple(p + _APART * torch.randn_like(p) for p in self._trained())
            made_inputs, made_targets = tree_unflatten(batch, structure)
            found = self._call(self._eager, made_inputs, made_targets, params)
            return [rows_first(row, 0) for row in found]

        streams = RandomStreams()
        try:
            with torch.no_grad():
                found = compare(rows, both_fills(made, _MADE_UP))
        finally:
            streams.restore()
        if isinstance(found, Mixed):
            # PRIVACY: one record would be in many rows (test_compiled_rows_that_are_coupled_are_refused)
            raise PrivacyError(_COUPLED.format(what=found.what))
        return found

    def _call(
        self,
        function: Callable[..., _Rows],
        inputs: Any,
        targets: Any,
        params: _Rows | None = None,
    ) -> _Rows:
        before = _versions(self._state())
        params = tuple(p.detach() for p in self._trained()) if params is None else params
        # other kernels of attention have no vectorized backward
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            rows = function(params, inputs, targets)
        if before != _versions(self._state()):
            # PRIVACY: what a forward writes leaves with the model, un-noised
            # (test_a_forward_that_begins_to_write_is_refused)
            raise PrivacyError(_CHANGED)
        return rows

    def _one(self, params: _Rows, inputs: Any, targets: Any) -> Tensor:
        """Returns the loss of one record, as that of a batch of one."""
        names = [
            f"model.{name}" for name, p in self._model.named_parameters() if p.requires_grad
        ]
        batch = tree_map(lambda t: t.unsqueeze(0), (inputs, targets))
        loss: Tensor = torch.func.functional_call(
            self._loss, dict(zip(names, params, strict=True)), batch
        )
        return loss

    def _patched(self, params: _Rows, inputs: Any, targets: Any) -> Tensor:
        """Returns the same loss, with convolutions in a form that is faster once it is compiled."""
        with PatchedConvolutions():
            return self._one(params, inputs, targets)

    def _patches_agree(self, inputs: Any, targets: Any) -> bool:
        """Returns whether patches give the rows of synthetic records: not if a forward differentiates in its input."""
        batch = tree_map(_synthetic, (inputs, targets))
        found = []
        for loss in (self._one, self._patched):
            with torch.random.fork_rng(devices=[]):
                # dropout, say, the same twice; torch.manual_seed would also fix the generators of GPUs, for good
                torch.default_generator.manual_seed(0)
                rows = attempt(
                    "vectorizing made-up records", partial(self._call, _rows_of(loss), *batch)
                )
            if isinstance(rows, Refused):
                return False
            found.append(torch.cat([row.flatten(1).double() for row in rows], dim=1))
        plain, patched = found
        return bool(
            torch.linalg.vector_norm(plain - patched) <= 1e-3 * torch.linalg.vector_norm(plain)
        )

    def _require_no_capture(self, inputs: Any, targets: Any) -> None:
        """Raises for a loss on weights that `functional_call` does not replace: their term would be in no row."""
        params = tuple(p.detach().requires_grad_() for p in self._trained())
        real = [p for p in self._loss.parameters() if p.requires_grad]
        with torch.enable_grad():
            loss = self._one(params, *tree_map(lambda t: t[0], (inputs, targets)))
        if not loss.requires_grad:
            return
        if any(grad is not None for grad in torch.autograd.grad(loss, real, allow_unused=True)):
            # PRIVACY: not a leak, but another objective (test_a_captured_weight_in_the_loss_is_refused)
            raise ValueError(
                "loss_fn must not use parameters that are kept outside of the model (a weight in a"
                " variable, a loss with parameters of its own): give reg= or prox= to the optimizer"
                " instead"
            )

    def _trained(self) -> list[nn.Parameter]:
        params = (p for m in self._layers for p in m._parameters.values() if p is not None)
        return list({id(p): p for p in params if p.requires_grad}.values())

    def _state(self) -> list[Tensor]:
        tensors = [[*m._parameters.values(), *m._buffers.values()] for m in self._layers]
        return [t for of_module in tensors for t in of_module if t is not None]


def _rows_of(loss: Callable[..., Tensor]) -> Callable[..., _Rows]:
    rows: Callable[..., _Rows] = torch.func.vmap(
        torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different"
    )
    return rows


def _versions(tensors: list[Tensor]) -> list[tuple[int, int]]:
    return [(id(t), t._version) for t in tensors]


class _RecordLoss(nn.Module):
    """Model and loss as one module, so that weights are replaced in the loss too."""

    def __init__(self, model: nn.Module, loss_fn: _LossFn) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, inputs: Any, targets: Any) -> Any:
        return self.loss_fn(*read_for(self.loss_fn, self.model(inputs), targets))


def _filled(records: Tensor, size: int) -> Tensor:
    """Returns the records with zeros below them, up to `size`, in one layout: another one would be compiled anew."""
    missing = size - len(records)
    whole = torch.cat([records, records.new_zeros(missing, *records.shape[1:])])
    # contiguous() leaves strides of dimensions of size 1
    return whole.contiguous().view(-1).view(whole.shape)


def _synthetic(records: Tensor) -> Tensor:
    two = records[:1].repeat(2, *[1] * (records.dim() - 1))
    numbers = torch.arange(two.numel(), device=two.device).sin().view(two.shape)
    return numbers.to(two.dtype) if two.is_floating_point() else two


def _batch_size(inputs: Any, targets: Any) -> int:
    leaves = tree_leaves((inputs, targets))
    if not all(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves):
        raise ValueError(
            "inputs and targets must be tensors, or nested tensors, with one entry per record"
        )
    if len({len(leaf) for leaf in leaves}) > 1:
        # PRIVACY: rows would pair records with targets of others; no size in the message, that of the draw is private
        # (test_batches_that_do_not_match_are_refused)
        raise ValueError("inputs and targets must have the same number of records")
    return len(leaves[0])


def _shapes(inputs: Any, targets: Any) -> tuple[Any, ...]:
    leaves, structure = tree_flatten((inputs, targets))
    return structure, [(t.shape[1:], t.dtype, t.device) for t in leaves]


def try_compile(model: nn.Module, loss_fn: _LossFn, loader: PrivateLoader) -> CompiledRows | str:
    """Returns compiled rows, or why there are none, for a loop that can do without; reads no value of a record.

    Args:
        model: see `CompiledRows`.
        loss_fn: see `CompiledRows`.
        loader: of (inputs, targets), with a first record, of which only the shapes are used.
    """
    device = next(model.parameters()).device
    filled = loader.design if loader.slots is None else Full(loader.slots.block)
    # users have any number of records
    design = None if isinstance(loader, UserLoader) else filled
    size = micro_batch_size(model, design, loader.physical_batch_size)

    def compiled() -> CompiledRows | str:
        rows = CompiledRows(model, loss_fn, micro_batch_size=size)
        example = to_device(loader.collate_fn([loader.dataset[0]]), device)[:2]
        return rows.prepare(*example) or rows

    made = attempt("compiling", compiled)
    return str(made) if isinstance(made, Refused) else made


_CALL = 8  # c, in records: measured 1 for a transformer block and 15 for a small network of convolutions
# records at once
_LEAST = 8
_MOST = 512
_NUMBERS = 2**22  # in the rows of a part, 16 MiB of float32: past it they only cost memory
_UNKNOWN = 16  # records at once if nothing is known of batches


def micro_batch_size(
    model: nn.Module, design: Design | None, physical_batch_size: int | None = None
) -> int:
    """Returns the number of records to compute at once.

    Args:
        model: of whose trainable parameters each record has a row.
        design: how batches of records are drawn; None if that is not known.
        physical_batch_size: most records that come at once, see `PrivateOptimizer.loader`.

    Example:
        >>> from torch_dpsco.accounting.designs import Full
        >>> model = nn.Linear(100, 10)
        >>> micro_batch_size(model, Full(64)), micro_batch_size(model, Poisson(64, 60_000))
        (64, 77)
    """
    dim = sum(p.numel() for p in model.parameters() if p.requires_grad)
    most = min(_MOST, max(_LEAST, _NUMBERS // max(dim, 1)))
    if design is None:
        return min(_UNKNOWN, most)
    plan = design.parts if isinstance(design, Parts) else ((design, 1),)

    def parts(size: int) -> Iterator[float]:
        for drawn, draws in plan:
            yield draws * _expected_parts(drawn, size, physical_batch_size)

    def cost(size: int) -> float:
        return math.fsum(parts(size)) * (size + _CALL)

    return min(range(1, most + 1), key=cost)


def _expected_parts(design: Design, size: int, physical_batch_size: int | None) -> float:
    mean = design.batch_size
    if physical_batch_size is not None and physical_batch_size <= mean:  # most come in full ones
        return mean / physical_batch_size * math.ceil(physical_batch_size / size)
    if isinstance(design, (Poisson, Assigned)):
        return _poisson_parts(mean, size)
    return math.ceil(mean / size)


def _poisson_parts(mean: int, size: int) -> float:
    """Returns E[ceil(n / size)] = sum over j >= 0 of P(n > j size)."""
    if mean > 32 * size:  # n mod size is nearly uniform
        return mean / size + 0.5
    last = mean + 10 * math.isqrt(mean) + 20  # past it P(n > last) does not count
    fewer = torch.arange(0, last, size, dtype=torch.float64)
    return float(torch.special.gammainc(fewer + 1.0, torch.full_like(fewer, mean)).sum())
