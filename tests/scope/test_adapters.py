"""The adapters and sinks inside the real frameworks: they see every step, change nothing, and leave whole runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from unlazy.runtime import stream
from unlazy.scope.scope import Scope
from unlazy.scope.sinks import MLflowSink, TensorBoardSink, WandbSink
from unlazy.store import Run

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("ignore")]
CLASSES, FEATURES = 3, 6
ALWAYS = float("inf")  # these are about frameworks, not about what a busy machine affords


@pytest.fixture
def points() -> tuple[Tensor, Tensor]:
    x = torch.randn(96, FEATURES, generator=stream(0, "adapters"))
    return x, (x[:, :CLASSES]).argmax(1)


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES))


def same(first: nn.Module, second: nn.Module) -> bool:
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def known_steps(scope: Scope | None) -> int | None:
    """How many steps the scope was told training takes."""
    assert scope is not None
    assert scope._session is not None
    return scope._session.total_steps


def check_run(folder: Path, last: int) -> Run:
    run = Run(folder)
    steps = run.array_steps("tangent")
    assert run.status()["state"] == "finished"
    assert (steps[0], steps[-1]) == (0, last)
    assert len(steps) >= 3
    assert (folder / "verdict.json").exists()
    return run


# --- Lightning -----------------------------------------------------------------------------------


def fit_with_lightning(
    points: tuple[Tensor, Tensor], folder: Path, callbacks: list[Any], accumulate: int = 1, fail_at: int | None = None
) -> nn.Module:
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from torch.utils.data import DataLoader, TensorDataset

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if index == fail_at:
                raise RuntimeError("the data ran out")
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-2)

    seed_everything(1, verbose=False)
    model = Classifier()
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        accumulate_grad_batches=accumulate,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, DataLoader(TensorDataset(*points), batch_size=8, shuffle=True))
    return model


@pytest.mark.parametrize("accumulate", [1, 4])
def test_lightning_trains_the_same_and_leaves_a_run(points, tmp_path: Path, accumulate: int) -> None:
    from unlazy.scope.adapters.lightning import ScopeCallback

    callback = ScopeCallback(points, tmp_path / "run", budget=ALWAYS)
    watched = fit_with_lightning(points, tmp_path, [callback], accumulate)
    assert same(watched, fit_with_lightning(points, tmp_path, [], accumulate))
    run = check_run(tmp_path / "run", last=2 * 12 // accumulate)
    assert "batch_loss" in run.lines[-1].scalars
    assert known_steps(callback.scope) == 2 * 12 // accumulate
    assert callback.scope.verdict().label in {"lazy", "rich", "mixed", "cannot tell"}


def test_lightning_looks_at_the_part_it_is_told(points, tmp_path: Path) -> None:
    from unlazy.scope.adapters.lightning import ScopeCallback

    callback = ScopeCallback(points, model=lambda module: module.body, budget=ALWAYS)
    watched = fit_with_lightning(points, tmp_path, [callback])
    assert callback.scope is not None
    assert callback.scope.model is watched.body


def test_a_failed_fit_leaves_a_failed_run_that_opens(points, tmp_path: Path) -> None:
    from unlazy.scope.adapters.lightning import ScopeCallback

    with pytest.raises(RuntimeError, match="ran out"):
        fit_with_lightning(points, tmp_path, [ScopeCallback(points, tmp_path / "run", budget=ALWAYS)], fail_at=7)
    status = Run(tmp_path / "run").status()
    assert status["state"] == "failed"
    assert "the data ran out" in status["error"]


# --- Hugging Face --------------------------------------------------------------------------------


def fit_with_transformers(folder: Path, callbacks: list[Any]) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

    tokens = torch.randint(0, 30, (64, 5), generator=stream(1, "adapters"))
    rows = [{"input_ids": row, "labels": int(row[0] > 14)} for row in tokens]
    set_seed(2)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=30, max_position_embeddings=8, **shape))
    options = {"per_device_train_batch_size": 16, "num_train_epochs": 3, "logging_steps": 2, "save_strategy": "no"}
    arguments = TrainingArguments(
        str(folder / "trainer"), use_cpu=True, report_to=[], disable_tqdm=True, seed=5, **options
    )
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks).train()
    return model


def test_hugging_face_trains_the_same_and_leaves_a_run(tmp_path: Path) -> None:
    from unlazy.scope.adapters.huggingface import ScopeCallback

    tokens = torch.randint(0, 30, (32, 5), generator=stream(2, "adapters"))
    probe = ({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, (tokens[:, 0] > 14).long())
    callback = ScopeCallback(probe, tmp_path / "run", budget=ALWAYS)
    watched = fit_with_transformers(tmp_path, [callback])
    assert known_steps(callback.scope) == 12
    assert same(watched, fit_with_transformers(tmp_path, []))
    run = check_run(tmp_path / "run", last=12)
    assert any("trainer_loss" in line.scalars for line in run.lines)


def test_the_tokenizer_of_the_trainer_gives_the_texts() -> None:
    from unlazy.scope.adapters.huggingface import decode_texts

    class Tokenizer:
        """Says the numbers of the tokens."""

        def batch_decode(self, tokens: Tensor, skip_special_tokens: bool) -> list[str]:
            """One text a row."""
            assert skip_special_tokens
            return [" ".join(map(str, row)) for row in tokens.tolist()]

    tokens, y = torch.tensor([[3, 1], [4, 1]]), torch.tensor([0, 1])
    assert decode_texts((tokens, y), Tokenizer()) == ["3 1", "4 1"]
    assert decode_texts(({"input_ids": tokens}, y), Tokenizer()) == ["3 1", "4 1"]
    assert decode_texts((tokens, y), None) == []
    assert decode_texts((tokens.float(), y), Tokenizer()) == []


# --- skorch --------------------------------------------------------------------------------------


def fit_with_skorch(points: tuple[Tensor, Tensor], callbacks: list[Any]) -> Any:
    from skorch import NeuralNetClassifier

    torch.manual_seed(4)
    net = NeuralNetClassifier(
        copy.deepcopy(mlp()),
        criterion=nn.CrossEntropyLoss,
        max_epochs=2,
        batch_size=16,
        train_split=None,
        verbose=0,
        callbacks=callbacks,
    )
    return net.fit(points[0].numpy(), points[1].numpy())


def test_skorch_trains_the_same_and_every_fit_is_a_run(points, tmp_path: Path) -> None:
    from unlazy.scope.adapters.skorch import ScopeCallback

    callback = ("scope", ScopeCallback(points, tmp_path, options={"budget": ALWAYS}))
    watched = fit_with_skorch(points, [callback])
    assert same(watched.module_, fit_with_skorch(points, []).module_)
    check_run(tmp_path / "fit-0001", last=12)
    assert known_steps(dict(watched.callbacks_)["scope"].scope_) == 12
    watched.set_params(callbacks__scope__options={"budget": ALWAYS, "steps": 99})
    watched.fit(points[0].numpy(), points[1].numpy())
    check_run(tmp_path / "fit-0002", last=12)
    assert known_steps(dict(watched.callbacks_)["scope"].scope_) == 99  # what the user says counts


def test_scikit_learn_can_copy_a_watched_net(points, tmp_path: Path) -> None:
    from sklearn.base import clone

    from unlazy.scope.adapters.skorch import ScopeCallback

    callback = ("scope", ScopeCallback(points, tmp_path, options={"budget": ALWAYS}))
    twin = clone(fit_with_skorch(points, [callback]))
    twin.fit(points[0].numpy(), points[1].numpy())
    check_run(tmp_path / "fit-0002", last=12)


# --- Fabric --------------------------------------------------------------------------------------


def fit_with_fabric(points: tuple[Tensor, Tensor], precision: Any, watch: Callable[..., Any]) -> nn.Module:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    module = mlp()
    model, optimiser = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))
    with watch(module, model) as scope:
        for step in range(1, 9):
            loss = nn.functional.cross_entropy(model(points[0]), points[1])
            optimiser.zero_grad()
            fabric.backward(loss)
            optimiser.step()
            if scope is not None:
                scope.step(step, batch_loss=loss)
    return module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_fabric_needs_no_adapter(points, tmp_path: Path, precision: str, wrapped: bool) -> None:
    """The scope may be given the module, or what Fabric made of it."""

    def watch(module: nn.Module, model: nn.Module) -> Scope:
        return Scope(model if wrapped else module, points, tmp_path / "run", budget=ALWAYS, strict=True)

    watched = fit_with_fabric(points, precision, watch)
    assert same(watched, fit_with_fabric(points, precision, lambda *_: nullcontext()))
    run = check_run(tmp_path / "run", last=8)
    assert run.header["recipe"]["scope"]["layers"] == ["0", "3"]
    assert run.header["recipe"]["scope"]["left_out"] == {}


# --- sinks ---------------------------------------------------------------------------------------


def train_into(sink: Any, points: tuple[Tensor, Tensor], folder: Path) -> Run:
    model = mlp()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    with Scope(model, points, folder, sinks=(sink,), budget=ALWAYS) as scope:
        for step in range(1, 7):
            loss = nn.functional.cross_entropy(model(points[0]), points[1])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            scope.step(step, batch_loss=loss)
    return Run(folder)


def test_tensorboard_holds_what_the_run_holds(points, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train_into(TensorBoardSink(tmp_path / "board"), points, tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    steps, values = run.scalars("tangent_distance")
    shown = events.Scalars("unlazy/tangent_distance")
    assert [event.step for event in shown] == steps.tolist()
    np.testing.assert_allclose([event.value for event in shown], values[:, 0], rtol=1e-6)


def test_wandb_offline_holds_the_last_numbers(points, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path), project="unlazy") as mine:
        run = train_into(WandbSink(), points, tmp_path / "run")
        assert wandb.run is mine, "a run that was open before stays open"
        steps, values = run.scalars("loss")
        assert mine.summary["unlazy/step"] == steps[-1]
        assert mine.summary["unlazy/loss"] == pytest.approx(values[-1, 0])


def test_mlflow_holds_what_the_run_holds(points, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    with mlflow.start_run() as mine:
        run = train_into(MLflowSink(), points, tmp_path / "run")
        assert mlflow.active_run() is not None, "a run that was active before stays active"
    history = mlflow.MlflowClient().get_metric_history(mine.info.run_id, "unlazy/loss")
    steps, values = run.scalars("loss")
    assert [entry.step for entry in history] == steps.tolist()
    np.testing.assert_allclose([entry.value for entry in history], values[:, 0], rtol=1e-6)


# --- settings ------------------------------------------------------------------------------------


def test_hugging_face_keeps_the_arguments_that_were_set(tmp_path: Path) -> None:
    from unlazy.scope.adapters.huggingface import ScopeCallback

    tokens = torch.randint(0, 30, (32, 5), generator=stream(2, "adapters"))
    callback = ScopeCallback(
        ({"input_ids": tokens}, (tokens[:, 0] > 14).long()), tmp_path / "run", config={"seed": "mine"}
    )
    fit_with_transformers(tmp_path, [callback])
    config = Run(tmp_path / "run").header["config"]
    assert config["learning_rate"] == 5e-5
    assert config["per_device_train_batch_size"] == 16
    assert config["logging_steps"] == 2
    assert config["seed"] == "mine"  # what the user says counts
    assert "adam_epsilon" not in config
    assert len(config) < 30


def test_skorch_keeps_the_parameters_of_the_net(points, tmp_path: Path) -> None:
    from unlazy.scope.adapters.skorch import ScopeCallback

    net = fit_with_skorch(points, [("scope", ScopeCallback(points, tmp_path))])
    config = Run(tmp_path / "fit-0001").header["config"]
    assert config["max_epochs"] == net.max_epochs
    assert config["lr"] == net.lr
    assert config["optimizer"] == net.optimizer.__name__


def test_lightning_keeps_the_hyperparameters_and_sees_ctrl_c(points, tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from unlazy.scope.adapters.lightning import ScopeCallback

    class Module(LightningModule):
        def __init__(self, width: int, rate: float) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if index == 5:
                raise KeyboardInterrupt
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-2)

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[ScopeCallback(points, tmp_path / "run", budget=ALWAYS)], **quiet
    )
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(Module(width=3, rate=0.1), DataLoader(TensorDataset(*points), batch_size=8))
    run = Run(tmp_path / "run")
    assert run.header["config"] == {"width": 3, "rate": 0.1}
    assert run.status()["state"] == "interrupted"
    assert run.lines[-1].step == 5
    assert (tmp_path / "run" / "verdict.json").exists()
