"""The examples with other libraries: trained, saved, resumed, compared."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import solvers

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

# timm, transformers and deepinv import torchvision. Next to torch for CPUs, the torchvision of PyPI does not
# load, and its import fails at two operators. Nothing here calls them, so their schemas are enough.
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _name_missing_operators() -> torch.library.Library | None:
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    try:
        for library in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:  # compiled for another torch
        missing = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            missing.define(name + _SCHEMA)
        return missing
    return None


_KEPT = _name_missing_operators()  # its operators live as long as it does

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "integrations"
NEEDS = {
    "accelerate_digits": ("accelerate", "sklearn"),
    "deepinv_deblurring": ("deepinv", "sklearn"),
    "graph_nodes": ("sklearn",),
    "hub_mixin": ("huggingface_hub", "safetensors"),
    "hugging_face": ("transformers", "accelerate", "sklearn"),
    "lightning_digits": ("lightning", "sklearn"),
    "padded_graphs": ("torch_geometric",),
    "timm_vit": ("timm", "sklearn"),
}
# Deprecations within the libraries that are integrated, and what they say about small runs.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(num_workers|logging interval|exists and is not empty)"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
    pytest.mark.filterwarnings("ignore:No explicit prior"),
]


def example(name: str) -> Any:
    """The example as a module; skipped where a package is missing."""
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f'needs {package}: pip install ".[examples,integrations]"')
    found = importlib.util.spec_from_file_location(f"integration_{name}", FOLDER / f"{name}.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _own_random_numbers() -> Any:
    with torch.random.fork_rng(devices=[]):
        yield


def images(count: int = 3) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_every_integration_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(NEEDS)


def test_timm(capsys: pytest.CaptureFixture[str]) -> None:
    module = example("timm_vit")
    models = module.main(epochs=1, blocks=2, limit=64)
    assert capsys.readouterr().out.count("% of the test digits") == 1
    vit, mixed = models["vit"], models["equilibrium"]
    kinds = [type(block).__name__ for block in mixed.blocks]
    assert kinds == ["Block"] * 2 + ["EquilibriumBlock"] * 2
    parameters = dict(mixed.named_parameters())
    for name, weight in parameters.items():
        assert weight.requires_grad or torch.equal(weight, vit.state_dict()[name])
    moving = {name.split(".")[0] for name, p in parameters.items() if p.requires_grad}
    assert moving == {"blocks", "norm", "head"}
    mixed(images()).sum().backward()
    trained = [p for p in mixed.blocks[-1].parameters() if p.requires_grad]
    assert trained and all(p.grad is not None and p.grad.isfinite().all() for p in trained)
    other = module.replace(vit, 2)
    other.load_state_dict(mixed.state_dict())
    assert torch.equal(other.eval()(images()), mixed.eval()(images()))
    mixed.set_grad_checkpointing()
    assert torch.equal(mixed.train()(images()), other(images()))


def test_transformers_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = example("hugging_face")
    model = module.main(out=tmp_path, epochs=1, limit=64).eval()
    assert "logistic regression" in capsys.readouterr().out
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model_type"] == "equilibrium-vit" and config["dim"] == 32
    assert (tmp_path / "model" / "model.safetensors").exists()
    loaded = module.EquilibriumForImages.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded(images()).logits, model(images()).logits)
    half = module.EquilibriumForImages.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert half(images().bfloat16()).logits.dtype == torch.bfloat16
    logits = half(images().bfloat16()).logits.float()
    torch.testing.assert_close(logits, model(images()).logits, rtol=0.1, atol=0.1)
    pushed = catch_uploads(monkeypatch)
    model.push_to_hub("someone/equilibrium")
    assert pushed["someone/equilibrium"] >= {"config.json", "model.safetensors"}


def test_hub_mixin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("hub_mixin")
    pushed = catch_uploads(monkeypatch)
    head = module.main(out=tmp_path / "head", push_to="someone/head")
    assert "after loading: 0.0e+00" in capsys.readouterr().out
    loaded = module.DigitHead.from_pretrained(tmp_path / "head")
    assert torch.equal(loaded(images()), head(images())) and loaded(images()).shape == (3, 4)
    assert pushed["someone/head"] >= {"config.json", "model.safetensors"}


def catch_uploads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Names of the files that are sent to a repository of the hub, which is out of reach."""
    huggingface_hub = importlib.import_module("huggingface_hub")
    sent: dict[str, set[str]] = {}

    def create(self: Any, repo_id: str, **options: Any) -> Any:
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload(self: Any, repo_id: str, folder_path: Any, **options: Any) -> None:
        sent.setdefault(repo_id, set()).update(p.name for p in Path(folder_path).iterdir())

    def commit(self: Any, repo_id: str, operations: Any, **options: Any) -> None:
        sent.setdefault(repo_id, set()).update(o.path_in_repo for o in operations)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", commit)
    return sent


def test_lightning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("lightning_digits")
    first = module.main(out=tmp_path, epochs=1, limit=64, resume=False)
    figures = first.callback_metrics
    assert figures["train_converged"] == 1 and figures["test_converged"] == 1
    assert 1 < figures["train_evaluations"] < 30
    loaded = module.Digits.load_from_checkpoint(tmp_path / "last.ckpt").eval()
    assert torch.equal(loaded.model(images()), first.model.eval().model(images()))
    again = module.main(out=tmp_path, epochs=2, limit=64, resume=True)
    assert again.current_epoch == 2 and again.global_step == 2 and first.global_step == 1
    assert "logistic regression" in capsys.readouterr().out


def test_accelerate(capsys: pytest.CaptureFixture[str]) -> None:
    module = example("accelerate_digits")
    state = importlib.import_module("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)  # that of transformers' Trainer
    models = module.main(1, limit=48, precision="bf16", accumulate=2)
    output = capsys.readouterr().out
    assert "explicit, bf16" in output and "converged: True" in output
    parameters = [sum(p.numel() for p in model.parameters()) for model in models.values()]
    assert abs(parameters[0] / parameters[1] - 1) < 0.02
    assert all(
        p.dtype == torch.float32 and p.isfinite().all() for p in models["equilibrium"].parameters()
    )


def test_graph(capsys: pytest.CaptureFixture[str]) -> None:
    module = example("graph_nodes")
    found = module.main(nodes=120, labels=3, steps=25)
    assert set(found) == {"each node alone", "graph"}
    assert found["graph"] > found["each node alone"] + 0.1
    assert "of the edges within a class" in capsys.readouterr().out


def test_deepinv(capsys: pytest.CaptureFixture[str]) -> None:
    """The layer has deepinv's solution, and the gradient of a long loop of its iteration in float64."""
    module = example("deepinv_deblurring")
    result = module.main(channels=4, steps=2, limit=48)
    assert "deepinv, Anderson" in capsys.readouterr().out
    theirs, ours = (result["results"][name][0] for name in ("deepinv", "layer"))
    assert (ours - theirs).norm() < 0.01 * theirs.norm()
    layer, denoiser, operator = (
        result[name].double() for name in ("layer", "denoiser", "operator")
    )
    y = images().double()
    options = {"tolerance": 1e-10, "max_steps": 500, "adjoint": solvers.Implicit(tolerance=1e-10)}
    found, unrolled = layer(y, **options), operator.A_adjoint(y)
    for _ in range(600):
        unrolled = layer.update(unrolled, y)
    torch.testing.assert_close(found, unrolled, rtol=1e-7, atol=1e-8)
    weights = list(denoiser.parameters())
    gradients, expected = (
        torch.autograd.grad(z.square().sum(), weights) for z in (found, unrolled)
    )
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-7)


def test_padded_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    """Padding changes nothing, and the equilibrium classifies nodes that two convolutions do not reach."""
    module = example("padded_graphs")
    result = module.main(steps=60, longest=10)
    assert capsys.readouterr().out.count("% of the nodes") == 2
    accuracy = result["accuracy"]
    assert accuracy["equilibrium"] > accuracy["two convolutions"] + 0.1
    batch, model = module.chains(4, 9), result["equilibrium"]
    assert len({graph.num_nodes for graph in batch.to_data_list()}) > 1
    model.layer.tolerance = solvers.Tolerance(1e-6)
    graphs = batch.to_data_list()
    alone = [model(g.x, g.edge_index, torch.zeros_like(g.y)) for g in graphs]
    together = model(batch.x, batch.edge_index, batch.batch)
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)
