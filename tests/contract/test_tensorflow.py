"""Every TensorFlow strategy equals torch's ``eager``: same weights, batches, crops, optimizer, loss, figures.

All TensorFlow runs share one process, because its import takes longer than they do; two logical CPU devices stand for
two devices. The bound is that of torch's strategies, because TensorFlow computes in double precision too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.by_hand import train_by_hand
from tests.contract.variants import Variant, missing_packages, widest
from workloads import registry

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytestmark = pytest.mark.torch

CLOSE = 1e-9
NUM_TEST = 21
EAGER, TF_EAGER = Variant("eager", 1), Variant("tf_eager", 1)
TF_VARIANTS = widest(1, 2, framework=registry.TENSORFLOW)
ON_TWO_DEVICES = [variant for variant in TF_VARIANTS if variant.devices == 2]

COMMON: dict[str, Any] = {
    "model": "cnn",
    "dataset": "imagefolder/few",
    "dropout": 0.0,
    "batch_size": 8,
    "eval_every": 0,
    "seed": 3,
    "precision": "fp64",
    "batch_norm": "frozen",
}
"""39 training images: every fifth batch has 7, of which two replicas take 4 and 3."""
CASES: dict[str, dict[str, Any]] = {
    "sgd": {
        **{"optimizer": "sgd", "lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
        **{"schedule": "cosine", "warmup_steps": 2, "augment": "crop_flip", "label_smoothing": 0.1, "steps": 6},
    },
    "adamw": {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.01, "steps": 5},
    "odd": {"optimizer": "sgd", "lr": 0.01, "momentum": 0.0, "batch_size": 19, "steps": 3},
    "single": {"optimizer": "adam", "lr": 1e-3, "precision": "fp32", "steps": 10},
    "norm": {"optimizer": "sgd", "lr": 0.01, "batch_norm": "batch", "batch_size": 20, "steps": 4},
    "undisturbed": {
        **{"optimizer": "adam", "lr": 1e-3, "schedule": "cosine", "dropout": 0.2, "augment": "crop_flip"},
        **{"batch_norm": "batch", "batch_size": 12, "drop_last": True, "epochs": 2, "precision": "fp32"},
    },
}
"""``odd``: batches of 19, 19 and 1 samples, of the last of which a second replica has none. ``undisturbed`` runs twice,
the second time from the first one's first checkpoint."""
COMPARED = [
    *((variant, "sgd") for variant in TF_VARIANTS),
    *((variant, case) for variant in TF_VARIANTS if variant.declaration.splits_batch for case in ("adamw", "odd")),
]

COPY_FIRST_CHECKPOINT = """
from pathlib import Path
import shutil
from workloads.engines import tf_checkpoint
save = tf_checkpoint.save
def save_and_copy(path, run_id, state, progress):
    save(path, run_id, state, progress)
    other = Path(str(path).replace("/undisturbed/", "/resumed/"))
    if progress["epoch"] == 1 and other != path:
        other.parent.mkdir(exist_ok=True)
        shutil.copy(path, other)
tf_checkpoint.save = save_and_copy
"""

needs_tensorflow = pytest.mark.skipif(
    bool(missing_packages(registry.strategies()["tf_eager"])), reason="TensorFlow is not installed"
)


def _write(launcher: Any, runs: Path, data_root: Path, variant: Variant, case: str) -> Any:
    train = COMMON | CASES[case] | variant.train
    every = 1 if case == "undisturbed" else 1000
    return launcher.write(
        runs, data_root=data_root, execution={"checkpoint_every": every, "hang_timeout_s": 300}, **train
    )


@pytest.fixture(scope="module")
def trained(launcher: Any, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """(variant, case) -> run."""
    root = tmp_path_factory.mktemp("runs")
    wanted = [*COMPARED, (TF_EAGER, "single"), *((variant, "norm") for variant in TF_VARIANTS)]
    runs = {key: _write(launcher, root / "compared", data_root, *key) for key in wanted}
    for variant in ON_TWO_DEVICES:
        for name in ("undisturbed", "resumed"):
            runs[variant, name] = _write(launcher, root / name, data_root, variant, "undisturbed")
    references = {
        (EAGER, case): _write(launcher, root / "eager", data_root, EAGER, case)
        for case in ("sgd", "adamw", "odd", "single")
    }
    # Two devices first: TensorFlow makes its logical devices when it is first used, and cannot add any.
    ordered = sorted(runs, key=lambda key: (-key[0].devices, key[1] == "resumed"))
    launcher.succeed([runs[key] for key in ordered], prelude=COPY_FIRST_CHECKPOINT, within_s=900)
    launcher.succeed(list(references.values()), within_s=600)
    return runs | references


def _state(run: Any) -> dict[str, Any]:
    from workloads.engines import tf_checkpoint

    found = tf_checkpoint.load(run.checkpoint, run.run_id)
    assert found is not None
    return found[0]


def _losses(launcher: Any, run: Any) -> list[float]:
    return [loss for e in launcher.events(run.attempt(1), "steps") for loss in e["loss"]]


def _farthest(arrays: dict[str, Any], tensors: dict[str, Any]) -> float:
    wanted = {name for name in tensors if "num_batches" not in name}
    assert arrays.keys() == wanted
    return max(float(np.abs(arrays[name] - tensors[name].numpy()).max()) for name in wanted)


@needs_tensorflow
@pytest.mark.parametrize(("variant", "case"), COMPARED, ids=str)
def test_every_tensorflow_strategy_equals_eager(
    launcher: Any, trained: dict[Any, Any], variant: Variant, case: str
) -> None:
    """Every parameter and loss within 1e-9 in float64, with odd batches, crops and schedule; the figures too."""
    run, eager = trained[variant, case], trained[EAGER, case]
    learned = torch.load(eager.checkpoint, weights_only=True)["model"]
    assert _farthest(_state(run)["model"], learned) < CLOSE
    assert _losses(launcher, run) == pytest.approx(_losses(launcher, eager), abs=CLOSE)
    found, expected = (r.attempt(1).read_result() for r in (run, eager))
    assert found.num_test_samples == NUM_TEST == sum(row["support"] for row in found.per_class)
    assert (found.test_accuracy, found.per_class) == (expected.test_accuracy, expected.per_class)
    assert found.test_loss == pytest.approx(expected.test_loss, abs=CLOSE)
    for name in ("num_parameters", "num_train_samples", "lr_applied", "world_size", "steps_done", "epochs_done"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.provenance["initial_weights"] == "torch"
    assert found.metrics["step_time_s"] > 0 and found.metrics["warmup_s"] > 0 and found.peak_memory_bytes > 0


@needs_tensorflow
def test_first_losses_in_single_precision_equal_eagers(launcher: Any, trained: dict[Any, Any]) -> None:
    """Ten steps of Adam, with the kernels that users get."""
    found, expected = (_losses(launcher, trained[variant, "single"]) for variant in (TF_EAGER, EAGER))
    assert len(found) == 10
    assert found == pytest.approx(expected, abs=1e-3)
    assert found[-1] < found[0]


@needs_tensorflow
@pytest.mark.parametrize("variant", TF_VARIANTS, ids=str)
def test_live_batch_norm_equals_a_loop_by_hand(trained: dict[Any, Any], data_root: Path, variant: Variant) -> None:
    """Each replica normalizes its part and running statistics are averaged, or one sees the whole batch; the running
    variance is the unbiased one."""
    run = trained[variant, "norm"]
    treatment = variant.declaration.batch_norm_treatment
    model, test_loss = train_by_hand(run.read_spec().train, data_root, 2 if treatment == "per_rank" else 1)
    assert run.attempt(1).read_result().batch_norm_treatment == treatment
    assert _farthest(_state(run)["model"], model) < CLOSE
    assert run.attempt(1).read_result().test_loss == pytest.approx(test_loss, abs=CLOSE)


@needs_tensorflow
def test_the_result_names_the_balance_and_the_lack_of_batch_norm(
    launcher: Any, data_root: Path, tmp_path: Path
) -> None:
    run = launcher.write(
        tmp_path,
        data_root=data_root,
        dataset="imagefolder/few",
        model="vgg16",
        image_size=32,
        strategy="tf_model_parallel",
        strategy_options={"balance": (30, 10)},
        hardware="cpu:2",
        steps=1,
    )
    launcher.succeed(run)
    result = run.attempt(1).read_result()
    assert (result.balance_applied, result.batch_norm_treatment) == ([30, 10], "none")


@needs_tensorflow
@pytest.mark.parametrize("variant", ON_TWO_DEVICES, ids=str)
def test_a_resumed_run_equals_an_uninterrupted_one(launcher: Any, trained: dict[Any, Any], variant: Variant) -> None:
    """Every bit of the last checkpoint and every loss, with dropout, crops and live batch norm."""
    undisturbed, resumed = trained[variant, "undisturbed"], trained[variant, "resumed"]
    assert resumed.attempt(1).read_result().resumed_from_epoch == 1
    losses = [_losses(launcher, run) for run in (undisturbed, resumed)]
    assert len(losses[0]) == 6 and losses[0][3:] == losses[1]
    one, two = (_state(run) for run in (undisturbed, resumed))
    assert one["optimizer"]["steps"] == two["optimizer"]["steps"] == 6
    for group in ("exp_avg", "exp_avg_sq"):
        assert all((one["optimizer"][group][k] == two["optimizer"][group][k]).all() for k in one["optimizer"][group])
    assert all((one["model"][name] == two["model"][name]).all() for name in one["model"])


WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "torchvision", "timm"}:
            raise ImportError("no " + name)
sys.meta_path.insert(0, Refuse())
"""


@needs_tensorflow
def test_without_torch_it_starts_from_keras_weights_and_records_that(
    launcher: Any, data_root: Path, tmp_path: Path
) -> None:
    """The engine does not need torch; the loss falls."""
    run = _write(launcher, tmp_path, data_root, TF_EAGER, "single")
    launcher.succeed(run, prelude=WITHOUT_TORCH)
    result = run.attempt(1).read_result()
    assert result.provenance["initial_weights"] == "keras"
    assert (result.num_parameters, result.num_test_samples) == (904_899, NUM_TEST)
    losses = _losses(launcher, run)
    assert losses[-1] < losses[0]


@needs_tensorflow
def test_gpus_that_tensorflow_does_not_see_are_wrong_hardware(launcher: Any, data_root: Path, tmp_path: Path) -> None:
    train = COMMON | CASES["single"] | {"strategy": "tf_eager", "hardware": "gpu:9"}
    run = launcher.write(tmp_path, data_root=data_root, expect={"ranks": 1, "gpus_per_node": 9}, **train)
    (code,) = launcher.start(run, env={"PATH": "/nowhere"}).exit_codes()
    result = run.attempt(1).read_result()
    assert (code, result.state, result.steps_done) == (78, "wrong_hardware", None)
    assert "TensorFlow sees 0 GPUs, 9 planned" in result.message and "CUDA_VISIBLE_DEVICES is" in result.message


FORMS = """
import os
os.environ["KERAS_BACKEND"] = "tensorflow"
import torch, torchvision
import keras, numpy as np, tensorflow as tf
from workloads import registry
from workloads.contract import Hardware, TrainConfig
from workloads.models.keras_forms.layers import Maker

for model, size, more in (("resnet50", 32, {}), ("resnet50", 24, {"stem": "cifar"}), ("vgg16", 40, {})):
    hardware = Hardware("cpu", 1)
    config = TrainConfig(model=model, dataset="synthetic", strategy="tf_eager", hardware=hardware, cpus=1, **more)
    declaration = registry.models()[model]
    torch.manual_seed(1)
    module = declaration.build(config, 3, 10, size).eval()
    for buffer in module.buffers():
        if buffer.dtype == torch.float32:
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    layers = declaration.keras_layers(make := Maker(dropout=None, freeze_batch_norm=False), config, 10)
    assert len(layers) == len(declaration.layers(module)), model
    x = torch.randn(2, 3, size, size)
    whole = keras.Sequential(layers)
    whole(tf.constant(x.permute(0, 2, 3, 1).numpy()))
    state = module.state_dict()
    entries = list(make.entries())
    assert [e.name for e in entries if e.trainable] == [n for n, _ in module.named_parameters()], model
    for entry in entries:
        entry.variable.assign(entry.from_torch(state.pop(entry.name).numpy()))
        assert (entry.to_torch(entry.variable.numpy()) == module.state_dict()[entry.name].numpy()).all()
    assert all("num_batches" in name for name in state), model
    answer = whole(tf.constant(x.permute(0, 2, 3, 1).numpy()), training=False).numpy()
    with torch.no_grad():
        expected = module(x).numpy()
    assert np.abs(answer - expected).max() < 1e-4 * np.abs(expected).max(), (model, np.abs(answer - expected).max())
print("equal")
"""


@needs_tensorflow
def test_keras_models_equal_torchs() -> None:
    """ResNet-50 with both stems and VGG16, at sizes where padding and pooling are uneven; parameters have torch's names
    in torch's order, and converting them there and back changes nothing."""
    done = subprocess.run([sys.executable, "-c", FORMS], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.endswith("equal\n"), done.stderr
