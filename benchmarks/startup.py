"""Start-up time of the command line, compared with Hydra's ``--help`` and ``import torch`` in interleaved runs.

    python -m benchmarks.startup [--repeats 15] [--json]

Needs hydra-core and torch. Ratios are medians of pairwise ratios with their quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HYDRA_APP = """
import hydra
from omegaconf import DictConfig

@hydra.main(version_base=None, config_path=None)
def app(config: DictConfig) -> None:
    pass

app()
"""
STUDY = """
[defaults]
dataset = "synthetic"
[matrix]
model = ["resnet18", "resnet50", "vit_tiny"]
strategy = ["eager", "ddp"]
hardware = ["a100:1", "a100:2", "a30:2"]
"""
TARGETS = {"help / hydra help": 0.5, "plan of 18 cells / import torch": 0.25}


def _seconds(argv: list[str], folder: Path) -> float:
    start = time.perf_counter()
    subprocess.run(argv, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def measure(repeats: int) -> dict[str, list[float]]:
    """Return the wall-clock seconds of each command. Commands alternate so that drift affects all of them equally."""
    root = Path(__file__).parents[1]
    script = str(Path(sys.executable).parent / "orchestrate")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "app.py").write_text(HYDRA_APP)
        (folder / "experiment.toml").write_text(STUDY)
        commands = {
            "help": [script, "--help"],
            "hydra help": [sys.executable, "app.py", "--help"],
            "plan of 18 cells": [script, "plan", "--cluster", str(root / "cluster.example.toml")],
            "import torch": [sys.executable, "-c", "import torch"],
        }
        for argv in commands.values():
            _seconds(argv, folder)  # warm up: fill the page cache and write byte code
        times: dict[str, list[float]] = {label: [] for label in commands}
        for _ in range(repeats):
            for label, argv in commands.items():
                times[label].append(_seconds(argv, folder))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    times = measure(arguments.repeats)
    rows = []
    for pair, target in TARGETS.items():
        ours, peer = pair.split(" / ")
        ratios = [a / b for a, b in zip(times[ours], times[peer], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "pair": pair,
                "ours_s": statistics.median(times[ours]),
                "peer_s": statistics.median(times[peer]),
                "ratio": median,
                "quartiles": [low, high],
                "target": target,
                "met": median <= target,
            }
        )
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        low, high = row["quartiles"]
        print(
            f"{row['pair']}: {row['ours_s'] * 1e3:.0f} ms / {row['peer_s'] * 1e3:.0f} ms = {row['ratio']:.2f} "
            f"({low:.2f}-{high:.2f}), target {row['target']}: {'met' if row['met'] else 'missed'}"
        )


if __name__ == "__main__":
    main()
