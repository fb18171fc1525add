"""`app.launch` writes jobs that their schedulers accept, submits them, and ends as the run does."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from app.config import load_config, run_verb
from app.launch import schedulers
from app.launch.__main__ import launch
from app.preflight import requested_devices
from app.run.job import IMAGE_HOME
from app.run.ranks import RENDEZVOUS_SECONDS
from tests.conftest import ROOT
from tests.in_process import make_data, make_model

NODES, GPUS = 7, 5  # numbers that stand for nothing else in a job file
EXPERIMENTS = ("llama70b", "llama8b", "llama8b_dpo", "mistral7b", "gpt_oss_20b")
LAUNCHERS = (*schedulers.SCHEDULERS, "kubernetes launch.kind=TrainJob")
PROGRAMS = (
    "sbatch", "srun", "scancel", "scontrol", "kubectl", "sky", "ray", "torchrun",
)  # fmt: skip
ON_GPUS = (f"hardware={NODES}x{GPUS}xh100", "trainer.global_batch_size=null", "plan.tokens=1000000")
SMALL = ("trainer.accelerator=cpu", "trainer.devices=2", "trainer.num_nodes=2", "strategy=ddp")


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The schedulers' programs as scripts; return the folder of what they keep."""
    bin_folder, jobs = tmp_path / "bin", tmp_path / "jobs"
    bin_folder.mkdir()
    jobs.mkdir()
    for name in PROGRAMS:
        call = f"sys.exit(programs.{name}(sys.argv[1:]))"
        lines = (f"#!{sys.executable}", "import sys", "from tests.launch import programs", call)
        (bin_folder / name).write_text("\n".join(lines))
        (bin_folder / name).chmod(0o755)
    (bin_folder / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (bin_folder / "python").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("LOFT_JOBS", str(jobs))
    monkeypatch.setattr(schedulers, "JOB_POLL_SECONDS", 0.01)
    return jobs


def start(*words: str) -> int:
    return run_verb("launch", lambda config: launch(config, words), words=words)


def write(name: str, *words: str) -> str:
    """Return the job file that a command writes."""
    code = start(f"launcher={name}", "launch.submit=false", "launch.image=ours:1", *words)
    assert code == 0
    files = Path.cwd().glob(f"outputs/*/launched/{schedulers.SCHEDULERS[name].file}")
    return max(files, key=lambda file: file.stat().st_mtime_ns).read_text()


def words_of(script: str, **variables: str) -> list[str]:
    """Return the overrides of the training command in a shell script, its variables replaced."""
    joined = script.replace("\\\n", " ")
    (line,) = [line for line in joined.splitlines() if re.search(r"app\.train|loft train", line)]
    for key, value in variables.items():
        line = line.replace(f'"${key}"', value).replace(f"${key}", value)
    assert "$" not in line.partition("train ")[2], line
    return shlex.split(line.partition("train ")[2].removesuffix(" &"))


def check_train(words: list[str], devices: int | str = GPUS) -> None:
    """Check that these overrides start a resumable run on all machines."""
    config = load_config("train", words)
    assert (config.trainer.num_nodes, config.trainer.devices) == (NODES, devices)
    assert config.resume == "auto" and config.output.dir is not None
    if devices == GPUS:
        assert requested_devices(config, GPUS).num_ranks == NODES * GPUS


def check_torchrun(script: str, first: str) -> None:
    from torch.distributed.run import get_args_parser

    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    joined = script.replace("\\\n", " ").replace("$NUM_NODES", str(NODES)).replace("$RANKS", "gpu")
    (line,) = [line for line in joined.splitlines() if "/torchrun " in line]
    line = line.removesuffix(" &").replace('$(echo "$SKYPILOT_NODE_IPS" | head -n 1)', first)
    options = get_args_parser().parse_args(shlex.split(line)[1:])
    assert (options.nnodes, options.nproc_per_node) == (str(NODES), "gpu")
    assert options.module and options.training_script == "app.train"
    assert options.rdzv_endpoint == f"{first}:29500"
    assert options.rdzv_conf == f"read_timeout={RENDEZVOUS_SECONDS}"
    check_train(options.training_script_args, "auto")


def check_slurm(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    option = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert (option["nodes"], option["gpus-per-node"]) == (str(NODES), str(GPUS))
    assert option["signal"].startswith("USR1@") and "requeue" in option
    assert option["ntasks-per-node"] == option["gpus-per-node"]
    variables = {"SLURM_JOB_NUM_NODES": str(NODES), "SLURM_NTASKS_PER_NODE": str(GPUS)}
    words = words_of(text, **variables)
    check_train(words)
    assert load_config("train", words).supervise.requeue
    # Only the scheduler's own request has the numbers.
    assert f"num_nodes={NODES}" not in text and f"devices={GPUS}" not in text


def check_kubernetes(text: str) -> None:
    content, *train = yaml.safe_load_all(text)
    name = content["metadata"]["name"]
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", name)
    if train:
        (job,), group = train, "trainer.kubeflow.org/v1alpha1"
        assert [one["kind"] for one in (content, job)] == ["TrainingRuntime", "TrainJob"]
        assert content["apiVersion"] == job["apiVersion"] == group
        assert job["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": name}
        assert job["metadata"]["name"] == name and job["spec"]["trainer"] == {"numNodes": NODES}
        (replicated,) = content["spec"]["template"]["spec"]["replicatedJobs"]
        labels = replicated["template"]["metadata"]["labels"]
        assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    else:
        assert (content["apiVersion"], content["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
        (replicated,) = content["spec"]["replicatedJobs"]
        assert replicated["replicas"] == NODES
    of_job = replicated["template"]["spec"]
    assert of_job["backoffLimit"] == 0
    of_one = {} if train else {"completions": 1, "parallelism": 1}  # else the operator sets them
    assert {key: of_job[key] for key in ("completions", "parallelism") if key in of_job} == of_one
    pod = of_job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # required by a podFailurePolicy
    assert (
        schedulers.SHUTDOWN_SECONDS
        < schedulers.POD_GRACE_SECONDS
        == pod["terminationGracePeriodSeconds"]
    )
    (container,) = pod["containers"]
    assert (
        container["name"] == of_job["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"]
    )
    assert container["image"] == "ours:1" and container["command"] == ["bash", "-c"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": GPUS}
    assert all(isinstance(one["name"], str) for one in container["env"])
    assert container["envFrom"] == [{"secretRef": {"name": "loft", "optional": True}}]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert mounts[schedulers.SHARED]["persistentVolumeClaim"]["claimName"] == "shared"
    (script,) = container["args"]
    assert ("NUM_NODES=$PET_NNODES\n" in script) == bool(train) != bool(container["env"])
    assert container["workingDir"] == IMAGE_HOME and f"{IMAGE_HOME}/.venv/bin/torchrun" in script
    check_torchrun(script.replace("$$(", "$("), f"{name}-node-0-0.{name}")


def check_sky(text: str) -> None:
    task = yaml.safe_load(text)
    assert task["num_nodes"] == NODES and schedulers.SHARED in task["volumes"]
    assert task["resources"]["accelerators"] == f"H100:{GPUS}"
    assert task["resources"]["image_id"] == "docker:ours:1"
    check_torchrun(task["run"], "10.0.0.1")


def check_ray(text: str) -> None:
    content = yaml.safe_load(text)
    job = json.loads(content["env_vars"][schedulers.RAY_VARIABLE])
    assert (job["nodes"], job["ranks_per_node"], job["uses_gpus"]) == (NODES, GPUS, True)
    assert content["working_dir"] == "." and job["max_failures"] > 0
    check_train([*job["words"], f"trainer.num_nodes={NODES}", f"trainer.devices={GPUS}"])


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for no base of the hub."""
    monkeypatch.setattr("app.launch.__main__.check_files", lambda *_, **__: [])


@pytest.mark.usefixtures("no_files")
@pytest.mark.parametrize(("launcher", "experiment"), zip(LAUNCHERS, EXPERIMENTS, strict=True))
def test_job_files_are_valid(
    launcher: str, experiment: str, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_planted0123456789abcdefghijklmnop")
    name, *kind = launcher.split()
    text = write(name, *kind, f"+experiment={experiment}", *ON_GPUS)
    of_run = text.replace(str(cwd), "")
    assert "planted" not in text and str(ROOT) not in of_run
    for number in (NODES, GPUS):
        # SLURM is asked for tasks and for GPUs of a node; each other number stands once.
        times = 2 if (name, number) == ("slurm", GPUS) else 1
        assert len(re.findall(rf"(?<![\w.]){number}(?![\w.])", of_run)) == times
    globals()[f"check_{name}"](text)


@pytest.mark.usefixtures("no_files")
def test_a_job_may_lose_nodes(cwd: Path) -> None:
    typed = ("launch.min_nodes=1", "+experiment=llama8b", *ON_GPUS)
    job = json.loads(yaml.safe_load(write("ray", *typed))["env_vars"][schedulers.RAY_VARIABLE])
    assert (job["min_nodes"], job["nodes"]) == (1, NODES)
    text = write("slurm", *typed)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert f"#SBATCH --nodes=1-{NODES}\n" in text and f"#SBATCH --mincpus={8 * GPUS}\n" in text
    assert not re.search("^#SBATCH --(ntasks|cpus-per-task)", text, re.MULTILINE)
    assert f"export SLURM_NTASKS_PER_NODE={GPUS} SLURM_CPUS_PER_TASK=8\n" in text
    config = load_config("train", words_of(text, SLURM_NTASKS_PER_NODE=str(GPUS)))
    assert (config.trainer.num_nodes, config.trainer.devices) == ("auto", GPUS)


MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}
"""kinds -> their published schemas"""


@pytest.mark.usefixtures("no_files")
@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
def test_jobs_on_kubernetes_follow_their_published_schemas(kind: str, cwd: Path) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    words = ("launcher.cpus=4", "launcher.memory_gib=8", "+experiment=llama8b", *ON_GPUS)
    for content in yaml.safe_load_all(write("kubernetes", f"launch.kind={kind}", *words)):
        read = getattr(models, MODELS[content["kind"]]).from_dict(content)
        assert read.to_dict() == content


@pytest.mark.slow
@pytest.mark.usefixtures("no_files")
def test_skypilot_reads_its_tasks(cwd: Path) -> None:
    sky = pytest.importorskip("sky")
    for experiment in EXPERIMENTS:
        text = write("sky", f"+experiment={experiment}", *ON_GPUS, f"output.name={experiment}")
        task = sky.Task.from_yaml_config(yaml.safe_load(text))
        assert task.num_nodes == NODES and task.name == experiment.replace("_", "-")
        (resources,) = task.resources
        assert resources.accelerators == {"H100": GPUS}


URL = "s3://bucket/runs/mine"


@pytest.mark.usefixtures("no_files")
@pytest.mark.parametrize(("name", "hardware"), [("slurm", "8xh100"), ("sky", "2x8xh100")])
def test_a_run_can_keep_its_folder_in_a_bucket(
    name: str, hardware: str, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.config.dispatch.check_store", lambda config: [])
    monkeypatch.delenv("LOFT_DATA_CACHE")  # in another folder
    text = write(name, "+experiment=llama8b", f"hardware={hardware}", f"output.dir={URL}")
    assert schedulers.SHARED not in text and f"output.dir={URL}" in text
    if name == "slurm":
        assert f"#SBATCH --output={cwd}/outputs/llama8b/launched/slurm-%j.txt" in text
        assert f"--container-mounts={cwd}:{cwd} " in text
    else:
        assert f"-m app.status run={URL}" in text
        words = words_of(text, NUM_NODES=hardware[0])
        assert f"output.dir={URL}" in words and "trainer.devices=auto" in words


def test_a_container_on_slurm_sees_what_the_run_reads_and_caches(
    cwd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = make_model(tmp_path / "base"), make_data(tmp_path / "real.jsonl")
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setenv("LOFT_DATA_CACHE", str(scratch / "new"))
    (cwd / "link.jsonl").symlink_to(data)
    typed = [f"model.path={model}", "data.datasets=[{path: link.jsonl, format: alpaca}]", *SMALL]
    mounts = [cwd, cwd / "outputs/launch/launched", model, data, scratch / "new"]
    listed = ",".join(f"{folder}:{folder}" for folder in mounts)
    assert f"--container-mounts={listed} " in write("slurm", *typed)
    assert (scratch / "new").is_dir()
    monkeypatch.setenv("LOFT_DATA_CACHE", str(data / "new"))
    assert start("launcher=slurm", "launch.submit=false", "launch.image=ours:1", *typed) == 3
    assert "the job's container mounts this folder" in capsys.readouterr().err


ENDINGS: list[tuple[str | None, int, str | None, int]] = [
    ("finished", 0, None, 0),
    ("failed", 2, "error: no such column", 2),
    ("training", 137, None, 3),
    ("failed", 4, "error (training stopped): loss is nan", 4),
    ("stopped", 143, "stopped by SIGTERM: step 3 is saved", 143),
    (None, 137, None, 3),
]
"""state, exit code and message of a run, and the exit code of a launch that watches it: 3 if it was
killed without a word"""


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        pytest.param(name, ending, id=f"{name}-{ending[0]}-{ending[1]}")
        for n, name in enumerate(LAUNCHERS)
        for m, ending in enumerate(ENDINGS)
        # Each launcher with an end and another ending; a log is read the same way for all.
        if m in (0, n + 1)
    ],
)
def test_exit_code_and_message_of_a_run_survive_its_launcher(
    name: str,
    ending: tuple[str | None, int, str | None, int],
    cwd: Path,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    state, code, message, expected = ending
    asked = {"state": state, "code": code, "message": message}
    monkeypatch.setenv("LOFT_ENDING", json.dumps(asked))
    folder = cwd / "runs" / "it's one"
    model, data = make_model(cwd / "model"), make_data(cwd / "data.jsonl")
    words = [*f"launcher={name}".split(), "launch.watch=true", *SMALL, f"output.dir={folder}"]
    words += [f"model.path={model}", f"data.datasets=[{{path: {data}, format: alpaca}}]"]
    if name.startswith(("kubernetes", "sky")):
        words.append("launch.image=ours:1")
    if name != "slurm":  # whose machines see the folders of this one
        monkeypatch.setattr("app.launch.__main__._is_typed_absolute", lambda *_: False)
        monkeypatch.setattr("app.launch.__main__.reaches", lambda *_: True)
    assert start(*words) == expected
    out = capsys.readouterr().out
    assert message is None or message in out
    printed = re.findall(r"^  (.*)   # its progress", out, re.MULTILINE)
    assert [shlex.split(line)[-1] for line in printed] == [f"run={folder}"] * (name == "slurm")
    given = json.loads((programs / "words.json").read_text())
    placed = set() if name == "ray" else {"trainer.num_nodes=2", "trainer.devices=2"}
    assert placed | {"resume=auto"} <= set(given)
    assert not [word for word in given if word.startswith("launch")]


def test_a_job_that_still_runs_is_not_submitted_again(
    cwd: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (programs / "mine.job").write_text(json.dumps({"code": None, "log": "none"}))
    words = ["launcher=kubernetes", "+experiment=quickstart", "output.name=mine", *SMALL]
    assert start(*words, "launch.image=ours:1") == 3
    assert "job mine has not ended" in capsys.readouterr().err
    assert not (programs / "words.json").exists()


def test_a_cancelled_job_ends_its_watch_with_the_code_of_its_run(
    cwd: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = {"state": "stopped", "code": 143, "message": "stopped by SIGTERM: step 3 is saved"}
    monkeypatch.setenv("LOFT_ENDING", json.dumps(ending))
    monkeypatch.setattr(schedulers, "ENDED_RUN", re.compile("(?!)()()"))  # no word in its log
    words = ["launcher=slurm", "launch.watch=true", "+experiment=quickstart", *SMALL]
    assert start(*words) == 143


def test_a_scheduler_that_refuses_is_quoted(
    cwd: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (programs.parent / "bin" / "sbatch").write_text("#!/bin/bash\necho no such partition; exit 1\n")
    words = ["launcher=slurm", "launcher.partition=gpu", "+experiment=quickstart", *SMALL]
    assert start(*words) == 3
    assert "sbatch ended with 1: no such partition" in capsys.readouterr().err


REFUSED: list[tuple[str, str]] = [
    ("launcher=local", "launcher=slurm or kubernetes"),
    ("launcher=slurm launcher.partition='a b'", "launcher.partition='a b'"),
    ("launcher=slurm launcher.gpus=2", "hardware=8xh100"),
    ("launcher=sky launcher.minutes=60 launch.image=i", "launcher.minutes=60 has no effect"),
    ("launcher=kubernetes", "launch.image=NAME"),
    ("launcher=slurm launch.kind=TrainJob", "launcher=kubernetes"),
    ("launcher=sky launch.image=i launch.min_nodes=1", "launcher=slurm or launcher=ray"),
    ("launcher=slurm launch.submit=false launch.min_nodes=3", "launch.min_nodes=3: the job has 2"),
    ("launcher=slurm launch.submit=false launch.min_nodes=1", "trainer.global_batch_size=N"),
    ("launcher=ray output.dir=runs/mine", "output.dir=runs/mine"),
    ("launcher=slurm", "the program sbatch was not found"),
    ("launcher=sky launch.image=i", "pip install 'skypilot"),
    ("launcher=kubernetes launch.image=i data.datasets=[{path: DATA}]", "exists only on this"),
    ("launcher=ray model.path=MODEL", "model.path"),
    ("launcher=ray data.datasets=[{path: HERE/a.jsonl}]", "type a.jsonl instead"),
    ("launcher=ray data.datasets=[{path: LINK/a.jsonl}]", "type a.jsonl instead"),
    ("launcher=ray data.datasets=[{path: '~/mine/a.jsonl'}]", "type a.jsonl instead"),
    ("launcher=ray evaluation.task_dir='~/mine'", "type . instead"),
    (
        "launcher=ray evaluation.tasks=[{name: x, path: '~/*/**/a.jsonl', kind: perplexity}]",
        "tasks[0].path=~/*/**/a.jsonl: exists only on this",
    ),
    ("launcher=ray +experiment=~/mine/mine.yaml", "type mine.yaml instead"),
    ("launcher=ray data.datasets=[{path: outputs/a.jsonl}]", "exists only on this"),
    ("launcher=ray data.datasets=[{path: b/outputs/a.jsonl}]", "exists only on this"),
    ("launcher=ray data.chat_template=TEMPLATE", "exists only on this"),
    ("launcher=sky launch.image=i evaluation.task_dir=MODEL", "exists only on this"),
    ("launcher=ray evaluation.harness_dir=MODEL", "evaluation.harness_dir="),
    (
        "launcher=ray evaluation.metric=MODEL/m.py:f evaluation.allow_code=true",
        "evaluation.metric=",
    ),
    ("launcher=ray evaluation.tasks=[{name: x, path: DATA, kind: perplexity}]", "tasks[0].path="),
    (
        "launcher=ray evaluation.tasks=[{name: x, path: sample:orders, few_shot_path: DATA}]",
        "tasks[0].few_shot_path=",
    ),
    ("launcher=ray data.datasets=[{path: 'MODEL/*.json'}]", "exists only on this"),
    ("launcher=kubernetes launch.image=i mine.yaml", "experiment=mine.yaml: exists only"),
    ("launcher=kubernetes launch.image=i +experiment=mine.yaml", "+experiment=mine.yaml"),
    ("launcher=slurm data.datasets=[{path: 'https://me:Zq7password@host/a.jsonl'}]", "a secret"),
]


@pytest.mark.parametrize(("typed", "fragment"), REFUSED, ids=[typed for typed, _ in REFUSED])
def test_what_cannot_run_there_is_refused_before_it_is_submitted(
    typed: str,
    fragment: str,
    cwd: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    elsewhere = tmp_path / "elsewhere"
    data = make_data(tmp_path / "data.jsonl")
    model = make_model(elsewhere / "model")
    (model / "m.py").write_text("def f(answer, reference):\n    return {'score': 1.0}\n")
    (cwd / "mine.yaml").write_text("# @package _global_\nseed: 3\n")
    (template := elsewhere / "own.jinja").write_text("{{ messages[0].content }}")
    (link := tmp_path / "link").symlink_to(cwd)
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in (cwd, cwd / "outputs", cwd / "b" / "outputs"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "a.jsonl").write_bytes(data.read_bytes())
    places = {"DATA": data, "MODEL": model, "HERE": cwd, "TEMPLATE": template, "LINK": link}
    for name, place in places.items():
        typed = typed.replace(name, str(place))
    words = re.findall(r"(?:\[.*?\]|'.*?'|\S)+", typed)
    first = [] if "mine.yaml" in typed else ["+experiment=quickstart"]
    named = ["model=tiny"] if first == [] else []
    assert start(*first, *named, *SMALL, *words) == 2
    assert fragment in capsys.readouterr().err
    assert not list(cwd.glob("**/job.*"))


def test_what_does_not_fit_is_refused_with_what_would(
    cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launcher=slurm", "launch.submit=false", "+experiment=llama70b"]
    assert start(*words, "hardware=1xrtx3090") == 2
    err = capsys.readouterr().err
    assert "does not fit a GPU" in err and "quantization=nf4" in err
    assert start(*words, "hardware=8xh100", "trainer.devices=9") == 2
    assert "hardware=9xh100" in capsys.readouterr().err


def test_the_same_command_resumes_in_the_same_folder_once_its_job_has_ended(
    cwd: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOFT_ENDING", json.dumps({"state": "stopped", "code": 143, "message": ""}))
    words = ["launcher=slurm", "+experiment=quickstart", *SMALL]
    folders = []
    for number in (1, 2):
        assert start(*words) == 0
        given: list[str] = json.loads((programs / "words.json").read_text())
        folders += [word for word in given if word.startswith("output.dir=")]
        job: dict[str, Any] = json.loads((cwd / "outputs/quickstart/launched/job.json").read_text())
        assert job["id"] == str(number)
    assert len(set(folders)) == 1
    (programs / "2.job").write_text(json.dumps({"code": None, "log": "none"}))  # it still runs
    assert start(*words) == 3
    assert "job 2 has not ended: wait for it, or stop it by scancel 2" in capsys.readouterr().err
    assert not (programs / "3.job").exists()
