"""Every script in examples/ runs as its first lines say, in a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_SECONDS = 120


def run(folder: Path, script: str, *words: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *map(str, words)],
        capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False, cwd=folder,
        env=os.environ | {"GEARSHIFT_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate_streams_an_answer(tmp_path: Path, smollm2_path: Path) -> None:
    output = run(tmp_path, "generate.py", smollm2_path, "The capital of France is", "--max-tokens", "3")
    lines = output.splitlines()
    assert lines[0].startswith(" Paris.")
    assert lines[-1].startswith("3 tokens written in the ")
    assert lines[-1].endswith("ended by length")


def test_compare_layouts_shows_all_four_pairs(tmp_path: Path, smollm2_path: Path) -> None:
    short = ("--prompt-tokens", "70", "--max-tokens", "4", "--rounds", "1", "--compute-type", "f32")
    lines = run(tmp_path, "compare_layouts.py", smollm2_path, *short).splitlines()
    pairs = [tuple(line.split()[:2]) for line in lines[1:5]]
    assert pairs == [("layer", "layer"), ("layer", "tensor"), ("tensor", "layer"), ("tensor", "tensor")]
    exposed = [float(line.split()[3]) for line in lines[1:5]]
    assert exposed[0] == exposed[3] == 0
    assert exposed[1] > 0
    assert exposed[2] > 0
    assert lines[5] == "all answers are equal"


def test_plan_workers_needs_no_worker(tmp_path: Path, smollm2_path: Path) -> None:
    lines = run(tmp_path, "plan_workers.py", smollm2_path, "--most", "3").splitlines()
    assert lines[0].endswith("30 layers")
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3"]


def test_every_example_is_run_here() -> None:
    source = Path(__file__).read_text()
    scripts = [path.name for path in EXAMPLES.glob("*.py")]
    assert scripts
    assert [name for name in scripts if f'"{name}"' not in source] == []
