"""hpctrain job: what it asks a scheduler for, what it warns of, what it refuses, and submitting."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli.job import command
from hpctrain.errors import HpctrainError
from hpctrain.job.batch_job import parse_nodes, parse_time
from tests.engines import DECK

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def deck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(DECK)
    return path


def job(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def refused(result: Result) -> tuple[str, ...]:
    assert isinstance(result.exception, HpctrainError), result.output
    assert result.exception.exit_code == 2
    return result.exception.problems


def test_ranks_binding_and_limits_follow_from_deck_and_machine(deck: Path) -> None:
    machine = [
        part for each in ("gpus_per_node=4", 'memory="64 GiB"') for part in ("--set", f"machine.{each}")
    ]
    told = ("--nodes", 2, "--time", "90 min", "--account", "physics", "--partition", "gpu")
    result = job(deck, *told, *machine, "--set", "run.threads=3", "--set", "batch.global_size=64")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("#SBATCH")]
    for asked in (
        "account=physics",
        "partition=gpu",
        "nodes=2",
        "ntasks-per-node=4",
        "cpus-per-task=3",
        "gpus-per-node=4",
        "mem=65536M",
        "time=01:30:00",
        "requeue",
        "signal=USR1@120",
    ):
        assert f"#SBATCH --{asked}" in lines
    assert "export OMP_NUM_THREADS=3" in result.stdout
    assert "--gpu-bind=none" in result.stdout
    assert "NCCL_DEBUG" in result.stdout


def test_a_range_of_nodes_asks_for_cores_and_not_for_tasks(deck: Path) -> None:
    """Slurm keeps the number of tasks of the first start, and with it the number of nodes."""
    script = job(deck, "--nodes", "1-2", "--ranks-per-node", 2, "--set", "run.threads=3").stdout
    assert "#SBATCH --nodes=1-2\n" in script
    assert "#SBATCH --mincpus=6\n#SBATCH --threads-per-core=1\n#SBATCH --cpus-per-task=3\n" in script
    assert "#SBATCH --ntasks" not in script


def test_memory_is_what_the_plan_predicts_and_a_quarter(deck: Path) -> None:
    from hpctrain.plan.deck_plan import PlanOptions, plan_deck

    result = job(deck, "--ranks-per-node", 4)
    (line,) = [line for line in result.stdout.splitlines() if "--mem=" in line]
    demand = plan_deck(deck, 4, options=PlanOptions(with_savings=False)).demand
    assert demand is not None
    asked = int(line.partition("--mem=")[2].removesuffix("M")) * 2**20
    assert asked == pytest.approx(demand.needed * 1.25, rel=0.05)  # libraries are measured anew each time

    small = job(deck, "--ranks-per-node", 2, "--set", 'machine.memory="1 MB"')
    assert "more than machine.memory = 1 MB" in small.stderr


def test_a_tensor_axis_across_nodes_is_warned_of(deck: Path) -> None:
    layout = ("--set", "layout.tensor=2", "--set", "batch.global_size=12")
    across = job(deck, "--nodes", 2, "--ranks-per-node", 3, *layout)
    assert across.exit_code == 0, across.output
    assert "layout.tensor = 2 does not divide the 3 ranks of a node" in across.stderr
    assert "layout.tensor = 1 or 4 ranks per node" in across.stderr
    assert "warning" not in job(deck, "--nodes", 3, "--ranks-per-node", 2, *layout).stderr


def test_a_job_without_gpus_warns_if_the_deck_requires_them(deck: Path) -> None:
    few = ("--ranks-per-node", 2, "--set", "run.device=cuda")
    told = 'run.device = "cuda", but the job requests no GPUs: add --gpus-per-node'
    assert told in job(deck, *few).stderr and told in job(deck, *few, "--gpus-per-node", 0).stderr
    assert "warning" not in job(deck, *few, "--gpus-per-node", 2, "--cores-per-rank", 4).stderr


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "lsf", "flux", "kubernetes"])
def test_ranks_have_more_cores_than_threads_where_that_is_asked_for(deck: Path, scheduler: str) -> None:
    text = job(deck, "--scheduler", scheduler, "--ranks-per-node", "2", "--cores-per-rank", "6").stdout
    asked = {
        "slurm": "#SBATCH --cpus-per-task=6",
        "pbs": ":ncpus=12:mpiprocs=2:ompthreads=1",
        "lsf": "affinity[core(6)]",
        "flux": "# flux: --cores-per-slot=6",
        "kubernetes": 'cpu: "12"',
    }
    assert asked[scheduler] in text
    assert "PE=1" not in text and "--cpus-per-task=1" not in text


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "lsf", "flux", "kubernetes"])
def test_one_core_for_a_rank_with_a_gpu_is_said_to_be_few(deck: Path, scheduler: str) -> None:
    on_gpus = ("--scheduler", scheduler, "--gpus-per-node", "2")
    done = job(deck, *on_gpus)
    assert (
        "warning: each rank gets 1 core, which is too few to feed a GPU: give --cores-per-rank" in done.stderr
    )
    assert "# Each rank gets 1 core, which is too few to feed a GPU: give --cores-per-rank C" in done.stdout
    for enough in (("--cores-per-rank", "1"), ("--set", "run.threads=2")):
        done = job(deck, *on_gpus, *enough)
        assert "too few to feed" not in done.stdout + done.stderr
    assert "too few to feed" not in job(deck, "--ranks-per-node", "2").output


def test_srun_starts_ranks_by_the_mpi_that_is_named(deck: Path) -> None:
    few = ("--ranks-per-node", "2")
    assert "\nsrun --mpi=pmi2 " in job(deck, *few, "--mpi", "pmi2").stdout
    assert "\nsrun --mpi=pmix " in job(deck, *few).stdout
    for more in (["--scheduler", "pbs"], ["--launcher", "mpirun"]):
        (problem,) = refused(job(deck, *few, "--mpi", "pmi2", *more))
        assert "--mpi pmi2 requires --launcher srun" in problem
    (problem,) = refused(job(deck, *few, "--mpi", "a b"))
    assert "--mpi a b: must be one word" in problem
    assert (
        "--cores-per-rank 1 is below run.threads = 2"
        in job(deck, *few, "--cores-per-rank", "1", "--set", "run.threads=2").stderr
    )


def test_a_job_for_gpus_is_planned_for_gpus_on_a_machine_without(deck: Path) -> None:
    few = ("--ranks-per-node", "2", "--gpus-per-node", "2")
    done = job(deck, *few)
    assert "#SBATCH --gpus-per-node=2" in done.stdout
    assert "#SBATCH --mem" not in done.stdout  # what is planned is memory of GPUs
    one = job(deck, "--ranks-per-node", "2", "--gpus-per-node", "1")
    assert "with 2 ranks and 1 GPU;" in one.stdout
    assert "2 ranks share 1 GPU of a node: start one rank per GPU" in one.stderr
    tight = job(deck, *few, "--set", "machine.gpu_memory=1 MB")
    assert "does not fit into GPU memory: 1 rank needs" in tight.stderr
    assert "#SBATCH --mem" in job(deck, "--ranks-per-node", "2").stdout


def test_numbers_of_nodes_that_the_layout_does_not_fit_are_left_out(deck: Path) -> None:
    result = job(deck, "--nodes", "1-4", "--ranks-per-node", 2, "--set", "batch.global_size=16")
    assert "\nfitting_nodes=(1 2 4)\n" in result.stdout
    assert "#SBATCH --nodes=1-4\n" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "the number of ranks per node is missing"),
        (("--ranks-per-node", "3"), "must be a multiple of batch.micro_size x data ranks"),
        (("--ranks-per-node", "2", "--set", "layout.tensor=4"), "must divide the number of ranks, 2"),
        (("--ranks-per-node", "2", "--variant", "model.layer=2"), "unknown key"),
        (("--ranks-per-node", "2", "--scheduler", "pbs", "--nodes", "1-2"), "a fixed number of nodes"),
        (
            ("--ranks-per-node", "2", "--scheduler", "lsf", "--variant", "run.seed=1"),
            "requires --scheduler slurm, not lsf",
        ),
        (
            ("--ranks-per-node", "2", "--scheduler", "pbs", "--launcher", "srun"),
            "requires --scheduler slurm, not pbs",
        ),
        (("--nodes", "two"), "--nodes two: must be a number"),
        (("--time", "90", "--scheduler", "kubernetes"), '--time 90: has no unit: write "90 min"'),
        (("--time", "10 s"), "must be at least 1 min"),
    ],
)
def test_what_cannot_be_is_one_sentence(deck: Path, arguments: tuple[str, ...], told: str) -> None:
    problems = refused(job(deck, *arguments))
    assert len(problems) == 1
    assert told in problems[0]


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "lsf", "flux", "kubernetes"])
def test_times_are_read_as_the_scheduler_reads_them(scheduler: str) -> None:
    assert parse_time("2:30", scheduler) == (9000 if scheduler == "lsf" else 150)
    assert parse_time("1:00:30", scheduler) == 3630
    assert parse_time("2-01:00:00", scheduler) == 49 * 3600
    assert parse_time("2-1", scheduler) == 49 * 3600
    assert parse_time("1 h 30 min", scheduler) == 5400
    if scheduler != "kubernetes":
        assert parse_time("90", scheduler) == (90 if scheduler == "pbs" else 5400)


def test_numbers_of_nodes() -> None:
    assert parse_nodes("4") == (4, 4)
    assert parse_nodes("1-4") == (1, 4)
    for wrong in ("0", "4-1", "-3", "x"):
        with pytest.raises(HpctrainError):
            parse_nodes(wrong)


@pytest.mark.parametrize(
    ("scheduler", "program", "call"),
    [
        ("slurm", "sbatch", "small.sh"),
        ("pbs", "qsub", "small.sh"),
        ("lsf", "bsub", ""),
        ("flux", "flux", "batch small.sh"),
        ("kubernetes", "kubectl", "create -f small.yaml"),
    ],
)
def test_submitting(
    deck: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str, program: str, call: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    asked = (deck, "--ranks-per-node", 2, "--scheduler", scheduler, "--submit", "--set", "run.title=small")
    assert f"the command {program} was not found" in refused(job(*asked))[0]
    assert not list(tmp_path.glob("small.[sy]*h"))

    stand_in = tmp_path / program
    stand_in.write_text('#!/bin/bash\necho "$*" >call\ncat >input\necho "job 4711"\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    result = job(*asked)
    assert (result.exit_code, result.stdout) == (0, "job 4711\n"), result.output
    assert (tmp_path / "call").read_text().strip() == call
    script = tmp_path / ("small.yaml" if scheduler == "kubernetes" else "small.sh")
    assert "ACCOUNT" not in script.read_text()
    assert "PARTITION" not in script.read_text()
    if scheduler == "lsf":
        assert (tmp_path / "input").read_text() == script.read_text()

    # What could not be submitted is as if it had not been written.
    stand_in.write_text('#!/bin/bash\necho "invalid account" >&2\nexit 1\n')
    script.write_text("precious")
    told = refused(job(*asked, "--force"))[0]
    assert "refused" in told
    assert "invalid account" in told
    assert script.read_text() == "precious"
    script.unlink()
    assert "refused" in refused(job(*asked))[0]
    assert not script.exists()


def test_a_file_that_is_there_is_replaced_by_force_alone(deck: Path, tmp_path: Path) -> None:
    asked = (deck, "--ranks-per-node", 2, "--set", 'machine.memory="8 GB"', "--output", "my job.sh")
    result = job(*asked)
    assert result.exit_code == 0, result.output
    assert (result.stdout, result.stderr) == ("", "my job.sh: written; submit it with `sbatch 'my job.sh'`\n")
    path = tmp_path / "my job.sh"
    text = path.read_text()
    assert path.stat().st_mode & 0o111
    assert job(*asked).exit_code == 0  # the same once more
    path.write_text("precious")
    (told,) = refused(job(*asked))
    assert told == "my job.sh: already exists (replace it with --force, or choose another file with --output)"
    assert path.read_text() == "precious"
    assert job(*asked, "--force").exit_code == 0
    assert path.read_text() == text

    path.unlink()
    path.symlink_to("nowhere")
    assert "is not a regular file" in refused(job(*asked, "--force"))[0]
    assert "is not a regular file" in refused(job(*asked[:-1], tmp_path, "--force"))[0]


def test_lines_for_the_scheduler_modules_and_pods(deck: Path) -> None:
    few = (deck, "--ranks-per-node", 2)
    text = job(*few, "--directive", "--qos=high", "--directive=--exclusive", "--module", "openmpi/5").stdout
    assert "\n#SBATCH --qos=high\n#SBATCH --exclusive\n" in text
    assert "\nmodule load openmpi/5 || exit 2\n" in text
    pods = ("--scheduler", "kubernetes", "--image", "me/it:2", "--volume", "mine:/data", "--shared-memory")
    text = job(*few, *pods, "3 GiB").stdout
    for line in ('image: "me/it:2"', "claimName: mine", "mountPath: /data", "sizeLimit: 3072Mi"):
        assert f" {line}\n" in text
    assert "must be at least 1 MiB" in refused(job(*few, *pods, "1 kB"))[0]
    assert "--image requires --scheduler kubernetes" in refused(job(*few, "--image", "me"))[0]


def test_run_resume_begins_and_goes_on(tmp_path: Path, launch: Launch) -> None:
    """The command of batch scripts, twice: steps 1 and 2, then 3 and 4, by the deck as it is then."""
    (tmp_path / "text.txt").write_text("hello world, " * 300)
    path = tmp_path / "small.toml"
    path.write_text(DECK.replace("none", "tokens.h5"))
    assert launch(0, "-m", "hpctrain", "prepare", "tokens.h5", "text.txt").returncode == 0
    settings = ("--set", "model.vocabulary=257", "--set", "run.dir=here", "--resume")
    for steps, first in ((2, False), (4, True)):
        path.write_text(path.read_text().replace("steps = 2", f"steps = {steps}"))
        done = launch(0, "-m", "hpctrain", "run", path, *settings, "--set", f"run.steps={steps}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("resumes from here/checkpoints/step-00000002.h5 at step 2" in done.stdout) == first
    assert (tmp_path / "here/metrics.jsonl").read_text().count("\n") == 4

    # Checkpoints that are all damaged are not thrown away.
    for checkpoint in (tmp_path / "here/checkpoints").glob("step-*.h5"):
        checkpoint.write_bytes(b"nothing")
    done = launch(0, "-m", "hpctrain", "run", path, *settings)
    assert done.returncode == 3
    assert "holds no valid checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
