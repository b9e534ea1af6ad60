"""Training scripts up to their loop, as users write them: eleven broken ones and the sound ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from opacus import GradSampleModule, PrivacyEngine
from opacus.accountants import RDPAccountant
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

import torch_dpsco as dp

N, BATCH, DIM = 64, 16, 4


class Parts(NamedTuple):
    model: nn.Module
    loss: Any
    loader: Any
    optimizer: Any
    scaler: Any = None


class FirstOnly(Dataset):
    """Shows its first record and nothing else."""

    def __init__(self, *record: Any) -> None:
        self.record = record[0] if len(record) == 1 else record

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        assert index == 0, f"record {index} was read"
        return self.record


def regression_data() -> TensorDataset:
    return TensorDataset(torch.randn(N, DIM), torch.randn(N, 1))


def class_data(*shape: int) -> TensorDataset:
    return TensorDataset(torch.randn(N, *shape), torch.randint(0, 3, (N,)))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, 1))


def secret_generator() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()  # from the operating system
    return generator


def private(model: nn.Module, dataset: Any, **keywords: Any) -> tuple[dp.PrivateOptimizer, Any]:
    """Our optimizer with its loader."""
    problem = dp.losses.Logistic().problem(bound_x=2.0)
    optimizer = dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(
            problem=problem, n=N, budget=dp.Budget(2.0, 1e-3), batch_size=BATCH, epochs=2
        ),
    )
    return optimizer, optimizer.loader(dataset, **keywords)


def with_opacus(
    model: nn.Module, dataset: Any, torch_optimizer: Any = None, **keywords: Any
) -> tuple[Any, ...]:
    """What Opacus' engine returns."""
    loader = keywords.pop("loader", None) or DataLoader(dataset, batch_size=BATCH)
    return PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch_optimizer or torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **keywords,
    )


# -- eleven broken scripts --------------------------------------------------------------------------------------------


def shared_batch_norm() -> Parts:
    """BatchNorm in a model that Opacus' engine never saw: GradSampleModule does not mind one without weights."""
    model = nn.Sequential(nn.Linear(DIM, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 1))
    wrapped = GradSampleModule(model)
    data = regression_data()
    loader = DPDataLoader(data, sample_rate=BATCH / N)
    optimizer = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=BATCH,
        generator=secret_generator(),
    )
    optimizer.attach_step_hook(RDPAccountant().get_optimizer_hook_fn(sample_rate=BATCH / N))
    return Parts(wrapped, F.mse_loss, loader, optimizer)


def tilted_loss() -> Parts:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets).square().mean(1)).logsumexp(0)

    model, data = nn.Linear(DIM, 1), regression_data()
    optimizer, loader = private(model, data)
    return Parts(dp.attach(model, loss_reduction="sum"), loss, loader, optimizer)


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


def batch_mean_feature() -> Parts:
    model, optimizer, loader = with_opacus(Centered(), regression_data())
    return Parts(model, F.mse_loss, loader, optimizer)


def l2_in_the_loss() -> Parts:
    model, optimizer, loader = with_opacus(mlp(), regression_data())

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets) + 0.1 * sum(
            p.square().sum() for p in model.parameters()
        )

    return Parts(model, loss, loader, optimizer)


def sum_declared_mean() -> Parts:
    model, optimizer, loader = with_opacus(mlp(), regression_data())
    return Parts(model, nn.MSELoss(reduction="sum"), loader, optimizer)


def ghost_with_column_loss() -> Parts:
    model, optimizer, criterion, loader = with_opacus(
        mlp(), regression_data(), criterion=nn.MSELoss(), grad_sample_mode="ghost"
    )
    return Parts(model, criterion, loader, optimizer)  # MSELoss without reduction gives (B, 1)


def shuffled_accounted_as_poisson() -> Parts:
    data = regression_data()
    model, optimizer, loader = with_opacus(
        mlp(),
        data,
        loader=DataLoader(data, batch_size=BATCH, shuffle=True),
        poisson_sampling=False,
    )
    return Parts(model, F.mse_loss, loader, optimizer)


def weighted_random_sampler() -> Parts:
    data = regression_data()
    loader = DataLoader(
        data, batch_size=BATCH, sampler=WeightedRandomSampler(torch.rand(N).tolist(), N)
    )
    model, optimizer, _ = with_opacus(mlp(), data, loader=loader)
    return Parts(model, F.mse_loss, loader, optimizer)  # goes on with the loader it had


def fixed_seed_every_epoch() -> Parts:
    model, optimizer, loader = with_opacus(mlp(), regression_data())
    torch.manual_seed(0)  # "for reproducibility", at the top of each epoch
    return Parts(model, F.mse_loss, loader, optimizer)


class LoRA(nn.Module):
    """A frozen layer with a trained product of two thin ones beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def lora_frozen_params() -> Parts:
    """The adapters come after the optimizer was built: it holds frozen weights, and trains nothing of the model."""
    model, data = mlp(), regression_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0], model[2] = LoRA(model[0]), LoRA(model[2])
    wrapped = GradSampleModule(model)
    private_optimizer = DPOptimizer(
        optimizer,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=BATCH,
        generator=secret_generator(),
    )
    private_optimizer.attach_step_hook(
        RDPAccountant().get_optimizer_hook_fn(sample_rate=BATCH / N)
    )
    return Parts(
        wrapped, F.mse_loss, DPDataLoader(data, sample_rate=BATCH / N), private_optimizer
    )


def grad_scaler() -> Parts:
    model, optimizer, loader = with_opacus(mlp(), regression_data())
    return Parts(model, F.mse_loss, loader, optimizer, torch.amp.GradScaler("cpu"))


BROKEN: dict[Callable[[], Parts], tuple[str, str]] = {
    shared_batch_norm: ("critical", "batch-norm"),
    tilted_loss: ("critical", "coupled-records"),
    batch_mean_feature: ("critical", "coupled-records"),
    l2_in_the_loss: ("error", "regularizer-in-loss"),
    sum_declared_mean: ("error", "loss-reduction"),
    ghost_with_column_loss: ("critical", "ghost-loss-shape"),
    shuffled_accounted_as_poisson: ("critical", "sampler-not-accounted"),
    weighted_random_sampler: ("critical", "sampler-not-accounted"),
    fixed_seed_every_epoch: ("critical", "fixed-seed"),
    lora_frozen_params: ("error", "stale-parameters"),
    grad_scaler: ("critical", "grad-scaler"),
}


# -- sound scripts ----------------------------------------------------------------------------------------------------


def ours_logistic() -> Parts:
    model, data = nn.Linear(DIM, 1), TensorDataset(torch.randn(N, DIM), torch.ones(N, 1))
    nn.init.zeros_(model.weight)
    optimizer, loader = private(model, data)
    return Parts(dp.attach(model), dp.losses.Logistic(), loader, optimizer)


def ours_cnn() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(4 * 36, 3),
    )
    optimizer, loader = private(model, class_data(1, 8, 8))
    return Parts(dp.attach(model, rows="dense"), F.cross_entropy, loader, optimizer)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read, self.out = (
            nn.Embedding(9, 6),
            nn.LSTM(6, 5, batch_first=True),
            nn.Linear(5, 3),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.read(self.embed(tokens))[0][:, -1])


def ours_lstm() -> Parts:
    model = ModuleValidator.fix(Tagger())
    data = TensorDataset(torch.randint(0, 9, (N, 5)), torch.randint(0, 3, (N,)))
    optimizer, loader = private(model, data)
    return Parts(dp.attach(model), F.cross_entropy, loader, optimizer)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encode(x).mean(1))


def opacus_transformer() -> Parts:
    model, optimizer, loader = with_opacus(ModuleValidator.fix(Attends()), class_data(6, 4))
    return Parts(model, nn.CrossEntropyLoss(), loader, optimizer)


class Records(Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((DIM,), float(index)), "y": index % 3, "name": f"record {index}"}


def ours_dict_records() -> Parts:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")

    model = nn.Sequential(nn.Linear(DIM, 6), nn.ReLU(), nn.Linear(6, 3))
    optimizer, loader = private(model, Records(), physical_batch_size=8)
    return Parts(dp.attach(model, loss_reduction="sum"), loss, loader, optimizer)


def opacus_hooks() -> Parts:
    model, optimizer, loader = with_opacus(
        mlp(), regression_data(), noise_generator=secret_generator()
    )
    return Parts(model, nn.MSELoss(), loader, optimizer)


class ColumnFree(nn.MSELoss):
    """One loss per record, (B,)."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(outputs.squeeze(1), targets.squeeze(1))


def opacus_ghost() -> Parts:
    model, optimizer, criterion, loader = with_opacus(
        mlp(), regression_data(), criterion=ColumnFree(), grad_sample_mode="ghost"
    )
    return Parts(model, criterion, loader, optimizer)


def lora_done_right() -> Parts:
    model = mlp()
    model[0], model[2] = LoRA(model[0]), LoRA(model[2])
    torch_optimizer = torch.optim.Adam(
        [p for p in model.parameters() if p.requires_grad], lr=0.1
    )
    model, optimizer, loader = with_opacus(model, regression_data(), torch_optimizer)
    return Parts(model, F.mse_loss, loader, optimizer)


SOUND: tuple[Callable[[], Parts], ...] = (
    ours_logistic,
    ours_cnn,
    ours_lstm,
    opacus_transformer,
    ours_dict_records,
    opacus_hooks,
    opacus_ghost,
    lora_done_right,
)
