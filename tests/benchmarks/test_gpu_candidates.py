"""The measurement of candidates on a GPU, with toy shapes: no part may fail for a typo."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu_candidates.py"
PARTS = {
    *("adamw", "head variants", "peagle", "peagle kernels", "peagle tiles"),
    *("eagle3", "eagle3 kernels"),
    *("eagle3 tiles", "dflash", "dflash kernels", "dflash tiles", "dspark", "dspark kernels"),
    *("eagle3 32k", "eagle3 32k tiles", "eagle3 32k variants"),
    *("peagle variants", "eagle3 variants", "dflash variants"),
}


def test_every_part_runs(tmp_path):
    out = tmp_path / "candidates.json"
    command = [sys.executable, SCRIPT, "--toy", "--out", out]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    results = json.loads(printed)
    assert results == json.loads(out.read_text())
    assert {name for name in results if f"{name}: seconds" in results} == PARTS
    assert "failed" not in printed
    assert "Error" not in printed
    assert results["peagle"]["as it is"]["ratio"] == 1
    layouts = {label.split(" ", 1)[0] for label in results["dflash tiles"]}
    assert layouts == {"attend", "query_grad", "key_grad"}
    for name, count in {"head": 3, "peagle": 7, "eagle3": 7, "dflash": 7}.items():
        differences = [
            value
            for line in results[f"{name} variants"].values()
            for what, value in line.items()
            if what.endswith(": difference")
        ]
        assert len(differences) >= count
        assert max(differences) < 1e-5
    assert any("NESTED" in label for label in results["peagle tiles"])
