"""An engine on real MPI ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpirun import MPIRUN, mpirun
from small_models import write_llama

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'"),
]


def test_the_first_rank_leads_and_the_others_follow(tmp_path):
    write_llama(tmp_path, n_layers=2, n_heads=8, n_kv_heads=2, max_context=256)
    script = Path(__file__).with_name("check_engine.py")
    done = mpirun(2, "-m", "mpi4py", str(script), str(tmp_path), "0;1", "0&1", timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the engine agrees" in done.stdout
