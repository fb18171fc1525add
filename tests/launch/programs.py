"""Stands in for the programs of the schedulers, by the name that it is called by.

A job runs to its end when it is submitted; what is kept of it lies in $LOFT_JOBS. Training is
replaced: it leaves the status that $LOFT_ENDING asks for, and ends as torchrun or srun would. Each
call is a process of its own, which imports only what it needs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

JOBS = Path(os.environ["LOFT_JOBS"])


def train(words: list[str]) -> int:
    """End a run of these words as it was asked for; return its exit code."""
    from app.process.status import begin_status, end_status, update_status

    (JOBS / "words.json").write_text(json.dumps(words))
    ending = json.loads(os.environ["LOFT_ENDING"])
    folder = Path(next(word for word in words if word.startswith("output.dir=")).partition("=")[2])
    if ending["state"] is not None:
        folder.mkdir(parents=True, exist_ok=True)
        begin_status(folder, 3)
        if ending["state"] == "training":  # killed without a word
            update_status(folder, state="training", pid=2**22 + 1)
            status = json.loads((folder / "status.json").read_text()) | {"pid": 2**22 + 1}
            (folder / "status.json").write_text(json.dumps(status))
        else:
            end_status(folder, ending["state"], ending["code"], ending["message"])
    return int(ending["code"])


def run(name: str, script: str, log: Path, **variables: str) -> None:
    """Run a job's script to its end, and keep its exit code."""
    script = script.replace("/loft/.venv/bin", str(Path(sys.argv[0]).parent))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        code = subprocess.run(
            ["bash", "-c", script], env=os.environ | variables, stdout=output, stderr=output
        ).returncode
    (JOBS / f"{name}.job").write_text(json.dumps({"code": code, "log": str(log)}))


def job(name: str) -> dict[str, Any] | None:
    file = JOBS / f"{name}.job"
    return json.loads(file.read_text()) if file.exists() else None


def sbatch(words: list[str]) -> int:
    text = Path(words[0]).read_text()
    number = str(1 + len(list(JOBS.glob("*.job"))))
    option = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.M))
    log = Path(shlex.split(option["output"])[0].replace("%j", number))
    names = {"SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": "node[1-2]"}
    names |= {"SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_NUM_NODES": option["nodes"]}
    run(number, text, log, **names, SLURM_NTASKS_PER_NODE=option["ntasks-per-node"])
    print(f"Submitted batch job {number}")
    return 0


def srun(words: list[str]) -> int:
    words = [
        word for word in words if not word.startswith(("--cpus", "--kill", "--nodes", "--nta"))
    ]
    if "app.train" in words:
        return train(words[words.index("app.train") + 1 :])
    return subprocess.run(words).returncode


def torchrun(words: list[str]) -> int:
    return bool(train(words[words.index("app.train") + 1 :]))


def kubectl(words: list[str]) -> int:
    import yaml  # type: ignore[import-untyped]

    if words[0] == "apply":
        content, *train = yaml.safe_load_all(Path(words[2]).read_text())
        spec = content["spec"]["template"]["spec"] if train else content["spec"]
        (replicated,) = spec["replicatedJobs"]
        (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
        name, (script,) = content["metadata"]["name"], container["args"]
        script = script.replace("$$(", "$(")
        nodes = str(train[0]["spec"]["trainer"]["numNodes"] if train else replicated["replicas"])
        run(name, script, JOBS / f"{name}.log", **{"PET_NNODES" if train else "NUM_NODES": nodes})
    elif words[0] == "get":
        if (kept := job(words[2])) is None:
            return 1
        print({0: "Completed", None: ""}.get(kept["code"], "Failed"), end="")
    elif words[0] == "logs":
        print(Path((job(words[2].rpartition("=")[2]) or {})["log"]).read_text())
    else:
        content = next(yaml.safe_load_all(Path(words[2]).read_text()))
        (JOBS / f"{content['metadata']['name']}.job").unlink()
    return 0


def sky(words: list[str]) -> int:
    import yaml

    if words[1] == "launch":
        name, task = words[5], yaml.safe_load(Path(words[6]).read_text())
        names = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
        names["SKYPILOT_NUM_NODES"] = str(task["num_nodes"])
        run(name, task["run"], JOBS / f"{name}.log", **names)
    elif words[1] == "queue":
        print("ID  TASK  NAME       REQUESTED    SUBMITTED   STATUS")
        for file in JOBS.glob("*.job"):
            print(f"8   -   {file.stem}-dpo   1x[H100:8]   1 min ago   CANCELLED")  # a newer job
            kept = json.loads(file.read_text())
            state = "FAILED" if kept["code"] else "SUCCEEDED"
            print(f"7   -   {file.stem}   1x[H100:8]   1 min ago   \x1b[32m{state}\x1b[0m")
    else:
        print(Path((job(words[3]) or {})["log"]).read_text())
    return 0


def ray(words: list[str]) -> int:
    import yaml

    if words[1] == "submit":
        name, file = "raysubmit_1", words[6]
        variables = yaml.safe_load(Path(file).read_text())["env_vars"]
        variables["PYTHONPATH"] = f"{Path(__file__).parent / 'ray'}:{os.environ['PYTHONPATH']}"
        run(name, shlex.join(words[8:]), JOBS / f"{name}.log", **variables)
        print(f"Job '{name}' submitted successfully")
    elif words[1] == "status":
        if (kept := job(words[2])) is None:
            return 1
        state = {0: "succeeded", None: "is running"}.get(kept["code"], "failed")
        print(f"Job '{words[2]}' {state}")
    elif words[1] == "logs":
        print(Path((job(words[3]) or {})["log"]).read_text())
    return 0


def scontrol(words: list[str]) -> int:
    if words[0] == "show":
        print("node1\nnode2")
        return 0
    if (kept := job(words[-1])) is None:
        print("slurm_load_jobs error: Invalid job id specified")
        return 1
    state = {0: "COMPLETED", None: "RUNNING"}.get(kept["code"], "FAILED")
    print(f"JobId={words[-1]} JobName=one JobState={state} ExitCode={kept['code']}:0")
    return 0
