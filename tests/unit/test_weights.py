"""Pretrained weights from local files in the publishers' formats; no network."""

from __future__ import annotations

import functools
import hashlib
import http.server
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.cli import run
from workloads import registry
from workloads.contract import Hardware, TrainConfig
from workloads.datasets.shared.image_data import ImageData, Split
from workloads.datasets.shared.published import PublishedFile
from workloads.errors import DatasetError, InputError
from workloads.models.swin_tiny import timm_name
from workloads.registry import ModelDeclaration

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

CLASSES = 7


def _config(model: str, **more: Any) -> TrainConfig:
    fields = {"dataset": "cifar10", "strategy": "eager", "hardware": Hardware("cpu", 1), "cpus": 1, "pretrained": True}
    return TrainConfig(model=model, **(fields | more))


def _data() -> ImageData:
    split = Split(np.zeros(1, np.int64), np.zeros((1, 3, 32, 32), np.uint8))
    return ImageData(split, split, tuple("abcdefg"), (0.5,) * 3, (0.5,) * 3, "")


def _published(root: Path, model: str, state: Any, monkeypatch: pytest.MonkeyPatch, *urls: str) -> Path:
    """Put a state where the model's weights belong, its digest known."""
    declaration = registry.models()[model]
    weights = declaration.weights
    assert weights is not None
    path = weights.path(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    file = PublishedFile(weights.file.name, digest[:8], urls=urls or ("http://127.0.0.1:9/x",))
    changed: ModelDeclaration = replace(declaration, weights=replace(weights, file=file))
    monkeypatch.setitem(registry.models(), model, changed)
    return path


def _original(name: str) -> Any:
    import torchvision

    torch.manual_seed(5)
    return getattr(torchvision.models, name)(weights=None).eval()


@pytest.mark.parametrize(("model", "classifier"), [("resnet18", "fc"), ("mobilenet_v2", "classifier.1")])
def test_all_but_the_classifier_comes_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, classifier: str
) -> None:
    """As torchvision's file of 1,000 classes has it; the classifier is what the seed makes of it, for 7 classes."""
    from workloads.engines.recipe import build_model

    theirs = _original(model).state_dict()
    for key in list(theirs):
        if "running_" in key:
            theirs[key] += 0.5
        if key.endswith("num_batches_tracked"):
            del theirs[key]  # as in files of before
    _published(tmp_path, model, theirs, monkeypatch)
    ours = build_model(_config(model), _data(), 32, tmp_path).state_dict()
    fresh = build_model(_config(model, pretrained=False), _data(), 32).state_dict()
    assert ours.keys() == fresh.keys()
    for name, value in ours.items():
        if name.startswith(classifier):
            assert torch.equal(value, fresh[name]) and len(value) == CLASSES
        elif name in theirs:
            assert torch.equal(value, theirs[name]), name
    assert (
        build_model(_config(model, precision="fp64"), _data(), 32, tmp_path).state_dict()[f"{classifier}.weight"].dtype
        == torch.float64
    )


def test_published_swin_weights_fit_the_model_of_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's Swin-T and ours compute the same features of an image, so each parameter found its place."""
    from workloads.engines.recipe import build_model

    original = _original("swin_t")
    _published(tmp_path, "swin_tiny", original.state_dict(), monkeypatch)
    ours = build_model(_config("swin_tiny", image_size=224), _data(), 224, tmp_path)
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = original.avgpool(original.permute(original.norm(original.features(x)))).flatten(1)
        found: Any = ours.forward_head(ours.forward_features(x), pre_logits=True)
    assert torch.allclose(found, expected, atol=1e-4)
    assert timm_name("features.1.0.attn.relative_position_index") == ""


def test_the_error_names_damaged_missing_and_foreign_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workloads.engines.recipe import build_model

    path = _published(tmp_path, "resnet18", _original("mobilenet_v2").state_dict(), monkeypatch)
    with pytest.raises(DatasetError, match=rf"{path.name}: not the weights of resnet18\n  why: left out: \['conv1"):
        build_model(_config("resnet18"), _data(), 32, tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(
        DatasetError, match=r"missing or damaged weights\n  why: SHA-256(.|\n)*prepare weights/resnet18"
    ):
        build_model(_config("resnet18"), _data(), 32, tmp_path)
    path.unlink()
    with pytest.raises(DatasetError, match=rf"{path.name}: missing or damaged weights\n  why: No such file"):
        build_model(_config("resnet18"), _data(), 32, tmp_path)
    with pytest.raises(DatasetError, match="ORCHESTRATE_DATA"):
        build_model(_config("resnet18"), _data(), 32)
    with pytest.raises(InputError, match="there are no pretrained weights for cnn"):
        build_model(_config("cnn"), _data(), 32, tmp_path)


EXPERIMENT = """
name = "n"
[defaults]
pretrained = true
{keys}
[matrix]
model = ["{model}"]
dataset = ["{dataset}"]
strategy = ["eager"]
hardware = ["cpu:1"]
"""


@pytest.mark.parametrize(
    ("model", "dataset", "keys", "why"),
    [
        ("cnn", "cifar10", "", "there are no pretrained weights for cnn"),
        ("resnet18", "digits", "", "the pretrained weights of resnet18 are for colour images, and digits has gray"),
        ("resnet18", "cifar10", 'stem = "cifar"', 'the pretrained weights of resnet18 are for stem = "imagenet"'),
        ("swin_tiny", "cifar10", "image_size = 32", "are for 128 px and more: set image_size"),
    ],
)
def test_runs_without_published_weights_are_excluded(
    tmp_path: Path, monkeypatch: Any, capsys: Any, model: str, dataset: str, keys: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("experiment.toml").write_text(EXPERIMENT.format(model=model, dataset=dataset, keys=keys))
    run(["plan", "--local", "--json", "--data", str(tmp_path)])
    assert why in capsys.readouterr().out.replace('\\"', '"')


def test_plan_reports_missing_weights_and_submit_submits_nothing(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("experiment.toml").write_text(EXPERIMENT.format(model="resnet18", dataset="synthetic", keys=""))
    run(["plan", "--local", "--data", str(tmp_path)])
    said = capsys.readouterr()
    assert "weights of resnet18" in said.out + said.err
    assert "orchestrate data prepare weights/resnet18" in said.out + said.err
    assert run(["submit", "--local", "--data", str(tmp_path)]) != 0
    assert not Path("runs").exists() or not list(Path("runs").glob("*/*/spec.json"))


def test_prepare_fetches_verifies_and_repeats_nothing(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Through the verb, over real HTTP on this machine; a wrong file at the first address is passed over."""
    served = tmp_path / "served"
    served.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(served))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        at = f"http://127.0.0.1:{server.server_port}"
        try:
            state = {"fc.weight": torch.zeros(2)}
            path = _published(tmp_path, "resnet18", state, monkeypatch, f"{at}/wrong", f"{at}/right")
            path.rename(served / "right")
            (served / "wrong").write_bytes(b"<html>")
            assert run(["data", "check", "weights/resnet18", "--data", str(tmp_path)]) == 1
            assert "pretrained weights are missing" in capsys.readouterr().out
            assert run(["data", "prepare", "weights/resnet18", "--data", str(tmp_path)]) == 0
            assert run(["data", "check", "weights/resnet18", "--data", str(tmp_path)]) == 0
        finally:
            server.shutdown()
            thread.join()
    capsys.readouterr()
    assert run(["data", "prepare", "weights/resnet18", "--data", str(tmp_path)]) == 0, "nobody answers any more"
    assert capsys.readouterr().err == f"weights/resnet18: {path} is whole\n"
    assert {p.name for p in path.parent.iterdir()} == {path.name, ".prepare.lock"}
    assert run(["data", "prepare", "weights/resnet19", "--data", str(tmp_path)]) == 2
    assert "did you mean weights/resnet18?" in capsys.readouterr().err


TORCHVISION_NAMES = {"swin_tiny": "swin_t"}
"""Of models that torchvision names differently."""


@pytest.mark.parametrize("model", [name for name, model in registry.models().items() if model.weights is not None])
def test_the_files_are_those_of_torchvision(model: str) -> None:
    """File names contain the digest, so the file that torchvision lists is the right one."""
    from torchvision.models import get_model_weights

    theirs: Any = get_model_weights(TORCHVISION_NAMES.get(model, model))
    weights = registry.models()[model].weights
    assert weights is not None and weights.file.urls == (theirs.IMAGENET1K_V1.url,)
    assert weights.file.digest in weights.file.name and len(weights.file.digest) == 8
