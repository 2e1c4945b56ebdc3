"""Any request that the OpenAPI document allows is answered as it says, and never with a fault."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
from support.server import running_server

TESTS = Path(__file__).resolve().parents[1]
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
ENDLESS = r"/v1/events|/live$"


def test_generated_requests_meet_no_fault_and_no_undocumented_answer(tmp_path: Path) -> None:
    with running_server(tmp_path / "server") as server:
        command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json"]
        command += ["--checks", CHECKS, "--exclude-path-regex", ENDLESS, "--phases", "examples,fuzzing"]
        command += ["--max-examples", "15", "--request-timeout", "30", "--seed", "4", "--no-color"]
        env = {**os.environ, "PYTHONPATH": str(TESTS), "SCHEMATHESIS_HOOKS": "support.schemathesis_hooks"}
        ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
        tested = re.search(r"Tested: (\d+)", ran.stdout)
        assert tested is not None
        assert int(tested[1]) >= 25
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        assert "Traceback" not in server.log
