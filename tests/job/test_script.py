"""Batch scripts of what users may write: every text stays one word, and what would be a line is refused.

Tests of job/script.py and job/batch_job.py.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError
from hpctrain.job.batch_job import Job, plan_job
from hpctrain.job.job_options import JobOptions
from hpctrain.job.script import quote_path, render_script
from tests.engines import DECK

LEGAL = (
    'zq"x',
    "zq'x",
    "zq'\"'\"x",
    "zq$(touch owned)x",
    "zq`touch owned`x",
    "zq;touch owned;x",
    "zq && touch owned x",
    "zq|x>owned",
    "zq${HOME}x",
    "zq$$(OMP_NUM_THREADS)x",
    "zq  two words",
    "-zq",
    "--zq=x",
    "#zq",
    "zq #x",
    "zq%j%x",
    "zq{{id}}@{account}",
    "zq\\x\\",
    "zq*?[x]",
    "zq: x",
    "'zq'",
    '"zq" #x',
    "zqé漢字🚀",
    "zq~!x",
    "zq(x)<y",
)
CONTROL = (
    "zq\ntouch owned",
    "zq\n#SBATCH --wrap=x",
    "zq\r\nx",
    "zq\rx",
    "zq\tx",
    "zq\x00x",
    "zq\x1b[2Jx",
    "zq\x7fx",
    "zq\x85x",
    "zq\x9bx",
    "zq\u2028x",
    "zq\u2029x",
    "zq\u202ex",
    "zq\udcffx",
    "zq\ufffex",
)
KINDS: Mapping[str, dict[str, Any]] = {
    "mpirun": {"scheduler": "slurm", "launcher": "mpirun", "nodes": (1, 2)},
    "srun": {"scheduler": "slurm"},
    "gpu": {"scheduler": "slurm", "gpus_per_node": 2},
    "sweep": {"scheduler": "slurm", "variants": (("run.seed=1",), ("run.seed=2", "run.steps=3"))},
    "pbs": {"scheduler": "pbs"},
    "lsf": {"scheduler": "lsf", "nodes": (1, 2)},
    "flux": {"scheduler": "flux"},
    "kubernetes": {"scheduler": "kubernetes"},
}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_deck(value: str) -> Path:
    path = Path(f"{value}.toml")
    path.write_text(DECK)
    return path


def planned(kind: str, value: str, **fields: Any) -> Job:
    """A job with the value as the name and title of its deck, and in a setting."""
    options: dict[str, Any] = {"ranks_per_node": 2, **KINDS[kind], **fields}
    if kind != "kubernetes":
        options.setdefault("modules", (value.lstrip("-"),))
    settings = [f"run.title={toml_value(value)}", f"memory.offload_dir={toml_value(value)}"]
    return plan_job(write_deck(value), ["model.vocabulary=", *settings], JobOptions(**options))


def written(kind: str, value: str, **fields: Any) -> str:
    command = shlex.join(["hpctrain", "job", value])
    return render_script(planned(kind, value, **fields), f"{value}/bin/hpctrain", f"{value}.sh", command)


def shell_of(kind: str, text: str) -> str:
    """What bash gets of a script."""
    if kind != "kubernetes":
        return text
    job = yaml.safe_load(text)
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    variables = {"OMP_NUM_THREADS": "1"}

    def expanded(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\((\w+)\)", expanded, launcher["args"][0])


def lines(text: str, value: str, name: str) -> list[list[str]]:
    """The words of every line that is no comment, the value and the job's name standing as "plain".

    In settings the value may have TOML's escapes and quotes, and as a path "./" before it.
    """
    forms = (toml_value(value)[1:-1], value, value.lstrip("-"), name, "./plain")
    found = []
    for line in text.splitlines():
        if not line.lstrip().startswith("#"):
            words = shlex.split(line.removesuffix("\\"), comments=False)
            for form in forms:
                words = [word.replace(form, "plain") for word in words]
            found.append([word.replace('"', "") for word in words])
    return found


@kinds
def test_what_is_legal_stays_one_word(kind: str) -> None:
    plain = written(kind, "plain")
    expected = lines(shell_of(kind, plain), "plain", "plain")
    for value in LEGAL:
        text = written(kind, value)
        shell = shell_of(kind, text)
        checked = subprocess.run(["bash", "-n"], input=shell, capture_output=True, text=True)
        assert (checked.returncode, checked.stderr) == (0, ""), value
        name = planned(kind, value).name
        found = lines(shell, value, name)
        assert found == expected, value
        assert len(text.splitlines()) == len(plain.splitlines()), value
        directives = [row for row in text.splitlines() if re.match(r"#(SBATCH|PBS|BSUB)|# flux:", row)]
        assert [row.replace(name, "plain") for row in directives] == [
            row for row in plain.splitlines() if re.match(r"#(SBATCH|PBS|BSUB)|# flux:", row)
        ], value


def test_replicas_that_are_left_fit_fewer_nodes() -> None:
    """Three nodes do not divide the batch; with a replica on each they go on with a replica's own."""
    options, batch = JobOptions(scheduler="slurm", nodes=(1, 4), ranks_per_node=1), "batch.global_size=16"
    replicas = ("layout.local_steps.replicas=4", "layout.local_steps.steps=10")
    assert plan_job(write_deck("plain"), [batch], options).node_counts == (1, 2, 4)
    assert plan_job(write_deck("plain"), [batch, *replicas], options).node_counts == (1, 2, 3, 4)


def test_shells_hand_it_on_as_it_was(folder: Path) -> None:
    """The stand-in of the launcher notes its arguments; nothing else is run."""
    (folder / "bin").mkdir()
    for name in ("srun", "mpirun"):
        (folder / f"bin/{name}").write_text('#!/bin/bash\nprintf "%s\\0" "$@" >"$HERE/words"\n')
        (folder / f"bin/{name}").chmod(0o755)
    (folder / "bin/module").symlink_to("/bin/true")
    environment = {"PATH": f"{folder}/bin:/usr/bin:/bin", "HERE": str(folder), "PBS_O_WORKDIR": str(folder)}
    environment |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "1"}
    environment |= {"SLURM_JOB_END_TIME": "1", "PBS_NODEFILE": "hosts"}
    for value in LEGAL:
        for kind in ("sweep", "pbs"):
            text = written(kind, value)
            done = subprocess.run(["bash"], input=text, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, (value, done.stderr)
            words = (folder / "words").read_text().split("\0")[:-1]
            words = words[words.index("run") - 1 :]
            deck = f"./{value}.toml" if value.startswith("-") else f"{value}.toml"
            assert words[:4] == [f"{value}/bin/hpctrain", "run", deck, "--resume"]
            title = f"run.title={toml_value(value)}"
            assert title in words
            if kind == "sweep":
                from hpctrain.deck.read import read_deck

                again = read_deck(Path(f"{value}.toml"), words[5::2])
                assert (again.run.title, again.run.seed, again.run.steps) == (f"{value}-1", 2, 3)
                assert again.run.dir == f"runs/{value}-1"
    assert not (folder / "owned").exists()


@kinds
def test_control_characters_are_refused_wherever_they_stand(kind: str) -> None:
    options = {"ranks_per_node": 2, **KINDS[kind]}
    path = write_deck("plain")
    plain = plan_job(path, ["model.vocabulary="], JobOptions(**options))
    for value in CONTROL:
        refused = (
            lambda value: plan_job(path, [f"run.title={value}"], JobOptions(**options)),
            lambda value: plan_job(Path(f"{value}.toml"), [], JobOptions(**options)),
            lambda value: plan_job(path, [], JobOptions(**options, account=value)),
            lambda value: plan_job(path, [], JobOptions(**options, partition=value)),
            lambda value: plan_job(path, [], JobOptions(**options, directives=(f"--{value}",))),
            lambda value: plan_job(path, [], JobOptions(**options, modules=(value,))),
            lambda value: plan_job(path, [], JobOptions(**options, image=value)),
            lambda value: plan_job(path, [], JobOptions(**options, volume=("claim", f"/{value}"))),
            lambda value: plan_job(
                path, [], JobOptions(**(options | {"variants": ((f"run.title={value}",),)}))
            ),
            lambda value: render_script(plain, "hpctrain", value, "hpctrain job"),
            lambda value: render_script(plain, value, "FILE", "hpctrain job"),
            lambda value: render_script(plain, "hpctrain", "FILE", f"hpctrain job {value}"),
        )
        for number, act in enumerate(refused):
            with pytest.raises(HpctrainError, match="control character") as caught:
                act(value)
            assert all(problem.isprintable() for problem in caught.value.problems), (number, value)


@kinds
@pytest.mark.parametrize("field", ["account", "partition"])
def test_directives_carry_words_alone(kind: str, field: str) -> None:
    for value in (*LEGAL, "", "two words"):
        if value != "zqé漢字🚀" or kind == "kubernetes":
            with pytest.raises(HpctrainError, match=f"--{field} .*must be"):
                planned(kind, "plain", **{field: value})
    good = "physics-2" if kind == "kubernetes" else "physics_2:a,b@host.org"
    assert good in written(kind, "plain", **{field: good})


@kinds
def test_directives_modules_and_a_pods_parts(kind: str) -> None:
    if kind == "kubernetes":
        parts = {
            "image": "registry.example.org:5000/hpctrain@sha256:12",
            "volume": ("data.1", "/my data"),
            "shared_memory": 8 << 30,
        }
        text = written(kind, "plain", account="physics", partition="123", **parts)
        job = yaml.safe_load(text)
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "123"
        for role in ("Launcher", "Worker"):
            pod = job["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]
            assert pod["containers"][0]["image"] == parts["image"]
            assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == "/my data"
            assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "data.1"
        assert pod["volumes"][1]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8192Mi"}
        for wrong in (
            {"directives": ("--x",)},
            {"modules": ("gcc",)},
            {"image": "-x"},
            {"volume": ("x", "y")},
        ):
            with pytest.raises(HpctrainError, match=r"--(directive|module|image|volume)"):
                planned(kind, "plain", **wrong)
        return
    text = written(kind, "plain", directives=("--qos=high", "-x"), modules=("gcc", "openmpi/5"))
    begin = {"pbs": "#PBS", "lsf": "#BSUB", "flux": "# flux:"}.get(kind, "#SBATCH")
    assert f"\n{begin} --qos=high\n{begin} -x\n\n" in text
    assert "\nmodule load gcc openmpi/5 || exit 2\n" in text
    head, _, body = text.partition("module load")
    assert head.count(begin) > 5
    assert begin not in body
    for wrong in (
        {"directives": ("qos=high",)},
        {"modules": ("-x",)},
        {"image": "x"},
        {"shared_memory": 1 << 30},
    ):
        with pytest.raises(HpctrainError, match=r"--(directive|module|image|shared-memory)"):
            planned(kind, "plain", **wrong)


@pytest.mark.parametrize("title", ["123", "true", "___", "Null", "a" * 150])
def test_a_pods_name_is_a_text_and_short(title: str) -> None:
    name = yaml.safe_load(written("kubernetes", title))["metadata"]["name"]
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", name)


def test_a_path_is_no_option() -> None:
    assert quote_path("-x y.sh") == "'./-x y.sh'"
    assert os.path.normpath("./-x") == "-x"


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_with_mirrors_a_job_goes_on_with_the_nodes_that_are_left(folder: Path, launcher: str) -> None:
    """Commands of Slurm are stood in for: the first launch fails, and one node of two is left then."""
    path = Path("deck.toml")
    path.write_text(DECK)
    shape: dict[str, Any] = {"scheduler": "slurm", "launcher": launcher, "nodes": (1, 2), "ranks_per_node": 2}
    settings = ["checkpoint.mirror=true", "batch.global_size=16"]
    text = render_script(
        plan_job(path, settings, JobOptions(**shape)), "bin/hpctrain", "job.sh", "hpctrain job"
    )
    assert "#SBATCH --no-kill" in text
    program = Path(sys.executable).parent / "shellcheck"
    found = subprocess.run([program, "-s", "bash", "-"], input=text, capture_output=True, text=True)
    assert found.stdout == ""
    Path("job.sh").write_text(text)
    Path("bin").mkdir()
    # The first launch is lost once the other node looks: what ends sooner ends that one unseen, too.
    looks = "until grep --quiet -e --nodelist=n2 calls; do sleep 0.05; done"
    launches = '[[ "$*" == *" run deck.toml"* ]] || exit 0; echo >>launched'
    launches += f'; [ "$(wc -l <launched)" -gt 1 ] || {{ {looks}; exit 137; }}'
    for name, does in {
        "srun": f'[[ "$*" == *trap* ]] && exec sleep 60; {launches if launcher == "srun" else "exit 0"}',
        "mpirun": f"{launches}; env | grep ^SLURM_ >environment",
        "squeue": 'case "$*" in *%D) echo 1 ;; *%N) echo n1 ;; *) echo 2030-01-01T00:00:00 ;; esac',
        "scontrol": 'case "$3" in "n[1-2]") printf "n1\\nn2\\n" ;; *) echo "$3" ;; esac',
    }.items():
        Path("bin", name).write_text(f'#!/bin/bash\necho "{name} $*" >>calls\n{does}\n')
        Path("bin", name).chmod(0o755)
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"SLURMD_NODENAME": "n1", "SLURM_JOB_CPUS_PER_NODE": "4(x2)", "PATH": f"bin:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "job.sh"], env=job, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert "exit code 137: resumes at once on n1" in done.stdout
    calls = Path("calls").read_text().splitlines()
    ranks = [line for line in calls if " run deck.toml" in line]
    asked = "--ntasks=" if launcher == "srun" else "-n "
    assert [int(line.partition(asked)[2].split()[0]) for line in ranks] == [4, 2]
    # Another node looks whether this one is there, as long as there is another one.
    assert len([line for line in calls if "--nodelist=n2" in line]) == 1
    assert not [line for line in calls if line.startswith("scontrol requeue")]
    assert not Path("deck.faults").exists()
    if launcher == "mpirun":
        environment = Path("environment").read_text().splitlines()
        assert {"SLURM_JOB_NODELIST=n1", "SLURM_NODELIST=n1", "SLURM_NNODES=1"} <= set(environment)
        assert {"SLURM_TASKS_PER_NODE=2(x1)", "SLURM_JOB_CPUS_PER_NODE=4(x1)"} <= set(environment)


def test_without_mirrors_or_with_one_node_slurm_ends_a_job_that_lost_one(folder: Path) -> None:
    path = Path("deck.toml")
    path.write_text(DECK)
    for settings, nodes in ([], (1, 2)), (["checkpoint.mirror=true"], (1, 1)):
        options = JobOptions(scheduler="slurm", nodes=nodes, ranks_per_node=2)
        assert "no-kill" not in render_script(
            plan_job(path, settings, options), "bin/hpctrain", "job.sh", "hpctrain job"
        )


@pytest.mark.parametrize("kind", ["srun", "sweep", "pbs"])
def test_a_job_goes_on_without_nodes_that_had_silent_faults(folder: Path, kind: str) -> None:
    """The run stops with 75 and its status names two nodes; commands of schedulers are stood in for."""
    path = Path("deck.toml")
    path.write_text(DECK)
    settings = ["stability.corruption=cheap", "run.dir=a run"]
    job = plan_job(path, settings, JobOptions(**{"ranks_per_node": 2, **KINDS[kind]}))
    text = render_script(job, "bin/hpctrain", "a job.sh", "hpctrain job")
    program = Path(sys.executable).parent / "shellcheck"
    found = subprocess.run([program, "-s", "bash", "-"], input=text, capture_output=True, text=True)
    assert found.stdout == ""
    Path("a job.sh").write_text(text)
    Path("bin").mkdir()
    own = "a run-1" if kind == "sweep" else "a run"
    for name, does in {
        "hpctrain": f'[ "$*" = "status --faulty {own}" ] && echo n3,n7',
        "srun": "exit 75",
        "mpirun": "exit 75",
        "squeue": "echo 2030-01-01T00:00:00",
        **dict.fromkeys(("sbatch", "scontrol", "qsub"), "exit 0"),
    }.items():
        Path("bin", name).write_text(f'#!/bin/bash\necho "{name} $*" >>calls\n{does}\n')
        Path("bin", name).chmod(0o755)
    ids = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1", "SLURM_ARRAY_JOB_ID": "9", "PBS_O_WORKDIR": "."}
    ids |= {"SLURM_ARRAY_TASK_ID": "1", "PBS_NODEFILE": "nodes", "PATH": f"bin:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "a job.sh"], env=ids, capture_output=True, text=True, timeout=50)
    calls = Path("calls").read_text().splitlines()
    if kind == "pbs":
        assert "silent faults on n3,n7: this script cannot exclude nodes" in done.stderr
        assert "qsub a job.sh" in calls
        return
    assert "submitted again without n3,n7 because of silent faults" in done.stdout
    task = " --array=1" if kind == "sweep" else ""
    assert f"sbatch{task} --exclude=n3,n7 a job.sh" in calls
    assert not [line for line in calls if line.startswith("scontrol requeue")]
    # Without any such nodes it is queued again as ever.
    Path("bin", "hpctrain").write_text("#!/bin/bash\n")
    subprocess.run(["bash", "a job.sh"], env=ids, capture_output=True, text=True, timeout=50)
    assert "scontrol requeue 17" in Path("calls").read_text().splitlines()
